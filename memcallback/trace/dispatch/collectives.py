"""Collectives on fake tensors: results, temporaries, bytes sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

#: Waits for what another operator has begun; a fake's kernel makes a new tensor of it, a device's
#: gives back the same.
WAIT = "_c10d_functional::wait_tensor"


def is_collective(operator: str) -> bool:
    """Whether an operator, by its name, is one of a process group, which works in place and gives
    something to wait for.
    """
    return operator.startswith("c10d::")


class InFlight:
    """What collectives hold on to that nobody waits for but through a future, as
    DistributedDataParallel does with communication hooks.

    A process group of NCCL lets go of it when its watchdog thread has seen the end and the next
    collective begins (`WorkNCCL`, `shelvesToUnstash_` in ProcessGroupNCCL.cpp): that is in the next
    step, as long as a step takes longer than the tenth of a second after which the watchdog looks
    again. It was seen to do so with PyTorch 2.11 on virtual devices; no other version was tried.

    Attributes:
        is_unwaited: Whether what begins now is waited for through a future alone.
    """

    def __init__(self) -> None:
        self.is_unwaited = False
        self._of_this_step: list[object] = []
        self._of_earlier_steps: list[object] = []

    def begin_step(self) -> None:
        """Another training step begins."""
        self._of_earlier_steps += self._of_this_step
        self._of_this_step = []

    def begun(self, tensors: object) -> None:
        """A collective with these tensors has begun."""
        self._of_earlier_steps.clear()
        if self.is_unwaited:
            self._of_this_step.append(tensors)

    def close(self) -> None:
        """Nothing is held any more."""
        self._of_this_step.clear()
        self._of_earlier_steps.clear()


def with_result(outputs: Any) -> Any:
    """What an operator of a process group returns, where what is waited for has the tensors as its
    result, as on a device.
    """
    if not isinstance(outputs, tuple):
        return outputs
    from torch._C import _distributed_c10d

    c10d: Any = _distributed_c10d
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(outputs[0] if isinstance(outputs[0], list) else [outputs[0]])
    return (*outputs[:-1], c10d.Work.boxed(c10d._create_work_from_future(future)))


def temporary_bytes(operator: str, args: Sequence[Any]) -> int:
    """What NCCL's process group takes for a moment: collectives over lists of tensors go through
    one flat buffer.

    `allgather` and `reduce_scatter` in ProcessGroupNCCL.cpp (`newLikeFlat`), for tensors of one
    size. Measured with PyTorch 2.11 on virtual devices; no other version was tried.
    """
    position = {"c10d::allgather_": 0, "c10d::reduce_scatter_": 1}.get(operator)
    if position is None:
        return 0
    return sum(
        tensor.numel() * tensor.element_size() for tensors in args[position] for tensor in tensors
    )


def unwaited(in_flight: InFlight, hook: Callable[..., Any]) -> Callable[..., Any]:
    """A communication hook whose collectives are waited for through a future alone."""

    def run(*args: Any) -> Any:
        before, in_flight.is_unwaited = in_flight.is_unwaited, True
        try:
            return hook(*args)
        finally:
            in_flight.is_unwaited = before

    return run
