"""Writers: memory values, texts and pictures for Lightning loggers and TensorBoard runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ParamSpec

from memcallback.core.errors import warn_and_go_on
from memcallback.core.files import make_next_version
from memcallback.core.interruptions import ENDS, raise_if_meant
from memcallback.report.tensorboard import write_layout, write_scalars

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_P = ParamSpec("_P")


class Writers:
    """All loggers of a Trainer; TensorBoard runs also get texts, pictures and a dashboard layout.

    A logger that fails is left out from then on, with a warning; a TensorBoard run that fails is
    reported once. Create it on rank zero only.
    """

    def __init__(self, loggers: list[Any], own_log_dir: str | None) -> None:
        self._loggers = list(loggers)
        self._own: Any = None
        #: Where a run of our own is to be opened, at its first value: TensorBoard takes a tenth of
        #: a second to open it, and a training's first step does not wait for that.
        self._own_log_dir = None if loggers else own_log_dir
        self._writers: list[Any] = []
        self._log_dirs: list[str] = []
        #: Failures warned of: a full disk stays full for a while.
        self._warned: set[str] = set()
        for logger in loggers:
            self._attempt(
                f"open {_name(logger)}",
                "Check the logger's folder.",
                self._open_tensorboard,
                logger,
            )

    @property
    def log_dir(self) -> str | None:
        """The folder of the first TensorBoard run; None if there is none."""
        return self._log_dirs[0] if self._runs() else None

    def write_layout(self, *, has_band: bool, rank_bands: Sequence[str] = ()) -> None:
        """Write the dashboard layout to every TensorBoard run."""
        action_name, hint = "write the layout of a TensorBoard run", "Check the run's folder."
        self._runs()
        for log_dir in self._log_dirs:
            self._attempt(
                action_name, hint, write_layout, log_dir, has_band=has_band, rank_bands=rank_bands
            )

    def log_scalars(self, points: Mapping[str, float], step: int) -> None:
        """Write one value for each tag to every logger."""
        for writer in self._runs():
            self._attempt(
                "write to a TensorBoard run",
                "Check the run's folder.",
                write_scalars,
                writer,
                points,
                step,
            )
        for logger in list(self._loggers):
            action_name = f"log {len(points)} float metrics to {_name(logger)}"
            hint = (
                f"{_name(logger)} gets no more memory values. "
                "Use a logger whose log_metrics takes a dict of floats."
            )
            if not self._attempt(action_name, hint, logger.log_metrics, dict(points), step=step):
                self._loggers.remove(logger)

    def log_text(self, tag: str, markdown: str, step: int) -> None:
        """Write a text to every TensorBoard run."""
        for writer in self._runs():
            self._attempt(
                f"write the text {tag!r}",
                "Check the run's folder.",
                writer.add_text,
                tag,
                markdown,
                step,
            )

    def log_image(
        self,
        tag: str,
        step: int,
        draw: Callable[_P, npt.NDArray[np.uint8]],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> None:
        """Draw a picture of shape (height, width, 3) and write it to every TensorBoard run."""
        if not self._runs():
            return
        # In a thread of its own: matplotlib's label parser caches exceptions, and their frames
        # would keep the callers' variables alive, the training's batch among them.
        with ThreadPoolExecutor(max_workers=1) as pool:
            image = pool.submit(draw, *args, **kwargs).result()
        for writer in self._runs():
            self._attempt(
                f"write the image {tag!r}",
                "Check the run's folder.",
                writer.add_image,
                tag,
                image,
                step,
                dataformats="HWC",
            )

    def close(self) -> None:
        """Flush all TensorBoard runs, and close the one that was opened here."""
        for writer in self._writers:
            self._attempt("write out a TensorBoard run", "Check the run's folder.", writer.flush)
        if self._own is not None:
            self._attempt("close a TensorBoard run", "Check the run's folder.", self._own.close)

    def _runs(self) -> list[Any]:
        """All TensorBoard runs; the one of our own is opened when first asked for."""
        if self._own_log_dir is not None:
            folder, self._own_log_dir = self._own_log_dir, None
            self._attempt(
                f"write to {folder!r}",
                "Set default_root_dir of the Trainer to a folder that can be written.",
                self._open_own,
                folder,
            )
        return self._writers

    def _open_own(self, log_dir: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._own = SummaryWriter(make_next_version(log_dir))
        self._writers.append(self._own)
        self._open_run(self._own.log_dir)

    def _open_tensorboard(self, logger: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writer = getattr(logger, "experiment", None)
        if isinstance(writer, SummaryWriter) and getattr(logger, "log_dir", None):
            self._writers.append(writer)
            self._loggers.remove(logger)
            self._open_run(logger.log_dir)

    def _open_run(self, log_dir: str) -> None:
        self._log_dirs.append(log_dir)

    def _attempt(
        self,
        action_name: str,
        hint: str,
        action: Callable[..., object],
        *args: object,
        **kwargs: object,
    ) -> bool:
        try:
            action(*args, **kwargs)
        except ENDS as error:  # a logger can fail in any way, and training goes on
            raise_if_meant(error)
            if hint not in self._warned:
                self._warned.add(hint)
                warn_and_go_on(
                    f"memcallback could not {action_name}: {type(error).__name__}: {error}. "
                    f"Memory is still recorded. {hint}"
                )
            return False
        return True


def _name(logger: Any) -> str:
    return type(logger).__name__
