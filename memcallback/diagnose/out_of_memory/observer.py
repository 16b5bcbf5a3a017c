"""Snapshot taken by the allocator's OOM observer.

The error comes from C++ with a text alone. By the time that it can be caught, what the operator had
taken so far is given back, and in a backward pass nothing says which operator it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memcallback.diagnose.out_of_memory.errors import out_of_memory_in
from memcallback.diagnose.tensors.saved import parameters_of


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What the allocator says when it gives up. It holds no tensor.

    Attributes:
        device_index: The device.
        requested_bytes: What it asked the device for.
        capacity_bytes: The device's memory, or what this process may use of it.
        free_bytes: Free on the device.
        allocated_bytes: Held by tensors.
        reserved_bytes: Taken from the device by the allocator.
        node: The name of the autograd node that was running, such as `ConvolutionBackward0`; empty
            for none.
        parameter_ids: The ids of the parameters that its operator takes.
        near_ids: The ids of parameters of the operators next to it.
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


_last: Moment | None = None
_is_listening = False


def listen() -> None:
    """From now on keep the last moment at which the allocator gave up; once for the life of the
    process, as PyTorch takes none back.

    Costs nothing until then. Does nothing where PyTorch has no such call.
    """
    global _is_listening
    attach: Callable[..., None] | None = getattr(
        torch._C, "_cuda_attach_out_of_memory_observer", None
    )
    if not _is_listening and attach is not None and torch.cuda.is_available():
        _is_listening = True
        attach(_note)


def last_moment() -> Moment | None:
    """The last moment at which the allocator gave up; None if it never did, or nothing was told of
    it.
    """
    return _last


def forget() -> None:
    """The last moment is past: what comes next is another error."""
    global _last
    _last = None


def shortage_in(error: BaseException) -> BaseException | None:
    """As `out_of_memory_in`, by what the allocator told: once it has given up, errors with other
    causes too say that memory ran out.
    """
    return out_of_memory_in(error, is_memory_short=_last is not None)


def _note(device_index: int, requested_bytes: int, capacity_bytes: int, free_bytes: int) -> None:
    """Called by the allocator, in the thread that asked it; an error here would stand for the real
    one.
    """
    global _last
    try:
        stats = torch.cuda.memory_stats_as_nested_dict(device_index)
        node, own, near = "", tuple[int, ...](), tuple[int, ...]()
        with torch._C.DisableTorchFunctionSubclass():
            running = torch._C._current_autograd_node()
            if running is not None:
                node, own, near = (
                    running.name().rpartition("::")[2],
                    tuple(parameters_of(running)),
                    _near(running),
                )
        _last = Moment(
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
    except Exception:
        _last = None


def _near(node: Any) -> tuple[int, ...]:
    """Parameters of the operators that were run before the node's in the forward pass, the nearest
    first; few are looked at.
    """
    pending, seen = [node], 0
    while pending and seen < 32:
        following = [one for found in pending for one, _ in found.next_functions if one is not None]
        ids = tuple(number for one in following for number in parameters_of(one))
        if ids:
            return ids
        pending, seen = following, seen + len(following)
    return ()
