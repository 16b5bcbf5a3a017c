"""Makes fake tensors on the CPU behave as CUDA tensors, for the Python code of a step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nested._internal.sdpa
import torch.nn.utils.clip_grad
import torch.utils._device
import torch.utils._foreach_utils
import torch.utils.checkpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from memcallback.cuda.decompositions.attention_backend import jagged_choices
from memcallback.cuda.decompositions.registry import is_compiling, registered
from memcallback.devices.catalogue import DeviceSpec
from memcallback.trace.dispatch.mode import CUDA, TraceMode
from memcallback.trace.patches import autocast
from memcallback.trace.patches.backward_order import BackwardNodes, backward_has_own_thread
from memcallback.trace.patches.cuda_api import Streams, cuda_api_patches
from memcallback.trace.patches.deterministic import deterministic_functions
from memcallback.trace.patches.flex_attention import flex_attention_patches
from memcallback.trace.patches.libraries import with_numbers_read
from memcallback.trace.patches.patching import Patch, in_this_thread, patched

_CPU, _META = torch.device("cpu"), torch.device("meta")
_GENERATOR = torch.Generator
#: The modules that choose between loops over tensors and foreach operators, CUDA's default.
_FOREACH_MODULES = (
    "torch.utils._foreach_utils",
    "torch.optim.optimizer",
    "torch.nn.utils.clip_grad",
)


@contextmanager
def cuda_semantics(mode: TraceMode, device: DeviceSpec) -> Iterator[None]:
    """Let a mode's fake tensors behave as CUDA tensors; one such context at a time in a process."""
    cache, functions = autocast.AutocastCache(), CudaFunctions(mode)
    with (
        autocast.registered(cache),
        registered(device),
        patched(_patches(mode, device, cache, functions)),
        mode,
        functions,
    ):
        try:
            mode.placement.reports_cuda_device = True
            yield
        finally:
            mode.placement.reports_cuda_device = False
            cache.clear()


