"""AllocatorAtStart: the CUDA allocator as a training begins, and who else has memory in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from memcallback.core.interruptions import ENDS, PassOver, raise_if_meant
from memcallback.core.tensors import storages_of, tensors_in
from memcallback.core.torch_private import is_memory_history_on
from memcallback.prediction.allocator.at_start import Segment, read_segments
from memcallback.record.recorder import MemoryRecorder
from memcallback.step.holdings import holdings
from memcallback.step.training_step import TrainingStep

MakeStep = Callable[[], TrainingStep]


class AllocatorAtStart:
    """Reads the allocator when it is made: before the first batch of a Trainer."""

    def __init__(self, recorder: MemoryRecorder) -> None:
        device = recorder.meter.device
        self._recorder = recorder
        self._snapshot: Sequence[Mapping[str, Any]] = ()
        self._device_index = 0
        self._held: set[int] = set()
        self._gradients: set[int] = set()
        if device.type != "cuda":
            return
        with PassOver():  # other allocators have no snapshot; a training goes on
            models, optimizers = recorder.models, recorder.optimizers
            self._held = set(holdings(models, optimizers, None, device).storages)
            self._gradients = _addresses(
                [one.grad for model in models for one in model.parameters()]
            )
            self._device_index = (
                torch.cuda.current_device() if device.index is None else device.index
            )
            self._snapshot = _snapshot()

    def segments(self, batch: object) -> tuple[Segment, ...]:
        """The segments of the default stream; empty where they cannot be read.

        What the first step makes anew counts as free: the batch, and gradients, which are freed
        before the first backward pass.
        """
        with PassOver():  # a batch of a user's can refuse to be read
            made_anew = self._gradients | _addresses(batch)
            return read_segments(
                self._snapshot, self._device_index, self._held - made_anew, made_anew
            )
        return ()

    def with_others(self, *makers: MakeStep) -> list[MakeStep]:
        """What makes the same steps, with what else of this process was on the device."""
        others: dict[str, list[torch.Tensor]] = {}
        if self._snapshot:
            from memcallback.diagnose.tensors.others import others_on_device

            recorder, blocks = self._recorder, self._blocks()
            try:
                others = others_on_device(recorder.models, recorder.optimizers, makers[0](), blocks)
            except ENDS as error:  # a step that cannot be made is warned of where it is predicted
                raise_if_meant(error)
        return [partial(_with_others, make_step, others) for make_step in makers]

    def _blocks(self) -> dict[int, int]:
        """The bytes of the blocks that are in use, by address."""
        blocks = {}
        for segment in self._snapshot:
            address = segment["address"]
            for block in segment["blocks"] if segment["device"] == self._device_index else ():
                if block["state"] != "inactive":
                    blocks[address] = block["size"]
                address += block["size"]
        return blocks


def _with_others(make_step: MakeStep, others: Mapping[str, list[torch.Tensor]]) -> TrainingStep:
    step = make_step()
    step.also = {**step.also, **others}
    return step


def _addresses(obj: object) -> set[int]:
    return {
        storage.data_ptr()
        for tensor in tensors_in(obj)
        for storage in storages_of(tensor)
        if storage.device.type == "cuda"
    }


def _snapshot() -> Sequence[Mapping[str, Any]]:
    """All segments, without a recorded history, which can take seconds to read."""
    read: Any = torch.cuda.memory_snapshot
    if "include_traces" in inspect.signature(read).parameters:
        segments: Sequence[Mapping[str, Any]] = read(include_traces=False)
        return segments
    return () if is_memory_history_on() else read()
