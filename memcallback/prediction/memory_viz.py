"""Exports a prediction for PyTorch's memory_viz.

The format is described in the docstring of `_snapshot` in torch/cuda/memory.py. In place of the
Python stack of an allocation there are its operator and category, the running modules from the
inside out, the phase and the number of the step. Where phases begin and end is in the annotations
that `torch.profiler.record_function` leaves in a recorded history (PyTorch's memory_snapshot.cpp).
Times are not predicted: they count entries, so that all are in order.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memcallback.core.allocation_trace import (
    GRAPH_POOL,
    Alloc,
    EmptyCache,
    Free,
    PhaseEnd,
    PhaseStart,
    StepStart,
    first_step_start,
    not_freed,
)
from memcallback.core.files import write_file
from memcallback.core.types import Phase
from memcallback.devices.catalogue import HostSpec
from memcallback.prediction.allocator.at_start import placed
from memcallback.prediction.allocator.blocks import Block
from memcallback.prediction.allocator.caching import CachingAllocator, OutOfMemoryError
from memcallback.prediction.asking_apart import asking_apart
from memcallback.prediction.fallbacks import KeptPlans
from memcallback.prediction.prediction import Prediction

#: PyTorch's default memory pool, and that of CUDA graphs.
_POOL_ID, _GRAPH_POOL_ID = (0, 0), (0, 1)


def snapshot(prediction: Prediction) -> dict[str, Any]:
    """The history and last segments of a predicted training, as `torch.cuda.memory._snapshot`."""
    return asking_apart(lambda: _snapshot(prediction))


def _snapshot(prediction: Prediction) -> dict[str, Any]:
    recorder = _Recorder(prediction)
    recorder.run()
    segments = [recorder.segment(blocks) for blocks in recorder.allocator.snapshot()]
    return {
        "segments": segments,
        "device_traces": [recorder.entries],
        "external_annotations": recorder.annotations,
    }


def dump_snapshot(prediction: Prediction, path: str | Path) -> None:
    """Write `snapshot` as a pickle, as `torch.cuda.memory._dump_snapshot` does.

    Open it at https://pytorch.org/memory_viz, or with `python -m torch.cuda._memory_viz`.
    """
    history = snapshot(prediction)
    write_file(path, pickle.dumps(history))


class _Recorder:
    """Replays a trace and records what the allocator does."""

    def __init__(self, prediction: Prediction) -> None:
        if isinstance(prediction.device, HostSpec):
            raise ValueError(
                "a CPU has no caching allocator, and a snapshot is the history of one; predict for "
                "a card."
            )
        self.prediction = prediction
        self.allocator = CachingAllocator(
            prediction.settings, capacity_bytes=prediction.device.allocator_capacity_bytes
        )
        self.is_expandable = prediction.settings.expandable_segments
        self.entries: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []
        self.frames: dict[int, list[dict[str, Any]]] = {}
        self.plans = KeptPlans()
        #: Blocks that are there before the first step, by the id of their allocation.
        self.known: dict[int, Block] = {}
        self.phase: Phase | None = None
        self.num_steps = 0
        self.mapped: dict[int, tuple[int, int]] = {}

    def run(self) -> None:
        events = self.prediction.trace.at(self.prediction.batch_size).events
        blocks: dict[int, Block] = {}
        self.known = self.allocator.adopt(placed(self.prediction.at_start, events))
        self.follow_segments(0, [])
        if self.known:
            start = first_step_start(events)
            events = (*not_freed(events[:start]), *events[start:])
        for event in events:
            if isinstance(event, Alloc):
                if not event.size_bytes:
                    continue
                try:
                    block = self.allocate(event)
                except OutOfMemoryError:
                    return
                if block is not None:
                    blocks[event.id] = block
            elif isinstance(event, Free):
                if event.id in blocks:
                    self.free(blocks.pop(event.id))
            elif isinstance(event, EmptyCache):
                self.allocator.empty_cache()
                self.follow_segments(0, [])
            elif isinstance(event, (PhaseStart, PhaseEnd)):
                self.phase = event.phase if isinstance(event, PhaseStart) else None
                self.annotate(event.phase, "START" if self.phase else "END")
            elif isinstance(event, StepStart):
                self.num_steps += 1

    def annotate(self, phase: Phase, stage: str) -> None:
        """Mark a boundary of a phase, after the last entry and before the next."""
        self.annotations.append(
            {
                "name": f"step {self.num_steps}: {phase.label}",
                "stage": stage,
                "device": 0,
                "time_us": 2 * len(self.entries),
            }
        )

    def allocate(self, event: Alloc) -> Block | None:
        """None for a workspace that gave way to an algorithm without one."""
        frames, reserved_bytes, retries = (
            self.frames_of(event),
            self.allocator.reserved_bytes,
            self.allocator.num_alloc_retries,
        )
        try:
            block = self.known.get(event.id) or self.plans.allocate(
                event,
                lambda size_bytes: self.allocator.allocate(size_bytes, event.stream),
                is_backward=self.phase is Phase.BACKWARD,
            )
        except OutOfMemoryError as error:
            self.follow_segments(event.stream, frames)
            free_bytes = error.capacity_bytes - self.allocator.reserved_bytes
            self.entry("oom", 0, event.size_bytes, event.stream, frames, device_free=free_bytes)
            raise
        if (self.allocator.reserved_bytes, self.allocator.num_alloc_retries) != (
            reserved_bytes,
            retries,
        ):
            self.follow_segments(event.stream, frames)
        if block is None:
            return None
        self.entry("alloc", block.address, block.requested_bytes, event.stream, frames)
        self.frames[block.address] = frames
        return block

    def free(self, block: Block) -> None:
        frames = self.frames.pop(block.address)
        for action in ("free_requested", "free_completed"):
            self.entry(action, block.address, block.requested_bytes, block.stream, frames)
        self.allocator.free(block)

    def follow_segments(self, stream: int, frames: list[dict[str, Any]]) -> None:
        """Record the segments allocated and freed since the last time."""
        before, after = self.mapped, {}
        for blocks in self.allocator.snapshot():
            after[blocks[0].address] = (
                blocks[0].address + sum(block.size_bytes for block in blocks),
                blocks[0].stream,
            )
        names = (
            ("segment_unmap", "segment_map")
            if self.is_expandable
            else ("segment_free", "segment_alloc")
        )
        for action, ranges, others in ((names[0], before, after), (names[1], after, before)):
            for start, (end, of_stream) in ranges.items():
                for address, size_bytes in _without(start, end, others):
                    self.entry(action, address, size_bytes, of_stream, frames)
        self.mapped = after

    def entry(
        self,
        action: str,
        address: int,
        size_bytes: int,
        stream: int,
        frames: list[dict[str, Any]],
        **more: int,
    ) -> None:
        entry = {
            "action": action,
            "addr": address,
            "size": size_bytes,
            "stream": stream,
            "pool_id": _pool_id(stream),
            "time_us": 2 * len(self.entries) + 1,
            "frames": frames,
        }
        self.entries.append(entry | more)

    def frames_of(self, event: Alloc) -> list[dict[str, Any]]:
        """From the inside out, as the stack of a recorded history."""
        names = event.module.split(".") if event.module else []
        modules = [".".join(names[:length]) for length in range(len(names), 0, -1)]
        frames = [
            _frame(
                event.category.value if event.category else "unknown",
                event.operator or "an allocation",
            )
        ]
        frames += [_frame("module", name) for name in modules]
        if self.phase:
            frames.append(_frame("phase", self.phase.value))
        frames.append(
            _frame("step", f"step {self.num_steps}" if self.num_steps else "before the first step")
        )
        return frames

    def segment(self, blocks: list[Block]) -> dict[str, Any]:
        first = blocks[0]
        allocated_bytes = sum(block.size_bytes for block in blocks if block.is_allocated)
        return {
            "device": 0,
            "address": first.address,
            "total_size": sum(block.size_bytes for block in blocks),
            "allocated_size": allocated_bytes,
            "active_size": allocated_bytes,
            "requested_size": sum(block.requested_bytes for block in blocks),
            "stream": first.stream,
            "segment_type": "small" if first.pool.is_small else "large",
            "segment_pool_id": _pool_id(first.stream),
            "is_expandable": self.is_expandable,
            "frames": [],
            "blocks": [self.block(block) for block in blocks],
        }

    def block(self, block: Block) -> dict[str, Any]:
        return {
            "address": block.address,
            "size": block.size_bytes,
            "requested_size": block.requested_bytes,
            "state": "active_allocated" if block.is_allocated else "inactive",
            "frames": self.frames.get(block.address, []),
        }


def _pool_id(stream: int) -> tuple[int, int]:
    return _GRAPH_POOL_ID if stream == GRAPH_POOL else _POOL_ID


def _frame(kind: str, name: str) -> dict[str, Any]:
    return {"filename": kind, "line": 0, "name": name}


def _without(start: int, end: int, others: dict[int, tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The address and size of each part of a range that no other range covers."""
    if others.get(start, (0, 0))[0] == end:
        return
    for other_start, (other_end, _) in sorted(others.items()):
        if other_start < end and other_end > start:
            if other_start > start:
                yield start, other_start - start
            start = other_end
    if start < end:
        yield start, end - start
