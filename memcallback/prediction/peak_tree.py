"""peak_tree(): what is in memory at the peak, by module, as boxes in boxes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from memcallback.core.allocation_trace import Alloc
from memcallback.core.kernel import AllocationSource
from memcallback.core.types import PERSISTENT_CATEGORIES, Category
from memcallback.page.treemap import Node
from memcallback.prediction.consumers import HELD, Names, Peak
from memcallback.prediction.replayed import LiveAllocation

#: Shapes named of allocations that share a box.
_NUM_SHAPES = 3
#: A part of a module's path, with the module's class where layers repeat.
_Step = tuple[str, str]


def peak_tree(peak: Peak) -> Node:
    """Allocations by module; layers of one class that differ in their number share a box.

    What no module holds has a box of its own, as in `largest_consumers`.
    """
    origins = {live.alloc.id: peak.origin_of(live.alloc) for live in peak.live}
    names = Names(peak)
    root = _Group()
    for live in peak.live:
        group = root
        for step, prefix in _steps(live.alloc, names, peak.kinds):
            group = group.inner.setdefault(step, _Group())
            group.prefixes.add(prefix)
        group.live.append(live)
    return root.node("all", origins)


@dataclass
class _Group:
    """Modules that share a box, and their own allocations."""

    inner: dict[_Step, _Group] = field(default_factory=dict)
    prefixes: set[str] = field(default_factory=set)
    live: list[LiveAllocation] = field(default_factory=list)

    def node(self, name: str, origins: Mapping[int, AllocationSource | None]) -> Node:
        children = [group.node(_label(step, group), origins) for step, group in self.inner.items()]
        own = list(_leaves(self.live, origins))
        if len(children) == 1 and not own and name != "all":
            # A module that only holds another.
            only = children[0]
            return Node(
                name=f"{name}.{only.name}",
                num_bytes=only.num_bytes,
                detail=only.detail,
                category=only.category,
                children=only.children,
            )
        children += own
        return Node(
            name=name,
            num_bytes=sum(child.num_bytes for child in children),
            children=tuple(children),
        )


def _label(step: _Step, group: _Group) -> str:
    name, kind = step
    if not kind:
        return name
    if len(group.prefixes) == 1:
        (prefix,) = group.prefixes
        return f"{name.removesuffix('*')}{prefix.rpartition('.')[2]} {kind}"
    return f"{name} {kind} ({len(group.prefixes)})"


def _steps(alloc: Alloc, names: Names, kinds: Mapping[str, str]) -> Iterator[tuple[_Step, str]]:
    """The parts of a module's path, each with the path up to there; else one name or none."""
    if not alloc.module:
        if alloc.category not in HELD:
            yield (names.outside(alloc), ""), ""
        return
    parts = alloc.module.split(".")
    pending = ""
    for number, name in enumerate(parts, start=1):
        prefix = ".".join(parts[:number])
        is_followed = number < len(parts) and parts[number].isdigit()
        if name.isdigit():
            yield (f"{pending}*", kinds.get(prefix, "")), prefix
            pending = ""
        elif is_followed:
            pending += f"{name}."
        else:
            yield (f"{pending}{name}", ""), prefix
            pending = ""


def _leaves(
    live: Sequence[LiveAllocation], origins: Mapping[int, AllocationSource | None]
) -> Iterator[Node]:
    """Allocations by category, those that a pass makes also by operator."""
    groups: dict[tuple[str, Category], list[LiveAllocation]] = {}
    for one in live:
        category = one.alloc.category or Category.TEMPORARY
        is_named = category not in PERSISTENT_CATEGORIES and one.alloc.operator
        name = one.alloc.operator.removeprefix("aten::") if is_named else category.label
        groups.setdefault((name, category), []).append(one)
    for (name, category), together in groups.items():
        yield Node(
            name=name,
            num_bytes=sum(one.block_bytes for one in together),
            detail="\n".join(_details(category, [origins[one.alloc.id] for one in together])),
            category=category,
        )


def _details(category: Category, origins: Sequence[AllocationSource | None]) -> Iterator[str]:
    """The category, shapes and the line of some allocations."""
    count = f"{len(origins):,} tensors" if len(origins) > 1 else "1 tensor"
    yield f"{category.label}, {count}"
    shapes = Counter(
        f"{origin.dtype} {tuple(origin.shape)}" for origin in origins if origin is not None
    )
    if shapes:
        named = [f"{count} x {shape}" for shape, count in shapes.most_common(_NUM_SHAPES)]
        yield ", ".join(named) + (", ..." if len(shapes) > _NUM_SHAPES else "")
    lines = Counter(origin.own_line or origin.line for origin in origins if origin is not None)
    line = next((line for line, _ in lines.most_common() if line is not None), None)
    if line is not None:
        yield f"at {line}"
