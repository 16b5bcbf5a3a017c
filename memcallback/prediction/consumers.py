"""What holds most at a predicted peak: modules, and lines of code outside of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from memcallback.core.allocation_trace import Alloc, Event, allocated_in
from memcallback.core.code_lines import CodeLine
from memcallback.core.kernel import AllocationSource
from memcallback.core.types import PERSISTENT_CATEGORIES, Category, Phase
from memcallback.core.units import brief_bytes
from memcallback.prediction.replayed import LiveAllocation

#: Made before a step, by its batch or by the optimizer: no line of the step made it.
HELD = frozenset(PERSISTENT_CATEGORIES)
#: Consumers named in a sentence, and the least share in percent that one has.
_NUM_NAMED = 3
_LEAST_PCT = 1.0


@dataclass(frozen=True)
class Consumer:
    """Something that holds memory at the peak.

    Attributes:
        name: A module, such as `lm_head` or `layers.*.mlp (32)`; else the function and the line of
            the program, such as `loss_of, train.py:12`.
        num_bytes: What it holds.
    """

    name: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Peak:
    """What is in memory at a peak, and what its names are made of.

    Attributes:
        live: The allocations that are live.
        saved: The activations that are live at the end of the forward pass.
        events: The events of the trace.
        origin_of: Where an allocation comes from; None if that is unknown.
        kinds: The class of each module, by its path.
        phase: The phase in which the peak is.
    """

    live: Sequence[LiveAllocation]
    saved: Sequence[LiveAllocation]
    events: Sequence[Event]
    origin_of: Callable[[Alloc], AllocationSource | None]
    kinds: Mapping[str, str]
    phase: Phase


def largest_consumers(peak: Peak) -> tuple[Consumer, ...]:
    """All that is live at the peak, by who holds it, the largest first."""
    names = Names(peak)
    sizes: Counter[str] = Counter()
    members: defaultdict[str, set[str]] = defaultdict(set)
    for live in peak.live:
        name, member = names.of(live.alloc)
        sizes[name] += live.block_bytes
        members[name].add(member)
    return tuple(
        Consumer(_shown(name, members[name]), num_bytes)
        for name, num_bytes in sizes.most_common()
        if num_bytes
    )


def most_sentence(consumers: Sequence[Consumer], peak_bytes: int) -> Iterator[str]:
    """Who holds most at the peak; nothing if nobody holds a notable part."""
    named = [
        f"{consumer.name} {brief_bytes(consumer.num_bytes)} ({share:.0f} %)"
        for consumer in consumers[:_NUM_NAMED]
        if (share := 100 * consumer.num_bytes / peak_bytes) >= _LEAST_PCT
    ]
    if named:
        yield f"Most at the peak: {', '.join(named)}."


def _shown(name: str, members: set[str]) -> str:
    """The name of a group of layers with their number; of a single layer its own."""
    if "*" not in name:
        return name
    return f"{name} ({len(members)})" if len(members) > 1 else next(iter(members))


def bytes_by_line(peak: Peak) -> dict[CodeLine, int]:
    """What the lines of the program made of what is live at the peak, the largest first.

    Memory that no line of the step made, such as parameters, is left out.
    """
    names = Names(peak)
    sizes: Counter[CodeLine] = Counter()
    for live in peak.live:
        if line := names.line(live.alloc):
            sizes[line] += live.block_bytes
    return {line: num_bytes for line, num_bytes in sizes.most_common() if num_bytes}


class Names:
    """Names for the allocations at a peak."""

    def __init__(self, peak: Peak) -> None:
        self._peak = peak
        self._kinds = peak.kinds
        self._patterns: dict[str, tuple[str, str]] = {}

    def of(self, alloc: Alloc) -> tuple[str, str]:
        """The consumer, and which of its members; of a line of code both are the same."""
        if alloc.module:
            if alloc.module not in self._patterns:
                self._patterns[alloc.module] = self._pattern(alloc.module)
            return self._patterns[alloc.module]
        name = self.outside(alloc)
        return name, name

    def _pattern(self, module: str) -> tuple[str, str]:
        """A repeated layer up to its part in the repetition, with a star; others with their class.

        `layers.3.mlp.gate_proj` is `layers.*.mlp`, `network.4` is `network.4 Conv2d`.
        """
        parts = module.split(".")
        for position, part in enumerate(parts):
            container = ".".join(parts[:position])
            if part.isdigit() and self._is_repeated(container, ".".join(parts[: position + 1])):
                own = parts[: position + 2]
                pattern = ".".join([*parts[:position], "*", *own[position + 1 :]])
                kind = "" if own[position + 1 :] else f" {self._kinds['.'.join(own)]}"
                return f"{pattern}{kind}", f"{'.'.join(own)}{kind}"
        kind = self._kinds.get(module, "")
        name = f"{module} {kind}" if parts[-1].isdigit() and kind else module
        return name, name

    def _is_repeated(self, container: str, child: str) -> bool:
        """Whether a child with children of its own has a sibling of its class."""
        return child in self._parents and self._num_of_kind[container, self._kinds[child]] > 1

    @cached_property
    def _parents(self) -> set[str]:
        return {name.rpartition(".")[0] for name in self._kinds if name}

    @cached_property
    def _num_of_kind(self) -> Counter[tuple[str, str]]:
        return Counter((name.rpartition(".")[0], kind) for name, kind in self._kinds.items())

    def outside(self, alloc: Alloc) -> str:
        """What to call memory that no module holds: a category, the update, a line, an operator."""
        if alloc.category in HELD:
            return alloc.category.label
        is_for_update = self._peak.phase is Phase.OPTIMIZER_STEP
        if alloc.category is Category.TEMPORARY and is_for_update:
            return Phase.OPTIMIZER_STEP.label
        operator = alloc.operator.rpartition("::")[2].lstrip("_")
        if place := self.place(alloc):
            return place
        if not operator:
            return "outside of modules"
        return f"backward of {_base(operator)}" if "_backward" in operator else operator

    def place(self, alloc: Alloc) -> str:
        """The line of the program outside of modules, for a backward pass that of its forward."""
        line = self._line_outside(alloc)
        return "" if line is None else _text(line)

    def line(self, alloc: Alloc) -> CodeLine | None:
        """The line that made an allocation, for a backward pass the one whose gradients it makes.

        None for what the step began with, and where no line or more than one is known.
        """
        if alloc.category in HELD:
            return None
        if not alloc.module:
            return self._line_outside(alloc)
        return self._line_of(alloc) or self._lines_of_modules.get(alloc.module)

    def _line_outside(self, alloc: Alloc) -> CodeLine | None:
        operator = alloc.operator.rpartition("::")[2].lstrip("_")
        return self._lines.get(_base(operator)) if "_backward" in operator else self._line_of(alloc)

    @cached_property
    def _lines_of_modules(self) -> Mapping[str, CodeLine]:
        """Of what is live, module -> the line that its forward pass ran, if it is one."""
        modules = {live.alloc.module for live in self._peak.live if live.alloc.category not in HELD}
        lines: defaultdict[str, set[CodeLine]] = defaultdict(set)
        for alloc in allocated_in(Phase.FORWARD, self._peak.events):
            if alloc.module in modules and (line := self._line_of(alloc)):
                lines[alloc.module].add(line)
        return {module: next(iter(own)) for module, own in lines.items() if len(own) == 1}

    @cached_property
    def _lines(self) -> Mapping[str, CodeLine]:
        """Operator -> the line that runs it in the forward pass, where that is known."""
        lines: dict[str, CodeLine] = {}
        kept = (live.alloc for live in (*self._peak.live, *self._peak.saved))
        for alloc in (*kept, *allocated_in(Phase.FORWARD, self._peak.events)):
            operator = alloc.operator.rpartition("::")[2]
            line = None if alloc.module else self._line_of(alloc)
            if line is not None and "_backward" not in operator:
                lines.setdefault(_base(operator), line)
        return lines

    @cached_property
    def _lines_of_caller(self) -> set[CodeLine]:
        """Where the program asked for the prediction: no line of the step itself."""
        return {
            line
            for live in self._peak.live
            if live.alloc.category in HELD and (line := self._origin(live.alloc)) is not None
        }

    def _line_of(self, alloc: Alloc) -> CodeLine | None:
        line = self._origin(alloc)
        return None if line in self._lines_of_caller else line

    def _origin(self, alloc: Alloc) -> CodeLine | None:
        source = self._peak.origin_of(alloc)
        return None if source is None else source.own_line or source.line


def _base(operator: str) -> str:
    """An operator without the direction in which it runs: `nll_loss` of `nll_loss_backward`."""
    return operator.lstrip("_").partition("_backward")[0].removesuffix("_forward")


def _text(line: CodeLine) -> str:
    place = f"{line.file}:{line.number}"
    return place if line.function == "<module>" else f"{line.function}, {place}"
