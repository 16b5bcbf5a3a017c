"""The segments that the allocator has before a training, and what of the training lies in them.

The model may lie in segments of an earlier one, and what ran before (the sanity check of Lightning,
an earlier training) leaves free segments, which the training uses.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from memcallback.core.allocation_trace import (
    Alloc,
    Event,
    first_step_end,
    first_step_start,
    not_freed,
)
from memcallback.core.types import Category
from memcallback.prediction.allocator.settings import SMALL_SIZE_BYTES


class Part(NamedTuple):
    """A block of a segment.

    Attributes:
        size_bytes: Its size.
        requested_bytes: The size that was requested; 0 if it is free.
        is_held: Whether model or optimizers hold it.
        id: The id of the allocation of a trace that it belongs to; None for no one of it.
    """

    size_bytes: int
    requested_bytes: int = 0
    is_held: bool = False
    id: int | None = None


@dataclass(frozen=True)
class Segment:
    """A segment of the default stream; of an expandable one, a range that is mapped.

    Attributes:
        is_small: Whether it belongs to the small pool.
        parts: Its blocks, by address.
        is_expandable: Whether it is expandable.
    """

    is_small: bool
    parts: tuple[Part, ...]
    is_expandable: bool = False

    @property
    def size_bytes(self) -> int:
        """Its size."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def is_free(self) -> bool:
        """Whether nothing lies in it."""
        return not any(part.requested_bytes for part in self.parts)


def total_bytes(segments: Iterable[Segment]) -> int:
    """What segments take together."""
    return sum(segment.size_bytes for segment in segments)


def layout(segments: Iterable[Segment]) -> list[tuple[bool, tuple[tuple[int, bool], ...]]]:
    """How segments are divided, whoever the blocks belong to and wherever the segments lie."""
    return sorted(
        (
            segment.is_small,
            tuple((part.size_bytes, part.requested_bytes > 0) for part in segment.parts),
        )
        for segment in segments
    )


def read_segments(
    snapshot: Iterable[Mapping[str, Any]],
    device_index: int,
    held: Collection[int],
    made_anew: Collection[int] = (),
) -> tuple[Segment, ...]:
    """The segments of a device's default stream; what is at `made_anew` counts as free."""
    # `snapshot` is as `torch.cuda.memory_snapshot` gives it. `held` are the addresses of the
    # storages of model and optimizers, `made_anew` of those that the first step allocates.
    found = []
    for segment in snapshot:
        # Others belong to side streams, to CUDA graphs and to pools of the user's own.
        is_shared = tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
        if segment["device"] != device_index or segment["stream"] or not is_shared:
            continue
        address, parts = segment["address"], []
        for block in segment["blocks"]:
            is_free = block["state"] == "inactive" or address in made_anew
            requested_bytes = 0 if is_free else block["requested_size"]
            parts.append(Part(block["size"], requested_bytes, not is_free and address in held))
            address += block["size"]
        is_expandable = segment.get("is_expandable", False)
        found.append(Segment(segment["segment_type"] == "small", tuple(parts), is_expandable))
    return tuple(found)


def placed(segments: Sequence[Segment], events: Sequence[Event]) -> tuple[Segment, ...]:
    """The segments that a training uses, with the ids of its allocations.

    Those are what it has before its first step, and workspaces that its first step makes and keeps:
    cuBLAS has them already if it ran before. Empty if model and optimizers are not all that lies in
    the segments for them, as before the model is moved to the device. Segments with memory of
    others alone are left out.
    """
    if not segments:
        return ()
    before = [alloc for alloc in not_freed(events[: first_step_start(events)]) if alloc.size_bytes]
    wanted: defaultdict[int, deque[int]] = defaultdict(deque)
    for alloc in before:
        if not alloc.stream:
            wanted[alloc.size_bytes].append(alloc.id)
    # At another batch size the ids are others.
    bare = (
        replace(segment, parts=tuple(part._replace(id=None) for part in segment.parts))
        for segment in segments
    )
    found = [_with_ids(segment, wanted, is_held=True) for segment in bare]
    # The counters of metrics, buckets of gradients: what neither model nor optimizer holds.
    found = [_with_ids(segment, wanted, is_held=False) for segment in found]
    is_unknown = any(
        part.is_held and part.id is None and part.requested_bytes > SMALL_SIZE_BYTES
        for segment in found
        for part in segment.parts
    )
    is_elsewhere = any(ids and size_bytes > SMALL_SIZE_BYTES for size_bytes, ids in wanted.items())
    if is_unknown or is_elsewhere:
        return ()
    workspaces: defaultdict[int, deque[int]] = defaultdict(deque)
    for alloc in _workspaces(events):
        workspaces[alloc.size_bytes].append(alloc.id)
    found = [_with_ids(segment, workspaces, is_held=False) for segment in found]
    return tuple(
        segment
        for segment in found
        if segment.is_free or any(part.is_held or part.id is not None for part in segment.parts)
    )


def _with_ids(segment: Segment, wanted: Mapping[int, deque[int]], *, is_held: bool) -> Segment:
    """The segment with the id of an allocation of the same size at each block that has none."""
    parts = (
        part._replace(id=wanted[part.requested_bytes].popleft())
        if part.requested_bytes
        and part.id is None
        and part.is_held == is_held
        and wanted[part.requested_bytes]
        else part
        for part in segment.parts
    )
    return replace(segment, parts=tuple(parts))


def _workspaces(events: Sequence[Event]) -> Iterator[Alloc]:
    """The workspaces of the first step on the default stream that are never freed: cuBLAS's."""
    first = {event.id for event in events[: first_step_end(events)] if isinstance(event, Alloc)}
    return (
        alloc
        for alloc in not_freed(events)
        if alloc.category is Category.WORKSPACE and not alloc.stream and alloc.id in first
    )
