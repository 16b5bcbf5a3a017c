"""OutOfMemoryReport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from memcallback.core.code_lines import CodeLine
from memcallback.core.document import Code, Document, Heading, Paragraph, Printable, Table
from memcallback.core.units import format_bytes
from memcallback.savings.plan import PlanRow

#: Of what stood, the largest.
NUM_TENSORS = 10
#: Columns of a table in which a line of code is shortened.
_CODE_WIDTH = 40


@dataclass(frozen=True, kw_only=True)
class StandingTensor:
    """A tensor that was there when memory ran out: one storage.

    Attributes:
        size_bytes: Of the storage.
        shape: Of the tensor.
        dtype: Such as `float32`.
        owner: Who held it, such as `gradient of fc.weight`; empty if that is not known.
        module: The module whose it is; the root is "", None is unknown.
        line: The line of the program that made it; None if it is not known.
    """

    size_bytes: int
    shape: tuple[int, ...]
    dtype: str
    owner: str
    module: str | None = None
    line: CodeLine | None = None


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where memory ran out.

    Attributes:
        phase: `forward pass`, `backward pass`, `optimizer step`, or another stage such as
            `validation`; empty if it is not known.
        step: The number of the training step, from 1; None outside of one.
        operator: What asked for memory: a node of autograd, or the expression as it stands in the
            program; empty if not known.
        module: The fully qualified name of the module that was running, the root is ""; None if it
            is not known.
        is_near: Whether `module` is only next to where it happened, in the order of the backward
            pass.
        line: The innermost line of the program; None if it is not known.
        forward_line: In the backward pass: the line whose operator in the forward pass it was,
            after the trace; None if that is not known.
    """

    phase: str = ""
    step: int | None = None
    operator: str = ""
    module: str | None = None
    is_near: bool = False
    line: CodeLine | None = None
    forward_line: CodeLine | None = None


@dataclass(frozen=True, kw_only=True)
class OomMemoryState:
    """The device at the moment at which memory ran out. All in bytes, None where unknown.

    Attributes:
        requested_bytes: What was asked of the device: the allocator's segment for the tensor, not
            the tensor.
        capacity_bytes: The device's memory, or what this process may use of it.
        free_bytes: Free on the device, for anybody.
        allocated_bytes: Held by tensors, as the allocator accounts for them.
        reserved_bytes: Taken from the device by the allocator.
        available_bytes: What the allocator can have: what it has reserved and what is free, or what
            it may.
        non_pytorch_bytes: Used on the device outside this process's allocator.
        other_processes_bytes: Of that, by other processes that the driver shows.
        resident_bytes: Of a CPU: the memory of this process.
    """

    requested_bytes: int | None = None
    capacity_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    available_bytes: int | None = None
    non_pytorch_bytes: int | None = None
    other_processes_bytes: int | None = None
    resident_bytes: int | None = None

    @property
    def unallocated_bytes(self) -> int | None:
        """Reserved but unallocated."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return self.reserved_bytes - self.allocated_bytes

    def rows(self) -> list[tuple[str, int]]:
        """Those that are known, with their names."""
        named = (
            ("asked for", self.requested_bytes),
            ("capacity", self.capacity_bytes),
            ("free", self.free_bytes),
            ("allocated", self.allocated_bytes),
            ("reserved", self.reserved_bytes),
            ("reserved but unallocated", self.unallocated_bytes),
            ("non-PyTorch", self.non_pytorch_bytes),
            ("of it other processes", self.other_processes_bytes),
            ("resident", self.resident_bytes),
        )
        return [(name, size_bytes) for name, size_bytes in named if size_bytes is not None]


@dataclass(frozen=True, kw_only=True)
class PredictedPeak:
    """What had been predicted of the step that failed, at its batch size. All in bytes, None where
    unknown.

    Attributes:
        peak_allocated_bytes: The largest allocated figure.
        peak_reserved_bytes: The largest reserved figure.
        available_bytes: What the allocator can have of the device.
        fits: Whether the step was predicted to fit.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int | None = None
    available_bytes: int | None = None
    fits: bool | None = None

    @property
    def shortfall_bytes(self) -> int | None:
        """How much more the step's tensors need than there is; None if that is not known, negative
        if they need less.
        """
        return (
            None
            if self.available_bytes is None
            else self.peak_allocated_bytes - self.available_bytes
        )


