"""Collectives on fake tensors: their results, temporaries, and the tensors they keep alive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memcallback.core.torch_private import c10d_bindings

#: Waits for another operator. The fake kernel makes a new tensor, a device returns the same one.
WAIT = "_c10d_functional::wait_tensor"


def is_collective(operator: str) -> bool:
    """Whether an operator is a process group's, which works in place and returns a `Work`."""
    return operator.startswith("c10d::")


class InFlight:
    """Tensors kept alive by asynchronous NCCL work that is awaited only through a future.

    The communication hooks of DistributedDataParallel await it so.

    NCCL's process group releases them when its watchdog thread has seen the end and the next
    collective begins (`WorkNCCL`, `shelvesToUnstash_` in ProcessGroupNCCL.cpp): in the next step,
    if a step takes longer than the watchdog's interval of a tenth of a second. Seen with PyTorch
    2.11 on virtual devices; no other version was tried.

    Attributes:
        is_unwaited: Whether collectives that begin now are awaited only through a future.
    """

    def __init__(self) -> None:
        self.is_unwaited = False
        self._of_this_step: list[object] = []
        self._of_earlier_steps: list[object] = []

    def begin_step(self) -> None:
        """Begin another training step."""
        self._of_earlier_steps += self._of_this_step
        self._of_this_step = []

    def begun(self, tensors: object) -> None:
        """Note that a collective with these tensors has begun."""
        self._of_earlier_steps.clear()
        if self.is_unwaited:
            self._of_this_step.append(tensors)

    def close(self) -> None:
        """Release all tensors."""
        self._of_this_step.clear()
        self._of_earlier_steps.clear()


def with_result(outputs: Any) -> Any:
    """Give the `Work` in a collective's result the tensors as its own result, as on a device."""
    if not isinstance(outputs, tuple):
        return outputs
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(outputs[0] if isinstance(outputs[0], list) else [outputs[0]])
    return (*outputs[:-1], c10d_bindings.Work.boxed(c10d_bindings._create_work_from_future(future)))


def temporary_bytes(operator: str, args: Sequence[Any]) -> int:
    """The flat buffer of collectives over lists of tensors.

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
    """Wrap a communication hook, whose collectives are awaited only through a future."""

    def run(*args: Any) -> Any:
        before, in_flight.is_unwaited = in_flight.is_unwaited, True
        try:
            return hook(*args)
        finally:
            in_flight.is_unwaited = before

    return run
