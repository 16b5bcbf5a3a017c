"""Warn about each finding once.

On a normal step it compares a few numbers that were read anyway. Only while these rise from one
window of steps to the next does it look at what is alive, when a window ends. A CPU has no such
counters: there it looks on recorded steps, every tenth at most, and half as often each time that it
has looked sixteen times.
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
from memcallback.devices.memory import device_memory, limit_bytes
from memcallback.diagnose.health.findings import Finding, Health, Sign
from memcallback.diagnose.health.growth import Growth, Progress, Trend, is_leak
from memcallback.diagnose.health.leaks import (
    Grown,
    Holding,
    filled_at,
    frames_around,
    growing_graph,
    grown,
    holding,
    is_named,
)
from memcallback.prediction.allocator.settings import AllocatorSettings

#: Steps in the first windows of a device whose allocator has counters; on a CPU, steps between two
#: looks.
_WINDOW = 10
#: Moments that are compared before anything is told.
_NUM_HOLDINGS = 3


class HealthMonitor:
    """Warns of what is wrong with the memory of one training.

    Attributes:
        findings: What was told, in order.
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
        self._modules = list(modules)
        self._optimizers = list(optimizers)
        self._device = device
        self._progress = progress
        self._health = Health(headroom, suggestion=suggestion, is_expandable=_is_expandable())
        self._growth = Growth(1, is_sparse=True) if device.type == "cpu" else Growth(_WINDOW)
        self._holdings: list[Holding] = []
        self._num_looks_left_out = 0
        self._next_left_out = 1
        self._last_look: int | None = None
        self._largest_peak_bytes = 0
        self._has_told_of_leak = False
        self.findings: list[Finding] = []

    def on_step(self, record: StepMemory, batch: object = None) -> None:
        """A step was recorded."""
        for finding in self._health.on_step(record):
            self._tell(finding)
        is_whole = (
            not record.is_warm_up
            and not record.is_interrupted
            and Phase.OPTIMIZER_STEP in record.phases
        )
        if self._has_told_of_leak or not is_whole or record.index is None:
            return
        self._largest_peak_bytes = max(self._largest_peak_bytes, record.peak_allocated_bytes or 0)
        end = record.windows[-1].end
        if self._device.type == "cpu":
            self._look_at_cpu(record.index, batch)
        elif end.allocated_bytes is not None and end.num_allocations is not None:
            epoch = self._progress().epoch if self._growth.is_at_edge else None
            is_due = self._growth.add(
                record.index, end.allocated_bytes, end.num_allocations, epoch=epoch
            )
            if is_due and (rise := self._growth.rise) is not None:
                self._follow(rise, record.index, batch)
            elif is_due:
                self._holdings = []

    def on_reading(self, device: DeviceMemory) -> None:
        """The whole device was read, after a step."""
        for finding in self._health.on_reading(device, limit_bytes=limit_bytes(self._device)):
            self._tell(finding)

    def close(self) -> None:
        """Let go of the models."""
        self._modules, self._optimizers, self._holdings = [], [], []
        self._has_told_of_leak = True

    def _look_at_cpu(self, step: int, batch: object) -> None:
        if (
            self._last_look is not None
            and step - self._last_look < _WINDOW << self._growth.num_doublings
        ):
            return
        self._last_look = step
        frames = frames_around()
        seen = self._holding(step, batch, frames)
        self._growth.add(step, seen.owned_bytes, seen.num_owned, epoch=self._progress().epoch)
        self._holdings = [*self._holdings[1 - _NUM_HOLDINGS :], seen]
        if len(self._holdings) == _NUM_HOLDINGS and (rise := self._growth.rise) is not None:
            self._judge(rise, frames)

    def _follow(self, rise: Trend, step: int, batch: object) -> None:
        """The counters rise: look at what is alive, unless that has led to nothing again and again."""
        if self._num_looks_left_out:
            self._num_looks_left_out -= 1
            return
        frames = frames_around()
        self._holdings = [*self._holdings[1 - _NUM_HOLDINGS :], self._holding(step, batch, frames)]
        if len(self._holdings) == _NUM_HOLDINGS and not self._judge(rise, frames):
            self._holdings = []
            self._num_looks_left_out = self._next_left_out
            self._next_left_out *= 2

    def _holding(self, step: int, batch: object, frames: list[FrameType]) -> Holding:
        return holding(step, self._modules, self._optimizers, batch, self._device, frames)

    def _judge(self, rise: Trend, frames: list[FrameType]) -> bool:
        """Tell of what grows, if it is a leak."""
        found = grown(self._holdings)
        if not found:
            return False
        growth = _Growing.of(found, self._holdings)
        free = self._free_bytes()
        if is_leak(
            rise,
            self._progress(),
            keeps_graph=growth.keeps_graph,
            bytes_per_step=growth.bytes_per_step,
            free_bytes=free,
        ):
            self._has_told_of_leak = True
            self._tell(growth.finding(rise, free, filled_at(growth.owner, self._modules, frames)))
        return True

    def _free_bytes(self) -> int | None:
        """What is left for more of what grows."""
        device = device_memory(self._device)
        if device.capacity_bytes is None:
            return None
        if self._device.type == "cpu":
            return (
                None
                if device.this_process_bytes is None
                else max(0, device.capacity_bytes - device.this_process_bytes)
            )
        limit = device.capacity_bytes - (device.non_pytorch_bytes or 0)
        own = limit_bytes(self._device)
        return max(0, (limit if own is None else min(limit, own)) - self._largest_peak_bytes)

    def _tell(self, finding: Finding) -> None:
        self.findings.append(finding)
        warn_and_go_on(str(finding))


