"""A Prediction as console text and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from memcallback.core.document import Document, Table
from memcallback.core.step_memory import PHASE_COLUMNS, MemoryStats, StepMemory
from memcallback.core.types import Phase
from memcallback.core.units import format_bytes
from memcallback.devices.catalogue import Device, HostSpec
from memcallback.prediction.batch_trace import BatchTrace
from memcallback.prediction.protocol import StepPrediction

#: Of the modules at the peak, those that hold most.
_NUM_MODULES = 8
_ONE_BATCH_SIZE = "The largest batch size is not known: only this batch size was traced."


class _Prediction(StepPrediction, Protocol):
    """What is told of a `Prediction` beyond what every prediction can be asked; what is what stands
    there.
    """

    @property
    def trace(self) -> BatchTrace: ...
    @property
    def device(self) -> Device: ...
    @property
    def sequence_length(self) -> int | None: ...
    @property
    def steps(self) -> tuple[StepMemory, ...]: ...
    @property
    def peak_phase(self) -> Phase: ...
    @property
    def by_module(self) -> Mapping[str, int]: ...
    @property
    def by_operator(self) -> Mapping[str, int]: ...
    @property
    def fits_without_retry(self) -> bool: ...
    @property
    def out_of_memory(self) -> str | None: ...
    @property
    def limit(self) -> int | None: ...
    @property
    def limit_without_retry(self) -> int | None: ...


def document(prediction: _Prediction) -> Document:
    """What each phase needs, what stands at the peak, whether it fits and up to which batch size,
    and what was assumed.
    """
    lines = (*verdict(prediction), *prediction.caveats)
    return Document(_phases(prediction), _at_peak(prediction), *lines)


def verdict(prediction: _Prediction) -> tuple[str, ...]:
    """Whether it fits, and up to which batch size, one sentence each."""
    device = prediction.device
    if isinstance(device, HostSpec):
        return _host_verdict(prediction)
    available = f"{format_bytes(device.allocator_capacity_bytes)} that the allocator can have of {format_bytes(device.capacity_bytes)}"
    if not prediction.fits:
        lines = [f"Does not fit in the {available}: out of memory in {prediction.out_of_memory}"]
    elif not prediction.fits_without_retry:
        lines = [
            f"Fits in the {available}, but only after the allocator has given back its cache, which is slow."
        ]
    else:
        lines = [f"Fits in the {available}, without a retry."]
    limit, without_retry = prediction.limit, prediction.limit_without_retry
    if limit is not None and without_retry is not None:
        lines.append(
            f"Largest batch size: {without_retry} without a retry, {limit} at all, with nothing kept free ({_assumed(prediction, limit)})."
        )
    elif not prediction.trace.is_any_batch_size_known:
        lines.append(_ONE_BATCH_SIZE)
    return tuple(lines)


def _host_verdict(prediction: _Prediction) -> tuple[str, ...]:
    if prediction.capacity_bytes is None:
        return ("How much memory there is on the CPU was not given: nothing is said of what fits.",)
    available = format_bytes(prediction.capacity_bytes)
    lines = [
        f"Fits in the {available}."
        if prediction.fits
        else f"Does not fit in the {available}: out of memory in {prediction.out_of_memory}"
    ]
    if prediction.limit is not None:
        lines.append(
            f"Largest batch size: {prediction.limit}, with nothing kept free ({_assumed(prediction, prediction.limit)})."
        )
    elif not prediction.trace.is_any_batch_size_known:
        lines.append(_ONE_BATCH_SIZE)
    return tuple(lines)


def _assumed(prediction: _Prediction, limit: int) -> str:
    """What is assumed of larger batches than those traced."""
    text = "a larger batch is taken to need no less"
    return (
        f"{text}, and to do the same: the largest that was traced is {prediction.trace.largest_traced}"
        if prediction.trace.is_far(limit)
        else text
    )


def _phases(prediction: _Prediction) -> Table:
    rows = []
    for step, name in ((prediction.steps[0], "warm-up"), (prediction.step, "")):
        if step is prediction.steps[0] and len(prediction.steps) == 1:
            continue
        rows += [
            window.row(f"{name}: {window.label}" if name else window.label)
            for window in step.windows
        ]
    num_warm_up = len(rows) - len(prediction.step.windows)
    columns = PHASE_COLUMNS if prediction.peak_reserved_bytes is not None else PHASE_COLUMNS[:-1]
    return Table(
        title=f"Memory of one training step ({_size(prediction)}) on {prediction.device_name}\npredicted by {prediction.source}",
        columns=columns,
        rows=tuple(row[: len(columns)] for row in rows),
        rules_after=frozenset({num_warm_up - 1} if num_warm_up else ()),
    )


def _size(prediction: _Prediction) -> str:
    length = (
        ""
        if prediction.sequence_length is None
        else f", sequence length {prediction.sequence_length}"
    )
    return f"batch size {prediction.batch_size}{length}"


def _at_peak(prediction: _Prediction) -> Table:
    peak_bytes = prediction.peak_allocated_bytes
    categories = {category.label: size for category, size in prediction.by_category.items()}
    modules = dict(list(prediction.by_module.items())[:_NUM_MODULES])
    rows = [_share_row(label, size, peak_bytes) for label, size in categories.items()]
    num_categories = len(rows)
    rows += [
        _share_row(name or "(root module)", size, peak_bytes) for name, size in modules.items()
    ]
    if rest := len(prediction.by_module) - len(modules):
        rest_bytes = peak_bytes - sum(modules.values())
        rows.append(
            _share_row(
                f"{rest} more modules" if rest > 1 else "1 more module", rest_bytes, peak_bytes
            )
        )
    rows.append(("all", format_bytes(peak_bytes), "100.0 %"))
    return Table(
        title=f"What stands at the peak, in {prediction.peak_phase.label}: by category and by module",
        columns=("", "allocated", "share"),
        rows=tuple(rows),
        totals=True,
        rules_after=frozenset({num_categories - 1}),
    )


def _share_row(label: str, num_bytes: int, peak_bytes: int) -> tuple[str, ...]:
    return (
        label,
        format_bytes(num_bytes),
        f"{100 * num_bytes / peak_bytes:.1f} %" if peak_bytes else "",
    )


def to_dict(prediction: _Prediction) -> dict[str, Any]:
    """The prediction as data that json writes; every size is named `_bytes`, every number of
    samples `batch_size`.
    """
    return {
        "source": prediction.source,
        "batch_size": prediction.batch_size,
        "sequence_length": prediction.sequence_length,
        "device_name": prediction.device_name,
        "capacity_bytes": prediction.capacity_bytes,
        "context_bytes": prediction.device.context_bytes,
        "communication_bytes": prediction.device.outside_bytes - prediction.device.context_bytes,
        "peak_allocated_bytes": prediction.peak_allocated_bytes,
        "peak_reserved_bytes": prediction.peak_reserved_bytes,
        "fits": prediction.fits,
        "fits_without_retry": prediction.fits_without_retry,
        "out_of_memory": prediction.out_of_memory,
        "limit_batch_size": prediction.limit,
        "limit_without_retry_batch_size": prediction.limit_without_retry,
        "steps": [_step_dict(step) for step in prediction.steps],
        "peak_phase": prediction.peak_phase.value,
        "at_peak_by_category_bytes": {
            category.value: size for category, size in prediction.by_category.items()
        },
        "at_peak_by_module_bytes": dict(prediction.by_module),
        "at_peak_by_operator_bytes": dict(prediction.by_operator),
        "caveats": list(prediction.caveats),
    }


def _step_dict(step: StepMemory) -> dict[str, Any]:
    return {
        "is_warm_up": step.is_warm_up,
        "peak_allocated_bytes": step.peak_allocated_bytes,
        "peak_reserved_bytes": step.peak_reserved_bytes,
        "num_alloc_retries": step.num_alloc_retries,
        "windows": [
            {
                "phase": window.phase.value,
                "start": _stats_dict(window.start),
                "end": _stats_dict(window.end),
                "peak_allocated_bytes": window.peak_allocated_bytes,
                "peak_reserved_bytes": window.peak_reserved_bytes,
                "num_alloc_retries": window.num_alloc_retries,
            }
            for window in step.windows
        ],
    }


def _stats_dict(stats: MemoryStats) -> dict[str, Any]:
    names = (
        "allocated_bytes",
        "reserved_bytes",
        "active_bytes",
        "requested_bytes",
        "inactive_split_bytes",
    )
    figures: Mapping[str, Any] = {name: getattr(stats, name) for name in names}
    return {
        **figures,
        "held_by_category_bytes": {
            category.value: size for category, size in (stats.by_category or {}).items()
        },
    }
