"""CUDA autocast on fake CPU tensors.

The state of autocast is CUDA's own (`torch.autocast("cuda")`, `torch.is_autocast_enabled("cuda")`),
which every build of PyTorch has for each thread. The thread that traces includes CUDA's dispatch
key in all of its calls, so tensors that lie on the CPU get there. Other threads with tensors of a
CPU never do; those with tensors of a real CUDA device meet the same lists here, without the cache.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_KEY = torch._C.DispatchKey.AutocastCUDA
_OFF = torch._C.DispatchKeySet(_KEY)
#: The lists in ATen/autocast_mode.h by what is done to the arguments of their operators.
_LISTS = {
    "lower": "AT_FORALL_LOWER_PRECISION_FP",
    "fp32": "AT_FORALL_FP32",
    "fp32_dtype": "AT_FORALL_FP32_SET_OPT_DTYPE",
    "append_dtype": "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE",
    "promote": "AT_FORALL_PROMOTE",
}


class AutocastCache:
    """The copies of weights in half precision that live until autocast is left (`cached_casts` in
    ATen/autocast_mode.cpp).
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def clear(self) -> None:
        """Let go of all of them."""
        self._copies.clear()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """A tensor, or the tensors in a sequence, in a type: `cached_cast`."""
        if isinstance(value, (list, tuple)):
            return type(value)([self.cast(item, dtype) for item in value])
        if not is_eligible(value) or value.dtype == dtype:
            return value
        keeps = (
            isinstance(value, FakeTensor)
            and dtype == torch.get_autocast_dtype("cuda")
            and value.dtype == torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not keeps:
            return value.to(dtype)
        if id(value) not in self._copies:
            self._copies[id(value)] = (value, value.to(dtype))
        return self._copies[id(value)][1]


def is_eligible(value: object) -> bool:
    """Whether autocast would touch it: a floating-point tensor of at most single precision."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


@contextmanager
def registered(cast: AutocastCache) -> Iterator[None]:
    """Let the dispatcher call CUDA's kernels for autocast for this thread's tensors of the CPU,
    until the end of the context.
    """
    library = torch.library.Library("aten", "IMPL")
    was_included = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
    try:
        with warnings.catch_warnings():
            # PyTorch says once that a kernel is overridden.
            warnings.simplefilter("ignore")
            for name, function in _kernels(cast):
                library.impl(name, function, "AutocastCUDA")
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, was_included)
        library._destroy()


def _kernels(cast: AutocastCache) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The operators on CUDA's lists with what is done to their arguments."""
    policies = {
        "lower": _lower,
        "fp32": _fp32,
        "fp32_dtype": _fp32_dtype,
        "append_dtype": _append_dtype,
        "promote": _promote,
    }
    for policy, names in operator_lists().items():
        for name in names:
            op = _operator(name)
            if op is not None:
                yield name, policies[policy](op, cast)


@cache
def operator_lists() -> dict[str, tuple[str, ...]]:
    """CUDA's lists, from the header of the installed PyTorch: policy to names such as
    `pow.Tensor_Scalar`.
    """
    text = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text(
        encoding="utf-8"
    )
    found = {}
    for policy, macro in _LISTS.items():
        block = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", text)
        assert block is not None, macro
        if policy == "append_dtype":
            found[policy] = tuple(re.findall(r'"(\w+\.\w+)"', block[1]))
        else:
            found[policy] = tuple(
                name + (f".{overload}" if overload else "")
                for name, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", block[1])
            )
    return found


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _call(
    op: Any, cast: AutocastCache, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call an operator with its arguments in a type. The last is cast first: so the compiler orders
    a call's arguments on x86.
    """
    named = {name: cast.cast(value, dtype) for name, value in reversed(kwargs.items())}
    placed = [cast.cast(arg, dtype) for arg in reversed(args)]
    return op(*reversed(placed), **named)


def _lower(op: Any, cast: AutocastCache) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cuda")
        with torch._C._ExcludeDispatchKeyGuard(_OFF):
            return _call(op, cast, dtype, args, kwargs)

    return run


def _fp32(op: Any, cast: AutocastCache) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_OFF):
            return _call(op, cast, torch.float32, args, kwargs)

    return run


def _fp32_dtype(op: Any, cast: AutocastCache) -> Callable[..., Any]:
    position = [argument.name for argument in op._schema.arguments].index("dtype")

    def run(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if len(args) > position else kwargs.get("dtype")
        if is_eligible(args[0]) and given is None:
            args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
        with torch._C._ExcludeDispatchKeyGuard(_OFF):
            return op(*args, **kwargs)

    return run


def _append_dtype(op: Any, cast: AutocastCache) -> Callable[..., Any]:
    packet = op.overloadpacket

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.float32 if is_eligible(args[0]) else args[0].dtype
        with torch._C._ExcludeDispatchKeyGuard(_OFF):
            return packet(*args, **kwargs, dtype=dtype)

    return run


def _promote(op: Any, cast: AutocastCache) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [
            item
            for arg in (*args, *kwargs.values())
            for item in (arg if isinstance(arg, (list, tuple)) else (arg,))
        ]
        dtype = torch.get_autocast_dtype("cuda")
        for tensor in tensors:
            if is_eligible(tensor) and tensor.dtype == torch.float32:
                dtype = torch.float32
        with torch._C._ExcludeDispatchKeyGuard(_OFF):
            return _call(op, cast, dtype, args, kwargs)

    return run
