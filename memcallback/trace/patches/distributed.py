"""Lets PyTorch's distributed engines (DDP, FSDP2, DTensor, DeviceMesh) run on fake tensors."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.c10d_logger as c10d_logger
import torch.distributed.fsdp._flat_param as fsdp1
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
from memcallback.trace.patches.patching import Patch

#: Thread numbers that no thread has.
_THREADS = count(-1, -1)


def rank_patches(mode: TraceMode) -> Iterator[Patch]:
    """Let PyTorch's distributed engines run on a mode's fakes."""
    ddp = DistributedDataParallel
    # Compares the shapes of all ranks.
    verify = "_verify_param_shape_across_processes"
    yield nn.parallel.distributed, verify, lambda *args, **kwargs: None
    yield ddp, "_ddp_init_helper", _ddp_init_helper(mode, ddp._ddp_init_helper)
    yield ddp, "_pre_forward", _with_numbers(mode, ddp._pre_forward)
    for module in _modules_that_prepare():
        prepare = "prepare_for_backward"
        yield module, prepare, _with_numbers(mode, getattr(module, prepare))
    yield ddp, "register_comm_hook", _register_comm_hook(mode, ddp.register_comm_hook)
    yield DeviceMesh, "__init__", _mesh_on_cpu(DeviceMesh.__init__)
    if mode.spec is not None:
        # Fakes report the card, and so do meshes.
        yield DeviceMesh, "device_type", _device_type(mode)
    # DTensor infers the shape of the whole on fakes of another mode, which no rank does.
    yield sharding, "detect_fake_mode", lambda *args: None
    yield torch.UntypedStorage, "resize_", _resize(mode, torch.UntypedStorage.resize_)
    # A rank takes its own chunk of a parameter and asks the first for its size: fakes of all the
    # chunks of a thousand ranks take longer than the rest of the trace.
    yield (
        fsdp2,
        "_chunk_with_empty",
        lambda tensor, num_chunks, dim: _Chunks(tensor, num_chunks, dim),
    )
    parameter = fsdp2.FSDPParam
    yield parameter, "reset_sharded_param", _reset_sharded_param(parameter.reset_sharded_param)
    # FSDP1 asks for an address, and fakes have none.
    yield fsdp1, "_data_ptr_allocated", lambda tensor: tensor.untyped_storage().size() > 0
    original = parameter.init_all_gather_outputs
    yield parameter, "init_all_gather_outputs", _init_all_gather_outputs(mode, original)
    # Differentiable collectives run other operators with each backend, and the stages of a pipeline
    # in PyTorch 2.14 send each other no shapes in a fake group.
    backend = dist.Backend.GLOO if mode.spec is None else dist.Backend.NCCL
    yield dist, "get_backend", lambda group=None: backend
    # PyTorch writes a failed collective to a log, with NCCL's version, which CPU builds lack.
    yield c10d_logger, "_get_msg_dict", lambda name, *args, **kwargs: {"func_name": name}
    yield dist, "new_group", _fake_group(dist.new_group)


def _modules_that_prepare() -> Iterator[Any]:
    """Lightning's modules that tell DDP of a backward pass under manual optimization."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        module = sys.modules.get(f"{package}.overrides.distributed")
        if module is not None:
            yield module


def _fake_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make groups that send nothing either, whatever backend is asked for."""
    signature = inspect.signature(original)

    def new_group(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        for name in ("backend", "pg_options", "device_id"):
            arguments.pop(name, None)
        return original(**arguments)

    return new_group


def _device_type(mode: TraceMode) -> property:
    thread, original = threading.get_ident(), DeviceMesh.__dict__["device_type"]

    def device_type(mesh: DeviceMesh) -> Any:
        if threading.get_ident() != thread:
            return original.__get__(mesh)
        return "cuda" if mode.placement.reports_cuda_device else "cpu"

    return property(device_type)


class _Chunks:
    """The chunks of a tensor for the ranks of a mesh (`_chunk_with_empty`), created when read."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, index: int) -> torch.Tensor:
        start, end = index * self._size, self._tensor.size(self._dim)
        if start >= end and index:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._size, end - start))


def _with_numbers(mode: TraceMode, original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep values meanwhile: DDP's reducer writes numbers into tensors, sends and reads them."""

    def call(*args: Any, **kwargs: Any) -> Any:
        before, mode.keeps_numbers = mode.keeps_numbers, True
        try:
            return original(*args, **kwargs)
        finally:
            mode.keeps_numbers = before

    return call


def _ddp_init_helper(mode: TraceMode, original: Callable[..., Any]) -> Callable[..., Any]:
    """Note the stream in which DDP makes the nodes that accumulate gradients.

    Its communication hooks run in it. Lightning wraps a model in a stream of its own.
    """
    init = _with_numbers(mode, original)

    def helper(model: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        mode.accumulated_in |= dict.fromkeys(map(id, parameters), mode.ledger.stream)
        return init(model, parameters, *args, **kwargs)

    return helper


def _register_comm_hook(mode: TraceMode, original: Callable[..., Any]) -> Callable[..., Any]:
    def register(model: Any, state: object, hook: Callable[..., Any]) -> Any:
        return original(model, state, functools.wraps(hook)(unwaited(mode.in_flight, hook)))

    return register


def _mesh_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Create meshes on the CPU, where the fakes are, and unlike those of any other trace.

    DTensor caches sharding decisions, and the process groups in them, by equal meshes. A thread
    number of its own keeps a trace's meshes apart from those of the user's training and of the next
    trace.
    """
    number = next(_THREADS)

    def init(mesh: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        # DTensor keeps meshes for ever: one that held a fake would keep the mode, and with it all
        # of the trace.
        args, kwargs = tree_map_only(FakeTensor, _constant_of, (args, kwargs))
        with unset_fake_temporarily():
            original(mesh, "cpu", *args, **kwargs)
        mesh._thread_id, mesh._hash = number, None

    return init


def _constant_of(fake: FakeTensor) -> torch.Tensor:
    """A real tensor with a fake's values if they are known, else the fake."""
    return fake if fake.constant is None else fake.constant


def _reset_sharded_param(original: Callable[..., Any]) -> Callable[..., Any]:
    """Pad a shard unless the padded one is in place.

    FSDP compares addresses to find out; fakes have none, so this compares storages.
    """

    def reset(parameter: Any) -> None:
        info, padded = parameter._module_info, getattr(parameter, "_sharded_param_data", None)
        current = getattr(info.module, info.param_name)
        if (
            padded is None
            or current is not parameter.sharded_param
            or padded.untyped_storage()._cdata != current._local_tensor.untyped_storage()._cdata
        ):
            original(parameter)

    return reset


def _resize(mode: TraceMode, original: Callable[..., Any]) -> Callable[..., Any]:
    """Record resized storages: FSDP frees gathered parameters by resizing their storages to 0."""

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        if mode.is_recording:
            mode.ledger.resize(storage)
        return result

    return resize


def _init_all_gather_outputs(mode: TraceMode, original: Callable[..., Any]) -> Callable[..., Any]:
    """Label gathered tensors as parameters of the running module."""

    def init(parameter: Any, *args: Any, **kwargs: Any) -> None:
        original(parameter, *args, **kwargs)
        gathered = ((mode.ledger.module, tensor) for tensor in parameter.all_gather_outputs)
        with torch._C.DisableTorchFunction():
            mode.ledger.label(gathered, Category.PARAMETER)

    return init
