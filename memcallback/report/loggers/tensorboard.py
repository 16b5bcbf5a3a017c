"""TensorBoardRun: a training's run, and one below it for each further curve."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memcallback.core.document import Document
from memcallback.core.files import inside
from memcallback.report.loggers.destination import Destination
from memcallback.report.tags import (
    MEASURED,
    PREDICTED,
    WORST_RANK,
    WORST_RANK_PREDICTED,
    Curves,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: A predicted curve -> the measured one beside it.
_COMPARED = {PREDICTED: MEASURED, WORST_RANK_PREDICTED: WORST_RANK}
#: Lines that differ by less lie on each other in a chart.
_VISIBLE_SHARE = 0.01


class TensorBoardRun(Destination):
    """TensorBoard colours by run: curves that share a tag need a run each.

    The page is no part of it: it lies as a file in the run's folder.
    """

    may_recover = True

    def __init__(self, writer: Any, log_dir: str, *, is_own: bool) -> None:
        super().__init__("a TensorBoard run")
        self.hint = "Check the run's folder."
        self.log_dir: str = log_dir
        self.folder = log_dir
        self._writer = writer
        self._is_own = is_own
        #: Runs below, by curve.
        self._below: dict[str, Any] = {}
        #: The predictions last written, by curve and tag.
        self._predicted: dict[str, dict[str, float]] = {}

    def log_curves(self, curves: Curves, step: int) -> None:
        for curve, values in curves.items():
            if news := self._news(curve, values, curves.get(_COMPARED.get(curve, ""), {})):
                _write(self._writer_of(curve), news, step)

    def _news(
        self, curve: str, values: Mapping[str, float], measured: Mapping[str, float]
    ) -> Mapping[str, float]:
        """The values without predictions that are written already and that the measured one meets.

        Of two equal lines one hides the other: here the measured one would not be seen.
        """
        if curve not in _COMPARED:
            return values
        written = self._predicted.setdefault(curve, {})
        news = {
            tag: value
            for tag, value in values.items()
            if written.get(tag) != value
            or abs(measured.get(tag, value) - value) > _VISIBLE_SHARE * value
        }
        written.update(news)
        return news

    def _writer_of(self, curve: str) -> Any:
        from torch.utils.tensorboard import FileWriter

        if not curve:
            return self._writer._get_file_writer()
        if curve not in self._below:
            self._below[curve] = FileWriter(inside(self.log_dir, curve))
        return self._below[curve]

    def log_text(self, tag: str, document: Document, step: int) -> None:
        self._writer.add_text(tag, document.markdown(), step)

    def log_image(self, tag: str, image: npt.NDArray[np.uint8], step: int) -> None:
        self._writer.add_image(tag, image, step, dataformats="HWC")

    def close(self) -> None:
        if self._is_own:
            self._writer.close()
        else:
            self._writer.flush()
        for writer in self._below.values():
            writer.close()
        self._below = {}


def _write(file_writer: Any, values: Mapping[str, float], step: int) -> None:
    """Write one value for each tag, all in one event, unlike add_scalar."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    summary = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
    file_writer.add_summary(Summary(value=summary), step)


def dashboard_command(log_dir: str) -> str:
    """The command that shows a run, as this console can run it."""
    program = "tensorboard"
    if shutil.which(program) is None:
        python = min(sys.executable, os.path.relpath(sys.executable), key=len)
        program = f"{shlex.quote(python)} -m tensorboard.main"
    if "://" not in log_dir:
        log_dir = min(log_dir, os.path.relpath(log_dir), key=len)
    return f"{program} --logdir {shlex.quote(log_dir)}"
