"""The long table of a report: memory by phase and by category, then the device."""

from __future__ import annotations

from collections.abc import Mapping

from memcallback.core.document import Table, size_text
from memcallback.core.step_memory import (
    DeviceMemory,
    MemoryStats,
    PhaseMemory,
    StepMemory,
    error_pct,
)
from memcallback.core.types import PERSISTENT_CATEGORIES, Phase
from memcallback.core.units import format_bytes
from memcallback.prediction.prediction import Prediction, StepPrediction

_INDENT = "  "
_COLUMNS = ("", "predicted", "lower bound", "measured", "error")
_Rows = list[tuple[str, ...]]


def long_table(
    measured: StepMemory | None,
    prediction: StepPrediction | None,
    device: DeviceMemory,
    *,
    without_savings: StepPrediction | None = None,
    lifetime_peak_allocated_bytes: int | None = None,
) -> Table:
    """The table; its arguments are the attributes of a `Report`."""
    # Predictions are of steady steps: a warm-up step is not set beside one.
    is_steady = measured is None or not measured.is_warm_up
    predicted = prediction.step if prediction and is_steady else None
    groups = [
        _phase_rows(measured, predicted),
        _category_rows(measured, predicted),
        _at_peak_rows(prediction) if predicted and isinstance(prediction, Prediction) else [],
        _saved_rows(measured, predicted, without_savings),
        _device_rows(measured, predicted, device, lifetime_peak_allocated_bytes),
    ]
    groups = [group for group in groups if group]
    ends = [sum(map(len, groups[: number + 1])) - 1 for number in range(len(groups) - 1)]
    rows = [row for group in groups for row in group]
    # Columns without a value go: a replay has no lower bound.
    shown = [number for number in range(len(_COLUMNS)) if any(row[number] for row in rows)]
    columns, *rows = (tuple(cells[number] for number in shown) for cells in (_COLUMNS, *rows))
    return Table(
        title=_title(measured, prediction),
        columns=columns,
        rows=tuple(rows),
        rules_after=frozenset(ends),
    )


def _title(measured: StepMemory | None, prediction: StepPrediction | None) -> str:
    step = measured or (prediction.step if prediction else None)
    if step is None:
        return "Memory of one training step: nothing was recorded"
    kind = "" if measured is None else "warm-up, " if measured.is_warm_up else "steady, "
    size = f"batch size {step.batch_size:,}" if step.batch_size else "batch size unknown"
    sources = [f"measured by {measured.source}"] if measured else []
    sources += [f"predicted by {prediction.source}"] if prediction else []
    step_line = f"Memory of one training step ({kind}{size}) on {step.device_name}"
    return f"{step_line}\n{', '.join(sources)}"


def _phase_rows(measured: StepMemory | None, predicted: StepMemory | None) -> _Rows:
    of_measured: Mapping[Phase, PhaseMemory] = measured.phases if measured else {}
    of_predicted: Mapping[Phase, PhaseMemory] = predicted.phases if predicted else {}
    rows = [_heading("peak allocated")]
    for phase in Phase:
        ours, theirs = of_predicted.get(phase), of_measured.get(phase)
        if ours is None and theirs is None:
            continue
        rows.append(
            _row(
                theirs.label if theirs else phase.label,
                ours.peak_allocated_bytes if ours else None,
                ours.low_bytes if ours else None,
                theirs.peak_allocated_bytes if theirs else None,
            )
        )
    return rows


def _category_rows(measured: StepMemory | None, predicted: StepMemory | None) -> _Rows:
    """Memory at the end of the forward pass, when all activations are live."""
    ends = _end_of_forward(predicted), _end_of_forward(measured)
    if ends == (None, None):
        return []
    predicted_sizes, measured_sizes = ((end and end.by_category) or {} for end in ends)
    predicted_rest, measured_rest = (end.rest_bytes if end else None for end in ends)
    return [
        _heading("at the end of forward"),
        *(
            _row(category.label, predicted_sizes.get(category), None, measured_sizes.get(category))
            for category in PERSISTENT_CATEGORIES
        ),
        _row("activations and other", predicted_rest, _low_rest(predicted), measured_rest),
    ]


