"""MeasuredShift: how much more a measured step needs than its replay."""

from __future__ import annotations

from dataclasses import dataclass

from memcallback.batch_size.peaks import counted_peak
from memcallback.core.step_memory import StepMemory
from memcallback.core.units import format_bytes
from memcallback.prediction.comparison import RESERVED_SHARE, allocated_band
from memcallback.prediction.prediction import Prediction
from memcallback.prediction.search import BatchReplays


@dataclass(frozen=True, kw_only=True)
class MeasuredShift:
    """How far a measured step is from its replay at its own batch size and sequence length.

    Attributes:
        batch_size: Samples in the measured step.
        more_bytes: How much more it needs than its replay; below 0 if it needs less.
        band_bytes: How far a step may be from a replay that is right.
    """

    batch_size: int
    more_bytes: int
    band_bytes: float

    def is_beyond(self, added_bytes: int) -> bool:
        """Whether it needs more than its replay and what is added to that, beyond the band."""
        return self.more_bytes > added_bytes + self.band_bytes

    def basis(self, added_bytes: int) -> str:
        """What it says of the peaks, as the end of a sentence."""
        if self.is_beyond(added_bytes):
            return (
                f"; the peak at batch size {self.batch_size:,} was raised by "
                f"{format_bytes(self.more_bytes)}, because the measured step needs more"
            )
        if self.more_bytes < -self.band_bytes:
            return (
                f"; the measured step needs {format_bytes(-self.more_bytes)} less, and the peaks "
                "were left as they are"
            )
        return "; the measured step agrees"


def measured_shift(
    predicted: Prediction, measured: StepMemory, replays: BatchReplays
) -> MeasuredShift | None:
    """How far a measured step is from its replay; None if its size or its peak is unknown."""
    measured_bytes = counted_peak(measured)
    if not measured.batch_size or measured_bytes is None:
        return None
    expected_bytes = replays.peak_bytes(measured.batch_size)
    if predicted.at_start:  # what ran before explains a part of what was measured
        here = predicted.at(measured.batch_size).run_peak_reserved_bytes
        expected_bytes = max(expected_bytes, here or 0)
    return MeasuredShift(
        batch_size=measured.batch_size,
        more_bytes=measured_bytes - expected_bytes,
        band_bytes=allocated_band(measured_bytes)
        if measured.peak_reserved_bytes is None
        else RESERVED_SHARE * measured_bytes,
    )
