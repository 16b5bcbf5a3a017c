"""A card known by its size alone is predicted with the architecture that leaves less room."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from memcallback.core.units import format_bytes
from memcallback.devices.catalogue import Device, DeviceSpec, architectures
from memcallback.prediction.predict_here import predict_here
from memcallback.prediction.prediction import Prediction
from memcallback.prediction.progress import TraceProgress, part_of
from memcallback.step.step import Step


def predict_with_least_room(
    step: Step, *, device: Device, progress: TraceProgress | None = None, **options: Any
) -> Prediction:
    """Predict as `predict_here` does, with the limits; a caveat says what the other would have."""
    specs = architectures(device)
    predictions = [
        predict_here(
            step,
            device=spec,
            progress=None if progress is None else part_of(progress, number, len(specs)),
            with_limits=True,
            **options,
        )
        for number, spec in enumerate(specs)
    ]
    least = min(predictions, key=_room)
    others = tuple(_of_others(least, predictions))
    return replace(least, other_architectures=others) if others else least


def _room(prediction: Prediction) -> tuple[bool, float, int]:
    """The least room sorts first: what does not fit, the smallest batch size, the highest peak."""
    largest = prediction.largest_batch_size
    return prediction.fits, math.inf if largest is None else largest, -_peak_bytes(prediction)


def _peak_bytes(prediction: Prediction) -> int:
    reserved = prediction.peak_reserved_bytes
    return prediction.peak_allocated_bytes if reserved is None else reserved


def _of_others(least: Prediction, predictions: Sequence[Prediction]) -> Iterator[str]:
    """What differs with the other architectures."""
    for other in predictions:
        if other is least or not isinstance(other.device, DeviceSpec):
            continue
        name = other.device.architecture_of
        if other.largest_batch_size is not None and (
            other.largest_batch_size != least.largest_batch_size
        ):
            yield would_fit(other.largest_batch_size, name)
        elif _peak_bytes(other) != _peak_bytes(least):
            peak = format_bytes(_peak_bytes(other))
            yield f"The peak would be {peak} with the architecture of {name}."


def would_fit(batch_size: int, architecture_of: str | None) -> str:
    """The largest batch size with another architecture."""
    architecture = f"the architecture of {architecture_of}"
    return f"With {architecture} the largest batch size would be {batch_size:,}."
