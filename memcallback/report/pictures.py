"""log_pictures(): the pictures of a report, for every logger that takes pictures."""

from __future__ import annotations

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


def log_pictures(
    writers: Writers, report: Report, modules: ModuleTable | None, number: int
) -> None:
    """Draw and log the step, its peak, the batch size and the modules, as far as each is known."""
    step, prediction, advice = report.measured, report.prediction, report.advice
    if isinstance(prediction, Prediction):
        writers.log_image(STEP_IMAGE_TAG, number, timeline, prediction, step)
        writers.log_image(PEAK_IMAGE_TAG, number, at_peak, prediction)
    elif (
        step is not None
        and step.held_bytes is not None
        and step.windows[0].start.allocated_bytes is not None
    ):
        writers.log_image(STEP_IMAGE_TAG, number, boundaries, step)
    if advice is not None:
        writers.log_image(BATCH_SIZE_IMAGE_TAG, number, batch_size_curve, advice)
    if modules is not None:
        writers.log_image(MODULES_IMAGE_TAG, number, module_icicle, modules)
