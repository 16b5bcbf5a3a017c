"""HealthMonitor: watches a training's memory and warns of each problem once.

On a normal step it compares a few numbers that were read anyway. It looks at live tensors only when
a window of steps ends and memory has been rising. A CPU has no allocator counters, so there it
looks on recorded steps: every tenth at most, and half as often after every 16 looks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType

import torch

from memcallback.core.errors import warn_and_go_on
from memcallback.core.step_memory import DeviceMemory, StepMemory
from memcallback.core.types import Phase
from memcallback.core.units import format_bytes
from memcallback.core.weak_list import WeakList
from memcallback.devices.memory import device_memory, limit_bytes
from memcallback.diagnose.health.findings import Finding, Health, Sign
from memcallback.diagnose.health.growth import Growth, Progress, Trend, is_leak
from memcallback.diagnose.health.leaks import (
    LiveByOwner,
    OwnerGrowth,
    growing_graph,
    growing_owners,
    is_variable,
    live_by_owner,
    program_frames,
)
from memcallback.prediction.allocator.settings import AllocatorSettings

#: Steps per window at first; on a CPU, steps between two looks.
_WINDOW = 10
#: Looks that are compared before we warn.
_NUM_LOOKS = 3


class HealthMonitor:
    """Warns when something is wrong with the memory of a training.

    `findings` lists the warnings so far.
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        device: torch.device,
        *,
        headroom: float,
        progress: Callable[[], Progress] = Progress,
        suggestion: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._modules: WeakList[torch.nn.Module] = WeakList(modules)
        self._optimizers: WeakList[torch.optim.Optimizer] = WeakList(optimizers)
        self._device = device
        self._progress = progress
        self._health = Health(headroom, suggestion=suggestion, is_expandable=_is_expandable())
        self._growth = Growth(1, is_sparse=True) if device.type == "cpu" else Growth(_WINDOW)
        self._looks: list[LiveByOwner] = []
        self._num_looks_to_skip = 0
        self._next_num_to_skip = 1
        self._last_look: int | None = None
        self._largest_peak_bytes = 0
        self._has_reported_leak = False
        self.findings: list[Finding] = []

    def on_step(self, record: StepMemory, batch: object = None) -> None:
        """Judge a recorded step."""
        for finding in self._health.on_step(record):
            self._warn(finding)
        is_complete = (
            not record.is_warm_up
            and not record.is_interrupted
            and Phase.OPTIMIZER_STEP in record.phases
        )
        if self._has_reported_leak or not is_complete or record.index is None:
            return
        self._largest_peak_bytes = max(self._largest_peak_bytes, record.peak_allocated_bytes or 0)
        end = record.windows[-1].end
        if self._device.type == "cpu":
            self._look_on_cpu(record.index, batch)
        elif end.allocated_bytes is not None and end.num_allocations is not None:
            epoch = self._progress().epoch if self._growth.is_at_edge else None
            has_window_ended = self._growth.add(
                record.index, end.allocated_bytes, end.num_allocations, epoch=epoch
            )
            if has_window_ended and (rise := self._growth.rise) is not None:
                self._follow(rise, record.index, batch)
            elif has_window_ended:
                self._looks = []

    def on_reading(self, device: DeviceMemory) -> None:
        """Judge a reading of the whole device, made after a step."""
        for finding in self._health.on_reading(device, limit_bytes=limit_bytes(self._device)):
            self._warn(finding)

    def close(self) -> None:
        """Release the models, and stop looking for leaks."""
        self._modules, self._optimizers, self._looks = WeakList(), WeakList(), []
        self._has_reported_leak = True

    def _look_on_cpu(self, step: int, batch: object) -> None:
        """Use the live tensors in place of allocator counters, at growing intervals."""
        interval = _WINDOW << self._growth.num_doublings
        if self._last_look is not None and step - self._last_look < interval:
            return
        self._last_look = step
        frames = program_frames()
        live = self._look(step, batch, frames)
        self._growth.add(step, live.owned_bytes, live.num_owned, epoch=self._progress().epoch)
        if len(self._looks) == _NUM_LOOKS and (rise := self._growth.rise) is not None:
            self._judge(rise)

    def _follow(self, rise: Trend, step: int, batch: object) -> None:
        """Look at live tensors while counters rise, less often each time this leads to nothing."""
        if self._num_looks_to_skip:
            self._num_looks_to_skip -= 1
            return
        self._look(step, batch, program_frames())
        if len(self._looks) == _NUM_LOOKS and not self._judge(rise):
            self._looks = []
            self._num_looks_to_skip = self._next_num_to_skip
            self._next_num_to_skip *= 2

    def _look(self, step: int, batch: object, frames: list[FrameType]) -> LiveByOwner:
        modules, optimizers = [*self._modules], [*self._optimizers]
        live = live_by_owner(step, modules, optimizers, batch, self._device, frames)
        self._looks = [*self._looks[1 - _NUM_LOOKS :], live]
        return live

    def _judge(self, rise: Trend) -> bool:
        """Warn of a leak; return whether any owner grows."""
        growing = growing_owners(self._looks)
        if not growing:
            return False
        suspect = _Suspect.among(growing, self._looks)
        free_bytes = self._free_bytes()
        if is_leak(
            rise,
            self._progress(),
            keeps_graph=suspect.keeps_graph,
            bytes_per_step=suspect.bytes_per_step,
            free_bytes=free_bytes,
        ):
            self._has_reported_leak = True
            self._warn(suspect.finding(rise, free_bytes))
        return True

    def _free_bytes(self) -> int | None:
        """Memory that can still be filled: above this process, on a CUDA device above its peak."""
        device = device_memory(self._device)
        if device.capacity_bytes is None:
            return None
        if self._device.type == "cpu":
            if device.this_process_bytes is None:
                return None
            return max(0, device.capacity_bytes - device.this_process_bytes)
        available = device.capacity_bytes - (device.non_pytorch_bytes or 0)
        limit = limit_bytes(self._device)
        if limit is not None:
            available = min(available, limit)
        return max(0, available - self._largest_peak_bytes)

    def _warn(self, finding: Finding) -> None:
        self.findings.append(finding)
        warn_and_go_on(str(finding))


