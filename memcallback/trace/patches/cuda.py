"""Everything patched in torch.cuda while a step is traced; the context manager that does it."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nested._internal.sdpa
import torch.nn.utils.clip_grad
import torch.utils._device
import torch.utils._foreach_utils
import torch.utils.checkpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memcallback.cuda.decompositions.attention_backend import jagged_choices
from memcallback.cuda.decompositions.registry import registered
from memcallback.devices.catalogue import DeviceSpec
from memcallback.trace.dispatch.mode import CUDA, TraceMode
from memcallback.trace.patches import autocast as cuda_autocast
from memcallback.trace.patches.autocast import AutocastCache
from memcallback.trace.patches.backward_order import BackwardNodes
from memcallback.trace.patches.flex_attention import flex_attention_answers
from memcallback.trace.patches.functions import CudaFunctions
from memcallback.trace.patches.patching import thread_local_patch
from memcallback.trace.patches.streams import Event, Streams, about_streams

_CPU, _META = torch.device("cpu"), torch.device("meta")
#: Where PyTorch decides between loops over tensors and foreach operators.
_WITH_FOREACH = ("torch.utils._foreach_utils", "torch.optim.optimizer", "torch.nn.utils.clip_grad")


def answers(
    mode: TraceMode, device: DeviceSpec, cache: AutocastCache, functions: CudaFunctions
) -> Iterator[tuple[Any, str, Any]]:
    """What stands in for functions of torch that ask for a device, as (where, name, in its place);
    for this thread alone.
    """
    for target, given in _by_target(mode, device, cache, functions):
        for name, answer in given.items():
            if hasattr(target, name):
                yield target, name, thread_local_patch(target, name, answer)
    # A fake parameter is of another class than a real one. Only the names of a class and of a
    # property: no other thread has such fakes.
    for module in map(sys.modules.get, _WITH_FOREACH):
        yield module, "_foreach_supported_types", _kinds(module)
    yield FakeTensor, "device", property(_device_of(mode))
    yield (
        torch,
        "Generator",
        _generators(thread_local_patch(torch, "Generator", lambda device=None: _OWN_GENERATOR())),
    )


def _kinds(module: Any) -> list[type]:
    """The classes of tensors that foreach operators take."""
    known = getattr(module, "_foreach_supported_types", [])
    return [*dict.fromkeys((torch.Tensor, nn.Parameter, FakeTensor, *known))]


def _by_target(
    mode: TraceMode, device: DeviceSpec, cache: AutocastCache, functions: CudaFunctions
) -> Iterator[tuple[Any, dict[str, Callable[..., Any]]]]:
    # The foreach implementations are the default on CUDA.
    for module in map(sys.modules.get, _WITH_FOREACH):
        yield (
            module,
            {
                "_get_foreach_kernels_supported_devices": lambda: ["cuda", "cpu"],
                "_get_fused_kernels_supported_devices": lambda: ["cuda", "cpu"],
                "_has_foreach_support": lambda tensors, device: True,
                "_device_has_foreach_support": lambda device: True,
            },
        )
    streams = Streams(mode)
    yield torch, {"clear_autocast_cache": cache.clear}
    yield torch.autograd, {"_engine_run_backward": _backward(mode, functions, streams)}
    yield torch.autograd.graph.saved_tensors_hooks, {"__init__": _hooks_of_saved_tensors(functions)}
    yield torch.utils._device.DeviceContext, {"__torch_function__": _default_device(mode)}
    # Checkpointing keeps the states of random number generators, of which the fakes have none.
    yield (
        torch.utils.checkpoint,
        {"get_device_states": lambda *args: ([], []), "set_device_states": _nothing},
    )
    yield (
        torch.cuda,
        {
            **_about_devices(device),
            **about_streams(streams),
            **_about_memory(device),
            **_about_random_numbers(),
        },
    )
    yield torch.cuda.memory, _about_memory(device)
    yield (
        torch.cuda.nvtx,
        dict.fromkeys(("range_push", "range_pop", "mark", "range_start", "range_end"), _nothing),
    )
    yield torch.cuda.Stream, {"__new__": lambda kind, *args, **kwargs: streams.new()}
    yield torch.cuda.Event, {"__new__": lambda kind, *args, **kwargs: Event()}
    yield FakeTensor, {"record_stream": streams.hold_back}
    yield torch.backends.cuda, {"is_built": lambda: True}
    yield torch.nested._internal.sdpa, jagged_choices(device)
    yield from flex_attention_answers(mode)
    if hasattr(torch, "accelerator"):
        yield (
            torch.accelerator,
            {
                "is_available": lambda: True,
                "device_count": lambda: 1,
                "current_accelerator": lambda check_available=False: torch.device("cuda"),
                "current_device_index": lambda: 0,
                "current_stream": lambda device=None: streams.current,
                "set_stream": streams.set,
                "synchronize": _nothing,
                "set_device_index": _nothing,
                **_about_memory(device),
            },
        )


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _about_devices(device: DeviceSpec) -> dict[str, Callable[..., Any]]:
    major, minor = device.compute_capability
    properties = SimpleNamespace(
        name=device.name,
        major=major,
        minor=minor,
        total_memory=device.capacity_bytes,
        multi_processor_count=device.num_multiprocessors,
        max_threads_per_multi_processor=device.max_threads_per_multiprocessor,
        shared_memory_per_block=device.shared_memory_per_block_bytes,
        shared_memory_per_block_optin=device.shared_memory_per_block_optin_bytes,
        warp_size=32,
        is_integrated=False,
    )
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": _nothing,
        "_lazy_init": _nothing,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _nothing,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "get_device_capability": lambda device=None: (major, minor),
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_arch_list": lambda: [f"sm_{major}{minor}"],
        "can_device_access_peer": lambda device, peer_device: False,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or major >= 8,
        "is_tf32_supported": lambda: major >= 8,
        "ipc_collect": _nothing,
        "_sleep": _nothing,
    }


def _about_memory(device: DeviceSpec) -> dict[str, Callable[..., Any]]:
    """An empty device: code that trains differently when memory is short goes its usual way."""
    reads = (
        *(
            "memory_allocated",
            "max_memory_allocated",
            "memory_reserved",
            "max_memory_reserved",
            "memory_cached",
            "max_memory_cached",
        ),
        "device_memory_used",
    )
    resets = (
        *(
            "empty_cache",
            "reset_peak_memory_stats",
            "reset_accumulated_memory_stats",
            "reset_max_memory_allocated",
        ),
        *("reset_max_memory_cached", "set_per_process_memory_fraction"),
    )
    capacity = device.capacity_bytes
    return {
        **dict.fromkeys(reads, lambda *args, **kwargs: 0),
        **dict.fromkeys(resets, _nothing),
        "memory_stats": lambda *args: defaultdict(int),
        "memory_summary": lambda *args, **kwargs: "",
        "mem_get_info": lambda *args: (capacity, capacity),
        "get_memory_info": lambda *args: (capacity, capacity),
    }


def _about_random_numbers() -> dict[str, Callable[..., Any]]:
    return {
        **dict.fromkeys(
            (
                "manual_seed",
                "manual_seed_all",
                "seed",
                "seed_all",
                "set_rng_state",
                "set_rng_state_all",
            ),
            _nothing,
        ),
        "initial_seed": lambda: 0,
        "get_rng_state": lambda device="cuda": torch.empty(16, dtype=torch.uint8),
        "get_rng_state_all": lambda: [torch.empty(16, dtype=torch.uint8)],
    }


_OWN_GENERATOR = torch.Generator


def _generators(make: Callable[..., Any]) -> type:
    """`torch.Generator`, whose generators are the CPU's in this thread; fakes draw no numbers from
    them.
    """

    class _Kind(type(_OWN_GENERATOR)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, _OWN_GENERATOR)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

    return _Kind("Generator", (_OWN_GENERATOR,), {})


def _device_of(mode: TraceMode) -> Callable[[FakeTensor], torch.device]:
    original: Callable[[FakeTensor], torch.device] = vars(FakeTensor)["device"].fget

    def device(tensor: FakeTensor) -> torch.device:
        if (
            mode.placement.reports_cuda_device
            and tensor.fake_mode is mode
            and mode.placement.is_on_device(tensor)
        ):
            return CUDA
        if (
            mode.placement.reports_cuda_device
            and tensor.fake_mode is mode
            and mode.placement.is_on_meta(tensor)
        ):
            return _META
        return original(tensor)

    return device


def _backward(mode: TraceMode, functions: CudaFunctions, streams: Streams) -> Callable[..., Any]:
    """User code runs inside a backward pass: hooks, backward passes of its own, forward passes
    again where they were checkpointed.
    """
    original = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    nodes = BackwardNodes()

    def run(*args: Any, **kwargs: Any) -> Any:
        with functions.user_code(), mode.in_backward(), streams.unchanged():
            return nodes.run(original, *args, **kwargs)

    return run


def _hooks_of_saved_tensors(functions: CudaFunctions) -> Callable[..., None]:
    """What saves a tensor is called from inside of torch functions."""

    def init(self: Any, pack_hook: Callable[[Any], Any], unpack_hook: Callable[[Any], Any]) -> None:
        def pack(tensor: torch.Tensor) -> Any:
            with functions.user_code():
                return pack_hook(tensor)

        self.pack_hook, self.unpack_hook = pack, unpack_hook

    return init


def _default_device(mode: TraceMode) -> Callable[..., Any]:
    """`with torch.device("cuda")` and `torch.set_default_device`, whose mode is called after that
    for torch functions.
    """

    def function(
        self: Any,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if (
            func not in torch.utils._device._device_constructors()
            or kwargs.get("device") is not None
        ):
            return func(*args, **kwargs)
        before, mode.placement.target = (
            mode.placement.target,
            "device" if self.device.type == "cuda" else "host",
        )
        try:
            return func(*args, **{**kwargs, "device": _CPU})
        finally:
            mode.placement.target = before

    return function


@contextmanager
def cuda_semantics(mode: TraceMode, device: DeviceSpec) -> Iterator[None]:
    """Let fake tensors of a mode behave as CUDA tensors, until the end of the context.

    Only one such context may be open in a process.
    """
    cache = cuda_autocast.AutocastCache()
    functions = CudaFunctions(mode)
    with ExitStack() as stack:
        stack.enter_context(cuda_autocast.registered(cache))
        stack.enter_context(registered(device))
        for target, name, value in answers(mode, device, cache, functions):
            if hasattr(target, name):
                stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(mode)
        stack.enter_context(functions)
        try:
            mode.placement.reports_cuda_device = True
            yield
        finally:
            mode.placement.reports_cuda_device = False
            cache.clear()
