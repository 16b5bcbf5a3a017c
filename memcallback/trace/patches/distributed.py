"""torch.distributed, FSDP2, DDP, DeviceMesh on fakes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp2
import torch.distributed.tensor._sharding_prop as sharding
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from memcallback.core.types import Category
from memcallback.trace.dispatch.collectives import unwaited
from memcallback.trace.dispatch.mode import TraceMode
from memcallback.trace.patches.patching import thread_local_patch
from memcallback.trace.patches.rank_messages import Messages

#: Numbers that no thread has.
_THREADS = count(-1, -1)


@contextmanager
def rank_answers(mode: TraceMode, messages: Messages) -> Iterator[None]:
    """Let PyTorch's own distributed engines run on the fakes of a mode, until the end of the
    context.
    """
    with ExitStack() as stack:
        for target, name, answer in (*_answers(mode), *_letters(messages)):
            stack.enter_context(
                mock.patch.object(target, name, thread_local_patch(target, name, answer))
            )
        if mode.spec is not None:
            # Where fakes say that they are on the card, so do meshes.
            stack.enter_context(mock.patch.object(DeviceMesh, "device_type", _device_type(mode)))
        yield


def _answers(mode: TraceMode) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    # Compares the shapes of all ranks.
    yield (
        nn.parallel.distributed,
        "_verify_param_shape_across_processes",
        lambda *args, **kwargs: None,
    )
    yield (
        DistributedDataParallel,
        "_ddp_init_helper",
        _with_numbers(mode, DistributedDataParallel._ddp_init_helper),
    )
    yield (
        DistributedDataParallel,
        "_pre_forward",
        _with_numbers(mode, DistributedDataParallel._pre_forward),
    )
    yield (
        DistributedDataParallel,
        "register_comm_hook",
        _register(mode, DistributedDataParallel.register_comm_hook),
    )
    yield DeviceMesh, "__init__", _mesh_of_cpus(DeviceMesh.__init__)
    # The shapes of a DTensor's whole are followed on fakes of another mode, which is nothing that a
    # rank does.
    yield sharding, "detect_fake_mode", lambda *args: None
    yield torch.UntypedStorage, "resize_", _resize(mode, torch.UntypedStorage.resize_)
    # Of a parameter's parts a rank takes its own and asks the first for its size; of a thousand,
    # fakes of all take longer than the rest.
    yield fsdp2, "_chunk_with_empty", _Parts
    yield fsdp2.FSDPParam, "reset_sharded_param", _reset(fsdp2.FSDPParam.reset_sharded_param)
    yield (
        fsdp2.FSDPParam,
        "init_all_gather_outputs",
        _gathered(mode, fsdp2.FSDPParam.init_all_gather_outputs),
    )


def _letters(messages: Messages) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    def send(
        objects: list[Any],
        dst: int | None = None,
        group: Any = None,
        device: Any = None,
        group_dst: int | None = None,
        **_: Any,
    ) -> None:
        messages.send(objects, _global_rank(group, dst, group_dst))

    def receive(
        objects: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
        **_: Any,
    ) -> int:
        sender = _global_rank(group, src, group_src)
        messages.receive(objects, sender)
        return sender

    yield dist, "send_object_list", send
    yield dist, "recv_object_list", receive


def _global_rank(group: Any, rank: int | None, group_rank: int | None) -> int:
    if rank is not None:
        return rank
    if group_rank is None:
        raise NotImplementedError("objects from whichever rank comes first: say from which")
    whole: Any = group or dist.group.WORLD
    return dist.get_global_rank(whole, group_rank)


def _device_type(mode: TraceMode) -> property:
    own, original = threading.get_ident(), DeviceMesh.__dict__["device_type"]

    def device_type(mesh: DeviceMesh) -> Any:
        if threading.get_ident() != own:
            return original.__get__(mesh)
        return "cuda" if mode.placement.reports_cuda_device else "cpu"

    return property(device_type)


class _Parts:
    """The parts of a tensor that FSDP makes for the ranks of a mesh (`_chunk_with_empty`), each
    when it is asked for.
    """

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self._size
        if start >= self._tensor.size(self._dim) and index:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(
            self._dim, start, min(self._size, self._tensor.size(self._dim) - start)
        )


def _with_numbers(mode: TraceMode, original: Callable[..., Any]) -> Callable[..., Any]:
    """DDP's reducer puts numbers into tensors, sends them round and reads them."""

    def call(*args: Any, **kwargs: Any) -> Any:
        before, mode.keeps_numbers = mode.keeps_numbers, True
        try:
            return original(*args, **kwargs)
        finally:
            mode.keeps_numbers = before

    return call


def _register(mode: TraceMode, original: Callable[..., Any]) -> Callable[..., Any]:
    def register(model: Any, state: object, hook: Callable[..., Any]) -> Any:
        return original(model, state, functools.wraps(hook)(unwaited(mode.in_flight, hook)))

    return register


def _mesh_of_cpus(original: Callable[..., Any]) -> Callable[..., Any]:
    """Fakes lie on the CPU, and so do meshes of them.

    DTensor remembers how tensors are spread by meshes that are equal, and with them whose process
    groups they are. By its thread a mesh of a trace is unlike any other, of the user's training and
    of the next trace.
    """
    number = next(_THREADS)

    def init(mesh: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        # DTensor keeps meshes for ever: one that held a fake would keep the mode, and with it all
        # of the trace.
        args, kwargs = tree_map_only(FakeTensor, _with_numbers_of, (args, kwargs))
        with unset_fake_temporarily():
            original(mesh, "cpu", *args, **kwargs)
        mesh._thread_id, mesh._hash = number, None

    return init


def _with_numbers_of(fake: FakeTensor) -> torch.Tensor:
    """A tensor of the whole numbers that a fake is known to have; itself if they are not known."""
    return fake if fake.constant is None else fake.constant


def _reset(original: Callable[..., Any]) -> Callable[..., Any]:
    """FSDP fills up a shard unless it is still the one that it has filled up, which it asks by an
    address. Fakes have none.
    """

    def reset(parameter: Any) -> None:
        info, padded = parameter._module_info, getattr(parameter, "_sharded_param_data", None)
        current = getattr(info.module, info.param_name)
        is_known = current is parameter.sharded_param
        if (
            padded is None
            or not is_known
            or padded.untyped_storage()._cdata != current._local_tensor.untyped_storage()._cdata
        ):
            original(parameter)

    return reset


def _resize(mode: TraceMode, original: Callable[..., Any]) -> Callable[..., Any]:
    """FSDP frees gathered parameters by making their storages empty."""

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        if mode.is_recording:
            mode.ledger.resize(storage)
        return result

    return resize


def _gathered(mode: TraceMode, original: Callable[..., Any]) -> Callable[..., Any]:
    def init(parameter: Any, *args: Any, **kwargs: Any) -> None:
        original(parameter, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            mode.ledger.label(
                ((mode.ledger.module, tensor) for tensor in parameter.all_gather_outputs),
                Category.PARAMETER,
            )

    return init
