"""CUDA autocast for fake tensors on the CPU.

The thread that traces includes CUDA's autocast dispatch key in all of its calls, so its CPU tensors
get there too; the state of autocast is CUDA's (`torch.autocast("cuda")`), which every build of
PyTorch has for each thread. CPU tensors of other threads never get there; CUDA tensors of other
threads meet the same operator lists, without the cache.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memcallback.cuda.aten_kernels import aten_kernels

_KEY = torch._C.DispatchKey.AutocastCUDA
_OFF = torch._C.DispatchKeySet(_KEY)
#: Policy for the arguments of operators -> the macro that lists them in ATen/autocast_mode.h.
_LISTS = {
    "lower": "AT_FORALL_LOWER_PRECISION_FP",
    "fp32": "AT_FORALL_FP32",
    "fp32_dtype": "AT_FORALL_FP32_SET_OPT_DTYPE",
    "append_dtype": "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE",
    "promote": "AT_FORALL_PROMOTE",
}


class AutocastCache:
    """Half-precision copies of weights, which live until autocast ends.

    As `cached_casts` in ATen/autocast_mode.cpp.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def clear(self) -> None:
        """Free all copies."""
        self._copies.clear()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Cast a tensor or a sequence of tensors, as `cached_cast`."""
        if isinstance(value, (list, tuple)):
            return type(value)([self.cast(item, dtype) for item in value])
        if not is_eligible(value) or value.dtype == dtype:
            return value
        is_cached = (
            isinstance(value, FakeTensor)
            and dtype == torch.get_autocast_dtype("cuda")
            and value.dtype == torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
            and torch.is_autocast_cache_enabled()
            and not torch.is_inference_mode_enabled()
        )
        if not is_cached:
            return value.to(dtype)
        if id(value) not in self._copies:
            self._copies[id(value)] = (value, value.to(dtype))
        return self._copies[id(value)][1]


@contextmanager
def outside_of_autocast() -> Iterator[None]:
    """Leave the regions of `torch.autocast` that the caller is in: a step enters its own.

    The outermost region frees the copies of weights as it ends, so their depth is put to 0.
    """
    was_enabled = {kind: torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu")}
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    for kind in was_enabled:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind, is_enabled in was_enabled.items():
            torch.set_autocast_enabled(kind, is_enabled)
        for _ in range(depth):
            torch.autocast_increment_nesting()


def is_eligible(value: object) -> bool:
    """Whether autocast casts it: a floating-point tensor of at most single precision."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


@contextmanager
def registered(cache: AutocastCache) -> Iterator[None]:
    """Let the dispatcher call CUDA's autocast kernels for this thread's CPU tensors."""
    was_included = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
    with ExitStack() as stack:
        with warnings.catch_warnings():
            # PyTorch warns once that a kernel is overridden.
            warnings.simplefilter("ignore")
            stack.enter_context(
                aten_kernels((name, "AutocastCUDA", kernel) for name, kernel in _kernels(cache))
            )
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)
        stack.callback(torch._C._dispatch_tls_set_dispatch_key_included, _KEY, was_included)
        yield


def _kernels(cache: AutocastCache) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Kernels for the operators on CUDA's lists."""
    policies = {
        "lower": _lower,
        "fp32": _fp32,
        "fp32_dtype": _fp32_dtype,
        "append_dtype": _append_dtype,
        "promote": _promote,
    }
    for policy, names in operator_lists().items():
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if op is not None:
                yield name, policies[policy](op, cache)


@cache
def operator_lists() -> dict[str, tuple[str, ...]]:
    """Policy -> operators such as `pow.Tensor_Scalar`, from the header of the installed PyTorch."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text(encoding="utf-8")
    lists = {}
    for policy, macro in _LISTS.items():
        block = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", text)
        assert block is not None, macro
        if policy == "append_dtype":
            lists[policy] = tuple(re.findall(r'"(\w+\.\w+)"', block[1]))
        else:
            names = re.findall(r"_\((\w+)(?:, (\w+))?\)", block[1])
            lists[policy] = tuple(f"{name}.{overload}".rstrip(".") for name, overload in names)
    return lists


def _call(
    op: Any, cache: AutocastCache, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call an operator with cast arguments, the last cast first, as compilers on x86 order them."""
    with torch._C._ExcludeDispatchKeyGuard(_OFF):
        named = {name: cache.cast(value, dtype) for name, value in reversed(kwargs.items())}
        positional = [cache.cast(arg, dtype) for arg in reversed(args)]
        return op(*reversed(positional), **named)


def _lower(op: Any, cache: AutocastCache) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return _call(op, cache, torch.get_autocast_dtype("cuda"), args, kwargs)

    return run


def _fp32(op: Any, cache: AutocastCache) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return _call(op, cache, torch.float32, args, kwargs)

    return run


def _fp32_dtype(op: Any, cache: AutocastCache) -> Callable[..., Any]:
    """Set the argument `dtype` unless it is given."""
    position = [argument.name for argument in op._schema.arguments].index("dtype")

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = args[position] if len(args) > position else kwargs.get("dtype")
        if is_eligible(args[0]) and dtype is None:
            args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
        with torch._C._ExcludeDispatchKeyGuard(_OFF):
            return op(*args, **kwargs)

    return run


def _append_dtype(op: Any, cache: AutocastCache) -> Callable[..., Any]:
    """Call the overload that takes a dtype."""
    packet = op.overloadpacket

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.float32 if is_eligible(args[0]) else args[0].dtype
        with torch._C._ExcludeDispatchKeyGuard(_OFF):
            return packet(*args, **kwargs, dtype=dtype)

    return run


def _promote(op: Any, cache: AutocastCache) -> Callable[..., Any]:
    """Cast to single precision if an argument has it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [
            item
            for arg in (*args, *kwargs.values())
            for item in (arg if isinstance(arg, (list, tuple)) else (arg,))
        ]
        dtype = torch.get_autocast_dtype("cuda")
        if any(is_eligible(tensor) and tensor.dtype == torch.float32 for tensor in tensors):
            dtype = torch.float32
        return _call(op, cache, dtype, args, kwargs)

    return run