class CudaFunctions(TorchFunctionMode):
    """Understands devices in calls of torch functions: `device="cuda"`, `.cuda()`, `.to(...)`.

    It sees the calls that Python makes, not those inside C++ or inside another torch function.
    """

    def __init__(self, mode: TraceMode) -> None:
        super().__init__()
        self._placement = placement = mode.placement
        is_on_device = placement.is_on_device
        tensor: Any = torch.Tensor
        self._special: dict[Any, Callable[..., Any]] = {
            tensor.to: self._to,
            tensor.cuda: lambda tensor, *args, **kwargs: self._moved(tensor, "device"),
            tensor.cpu: lambda tensor, *args, **kwargs: self._moved(tensor, "host"),
            tensor.__setitem__: self._set_item,
            tensor.pin_memory: lambda tensor, *args, **kwargs: tensor,
            tensor.is_pinned: lambda tensor, *args, **kwargs: False,
            tensor.get_device: lambda tensor: 0 if is_on_device(tensor) else -1,
            tensor.is_meta.__get__: placement.is_on_meta,
            tensor.is_cuda.__get__: is_on_device,
            tensor.is_cpu.__get__: lambda tensor: not is_on_device(tensor),
            **deterministic_functions(placement, self.user_code),
        }

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function with CUDA devices replaced by the CPU, on which the fakes are."""
        kwargs = kwargs or {}
        placement = self._placement
        before = placement.arguments, placement.target, placement.reports_cuda_device
        if func is torch.tensor:
            args, kwargs = with_numbers_read(args, kwargs)
        placement.arguments = (*args, *kwargs.values())
        placement.reports_cuda_device = False
        try:
            special = self._special.get(func)
            if special is not None:
                return special(*args, **kwargs)
            if kwargs.get("device") is not None:
                placement.target = _target_of(kwargs["device"])
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
            if placement.target == "device" and _takes_array(func, args, kwargs):
                return self._of_array(func, args, kwargs)
            return func(*args, **kwargs)
        finally:
            placement.arguments, placement.target, placement.reports_cuda_device = before

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """Understand devices also in user code that is called from inside a torch function."""
        placement = self._placement
        before = placement.arguments, placement.target, placement.reports_cuda_device
        placement.arguments = placement.target = None
        placement.reports_cuda_device = True
        is_on = any(other is self for other in _get_current_function_mode_stack())
        try:
            with nullcontext() if is_on else self:
                yield
        finally:
            placement.arguments, placement.target, placement.reports_cuda_device = before

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`Tensor.to`: a dtype, a device, both, or another tensor to be like."""
        target, dtype = None, kwargs.get("dtype")
        for value in (*args, kwargs.get("device"), kwargs.get("other")):
            if isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, torch.Tensor):
                dtype, target = value.dtype, self._target_of_tensor(value)
            elif isinstance(value, (str, torch.device)) or (
                isinstance(value, int) and not isinstance(value, bool)
            ):
                target = _target_of(value)
        rest = {name: kwargs[name] for name in ("copy", "memory_format") if name in kwargs}
        now = self._target_of_tensor(tensor)
        self._placement.target = target = target or now
        if dtype is not None and dtype != tensor.dtype:
            # CUDA copies to the device first and converts there; the host converts first
            # (Tensor.to, aten/native/TensorConversions.cpp).
            return tensor.to(dtype, **rest)
        return tensor.to(tensor.dtype, **rest) if target == now else tensor.clone()

    def _set_item(self, tensor: torch.Tensor, index: Any, value: Any) -> None:
        """A number stays on the host, unless a kernel puts it where an index says.

        `THPVariable_setitem` (torch/csrc/autograd/python_variable_indexing.cpp).
        """
        is_number = not isinstance(value, torch.Tensor)
        if is_number and self._placement.is_on_device(tensor) and not _gathers(index):
            self._placement.target = "host"
        tensor[index] = value

    def _of_array(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """A tensor of an array: on the host first, where it gets its dtype."""
        self._placement.target = "host"
        requires_grad = kwargs.get("requires_grad", False)
        with torch.no_grad():
            rest = {name: value for name, value in kwargs.items() if name != "requires_grad"}
            made = self._moved(func(*args, **rest), "device")
        return made.requires_grad_(requires_grad)

    def _moved(self, tensor: torch.Tensor, target: str) -> torch.Tensor:
        self._placement.target = target
        return tensor if self._target_of_tensor(tensor) == target else tensor.clone()

    def _target_of_tensor(self, tensor: torch.Tensor) -> str:
        return "device" if self._placement.is_on_device(tensor) else "host"


def _takes_array(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function makes a tensor of an array of NumPy."""
    numpy = sys.modules.get("numpy")
    if func not in (torch.tensor, torch.as_tensor) or numpy is None:
        return False
    return isinstance(args[0] if args else kwargs.get("data"), numpy.ndarray)


def _gathers(index: Any) -> bool:
    """Whether an index has whole numbers in a tensor or a list, and not only slices and masks."""
    return any(
        part.dtype not in (torch.bool, torch.uint8)
        if isinstance(part, torch.Tensor)
        else not isinstance(part, (int, slice, type(None), type(...)))
        for part in (index if isinstance(index, tuple) else (index,))
    )


def _target_of(device: Any) -> str:
    is_cuda = isinstance(device, int) or torch.device(device).type == "cuda"
    return "device" if is_cuda else "host"


def _patches(
    mode: TraceMode, device: DeviceSpec, cache: autocast.AutocastCache, functions: CudaFunctions
) -> Iterator[Patch]:
    for module in map(sys.modules.get, _FOREACH_MODULES):
        replacements = {
            "_get_foreach_kernels_supported_devices": lambda: ["cuda", "cpu"],
            "_get_fused_kernels_supported_devices": lambda: ["cuda", "cpu"],
            "_has_foreach_support": lambda tensors, device: True,
            "_device_has_foreach_support": lambda device: True,
            # A fake parameter has another class than a real one.
            "_foreach_supported_types": _foreach_types(module),
        }
        for name, replacement in replacements.items():
            if hasattr(module, name):
                yield module, name, replacement
    streams = Streams(mode)
    yield torch, "clear_autocast_cache", cache.clear
    yield torch, "Generator", _generator_class()
    yield torch.autograd, "_engine_run_backward", _backward(mode, functions, streams)
    yield torch.autograd.graph.saved_tensors_hooks, "__init__", _saved_tensors_hooks(functions)
    yield torch.utils._device.DeviceContext, "__torch_function__", _default_device(mode)
    yield FakeTensor, "device", property(_device_of(mode))
    # Checkpointing keeps the states of random number generators, which fakes do not have.
    yield torch.utils.checkpoint, "get_device_states", lambda *args: ([], [])
    yield torch.utils.checkpoint, "set_device_states", lambda *args, **kwargs: None
    for name, replacement in jagged_choices(device).items():
        yield torch.nested._internal.sdpa, name, replacement
    yield from cuda_api_patches(device, streams)
    yield from flex_attention_patches(mode)


def _foreach_types(module: Any) -> list[type]:
    known = getattr(module, "_foreach_supported_types", [])
    return [*dict.fromkeys((torch.Tensor, nn.Parameter, FakeTensor, *known))]


def _generator_class() -> type:
    """`torch.Generator` that makes CPU generators in this thread; fakes draw no numbers."""
    make = in_this_thread(lambda device=None: _GENERATOR(), torch.Generator)

    class _Meta(type(_GENERATOR)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, _GENERATOR)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

    return _Meta("Generator", (_GENERATOR,), {})


def _device_of(mode: TraceMode) -> Callable[[FakeTensor], torch.device]:
    original: Callable[[FakeTensor], torch.device] = vars(FakeTensor)["device"].fget
    placement = mode.placement

    def device(tensor: FakeTensor) -> torch.device:
        if placement.reports_cuda_device and tensor.fake_mode is mode:
            if placement.is_on_device(tensor):
                return CUDA
            if placement.is_on_meta(tensor):
                return _META
        return original(tensor)

    return device


def _backward(mode: TraceMode, functions: CudaFunctions, streams: Streams) -> Callable[..., Any]:
    """Understand devices in user code inside a backward pass: hooks, recomputed forward passes."""
    original = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    nodes = BackwardNodes()

    def run(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # which runs no code of the user's
            return original(*args, **kwargs)
        with functions.user_code(), streams.kept():
            if not backward_has_own_thread():
                return original(*args, **kwargs)
            with mode.kernels.in_backward():
                return nodes.run(original, *args, **kwargs)

    return run


def _saved_tensors_hooks(functions: CudaFunctions) -> Callable[..., None]:
    """Understand devices in pack hooks, which are called from inside torch functions."""

    def init(self: Any, pack_hook: Callable[[Any], Any], unpack_hook: Callable[[Any], Any]) -> None:
        def pack(tensor: torch.Tensor) -> Any:
            if is_compiling():
                return pack_hook(tensor)
            with functions.user_code():
                return pack_hook(tensor)

        self.pack_hook, self.unpack_hook = pack, unpack_hook

    return init


def _default_device(mode: TraceMode) -> Callable[..., Any]:
    """Understand `with torch.device("cuda")` and `torch.set_default_device`.

    Their mode is called after `CudaFunctions`.
    """
    placement = mode.placement

    def function(
        self: Any,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        makes_tensor = func in torch.utils._device._device_constructors()
        if not makes_tensor or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        before, placement.target = placement.target, _target_of(self.device)
        try:
            return func(*args, **{**kwargs, "device": _CPU})
        finally:
            placement.target = before

    return function