@dataclass(frozen=True, kw_only=True)
class OutOfMemoryReport(Printable):
    """What is known of an out-of-memory error. It holds no tensor.

    Attributes:
        error: The error's own text.
        device_name: The device.
        place: Where it happened.
        shortage: The device at that moment, measured.
        by_category: What stood at that moment by what it was for, measured: name -> bytes, with
            what no tensor is known for at the end.
        tensors: The largest tensors that stood, the largest first, measured.
        num_tensors: How many stood.
        batch: The batch's tensors: name, shape, dtype.
        batch_size: Samples in it; None if unknown.
        expected: What had been predicted; None if nothing was.
        savings: Savings of memory with their predicted effect, the best first.
        processes: Other processes on the device, one sentence each.
        notes: What else a person should know, one sentence each.
        rank: Of a job of several ranks the one that failed; None of a job of one.
    """

    error: str
    device_name: str
    place: Place
    shortage: OomMemoryState
    by_category: tuple[tuple[str, int], ...] = ()
    tensors: tuple[StandingTensor, ...] = ()
    num_tensors: int = 0
    batch: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    batch_size: int | None = None
    expected: PredictedPeak | None = None
    savings: tuple[PlanRow, ...] = ()
    processes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    rank: int | None = None

    def with_savings(self, savings: Sequence[PlanRow]) -> OutOfMemoryReport:
        """The same, with what would help.

        Args:
            savings: With their predicted effect; those that do not help or do not work are left
                out.
        """
        helping = [
            row for row in savings if not row.problem and (row.fits or self._saved_bytes(row) > 0)
        ]
        return replace(
            self,
            savings=tuple(
                sorted(helping, key=lambda row: (not row.fits, row.peak_allocated_bytes or 0))
            ),
        )

    def headline(self) -> str:
        """What happened, in one sentence."""
        place = self.place
        where = [
            f"in the {place.phase}" if place.phase else "",
            f"of step {place.step}" if place.step is not None else "",
        ]
        batch = f" (batch size {self.batch_size})" if self.batch_size is not None else ""
        rank = "" if self.rank is None else f", on rank {self.rank}"
        return (
            f"Out of memory on {self.device_name} {' '.join(filter(None, where))}".rstrip()
            + f"{batch}{rank}."
        )

    def sentences(self) -> list[str]:
        """Where it happened, what was short, what had been predicted."""
        place, said = self.place, []
        if place.operator or place.module is not None:
            module = (
                ""
                if place.module is None
                else "the root module"
                if not place.module
                else f"module {place.module!r}"
            )
            joint = " next to " if place.is_near else " in "
            said.append(f"At {joint.join(filter(None, (place.operator, module)))}.")
        for name, line in (
            ("Your line", place.line),
            ("In the forward pass that was", place.forward_line),
        ):
            if line is not None:
                said.append(f"{name}: {line}: {line.text}" if line.text else f"{name}: {line}")
        if self.batch:
            shapes = ", ".join(
                f"{name} {_shape(shape)} {dtype}".strip() for name, shape, dtype in self.batch
            )
            said.append(f"The batch: {shapes}.")
        return [*said, *self._of_expected()]

    def _of_expected(self) -> list[str]:
        expected = self.expected
        if expected is None:
            return []
        said = f"Predicted for this batch size: peak allocated {format_bytes(expected.peak_allocated_bytes)}"
        short = expected.shortfall_bytes
        if short is not None and expected.available_bytes is not None:
            said += f", of {format_bytes(expected.available_bytes)} that the allocator can have"
            said += f": {format_bytes(short)} too much" if short > 0 else ""
        if expected.peak_reserved_bytes is not None:
            said += f"; peak reserved {format_bytes(expected.peak_reserved_bytes)} if there were no end of memory"
        if expected.fits:
            return [
                f"{said}. It was predicted to fit, so something else holds memory: see what stood, and the notes."
            ]
        if expected.fits is False and short is not None and short <= 0:
            return [
                f"{said}. By the sum of its tensors it fits, as they lie it does not: see reserved but unallocated."
            ]
        return [f"{said}."]

    def document(self) -> Document:
        """What happened and where, the error itself, memory at that moment, and what would help."""
        return self._document(Code(self.error))

    def to_text(self) -> str:
        """Text for a console, without the error itself, which the traceback shows."""
        return self._document().text()

    def _document(self, *error: Code) -> Document:
        sentences = (*self.sentences(), *self.processes)
        return Document(
            Heading(self.headline(), 1),
            *(Paragraph(sentence, 1) for sentence in sentences),
            *error,
            *(table for table in (self._memory_table(), self._tensor_table()) if table.rows),
            *self.notes,
            self.savings_document(),
        )

    def savings_document(self) -> Document:
        """What would help; empty if nothing is known to."""
        if not self.savings:
            return Document()
        document = Document(self._savings_table())
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
        return Table(
            title=f"The {len(self.tensors)} largest of {self.num_tensors} live tensors, measured",
            columns=("held by", "size", "tensor", "made at"),
            rows=tuple(
                (
                    _owner(tensor),
                    format_bytes(tensor.size_bytes),
                    f"{tensor.dtype} {_shape(tensor.shape)}",
                    _made_at(tensor.line),
                )
                for tensor in self.tensors
            ),
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
        return Table(
            title=f"What would help, predicted for {self.batch_size} samples an update",
            columns=columns,
            rows=cells,
        )

    def _saved_bytes(self, row: PlanRow) -> int:
        if self.expected is None or row.peak_allocated_bytes is None:
            return 0
        return self.expected.peak_allocated_bytes - row.peak_allocated_bytes

    def to_dict(self) -> dict[str, Any]:
        """Data that json writes, with the unit in every key."""
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


def _owner(tensor: StandingTensor) -> str:
    if tensor.owner:
        return tensor.owner
    return (
        "unknown"
        if tensor.module is None
        else f"of module {tensor.module!r}"
        if tensor.module
        else "of the root module"
    )
