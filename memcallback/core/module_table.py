"""ModuleTable: the memory of one step broken down by module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from memcallback.core.document import Document, Printable, Table, size_text
from memcallback.core.step_memory import error_pct, largest, total
from memcallback.core.types import Kind, Phase
from memcallback.core.units import format_bytes

#: The number of groups of modules on a console.
_NUM_GROUPS = 10


class ModuleInfo(NamedTuple):
    """A module of a model.

    Attributes:
        name: Its FQN; the root is "".
        kind: Its class name, such as `Conv2d`.
        parameter_bytes: Its own parameters, without those of its children.
    """

    name: str
    kind: str
    parameter_bytes: int


class Span(NamedTuple):
    """A stretch of a step in which the same modules run. Sizes in bytes, None where unknown.

    Attributes:
        phase: `Phase.FORWARD` or `Phase.BACKWARD`.
        path: The FQNs of the running modules, outermost first.
        start_bytes: Allocated when it begins.
        end_bytes: Allocated when it ends.
        peak_bytes: The largest allocated memory inside.
    """

    phase: Phase
    path: tuple[str, ...]
    start_bytes: int | None
    end_bytes: int | None
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class ModuleWindow:
    """The time in one pass in which a module ran, with the modules inside it.

    Sizes are in bytes; None if unknown. A module that is called several times has one window from
    the first call to the last, without the time between calls.

    Attributes:
        num_runs: In the forward pass the number of calls; in the backward pass how often autograd
            entered it.
        start_allocated_bytes: Allocated on the device when it first began.
        end_allocated_bytes: Allocated on the device when it last ended.
        peak_allocated_bytes: The largest allocated memory of the device while it ran.
        change_bytes: The change of allocated memory over all its runs; negative if they freed more
            than they allocated.
    """

    num_runs: int
    start_allocated_bytes: int | None
    end_allocated_bytes: int | None
    peak_allocated_bytes: int | None
    change_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class ModuleMemory:
    """The memory of one module in one training step, with the modules inside it.

    Attributes:
        name: Its FQN; the root, "", is the whole step without the optimizer's: it has the loss.
        kind: Its class name; empty if unknown.
        parameter_bytes: Its parameters.
        forward: The forward pass; None if the module did not run in it. Recomputation of
            checkpointing is in the backward pass.
        backward: The backward pass: the autograd nodes that its forward pass made; None if none of
            them ran.
        saved_bytes: Allocations of the module's operators in the forward pass that are live when
            that ends. Known for a prediction only: no counter of a device measures it.
    """

    name: str
    kind: str
    parameter_bytes: int
    forward: ModuleWindow | None
    backward: ModuleWindow | None
    saved_bytes: int | None = None

    @property
    def kept_bytes(self) -> int | None:
        """What its forward pass left allocated: saved tensors and its output.

        None without a forward pass. It is less if the module frees tensors of other modules; an
        input that only the caller holds is freed by the caller.
        """
        return self.forward.change_bytes if self.forward else None


@dataclass(frozen=True, kw_only=True)
class ModuleTable(Printable):
    """The memory of a model's modules in one training step: one type for measured and predicted.

    Attributes:
        step_kind: Measured or predicted.
        source: Where the values come from.
        device_name: The device.
        batch_size: Samples in the batch; None if unknown.
        modules: All modules in the order of `model.named_modules()`, the root first.
        notes: What is missing, one sentence each.
    """

    step_kind: Kind
    source: str
    device_name: str
    batch_size: int | None
    modules: tuple[ModuleMemory, ...]
    notes: tuple[str, ...] = ()
    _by_name: dict[str, ModuleMemory] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self._by_name.update((module.name, module) for module in self.modules)

    def __getitem__(self, name: str) -> ModuleMemory:
        """The module of a name; KeyError if there is none."""
        return self._by_name[name]

    def get(self, name: str) -> ModuleMemory | None:
        """The module of a name; None if there is none."""
        return self._by_name.get(name)

    @cached_property
    def ran(self) -> tuple[ModuleMemory, ...]:
        """Those that ran."""
        return tuple(module for module in self.modules if module.forward or module.backward)

    def children(self, name: str) -> tuple[ModuleMemory, ...]:
        """The children of a module that ran."""
        return self._children.get(name, ())

    @cached_property
    def _children(self) -> Mapping[str, tuple[ModuleMemory, ...]]:
        children: dict[str, tuple[ModuleMemory, ...]] = {}
        for module in self.ran:
            if module.name:
                parent = module.name.rpartition(".")[0]
                children[parent] = (*children.get(parent, ()), module)
        return children

    def to_table(self, other: ModuleTable | None = None) -> Table:
        """One row for each module that ran.

        Args:
            other: The prediction of the same step, if this one is measured; shown side by side.
        """
        tables = [other, self] if other else [self]
        names = [f" {table.step_kind.value}" if other else "" for table in tables]
        columns = ["module", "class", "calls", "parameters"]
        columns += [f"{column}{name}" for column in _COLUMNS for name in names]
        rows = []
        for module in self.ran:
            of_tables = [table.get(module.name) for table in tables]
            cells = [
                size_text(_value(each, path)) for path in _COLUMNS.values() for each in of_tables
            ]
            runs = module.forward.num_runs if module.forward else 0
            row = (
                module.name or "(root)",
                module.kind,
                f"{runs:,}",
                format_bytes(module.parameter_bytes),
                *cells,
            )
            rows.append((*row, _error(module, other.get(module.name))) if other else row)
        return Table(
            title=self._title(other),
            columns=(*columns, "error of peak") if other else tuple(columns),
            rows=tuple(rows),
            left_columns=frozenset({"class"}),
        )

    def summary(self, other: ModuleTable | None = None) -> Table:
        """The innermost modules that keep most; names that differ only in numbers share a row.

        Args:
            other: As for `to_table`.
        """

        def kept(modules: Sequence[ModuleMemory]) -> list[str]:
            own = size_text(_kept(modules))
            if other is None:
                return [own]
            predicted = [match for module in modules if (match := other.get(module.name))]
            return [size_text(_kept(predicted) if predicted else None), own]

        groups: dict[tuple[str, str], list[ModuleMemory]] = {}
        for module in self.ran:
            if module.name and module.forward and not self.children(module.name):
                groups.setdefault((re.sub(r"\d+", "*", module.name), module.kind), []).append(
                    module
                )
        most = sorted(groups.items(), key=lambda group: -_kept(group[1]))
        rows = []
        for (pattern, kind), modules in most[:_NUM_GROUPS]:
            name = modules[0].name if len(modules) == 1 else f"{pattern} ({len(modules)})"
            peaks = [largest(_value(module, path) for module in modules) for path in _PEAKS]
            rows.append((name, kind, *kept(modules), *map(size_text, peaks)))
        if len(most) > _NUM_GROUPS:
            rest = [module for _, modules in most[_NUM_GROUPS:] for module in modules]
            rows.append((f"{len(rest)} more", "", *kept(rest), "", ""))
        names = ["kept"]
        if other:
            names = [f"kept, {table.step_kind.value}" for table in (other, self)]
        return Table(
            title="What modules keep after their forward pass, and the peaks while they run\n"
            f"{self.source}",
            columns=("module", "class", *names, "peak forward", "peak backward"),
            rows=tuple(rows),
            left_columns=frozenset({"class"}),
        )

    def document(self, other: ModuleTable | None = None) -> Document:
        """The summary and the notes; where no inner module is known, a sentence."""
        summary = self.summary(other)
        if summary.rows:
            return Document(summary, *self.notes)
        return Document(*(self.notes or ("No module inside of the model is known to have run.",)))

    def to_text(self, other: ModuleTable | None = None) -> str:
        """The summary and the notes, for a console."""
        return self.document(other).text()

    def to_markdown(self, other: ModuleTable | None = None) -> str:
        """The whole table and the notes, for TensorBoard and files."""
        return self.whole_document(other).markdown()

    def whole_document(self, other: ModuleTable | None = None) -> Document:
        """The whole table, beside another's values, and the notes."""
        return Document(self.to_table(other), *self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Data that json writes, with the unit in every key."""
        return {
            "kind": self.step_kind.value,
            "source": self.source,
            "device_name": self.device_name,
            "batch_size": self.batch_size,
            "modules": [
                {**asdict(module), "kept_bytes": module.kept_bytes} for module in self.modules
            ],
            "notes": list(self.notes),
        }

    def _title(self, other: ModuleTable | None) -> str:
        kinds = " and ".join(table.step_kind.value for table in (self, other) if table)
        size = f"batch size {self.batch_size:,}" if self.batch_size else "batch size unknown"
        idle = len(self.modules) - len(self.ran)
        left_out = f"; {idle} did not run" if idle else ""
        return f"Memory by module, {kinds} ({size}) on {self.device_name}{left_out}"


#: Column -> the attributes of a `ModuleMemory` that lead to its value.
_COLUMNS = {
    "kept": ("forward", "change_bytes"),
    "forward end": ("forward", "end_allocated_bytes"),
    "forward peak": ("forward", "peak_allocated_bytes"),
    "backward end": ("backward", "end_allocated_bytes"),
    "backward peak": ("backward", "peak_allocated_bytes"),
}
_PEAKS = (_COLUMNS["forward peak"], _COLUMNS["backward peak"])


def _value(module: ModuleMemory | None, path: tuple[str, str]) -> int | None:
    window = getattr(module, path[0], None)
    return None if window is None else getattr(window, path[1])


def _error(module: ModuleMemory, predicted: ModuleMemory | None) -> str:
    """The larger error of the two peaks."""
    errors = [error_pct(_value(predicted, path), _value(module, path)) for path in _PEAKS]
    known = [error for error in errors if error is not None]
    return f"{max(known, key=abs) + 0:+.1f} %" if known else ""


def _kept(modules: Sequence[ModuleMemory]) -> int:
    return sum(module.kept_bytes or 0 for module in modules)


def phase_of_span(covers: Sequence[Phase], *, is_backward: bool) -> Phase | None:
    """The pass of a span, given the phases of its window; None outside of both passes."""
    if Phase.BACKWARD in covers and (is_backward or Phase.FORWARD not in covers):
        return Phase.BACKWARD
    return Phase.FORWARD if Phase.FORWARD in covers else None


def modules_of(
    windows: Iterable[Sequence[Span]],
    infos: Sequence[ModuleInfo],
    saved_bytes: Mapping[str, int] | None = None,
) -> tuple[ModuleMemory, ...]:
    """Add up the spans in which each module, or a module inside it, ran."""
    runs: dict[tuple[str, Phase], list[list[Span]]] = {}
    owners: dict[tuple[str, ...], frozenset[str]] = {}
    for window in windows:
        before: tuple[frozenset[str], Phase | None] = frozenset(), None
        for span in window:
            if span.path not in owners:
                owners[span.path] = frozenset(_owners(span.path))
            for name in owners[span.path]:
                of_module = runs.setdefault((name, span.phase), [])
                if name not in before[0] or span.phase is not before[1]:
                    of_module.append([])
                of_module[-1].append(span)
            before = owners[span.path], span.phase
    inside: dict[str, list[ModuleInfo]] = {}
    for info in infos:
        for name in frozenset(_owners((info.name,))):
            inside.setdefault(name, []).append(info)
    return tuple(
        ModuleMemory(
            name=info.name,
            kind=info.kind,
            parameter_bytes=sum(inner.parameter_bytes for inner in inside[info.name]),
            forward=_window(runs.get((info.name, Phase.FORWARD))),
            backward=_window(runs.get((info.name, Phase.BACKWARD))),
            saved_bytes=None
            if saved_bytes is None
            else sum(saved_bytes.get(inner.name, 0) for inner in inside[info.name]),
        )
        for info in infos
    )


def _owners(path: Iterable[str]) -> Iterator[str]:
    """The modules of a path, with all modules around them and the root."""
    yield ""
    for name in path:
        yield from accumulate(name.split("."), lambda outer, inner: f"{outer}.{inner}")


def _window(runs: Sequence[Sequence[Span]] | None) -> ModuleWindow | None:
    if not runs:
        return None
    spans = [span for run in runs for span in run]
    changes = (
        None
        if span.start_bytes is None or span.end_bytes is None
        else span.end_bytes - span.start_bytes
        for span in spans
    )
    return ModuleWindow(
        num_runs=len(runs),
        start_allocated_bytes=spans[0].start_bytes,
        end_allocated_bytes=spans[-1].end_bytes,
        peak_allocated_bytes=largest(span.peak_bytes for span in spans),
        change_bytes=total(changes),
    )
