"""Records the allocator's state when it fails to allocate, through PyTorch's observer.

The error itself is raised in C++ and has only a text. When Python catches it, the operator's own
allocations are already freed, and in a backward pass nothing shows which operator it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memcallback.core.torch_private import (
    DisableTorchFunctionSubclass,
    attach_oom_observer,
    current_autograd_node,
)
from memcallback.diagnose.out_of_memory.errors import out_of_memory_in
from memcallback.diagnose.tensors.saved import parameters_of

#: Earlier operators to search for parameters.
_MAX_NEAR = 32


@dataclass(frozen=True, kw_only=True)
class AllocatorFailure:
    """The allocator's state when it failed to allocate. It holds no tensor.

    Attributes:
        device_index: The device.
        requested_bytes: Requested from the device.
        capacity_bytes: The device's memory, or what this process may use of it.
        free_bytes: Free on the device.
        allocated_bytes: Allocated to tensors.
        reserved_bytes: Reserved by the allocator.
        node: The running autograd node, such as `ConvolutionBackward0`; empty for none.
        parameter_ids: The ids of parameters that the node's operator uses.
        near_ids: The ids of parameters of the nearest earlier operators.
    """

    device_index: int
    requested_bytes: int
    capacity_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    node: str = ""
    parameter_ids: tuple[int, ...] = ()
    near_ids: tuple[int, ...] = ()


_last: AllocatorFailure | None = None
_is_attached = False


def record_failures() -> None:
    """Record failures of the CUDA allocator from now on, if this PyTorch can.

    It costs nothing until one occurs. PyTorch cannot detach an observer, so attach it only once.
    """
    global _is_attached
    if not _is_attached and torch.cuda.is_available():
        _is_attached = True
        attach_oom_observer(_record)


def last_failure() -> AllocatorFailure | None:
    """The last recorded failure; None if there was none."""
    return _last


def forget_failure() -> None:
    """Forget the last failure, so that it does not explain a later error."""
    global _last
    _last = None


def find_out_of_memory(error: BaseException) -> BaseException | None:
    """The same as `out_of_memory_in`; after a failure, ambiguous errors count too."""
    return out_of_memory_in(error, is_memory_short=_last is not None)


def _record(device_index: int, requested_bytes: int, capacity_bytes: int, free_bytes: int) -> None:
    # Called by the allocator in the thread of the allocation. An error here would replace the
    # out-of-memory error.
    global _last
    try:
        stats = torch.cuda.memory_stats_as_nested_dict(device_index)
        node, own, near = "", tuple[int, ...](), tuple[int, ...]()
        with DisableTorchFunctionSubclass():
            running = current_autograd_node()
            if running is not None:
                node, own, near = (
                    running.name().rpartition("::")[2],
                    tuple(parameters_of(running)),
                    _near(running),
                )
        _last = AllocatorFailure(
            device_index=device_index,
            requested_bytes=requested_bytes,
            capacity_bytes=capacity_bytes,
            free_bytes=free_bytes,
            allocated_bytes=stats["allocated_bytes"]["all"]["current"],
            reserved_bytes=stats["reserved_bytes"]["all"]["current"],
            node=node,
            parameter_ids=own,
            near_ids=near,
        )
    except Exception:  # the allocator calls this in the middle of its error, which must go on
        _last = None


def _near(node: Any) -> tuple[int, ...]:
    """The parameters of the nearest operators that ran before the node's in the forward pass."""
    level, num_seen = [node], 0
    while level and num_seen < _MAX_NEAR:
        level = [
            earlier for later in level for earlier, _ in later.next_functions if earlier is not None
        ]
        if ids := tuple(number for earlier in level for number in parameters_of(earlier)):
            return ids
        num_seen += len(level)
    return ()
