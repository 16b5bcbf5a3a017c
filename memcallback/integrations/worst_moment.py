"""Which part of a run needs most memory, and whether what runs between training steps fits."""

from __future__ import annotations

from memcallback.core.errors import warn_and_go_on
from memcallback.core.units import brief_bytes
from memcallback.prediction.prediction import Prediction
from memcallback.record.monitor import Monitor


def note_worst_moment(
    monitor: Monitor,
    training: Prediction,
    validation: Prediction,
    name: str = "validation",
) -> None:
    """Say in the report which part of a run needs most; warn if the validation does not fit."""
    monitor.notes = (*monitor.notes, _worst_moment(training, validation, name))
    if reason := _shortage(validation, monitor.capacity_bytes, name):
        monitor.notes = (*monitor.notes, reason)
        warn_and_go_on(reason)


def _worst_moment(training: Prediction, validation: Prediction, name: str) -> str:
    """Which of the two needs more memory, in one sentence."""
    moments = {
        "the training step": training.peak_allocated_bytes,
        name: validation.peak_allocated_bytes,
    }
    worst, other = sorted(moments, key=lambda moment: -moments[moment])
    return (
        f"Worst moment of the run: {worst}, {brief_bytes(moments[worst])} allocated; {other} "
        f"reaches {brief_bytes(moments[other])} (both predicted; {name} with "
        f"{validation.batch_size:,} samples)."
    )


def _shortage(validation: Prediction, capacity_bytes: int | None, name: str) -> str | None:
    """Why a validation does not fit, in one sentence; None if it does.

    The capacity is that of the device that was asked for; None for the one that trains.
    """
    needed_bytes = validation.peak_reserved_bytes or validation.peak_allocated_bytes
    if capacity_bytes is not None and needed_bytes > capacity_bytes:
        return (
            f"{name.capitalize()} does not fit: it needs {brief_bytes(needed_bytes)}, and the "
            f"device has {brief_bytes(capacity_bytes)}. Use smaller batches for {name}, or "
            "keep less from batch to batch."
        )
    if not validation.fits:
        return f"{name.capitalize()} does not fit: out of memory in {validation.out_of_memory}"
    return None
