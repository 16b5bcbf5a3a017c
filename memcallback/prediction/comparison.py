"""Compares a measured with a predicted step, and says which values differ by more than noise."""

from __future__ import annotations

from dataclasses import dataclass

from memcallback.core.step_memory import MemoryStats, StepMemory
from memcallback.core.types import PERSISTENT_CATEGORIES
from memcallback.core.units import MiB

#: Allocated memory agrees with its replay within this share plus this many bytes.
ALLOCATED_SHARE = 0.001
ALLOCATED_SLACK_BYTES = MiB
#: Reserved memory within this share: where segments lie depends on more than one step.
RESERVED_SHARE = 0.02
#: Where a peak differs if the phase agrees at its start and end.
INSIDE = "temporary memory and workspaces"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A measured value outside the band around its prediction.

    Attributes:
        where: The value, such as `allocated at the end of forward`.
        predicted_bytes: The predicted value.
        measured_bytes: The measured value.
        carrier: The category with most of the difference, and how much more of it was measured, in
            bytes; None if unknown.
    """

    where: str
    predicted_bytes: int
    measured_bytes: int
    carrier: tuple[str, int] | None = None

    @property
    def size_bytes(self) -> int:
        """How far the two are apart."""
        return abs(self.measured_bytes - self.predicted_bytes)


def allocated_band(measured_bytes: int) -> float:
    """How far replayed allocated memory may be from a measured value, in bytes."""
    return ALLOCATED_SHARE * measured_bytes + ALLOCATED_SLACK_BYTES


def differences(predicted: StepMemory, measured: StepMemory) -> tuple[Difference, ...]:
    """Every boundary and peak of two steps that differ by more than the band.

    A step predicted for a CPU is compared at phase boundaries alone: its peaks leave out temporary
    memory inside operators.
    """
    result: list[Difference | None] = []
    has_peaks = predicted.peak_reserved_bytes is not None
    for phase, ours in predicted.phases.items():
        theirs = measured.phases.get(phase)
        if theirs is None or theirs.covers != ours.covers:
            continue
        at_boundaries = [
            _beyond(
                f"allocated at the {moment} of {phase.label}",
                predicted_moment.allocated_bytes,
                other.allocated_bytes,
                _carrier(predicted_moment, other),
            )
            for moment, predicted_moment, other in (
                ("start", ours.start, theirs.start),
                ("end", ours.end, theirs.end),
            )
        ]
        result += at_boundaries
        if has_peaks:
            # A difference at neither boundary is memory that came and went within the phase.
            whole = max(
                (difference for difference in at_boundaries if difference),
                key=lambda difference: difference.size_bytes,
                default=None,
            )
            more = (theirs.peak_allocated_bytes or 0) - (ours.peak_allocated_bytes or 0)
            carrier = whole.carrier if whole else (INSIDE, more)
            result.append(
                _beyond(
                    f"peak allocated in {phase.label}",
                    ours.peak_allocated_bytes,
                    theirs.peak_allocated_bytes,
                    carrier,
                )
            )
    reserved, measured_reserved = predicted.peak_reserved_bytes, measured.peak_reserved_bytes
    if (
        reserved is not None
        and measured_reserved is not None
        and abs(reserved - measured_reserved) > RESERVED_SHARE * measured_reserved
    ):
        result.append(
            Difference(
                where="peak reserved",
                predicted_bytes=reserved,
                measured_bytes=measured_reserved,
                carrier=_reserved_carrier(predicted, measured),
            )
        )
    return tuple(difference for difference in result if difference is not None)


def _reserved_carrier(predicted: StepMemory, measured: StepMemory) -> tuple[str, int]:
    """Whether more is allocated at the peak, or more is reserved but unallocated."""
    allocated = (measured.peak_allocated_bytes or 0) - (predicted.peak_allocated_bytes or 0)
    unallocated = (
        (measured.peak_reserved_bytes or 0) - (predicted.peak_reserved_bytes or 0) - allocated
    )
    return max(
        ("allocated memory", allocated),
        ("reserved but unallocated memory", unallocated),
        key=lambda part: abs(part[1]),
    )


def _beyond(
    where: str, predicted: int | None, measured: int | None, carrier: tuple[str, int] | None
) -> Difference | None:
    if (
        predicted is None
        or measured is None
        or abs(predicted - measured) <= allocated_band(measured)
    ):
        return None
    return Difference(
        where=where, predicted_bytes=predicted, measured_bytes=measured, carrier=carrier
    )


def _carrier(predicted: MemoryStats, measured: MemoryStats) -> tuple[str, int] | None:
    """The category that differs most."""
    if predicted.by_category is None or measured.by_category is None:
        return None
    parts = {
        c.label: (measured.by_category.get(c, 0) - predicted.by_category.get(c, 0))
        for c in PERSISTENT_CATEGORIES
    }
    if predicted.rest_bytes is not None and measured.rest_bytes is not None:
        parts["activations and other"] = measured.rest_bytes - predicted.rest_bytes
    label = max(parts, key=lambda name: abs(parts[name]))
    return label, parts[label]
