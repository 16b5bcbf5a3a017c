"""Collectives on fake tensors: results, temporaries, bytes sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memcallback.trace.dispatch.operators import tensors_of

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


#: What a rank sends of a tensor of one byte, times the number of ranks less one over that number
#: where it says so: nccl-tests, doc/PERFORMANCE.md (bus bandwidth). The position is that of the
#: tensors that count: what is reduced, scattered or gathered as a whole.
_SENT: dict[str, tuple[float, bool, int]] = {
    "allreduce_": (2.0, True, 0),
    "allgather_": (1.0, True, 0),
    "_allgather_base_": (1.0, True, 0),
    "reduce_scatter_": (1.0, True, 1),
    "_reduce_scatter_base_": (1.0, True, 1),
    "alltoall_": (1.0, True, 1),
    "alltoall_base_": (1.0, True, 1),
    "broadcast_": (1.0, False, 0),
    "send": (1.0, False, 0),
    "all_reduce": (2.0, True, 0),
    "all_reduce_": (2.0, True, 0),
    "all_gather_into_tensor": (1.0, True, -1),
    "reduce_scatter_tensor": (1.0, True, 0),
    "all_to_all_single": (1.0, True, 0),
}


def sent_bytes(operator: str, args: Sequence[Any], outputs: Any) -> int:
    """How much a rank sends in a collective, by the ring's formulas; 0 for an operator that is
    none.
    """
    namespace, _, name = operator.partition("::")
    known = _SENT.get(name) if namespace in ("c10d", "_c10d_functional") else None
    if known is None:
        return 0
    factor, is_shared, position = known
    num_bytes = sum(
        tensor.numel() * tensor.element_size()
        for tensor in tensors_of([outputs if position < 0 else args[position]])
    )
    num_ranks = _num_ranks(args)
    return int(factor * num_bytes * ((num_ranks - 1) / num_ranks if is_shared else 1))


def _num_ranks(args: Sequence[Any]) -> int:
    """Of the process group among the arguments: the object, or its name, which comes last."""
    from torch._C import _distributed_c10d
    from torch.distributed import distributed_c10d

    c10d: Any = _distributed_c10d
    groups: Any = distributed_c10d
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return int(c10d.ProcessGroup.unbox(argument).size())
    return int(groups._resolve_process_group(args[-1]).size())


def unwaited(in_flight: InFlight, hook: Callable[..., Any]) -> Callable[..., Any]:
    """A communication hook whose collectives are waited for through a future alone."""

    def run(*args: Any) -> Any:
        before, in_flight.is_unwaited = in_flight.is_unwaited, True
        try:
            return hook(*args)
        finally:
            in_flight.is_unwaited = before

    return run
