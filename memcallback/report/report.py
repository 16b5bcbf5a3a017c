"""Report: the measured step, its prediction and the batch size suggested, as one document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memcallback.batch_size.advice import BatchSizeAdvice
from memcallback.core.document import Document, Printable, Table, size_text
from memcallback.core.step_memory import (
    DeviceMemory,
    MemoryStats,
    PhaseMemory,
    StepMemory,
    error_pct,
)
from memcallback.core.types import PERSISTENT_CATEGORIES, Category, Phase
from memcallback.core.units import format_bytes
from memcallback.prediction.comparison import differences
from memcallback.prediction.prediction import Prediction, StepPrediction
from memcallback.report.rank_values import RankValues

_INDENT = "  "
#: Modules named of those with most memory at the predicted peak.
_NUM_MODULES = 3


@dataclass(frozen=True, kw_only=True)
class Report(Printable):
    """All that is known of a training's memory at one time.

    Attributes:
        measured: A steady step, or the warm-up step if there is no other; None if no step was
            recorded.
        prediction: The prediction at that step's batch size; None if there is none.
        device: The memory of the whole device.
        advice: The suggested batch size; None if there is none.
        lifetime_peak_allocated_bytes: Peak of allocated memory since the recording began.
        notes: Further notes, one sentence each.
        without_savings: The prediction of the same update without the callback's savings, with as
            many samples in one batch; None if there are no savings.
        ranks: The values of all ranks of a job at the last step for which they are known; None for
            a job of one rank.
    """

    measured: StepMemory | None
    prediction: StepPrediction | None
    device: DeviceMemory
    advice: BatchSizeAdvice | None
    lifetime_peak_allocated_bytes: int | None = None
    notes: tuple[str, ...] = ()
    without_savings: StepPrediction | None = None
    ranks: RankValues | None = None

    def table(self) -> Table:
        """Predicted and measured memory by phase and by category, with errors; then the device."""
        predicted = self.prediction.step if self.prediction else None
        if self.measured and self.measured.is_warm_up:
            # Predictions are of steady steps, and none was measured.
            predicted = None
        phases = _phase_rows(self.measured, predicted)
        categories = _category_rows(self.measured, predicted)
        at_peak = (
            _at_peak_rows(self.prediction)
            if predicted and isinstance(self.prediction, Prediction)
            else []
        )
        groups = [
            phases,
            categories,
            *(group for group in (at_peak, self._saved_rows(predicted)) if group),
            self._device_rows(predicted),
        ]
        ends = [
            sum(len(group) for group in groups[: number + 1]) - 1
            for number in range(len(groups) - 1)
        ]
        columns: tuple[str, ...] = (
            "",
            "predicted",
            "low edge",
            "measured",
            "error" if predicted else "",
        )
        rows = [row for group in groups for row in group]
        # Columns without a value go: a replay has no low edge.
        shown = [number for number in range(len(columns)) if any(row[number] for row in rows)]
        columns, *rows = (tuple(cells[number] for number in shown) for cells in (columns, *rows))
        return Table(
            title=self._title(), columns=columns, rows=tuple(rows), rules_after=frozenset(ends)
        )

    def lines(self) -> tuple[str, ...]:
        """The suggestion, what it does not include, and the notes."""
        lines = []
        if self.advice:
            lines.append(self.advice.sentence())
            lines.append("Not included: " + "; ".join(self.advice.leaves_out) + ".")
        if isinstance(self.prediction, Prediction):
            lines.extend(_off(self.prediction, self.measured))
            most = [
                f"{name or 'the root module'} {format_bytes(size)}"
                for name, size in self.prediction.by_module.items()
            ]
            lines.append(f"Most at the predicted peak: {', '.join(most[:_NUM_MODULES])}.")
        if self.prediction:
            lines.extend(self.prediction.caveats)
        if self.device.unavailable:
            lines.append(f"Of the device: {self.device.unavailable}.")
        return (*lines, *self.notes)

    def document(self) -> Document:
        """The table, the lines below it, and the table over the ranks."""
        return Document(
            self.table(), *self.lines(), *([self.ranks.document()] if self.ranks else [])
        )

    def _title(self) -> str:
        step = self.measured or (self.prediction.step if self.prediction else None)
        if step is None:
            return "Memory of one training step: nothing was recorded"
        kind = (
            "" if self.measured is None else "warm-up, " if self.measured.is_warm_up else "steady, "
        )
        size = f"batch size {step.batch_size}" if step.batch_size else "batch size unknown"
        sources = [f"measured by {self.measured.source}"] if self.measured else []
        sources += [f"predicted by {self.prediction.source}"] if self.prediction else []
        step_line = f"Memory of one training step ({kind}{size}) on {step.device_name}"
        return f"{step_line}\n{', '.join(sources)}"

    def _saved_rows(self, predicted: StepMemory | None) -> list[tuple[str, ...]]:
        """How much the savings lower the peaks, against the predicted step without them."""
        measured, without = self.measured, self.without_savings
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
        rows = [_heading(f"saved, of {without.batch_size:,} samples in one step")]
        for label, before, after, real in peaks:
            if before is not None and after is not None and real is not None:
                rows.append((f"{_INDENT}peak {label} without", format_bytes(before), "", "", ""))
                rows.append(_row(f"saved, {label}", before - after, None, before - real))
        return rows

    def _device_rows(self, predicted: StepMemory | None) -> list[tuple[str, ...]]:
        measured = self.measured
        reserved = measured.peak_reserved_bytes if measured else None
        resident = measured.peak_resident_bytes if measured else None
        capacity, used = self.device.capacity_bytes, self.device.used_bytes
        rows = [_heading("device")]
        if resident is not None or (
            measured and measured.windows and measured.windows[-1].end.resident_bytes is not None
        ):
            rows.append(_row("peak resident size", None, None, resident))
        else:
            rows.append(
                _row(
                    "peak reserved",
                    predicted.peak_reserved_bytes if predicted else None,
                    None,
                    reserved,
                )
            )
            rows.append(_row("non-PyTorch memory", None, None, self.device.non_pytorch_bytes))
        if self.device.other_processes_bytes is not None:
            rows.append(
                _row("used by other processes", None, None, self.device.other_processes_bytes)
            )
        rows.append(_row("lifetime peak allocated", None, None, self.lifetime_peak_allocated_bytes))
        share = f"{100 * used / capacity:.1f} % used" if capacity and used is not None else ""
        rows.append((_INDENT + "capacity", "", "", size_text(capacity), share))
        return rows


def _phase_rows(measured: StepMemory | None, predicted: StepMemory | None) -> list[tuple[str, ...]]:
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


def _category_rows(
    measured: StepMemory | None, predicted: StepMemory | None
) -> list[tuple[str, ...]]:
    """Memory at the end of the forward pass, when all activations are live."""
    ends = end_of_forward(predicted), end_of_forward(measured)
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


def _at_peak_rows(prediction: Prediction) -> list[tuple[str, ...]]:
    """Predicted memory at the peak in the categories that cannot be measured."""
    categories = [
        category
        for category in Category
        if category not in PERSISTENT_CATEGORIES and category in prediction.by_category
    ]
    return [
        _heading(f"at the predicted peak, in {prediction.peak_phase.label}"),
        *(
            _row(category.label, prediction.by_category[category], None, None, is_measurable=False)
            for category in categories
        ),
    ]


def _off(prediction: Prediction, measured: StepMemory | None) -> list[str]:
    """The largest errors: of allocated memory at a boundary and at a peak, of reserved memory."""
    if (
        measured is None
        or measured.is_warm_up
        or measured.is_interrupted
        or measured.batch_size != prediction.batch_size
    ):
        return []
    sentences: dict[str, str] = {}
    for difference in sorted(
        differences(prediction.step, measured), key=lambda difference: difference.size_bytes
    ):
        sentences[" ".join(difference.where.split()[:2])] = difference.sentence()
    kinds = ("allocated at", "peak allocated", "peak reserved")
    return [sentences[kind] for kind in kinds if kind in sentences]


def _low_rest(predicted: StepMemory | None) -> int | None:
    """The low edge of activations and other memory at the end of the forward pass."""
    forward = predicted.phases.get(Phase.FORWARD) if predicted else None
    if (
        forward is None
        or forward.low_bytes is None
        or forward.end.allocated_bytes is None
        or forward.end.rest_bytes is None
    ):
        return None
    return forward.end.rest_bytes - (forward.end.allocated_bytes - forward.low_bytes)


def end_of_forward(step: StepMemory | None) -> MemoryStats | None:
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
