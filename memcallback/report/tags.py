"""The tags under which values, texts and pictures are logged. Sizes are in GiB, with four digits.

| tag | meaning |
|---|---|
| `memory_gib/peak_forward` | peak of allocated memory in the forward pass |
| `memory_gib/peak_backward` | the same in the backward pass |
| `memory_gib/peak_optimizer` | the same in the optimizer step |
| `memory_gib/reserved` | peak of reserved memory (accelerators) |
| `memory_gib/resident` | peak of the process's resident size (CPU) |
| `memory_gib/non_pytorch` | used outside this process's allocator, where it is above 1 GiB |
| `memory/num_alloc_retries` | retries of the allocator with its cache freed, once there are any |
| `memory/worst_rank` | of several ranks the one with the largest share of its capacity in use |
| `memory/worst_rank_capacity_pct` | that share: peak reserved (CPU: allocated), percent |
| `memory/num_ranks_missing` | ranks that sent no values, if there are any |
| `device/utilisation_pct` | share of the last moments in which a kernel ran, percent (NVML) |
| `device/temperature_celsius` | the temperature of the device's chip (NVML) |
| `device/power_watts` | the power draw of the device (NVML) |

A measured peak is that of the largest step since the last point. Other curves have the same tags,
each in a run below the training's run, so that TensorBoard gives it a colour and a name in the
legend.

| run | curve |
|---|---|
| the training's | measured |
| `predicted` | predicted; for the textbook estimate the upper bound |
| `predicted_low` | the lower bound of the textbook estimate |
| `capacity` | the device's memory, beside `reserved` (CPU: `resident`) |
| `ranks_min`, `ranks_mean`, `ranks_max` | measured, over the ranks of a job |
| `worst_rank` | measured on the rank with the largest share of its capacity in use |
| `worst_rank_predicted` | predicted for that rank |

Loggers without runs below others have the curve in the tag: `memory_gib/predicted/peak_forward`;
the capacity is `memory_gib/capacity` there.

An unknown value has no point. In a job of several ranks the first four curves are rank zero's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from memcallback.core.step_memory import DeviceMemory, StepMemory
from memcallback.core.types import Phase
from memcallback.core.units import GiB
from memcallback.report.rank_values import RankValues, Spread

#: Values by curve, then by tag.
Curves: TypeAlias = Mapping[str, Mapping[str, float]]

REPORT_TAG = "memory/report"
MODULES_TAG = "memory/modules"
WHAT_IF_TAG = "memory/what_if"
OUT_OF_MEMORY_TAG = "memory/out_of_memory"
PAGE_TAG = "memory/page"
# TensorBoard shows groups and pictures in the order of their tags: pictures after curves.
STEP_IMAGE_TAG = "memory_pictures/1_timeline"
PEAK_IMAGE_TAG = "memory_pictures/2_at_the_peak"
BATCH_SIZE_IMAGE_TAG = "memory_pictures/3_batch_size"
WHAT_IF_IMAGE_TAG = "memory_pictures/4_what_if"
MODULES_IMAGE_TAG = "memory_pictures/5_modules"

#: The training's own values; TensorBoard has them in the training's run.
MEASURED = ""
PREDICTED = "predicted"
PREDICTED_LOW = "predicted_low"
CAPACITY = "capacity"
WORST_RANK = "worst_rank"
WORST_RANK_PREDICTED = "worst_rank_predicted"

_PEAKS = {
    Phase.FORWARD: "memory_gib/peak_forward",
    Phase.BACKWARD: "memory_gib/peak_backward",
    Phase.OPTIMIZER_STEP: "memory_gib/peak_optimizer",
}
_RESERVED = "memory_gib/reserved"
_RESIDENT = "memory_gib/resident"
#: More than the context and the libraries of one process take.
_NOTABLE_NON_PYTORCH_BYTES = GiB


def step_curves(
    step: StepMemory, predicted: StepMemory | None, device: DeviceMemory
) -> dict[str, dict[str, float]]:
    """The known values of a step: measured, predicted, and of its device."""
    last = step.windows[-1].end if step.windows else None
    measured = {
        **_peaks({phase: window.peak_allocated_bytes for phase, window in step.phases.items()}),
        _RESERVED: _gib(step.peak_reserved_bytes),
        _RESIDENT: _gib(step.peak_resident_bytes),
        "memory_gib/non_pytorch": _gib(device.non_pytorch_bytes)
        if (device.non_pytorch_bytes or 0) > _NOTABLE_NON_PYTORCH_BYTES
        else None,
        "memory/num_alloc_retries": (last.num_alloc_retries or None) if last else None,
        "device/utilisation_pct": device.utilisation_pct,
        "device/temperature_celsius": device.temperature_celsius,
        "device/power_watts": device.power_watts,
    }
    phases = predicted.phases.items() if predicted else ()
    # Beside the memory that counts against it.
    full = _RESERVED if step.peak_reserved_bytes is not None else _RESIDENT
    return _known(
        {
            MEASURED: measured,
            PREDICTED: {
                **_peaks({phase: window.peak_allocated_bytes for phase, window in phases}),
                _RESERVED: _gib(predicted.peak_reserved_bytes if predicted else None),
            },
            PREDICTED_LOW: _peaks({phase: window.low_bytes for phase, window in phases}),
            CAPACITY: {full: _gib(device.capacity_bytes)},
        }
    )


def rank_curves(ranks: RankValues) -> dict[str, dict[str, float]]:
    """The known values over the ranks of a job."""
    worst = ranks.worst
    spreads: dict[str, Spread | None] = {
        _PEAKS[phase]: ranks.of_phase(phase) for phase in Phase
    } | {_RESERVED: ranks.peak_reserved}
    over_ranks = {
        f"ranks_{which}": {
            tag: _gib(spread[position]) for tag, spread in spreads.items() if spread is not None
        }
        for position, which in enumerate(("min", "mean", "max"))
    }
    return _known(
        {
            MEASURED: {
                "memory/worst_rank": worst.rank,
                "memory/worst_rank_capacity_pct": worst.capacity_share_pct,
                "memory/num_ranks_missing": len(ranks.missing) or None,
            },
            **over_ranks,
            WORST_RANK: {**_peaks(worst.phases), _RESERVED: _gib(worst.peak_reserved_bytes)},
            WORST_RANK_PREDICTED: {
                **_peaks(worst.predicted),
                _RESERVED: _gib(worst.predicted_reserved_bytes),
            },
        }
    )


def flat(curves: Curves) -> dict[str, float]:
    """The same values for a logger without runs below others: the curve is part of the tag."""
    return {
        _flat_tag(curve, tag): value
        for curve, values in curves.items()
        for tag, value in values.items()
    }


def _flat_tag(curve: str, tag: str) -> str:
    group, _, name = tag.partition("/")
    if curve == CAPACITY:
        return f"{group}/{curve}"
    return f"{group}/{curve}/{name}" if curve else tag


def _peaks(sizes: Mapping[Phase, int | None]) -> dict[str, float | None]:
    return {_PEAKS[phase]: _gib(num_bytes) for phase, num_bytes in sizes.items()}


def _known(curves: Mapping[str, Mapping[str, float | None]]) -> dict[str, dict[str, float]]:
    known = {
        curve: {tag: float(value) for tag, value in values.items() if value is not None}
        for curve, values in curves.items()
    }
    return {curve: values for curve, values in known.items() if values}


def _gib(num_bytes: int | None) -> float | None:
    # Four digits: TensorBoard fits the axis to its values, and a curve would show little but a few
    # bytes more or less.
    return None if num_bytes is None else float(f"{num_bytes / GiB:.4g}")
