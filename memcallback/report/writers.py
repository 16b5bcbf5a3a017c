"""Writers: sends values, texts and pictures to every logger, whatever happens to one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ParamSpec

from memcallback.core.document import Document
from memcallback.core.errors import warn_and_go_on
from memcallback.core.files import make_next_version
from memcallback.core.interruptions import ENDS, raise_if_meant
from memcallback.report.loggers.destination import Destination
from memcallback.report.loggers.lightning import destination_of
from memcallback.report.loggers.tensorboard import TensorBoardRun
from memcallback.report.tags import Curves

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_P = ParamSpec("_P")
_FOLDER_HINT = (
    "Give a folder that can be written: default_root_dir of Lightning's Trainer, output_dir of "
    "transformers' TrainingArguments (logging_dir, where it has one), log_dir of MemoryLog, or "
    "--log-dir of `memcallback run`."
)


class Writers:
    """All loggers of a Trainer, or a TensorBoard run of our own where there are none.

    A logger that fails is left out from then on, with a warning; a TensorBoard run that fails is
    reported once. Create it on rank zero only.
    """

    def __init__(self, loggers: Sequence[Any], own_log_dir: str | None) -> None:
        #: Where a run of our own is to be opened, at its first value: TensorBoard takes a tenth of
        #: a second to open it, and a training's first step does not wait for that.
        self._own_log_dir = None if loggers else own_log_dir
        self._folder = own_log_dir
        self._made_folder: str | None = None
        self._destinations: list[Destination] = []
        #: Hints of the failures that were warned of: a full disk stays full for a while.
        self._warned: set[str] = set()
        for logger in loggers:
            self._attempt(
                f"open {type(logger).__name__}", "Check the logger's folder.", self._open, logger
            )

    @property
    def log_dir(self) -> str | None:
        """The folder of the first TensorBoard run; None if there is none."""
        folders = (destination.log_dir for destination in self._opened())
        return next((folder for folder in folders if folder is not None), None)

    def make_folder(self) -> str | None:
        """The folder of this training's files; None if there is none that can be written.

        It is the first logger's that has one, else a new one, so that no training's page is written
        over that of an earlier one.
        """
        folders = (destination.folder for destination in self._opened())
        folder = next((folder for folder in folders if folder is not None), self._made_folder)
        if folder is None and self._folder is not None:
            self._attempt(f"write to {self._folder!r}", _FOLDER_HINT, self._make_own)
            folder = self._made_folder
        return folder

    def log_curves(self, curves: Curves, step: int) -> None:
        """Log one value for each curve and tag."""
        num_values = sum(map(len, curves.values()))
        for destination in self._opened():
            is_logged = self._attempt(
                f"log {num_values} float metrics to {destination.name}",
                destination.hint,
                destination.log_curves,
                curves,
                step,
            )
            if not is_logged and not destination.may_recover:
                self._destinations.remove(destination)

    def log_text(self, tag: str, document: Document, step: int) -> None:
        """Log a text wherever texts can be logged."""
        self._log_more(f"the text {tag!r}", lambda each: each.log_text(tag, document, step))

    def log_image(
        self,
        tag: str,
        step: int,
        draw: Callable[_P, npt.NDArray[np.uint8]],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> bool:
        """Draw a picture of shape (height, width, 3) and log it wherever pictures can be logged.

        Tells whether it was logged everywhere.
        """
        if not any(destination.takes_all for destination in self._opened()):
            return False
        images: list[npt.NDArray[np.uint8]] = []

        def draw_apart() -> None:
            # In a thread of its own: matplotlib's label parser caches exceptions, and their frames
            # would keep the callers' variables alive, the training's batch among them.
            with ThreadPoolExecutor(max_workers=1) as pool:
                images.append(pool.submit(draw, *args, **kwargs).result())

        if not self._attempt(f"draw the picture {tag!r}", f"{tag} is left out.", draw_apart):
            return False
        (image,) = images
        return self._log_more(f"the picture {tag!r}", lambda each: each.log_image(tag, image, step))

    def log_page(self, tag: str, html: str, step: int) -> None:
        """Log a page wherever pages can be logged; a TensorBoard run has it as a file."""
        self._log_more("the page", lambda each: each.log_page(tag, html, step))

    def _log_more(self, what: str, log: Callable[[Destination], None]) -> bool:
        """Log to each destination that takes more than values; one that fails keeps its values."""
        is_logged = True
        for destination in self._opened():
            if not destination.takes_all:
                continue
            hint = f"{destination.name} gets no more pictures and texts."
            if destination.may_recover:
                hint = destination.hint
            if not self._attempt(f"log {what} to {destination.name}", hint, log, destination):
                destination.takes_all = destination.may_recover
                is_logged = False
        return is_logged

    def close(self) -> None:
        """Write out what is still in memory, and close what was opened here."""
        for destination in self._destinations:
            self._attempt(f"write out {destination.name}", destination.hint, destination.close)

    def _opened(self) -> list[Destination]:
        """All destinations; the run of our own is opened when first asked for."""
        if self._own_log_dir is not None:
            folder, self._own_log_dir = self._own_log_dir, None
            if find_spec("tensorboard") is None:
                warn_and_go_on(
                    f"TensorBoard is not installed, so no curves are logged to {folder!r}. Install "
                    "it: pip install tensorboard. Reports and the page do not need it."
                )
                return list(self._destinations)
            is_open = self._attempt(
                f"write to {folder!r}",
                _FOLDER_HINT,
                self._open_own,
                folder,
            )
            if not is_open:
                self._folder = None
        return list(self._destinations)

    def _open(self, logger: Any) -> None:
        self._destinations.append(destination_of(logger))

    def _make_own(self) -> None:
        assert self._folder is not None
        self._made_folder = make_next_version(self._folder)

    def _open_own(self, log_dir: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(make_next_version(log_dir))
        self._destinations.append(TensorBoardRun(writer, writer.log_dir, is_own=True))

    def _attempt(
        self,
        action_name: str,
        hint: str,
        action: Callable[..., object],
        *args: object,
    ) -> bool:
        try:
            action(*args)
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
