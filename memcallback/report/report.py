"""Report: measured, predicted and advised, as text."""

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
#: Of the modules at the predicted peak, those that hold most.
_NUM_MODULES = 3


@dataclass(frozen=True, kw_only=True)
class Report(Printable):
    """All that is known of a training's memory at one time.

    Attributes:
        measured: A steady step, or the warm-up step where there is no other; None if no step was
            recorded.
        prediction: The prediction at that step's batch size, None if there is none.
        device: The whole device.
        advice: The suggestion, None if there is none.
        lifetime_peak_allocated_bytes: The largest allocated figure since the recording began.
        notes: What else the person should know, one sentence each.
        without_savings: The prediction of the same update without the callback's savings: of as
            many samples in one batch; None if there are no savings.
        ranks: Of a job of several ranks the figures of all at the last step of which they are
            known; None if there are none.
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
        """Per phase and per category: predicted and measured with the error; then the device."""
        predicted = self.prediction.step if self.prediction else None
        if self.measured and self.measured.is_warm_up:
            # A prediction is of a steady step, and there is none to compare it with.
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
        # A replay has no band; without a prediction there is nothing to compare with.
        shown = [number for number in range(len(columns)) if any(row[number] for row in rows)]
        columns, *rows = (tuple(cells[number] for number in shown) for cells in (columns, *rows))
        return Table(
            title=self._title(), columns=columns, rows=tuple(rows), rules_after=frozenset(ends)
        )

    def lines(self) -> tuple[str, ...]:
        """The suggestion, what it leaves out, and the notes."""
        lines = []
        if self.advice:
            lines.append(self.advice.sentence())
            lines.append("It leaves out " + "; ".join(self.advice.leaves_out) + ".")
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
        return f"Memory of one training step ({kind}{size}) on {step.device_name}\n{', '.join(sources)}"

    def _saved_rows(self, predicted: StepMemory | None) -> list[tuple[str, ...]]:
        """What the savings take off the peaks; what was measured is set against the prediction
        without them.
        """
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
    """What stands when the forward pass ends: the moment at which all activations are alive."""
    ours, theirs = end_of_forward(predicted), end_of_forward(measured)
    if ours is None and theirs is None:
        return []
    our_split, their_split = (
        (ours.by_category if ours else None) or {},
        (theirs.by_category if theirs else None) or {},
    )
    return [
        _heading("at the end of forward"),
        *(_row(c.label, our_split.get(c), None, their_split.get(c)) for c in PERSISTENT_CATEGORIES),
        _row(
            "activations and other",
            ours.rest_bytes if ours else None,
            _low_rest(predicted),
            theirs.rest_bytes if theirs else None,
        ),
    ]


def _at_peak_rows(prediction: Prediction) -> list[tuple[str, ...]]:
    """What the prediction has beyond what a training can be asked for: at the peak, by category."""
    beyond = [
        category
        for category in Category
        if category not in PERSISTENT_CATEGORIES and category in prediction.by_category
    ]
    return [
        _heading(f"at the predicted peak, in {prediction.peak_phase.label}"),
        *(
            _row(category.label, prediction.by_category[category], None, None, is_measurable=False)
            for category in beyond
        ),
    ]


def _off(prediction: Prediction, measured: StepMemory | None) -> list[str]:
    """The largest difference of allocated memory at a boundary, at a peak, and that of reserved
    memory, where they are beyond the band.
    """
    if (
        measured is None
        or measured.is_warm_up
        or measured.is_interrupted
        or measured.batch_size != prediction.batch_size
    ):
        return []
    found: dict[str, str] = {}
    for difference in sorted(
        differences(prediction.step, measured), key=lambda one: one.size_bytes
    ):
        found[" ".join(difference.where.split()[:2])] = difference.sentence()
    return [
        found[kind] for kind in ("allocated at", "peak allocated", "peak reserved") if kind in found
    ]


def _low_rest(predicted: StepMemory | None) -> int | None:
    """The lower edge of what is allocated beyond what is held, at the end of the forward pass."""
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
    """The reading at the end of the first forward pass that ends at a boundary of its own."""
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
