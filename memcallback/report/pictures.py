"""Pictures: those of a training's reports, for every logger that takes pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memcallback.core.module_table import ModuleTable
from memcallback.prediction.prediction import Prediction
from memcallback.report.plots.at_peak import at_peak
from memcallback.report.plots.batch_size import batch_size_curve
from memcallback.report.plots.modules import module_icicle
from memcallback.report.plots.step import boundaries, timeline
from memcallback.report.report import Report
from memcallback.report.tags import (
    BATCH_SIZE_IMAGE_TAG,
    MODULES_IMAGE_TAG,
    PEAK_IMAGE_TAG,
    STEP_IMAGE_TAG,
)
from memcallback.report.writers import Writers


class Pictures:
    """Draws what reports show, and logs each picture again only where it would show other things.

    To draw is most of what a report costs.
    """

    def __init__(self) -> None:
        #: Tag -> what the picture logged last shows.
        self._shown: dict[str, tuple[object, ...]] = {}

    def log(
        self, writers: Writers, report: Report, modules: ModuleTable | None, number: int
    ) -> None:
        """Log the step, its peak, the batch size and the modules, as far as each is known."""

        def show(tag: str, draw: Callable[..., Any], *what: object) -> None:
            # A training has one prediction, which is compared by what it is of.
            if self._shown.get(tag) != what and writers.log_image(tag, number, draw, *what):
                self._shown[tag] = what

        step, prediction, advice = report.measured, report.prediction, report.advice
        if isinstance(prediction, Prediction):
            show(STEP_IMAGE_TAG, timeline, prediction, step)
            show(PEAK_IMAGE_TAG, at_peak, prediction)
        elif (
            step is not None
            and step.held_bytes is not None
            and step.windows[0].start.allocated_bytes is not None
        ):
            show(STEP_IMAGE_TAG, boundaries, step)
        if advice is not None:
            show(BATCH_SIZE_IMAGE_TAG, batch_size_curve, advice)
        if modules is not None:
            show(MODULES_IMAGE_TAG, module_icicle, modules)
