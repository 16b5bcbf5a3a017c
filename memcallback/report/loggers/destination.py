"""Destination: where a training's values go, and texts, pictures and its page if it takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from memcallback.core.document import Document
from memcallback.report.tags import Curves, flat

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Destination:
    """Takes values alone; subclasses take more.

    Attributes:
        name: What it is called in warnings.
        hint: What a user can do where it fails.
        log_dir: The folder of a TensorBoard run; None for everything else.
        folder: The folder of this training's files, where it has one to itself.
        takes_all: Whether it takes texts, pictures and the page too.
        may_recover: Whether it is used again after it has failed.
    """

    log_dir: str | None = None
    folder: str | None = None
    takes_all = True
    may_recover = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.hint = (
            f"{name} gets no more memory values. Use a logger whose log_metrics takes a dict of "
            "floats."
        )

    def log_curves(self, curves: Curves, step: int) -> None:
        """Log a value for each curve and tag."""
        raise NotImplementedError

    def log_text(self, tag: str, document: Document, step: int) -> None:
        """Log a text."""

    def log_image(self, tag: str, image: npt.NDArray[np.uint8], step: int) -> None:
        """Log a picture of shape (height, width, 3)."""

    def log_page(self, tag: str, html: str, step: int) -> None:
        """Log a page, which is one HTML file."""

    def close(self) -> None:
        """Write out what is still in memory, and close what was opened here."""


#: Logs values, or objects of the logger's own, under a step.
LogMetrics = Callable[[Mapping[str, Any], int], None]


class ValuesOnly(Destination):
    """A logger that is known to take numbers, and nothing else."""

    takes_all = False

    def __init__(self, name: str, log_metrics: LogMetrics) -> None:
        super().__init__(name)
        self._log_metrics = log_metrics

    def log_curves(self, curves: Curves, step: int) -> None:
        self._log_metrics(flat(curves), step)