@dataclass(frozen=True, kw_only=True)
class _Suspect:
    """The owner to blame for growth between the first and the last of several looks.

    A graph counts only if a variable or attribute holds it: others may be garbage that Python has
    not collected yet.
    """

    growing: list[OwnerGrowth]
    main: OwnerGrowth
    owner: str
    keeps_graph: bool
    first_step: int
    last_step: int

    @classmethod
    def among(cls, growing: list[OwnerGrowth], looks: list[LiveByOwner]) -> _Suspect:
        """Choose a variable that keeps graphs, else a graph that grows, else what grows most."""
        variables = [growth for growth in growing if is_variable(growth.now.owner)]
        with_graph = next(
            (growth for growth in variables if growth.now.keeps_graph and growth.count), None
        )
        saved = next(
            (
                growth
                for growth in growing
                if growth.now.keeps_graph and not is_variable(growth.now.owner)
            ),
            None,
        )
        graph_owner = growing_graph(looks) if with_graph is None and saved is not None else ""
        main = with_graph or (saved if graph_owner else None) or (variables or growing)[0]
        return cls(
            growing=growing,
            main=main,
            owner=graph_owner or main.now.owner,
            keeps_graph=with_graph is not None or bool(graph_owner),
            first_step=looks[0].step,
            last_step=looks[-1].step,
        )

    @property
    def num_bytes(self) -> int:
        return sum(growth.num_bytes for growth in self.growing)

    @property
    def bytes_per_step(self) -> float:
        return self.num_bytes / (self.last_step - self.first_step)

    def finding(self, rise: Trend, free_bytes: int | None) -> Finding:
        """Name what grows, who owns it and how to stop it."""
        main = self.main
        # The tensors of a growing graph can have another owner than the graph.
        is_graph_of_other = self.owner != main.now.owner
        owner = self.owner or "tensors that no variable holds"
        if is_graph_of_other:
            part = main.now.owner or "tensors that no variable holds"
            owner = f"the graph behind {owner} ({part})"
        kind, size = main.now.most_frequent_kind, format_bytes(main.num_bytes)
        change = (
            f"{main.count} more tensors such as {kind}, {size} in total"
            if main.count
            else f"tensors have become larger, for example {kind}, by {size} in total"
        )
        others = ""
        if rest := [growth for growth in self.growing if growth is not main]:
            size = format_bytes(sum(growth.num_bytes for growth in rest))
            others = f" Tensors of other owners grow with it, by {size} in total."
        full = ""
        if free_bytes is not None:
            # Of an estimate two digits.
            num_steps = int(float(f"{free_bytes / self.bytes_per_step:.2g}"))
            full = f" At this rate the device is full in about {num_steps:,} steps."
        if self.keeps_graph:
            rule = "An autograd graph is needed for one step only, and these tensors keep theirs."
            hint = _CUT_GRAPH if is_graph_of_other else _KEEP_NUMBERS
        else:
            rule = _WILL_FILL_DEVICE
            hint = "Move the tensors to the host (.cpu()), or empty the container after use."
        return Finding(
            sign=Sign.LEAK,
            value=(
                f"Memory grows from step to step, since step {rise.first_step + 1} or earlier: "
                f"{format_bytes(self.num_bytes)} from step {self.first_step + 1} to "
                f"{self.last_step + 1}. It grows in {owner}: {change}.{others}{full}"
            ),
            rule=rule,
            hint=hint,
        )


_WILL_FILL_DEVICE = (
    "Unlike a buffer of fixed size, or a list that is emptied after each epoch, this would "
    "fill the device if the training went on long enough."
)
_KEEP_NUMBERS = "Keep numbers: loss.item(), or loss.detach() if it has to stay on the device."
_CUT_GRAPH = "Cut the graph between steps: hidden = hidden.detach(), total += loss.item()."


def _is_expandable() -> bool:
    """Whether PYTORCH_CUDA_ALLOC_CONF turns on expandable segments."""
    try:
        return AllocatorSettings.from_environ(os.environ).expandable_segments
    except ValueError:  # a setting of another version of PyTorch
        return False