def _at_peak_rows(prediction: Prediction) -> _Rows:
    """Predicted memory at the peak by category; together they are the peak."""
    return [
        _heading(f"at the predicted peak, in {prediction.peak_phase.label}"),
        *(
            _row(category.label, size, None, None, is_measurable=False)
            for category, size in prediction.by_category.items()
        ),
    ]


def _saved_rows(
    measured: StepMemory | None, predicted: StepMemory | None, without: StepPrediction | None
) -> _Rows:
    """How much the savings lower the peaks, against the predicted step without them."""
    if without is None or predicted is None or measured is None:
        return []
    peaks = (
        (
            "allocated",
            without.peak_allocated_bytes,
            predicted.peak_allocated_bytes,
            measured.peak_allocated_bytes,
        ),
        (
            "reserved",
            without.peak_reserved_bytes,
            predicted.peak_reserved_bytes,
            measured.peak_reserved_bytes,
        ),
    )
    rows = [_heading(f"saved, against {without.batch_size:,} samples without savings")]
    for label, before, after, real in peaks:
        if before is not None and after is not None and real is not None:
            rows.append((f"{_INDENT}peak {label} without", format_bytes(before), "", "", ""))
            rows.append(_row(f"saved, {label}", before - after, None, before - real))
    return rows


def _device_rows(
    measured: StepMemory | None,
    predicted: StepMemory | None,
    device: DeviceMemory,
    lifetime_peak_allocated_bytes: int | None,
) -> _Rows:
    resident = measured.peak_resident_bytes if measured else None
    rows = [_heading("device")]
    if resident is not None or (
        measured and measured.windows and measured.windows[-1].end.resident_bytes is not None
    ):
        rows.append(_row("peak resident size", None, None, resident))
    else:
        ours = predicted.peak_reserved_bytes if predicted else None
        theirs = measured.peak_reserved_bytes if measured else None
        rows.append(_row("peak reserved", ours, None, theirs))
        rows.append(_row("non-PyTorch memory", None, None, device.non_pytorch_bytes))
    if device.other_processes_bytes is not None:
        rows.append(_row("used by other processes", None, None, device.other_processes_bytes))
    rows.append(_row("lifetime peak allocated", None, None, lifetime_peak_allocated_bytes))
    capacity, used = device.capacity_bytes, device.used_bytes
    if capacity and used is not None:
        rows.append(_row(f"used by all ({100 * used / capacity:.1f} %)", None, None, used))
    rows.append(_row("capacity", None, None, capacity))
    return rows


def _low_rest(predicted: StepMemory | None) -> int | None:
    """The lower bound of activations and other memory at the end of the forward pass."""
    forward = predicted.phases.get(Phase.FORWARD) if predicted else None
    if (
        forward is None
        or forward.low_bytes is None
        or forward.end.allocated_bytes is None
        or forward.end.rest_bytes is None
    ):
        return None
    return forward.end.rest_bytes - (forward.end.allocated_bytes - forward.low_bytes)


def _end_of_forward(step: StepMemory | None) -> MemoryStats | None:
    """The reading at the end of the first phase that is a forward pass and nothing else."""
    if step is None:
        return None
    return next((window.end for window in step.windows if window.covers == (Phase.FORWARD,)), None)


def _heading(text: str) -> tuple[str, ...]:
    return (text, "", "", "", "")


def _row(
    label: str,
    predicted: int | None,
    low: int | None,
    measured: int | None,
    *,
    is_measurable: bool = True,
) -> tuple[str, ...]:
    error = error_pct(predicted, measured)
    return (
        _INDENT + label,
        size_text(predicted, ""),
        size_text(low, ""),
        size_text(measured) if is_measurable else "",
        _percent(error) if error is not None else "",
    )


def _percent(error: float) -> str:
    rounded = round(error, 1)
    return f"{rounded:+.1f} %" if rounded else "0.0 %"
