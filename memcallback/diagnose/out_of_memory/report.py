"""OutOfMemoryReport: where memory ran out, what was live then, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from memcallback.core.code_lines import CodeLine
from memcallback.core.document import Code, Document, Heading, Paragraph, Printable, Table
from memcallback.core.units import format_bytes
from memcallback.diagnose.out_of_memory.parts import (
    OomLocation,
    OomMemoryState,
    OomTensor,
    PredictedPeak,
)
from memcallback.page.page import Page, Section
from memcallback.prediction.prediction import Prediction
from memcallback.savings.plan import PlanRow
from memcallback.savings.plan_page import savings_section, way_out

#: Live tensors to list, the largest.
NUM_TENSORS = 10
#: Longer lines of code are cut in a table.
_CODE_WIDTH = 40


@dataclass(frozen=True, kw_only=True)
class OutOfMemoryReport(Printable):
    """An explanation of an out-of-memory error. It holds no tensor.

    Attributes:
        error: The error's own text.
        device_name: The device.
        place: Where it happened.
        shortage: The device's memory at that moment, measured.
        by_category: Live memory by category, measured: name -> bytes; last, allocated memory of no
            known tensor.
        tensors: The largest live tensors, largest first, measured.
        num_tensors: The number of live tensors.
        batch: The batch's tensors: name, shape, dtype.
        batch_size: Samples in the batch; None if unknown.
        expected: The prediction for this step; None without one.
        savings: Memory savings with their predicted effect, best first.
        processes: Other processes on the device, one sentence each.
        notes: Further notes, one sentence each.
        rank: The rank that failed; None in a job of one rank.
    """

    error: str
    device_name: str
    place: OomLocation
    shortage: OomMemoryState
    by_category: tuple[tuple[str, int], ...] = ()
    tensors: tuple[OomTensor, ...] = ()
    num_tensors: int = 0
    batch: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    batch_size: int | None = None
    expected: PredictedPeak | None = None
    savings: tuple[PlanRow, ...] = ()
    processes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    rank: int | None = None

    def with_savings(self, savings: Sequence[PlanRow]) -> OutOfMemoryReport:
        """Add the savings that would help, best first.

        Args:
            savings: Candidates with their predicted effect; those that fail, or neither fit nor
                save 1 % of the peak, are dropped.

        Returns:
            A copy of the report.
        """
        helping = [
            row for row in savings if not row.problem and (row.fits or self._is_notable(row))
        ]
        return replace(
            self,
            savings=tuple(
                sorted(helping, key=lambda row: (not row.fits, row.peak_allocated_bytes or 0))
            ),
        )

    def headline(self) -> str:
        """One sentence: what happened, where and when."""
        place = self.place
        where = [
            f"in the {place.phase}" if place.phase else "",
            f"{'of' if place.phase else 'at'} step {place.step}" if place.step is not None else "",
        ]
        batch = f" (batch size {self.batch_size:,})" if self.batch_size is not None else ""
        rank = "" if self.rank is None else f", on rank {self.rank}"
        return (
            f"Out of memory on {self.device_name} {' '.join(filter(None, where))}".rstrip()
            + f"{batch}{rank}."
        )

    def sentences(self) -> list[str]:
        """Sentences on the place, the batch and the prediction."""
        place, sentences = self.place, []
        if place.operator or place.module is not None:
            module = ""
            if place.module is not None:
                module = f"module {place.module!r}" if place.module else "the root module"
            joint = " near " if place.is_near else " in "
            text = joint.join(filter(None, (place.operator, module)))
            sentences.append(f"Memory ran out at {text}.")
        for name, line in (
            ("Your line", place.line),
            ("Line of the forward pass", place.forward_line),
        ):
            if line is not None:
                sentences.append(f"{name}: {line}: {line.text}" if line.text else f"{name}: {line}")
        if self.batch:
            shapes = ", ".join(
                f"{name} {_shape(shape)} {dtype}".strip() for name, shape, dtype in self.batch
            )
            sentences.append(f"The batch: {shapes}.")
        return [*sentences, *self._prediction_sentences()]

    def _prediction_sentences(self) -> list[str]:
        peak = self.expected
        if peak is None:
            return []
        allocated = format_bytes(peak.peak_allocated_bytes)
        text = f"Predicted for this batch size: peak allocated {allocated}"
        shortfall = peak.shortfall_bytes
        if shortfall is not None and peak.available_bytes is not None:
            available = format_bytes(peak.available_bytes)
            if shortfall > 0:
                text += f", {format_bytes(shortfall)} above the available {available}"
            else:
                text += f" of {available} available"
        if peak.peak_reserved_bytes is not None:
            reserved = format_bytes(peak.peak_reserved_bytes)
            text += f"; peak reserved {reserved} with unlimited memory"
        if peak.fits:
            return [
                f"{text}. It was predicted to fit, so something else uses memory: see the live "
                "tensors and the notes."
            ]
        if peak.fits is False and shortfall is not None and shortfall <= 0:
            return [
                f"{text}. The tensors alone would fit, but not with fragmentation: see the row "
                "'reserved but unallocated'."
            ]
        return [f"{text}."]

    def document(self) -> Document:
        """The whole report: place, error, memory at that moment, and savings that would help."""
        return self._document(Code(self.error))

    def to_text(self) -> str:
        """Text for a console, without the error itself, which the traceback shows."""
        return self._document().text()

    def _document(self, *error: Code) -> Document:
        sentences = (*self.sentences(), *self.processes)
        return Document(
            Heading(self.headline(), 1),
            *(Paragraph(sentence, 1) for sentence in sentences),
            self._moment(*error),
            self.savings_document(),
        )

    def _moment(self, *error: Code) -> Document:
        """The error if given, the tables of what was measured, and the notes."""
        tables = (self._memory_table(), self._tensor_table())
        return Document(*error, *(table for table in tables if table.rows), *self.notes)

    def page(self, prediction: Prediction | None = None) -> Page:
        """The report as a page, with the charts of a prediction of the step that failed."""
        # What it needs and what would do comes before where it was.
        needed = self._prediction_sentences()
        where = self.sentences()[: -len(needed) or None]
        verdict = (self.headline(), *needed, *self._way_out(prediction), *where, *self.processes)
        moment = Section(
            title="At that moment",
            note="measured",
            parts=[self._moment(Code(self.error))],
        )
        if prediction is None:
            return Page(title="Out of memory", verdict=verdict, is_good=False, sections=[moment])
        sections = [moment]
        if self.savings:
            reserved = prediction.peak_reserved_bytes
            present = prediction.peak_allocated_bytes if reserved is None else reserved
            sections.insert(0, savings_section(present, self.savings))
        page = prediction.page("Out of memory", verdict=verdict, more=sections)
        return replace(page, is_good=False)

    def _way_out(self, prediction: Prediction | None) -> tuple[str, ...]:
        """The batch size that fits, and savings with which this one does."""
        if prediction is None:
            return ()
        return way_out(prediction.largest_batch_size, self.savings)

    def savings_document(self) -> Document:
        """The savings that would help; empty if none is known."""
        if not self.savings:
            return Document()
        how_to = Heading("How to turn each on, and what it changes:")
        document = Document(self._savings_table(), how_to)
        for row in self.savings:
            changes = Paragraph(f"{row.saving}: {row.changes}" if row.changes else row.saving, 1)
            document = Document(document, changes, Code(row.line, 2))
        return document

    def _memory_table(self) -> Table:
        live = [(name, size_bytes) for name, size_bytes in self.by_category if size_bytes]
        return Table(
            title="At that moment, measured",
            columns=("", "size"),
            rows=tuple(
                (name, format_bytes(size_bytes))
                for name, size_bytes in (*self.shortage.rows(), *live)
            ),
        )

    def _tensor_table(self) -> Table:
        columns: tuple[str, ...] = ("held by", "size", "tensor", "made at")
        rows = [
            (
                _owner(tensor),
                format_bytes(tensor.size_bytes),
                f"{tensor.dtype} {_shape(tensor.shape)}",
                _made_at(tensor.line),
            )
            for tensor in self.tensors
        ]
        has_lines = any(tensor.line is not None for tensor in self.tensors)
        num_columns = len(columns) if has_lines else len(columns) - 1
        return Table(
            title=f"The {len(self.tensors)} largest of {self.num_tensors} live tensors, measured",
            columns=columns[:num_columns],
            rows=tuple(row[:num_columns] for row in rows),
            left_columns=frozenset({"tensor", "made at"}),
        )

    def _savings_table(self) -> Table:
        cells = tuple(
            (
                row.saving,
                format_bytes(row.peak_allocated_bytes or 0),
                format_bytes(self._saved_bytes(row)),
                "yes" if row.fits else "no",
            )
            for row in self.savings
        )
        columns = ("saving", "peak allocated", "saved", "fits")
        size = "" if self.batch_size is None else f" with {self.batch_size:,} samples per update"
        return Table(
            title=f"What would help, predicted{size}",
            columns=columns,
            rows=cells,
        )

    def _is_notable(self, row: PlanRow) -> bool:
        peak_bytes = self.expected.peak_allocated_bytes if self.expected else 0
        return self._saved_bytes(row) > 0 and 100 * self._saved_bytes(row) >= peak_bytes

    def _saved_bytes(self, row: PlanRow) -> int:
        if self.expected is None or row.peak_allocated_bytes is None:
            return 0
        return self.expected.peak_allocated_bytes - row.peak_allocated_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with the unit in every key."""
        place, shortage, expected = self.place, self.shortage, self.expected
        return {
            "error": self.error,
            "device_name": self.device_name,
            "rank": self.rank,
            "phase": place.phase,
            "step": place.step,
            "operator": place.operator,
            "module": place.module,
            "is_next_to_module": place.is_near,
            "line": place.line and place.line.to_dict(),
            "forward_line": place.forward_line and place.forward_line.to_dict(),
            **vars(shortage),
            "reserved_but_unallocated_bytes": shortage.unallocated_bytes,
            "by_category_bytes": dict(self.by_category),
            "num_tensors": self.num_tensors,
            "tensors": [
                {
                    **vars(tensor),
                    "shape": list(tensor.shape),
                    "line": tensor.line and tensor.line.to_dict(),
                }
                for tensor in self.tensors
            ],
            "batch_size": self.batch_size,
            "batch": [
                {"name": name, "shape": list(shape), "dtype": dtype}
                for name, shape, dtype in self.batch
            ],
            "predicted": None
            if expected is None
            else {**vars(expected), "shortfall_bytes": expected.shortfall_bytes},
            "savings": [
                {**vars(row), "saved_bytes": self._saved_bytes(row)} for row in self.savings
            ],
            "processes": list(self.processes),
            "notes": list(self.notes),
        }


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"


def _made_at(line: CodeLine | None) -> str:
    """The line, and below it the beginning of its code."""
    if line is None:
        return ""
    code = line.text if len(line.text) <= _CODE_WIDTH else f"{line.text[:_CODE_WIDTH]} ..."
    return f"{line}\n{code}".rstrip()


def _owner(tensor: OomTensor) -> str:
    if tensor.owner:
        return tensor.owner
    if tensor.module is None:
        return "unknown"
    return f"of module {tensor.module!r}" if tensor.module else "of the root module"