@dataclass(frozen=True, kw_only=True)
class _Growing:
    """What grows between the first and the last of several moments, and who is told of.

    A graph counts where a variable or an attribute holds it: what else keeps one may be garbage
    that Python has not collected yet.
    """

    all_of_it: list[Grown]
    main: Grown
    owner: str
    keeps_graph: bool
    first_step: int
    last_step: int

    @classmethod
    def of(cls, found: list[Grown], holdings: list[Holding]) -> _Growing:
        named = [one for one in found if is_named(one.held.owner)]
        with_graph = next((one for one in named if one.held.keeps_graph and one.count), None)
        saved = next(
            (one for one in found if one.held.keeps_graph and not is_named(one.held.owner)), None
        )
        graph = growing_graph(holdings) if with_graph is None and saved is not None else ""
        main = with_graph or (saved if graph else None) or (named or found)[0]
        return cls(
            all_of_it=found,
            main=main,
            owner=graph or main.held.owner,
            keeps_graph=with_graph is not None or bool(graph),
            first_step=holdings[0].step,
            last_step=holdings[-1].step,
        )

    @property
    def num_bytes(self) -> int:
        return sum(one.num_bytes for one in self.all_of_it)

    @property
    def bytes_per_step(self) -> float:
        return self.num_bytes / (self.last_step - self.first_step)

    def finding(self, rise: Trend, free_bytes: int | None, lines: tuple[str, ...]) -> Finding:
        is_carried = self.owner != self.main.held.owner
        owner = self.owner or "tensors that no variable holds"
        who = (
            f"what the graph behind {owner} keeps ({self.main.held.owner})" if is_carried else owner
        )
        filled = f", filled at {'; '.join(lines)}" if lines else ""
        more = f"{self.main.count} tensors more, such as" if self.main.count else "larger, now"
        rest = [one for one in self.all_of_it if one is not self.main]
        number, size = (
            sum(one.count for one in rest),
            format_bytes(sum(one.num_bytes for one in rest)),
        )
        others = f", and with it {number} others, {size}" if rest else ""
        full = (
            ""
            if free_bytes is None
            else f" At this rate the device is full in about {int(free_bytes / self.bytes_per_step):,} steps."
        )
        return Finding(
            sign=Sign.LEAK,
            value=(
                f"Memory grows from step to step, since step {rise.first_step + 1} at the latest; from step {self.first_step + 1} to "
                f"{self.last_step + 1} by {format_bytes(self.num_bytes)}. What grows is {who}: {more} {self.main.held.shape} "
                f"{self.main.held.dtype}, {format_bytes(self.main.num_bytes)}{filled}{others}.{full}"
            ),
            rule=_KEEPS_GRAPH if self.keeps_graph else _FILLS,
            hint=(_CUT if is_carried else _KEEP_NUMBERS) if self.keeps_graph else _MOVE,
        )


_KEEPS_GRAPH = (
    "Tensors that keep the graph that computed them are needed for one step, and no longer."
)
_FILLS = "A buffer that fills up to a fixed size, or is emptied at the end of an epoch, is not told of; this fills the device first."
_KEEP_NUMBERS = "Keep numbers: loss.item(), or loss.detach() if it has to stay on the device."
_CUT = "Cut the graph between steps: hidden = hidden.detach(), total += loss.item()."
_MOVE = "Move what is kept to the host (.cpu()), or empty it when it has been used."


def _is_expandable() -> bool:
    try:
        return AllocatorSettings.from_environ(os.environ).expandable_segments
    except ValueError:  # a setting of another version of PyTorch
        return False
