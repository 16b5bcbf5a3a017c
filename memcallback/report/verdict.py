"""Verdict: whether a training step fits its device, by the measured peak or else the predicted."""

from __future__ import annotations

from dataclasses import dataclass

from memcallback.core.step_memory import StepMemory, largest
from memcallback.core.units import MiB, brief_bytes
from memcallback.prediction.prediction import Prediction, StepPrediction

#: Peaks differ above this share and so many bytes.
_NOTABLE_SHARE = 0.01
_NOTABLE_BYTES = MiB


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a step fits, and its peak.

    Attributes:
        fits: Whether it fits; None if unknown.
        peak_bytes: The peak that counts against the capacity; None if unknown.
        counts: Which memory that is: `reserved`, on a CPU `allocated` or `resident`.
        allocated_bytes: The allocated peak, where `counts` is another.
        capacity_bytes: The device's memory; None if unknown.
        is_measured: Whether the peak was measured; else it was predicted.
        num_alloc_retries: Retries of the allocator inside the measured step.
    """

    fits: bool | None
    peak_bytes: int | None
    counts: str = "allocated"
    allocated_bytes: int | None = None
    capacity_bytes: int | None = None
    is_measured: bool = False
    num_alloc_retries: int = 0

    @property
    def word(self) -> str:
        """The verdict in a word or two."""
        if self.fits is None:
            return "PEAK" if self.peak_bytes is not None else "UNKNOWN"
        if not self.fits:
            return "DOES NOT FIT"
        return "FITS WITH RETRIES" if self.num_alloc_retries else "FITS"

    @property
    def share(self) -> float | None:
        """The peak as a share of the capacity; None if one of them is unknown."""
        if self.peak_bytes is None or not self.capacity_bytes:
            return None
        return self.peak_bytes / self.capacity_bytes

    @property
    def share_text(self) -> str:
        """That share in percent; empty if it is unknown."""
        return "" if self.share is None else share_text(self.share)

    @property
    def peak_text(self) -> str:
        """The peak in words."""
        if self.peak_bytes is None:
            return "nothing was recorded"
        kind = "measured" if self.is_measured else "predicted"
        text = f"{kind} peak {brief_bytes(self.peak_bytes)} {self.counts}"
        if self.allocated_bytes is not None:
            text += f", {brief_bytes(self.allocated_bytes)} allocated"
        return text

    def sentence(self) -> str:
        """The verdict in a sentence."""
        share = ""
        if self.capacity_bytes and self.share is not None:
            share = f": {self.share_text} of {brief_bytes(self.capacity_bytes)}"
        return f"{self.word}: {self.peak_text}{share}."


def verdict_of(
    measured: StepMemory | None,
    prediction: StepPrediction | None,
    capacity_bytes: int | None,
    *,
    is_for_another: bool,
    allocator_bytes: int | None,
) -> Verdict:
    """The verdict on a step; `is_for_another` device than the one that trains.

    Of the other one's capacity the allocator can have `allocator_bytes`; None if unknown.
    """
    is_measured = (
        measured is not None
        and not (measured.is_warm_up or measured.is_interrupted)
        and peak_of(measured) is not None
    )
    step = measured if is_measured or prediction is None else prediction.step
    peak_bytes, counts = peak_of(step) or (None, "allocated")
    if is_measured and not is_for_another:
        fits: bool | None = True
    elif isinstance(prediction, Prediction) and not is_for_another:
        fits = prediction.fits if capacity_bytes is not None else None
    elif (step is measured and not is_measured) or peak_bytes is None or capacity_bytes is None:
        fits = None
    else:
        usable_bytes = capacity_bytes if allocator_bytes is None else allocator_bytes
        lows = [window.low_bytes for window in step.windows] if step else []
        low_bytes = largest(lows) or peak_bytes
        # Between its bounds a formula knows nothing.
        is_between = low_bytes <= usable_bytes < peak_bytes
        fits = None if is_between else peak_bytes <= usable_bytes
    return Verdict(
        fits=None if capacity_bytes is None else fits,
        peak_bytes=peak_bytes,
        counts=counts,
        allocated_bytes=step.peak_allocated_bytes if step and counts != "allocated" else None,
        capacity_bytes=capacity_bytes,
        is_measured=step is not None and step is measured,
        num_alloc_retries=(measured.num_alloc_retries or 0) if measured and is_measured else 0,
    )


def differ(before: int, after: int) -> bool:
    """Whether two peaks differ by enough to say so."""
    difference = abs(after - before)
    return difference > _NOTABLE_BYTES and difference > _NOTABLE_SHARE * before


def peak_of(step: StepMemory | None) -> tuple[int, str] | None:
    """The peak that counts against a capacity, and which memory that is; None if unknown."""
    if step is None:
        return None
    if step.peak_reserved_bytes is not None:
        return step.peak_reserved_bytes, "reserved"
    if step.peak_allocated_bytes is not None:
        return step.peak_allocated_bytes, "allocated"
    return None if step.peak_resident_bytes is None else (step.peak_resident_bytes, "resident")


def share_text(share: float) -> str:
    """A share in percent, with a digit after the point below 10 %."""
    pct = 100 * share
    return f"{pct:,.0f} %" if pct >= 9.95 else f"{pct:.1f} %"
