"""Runs the code that Inductor generates as a part of a trace.

The code allocates buffers, calls kernels, and lets go of buffers in the order that Inductor's
scheduler chose. Here its allocations are those of the trace, its calls of library kernels (cuBLAS,
cuDNN, attention) are the operators that the trace knows, and its Triton kernels do nothing.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from memcallback.trace.dispatch.mode import TraceMode

_CPU = torch.device("cpu")


def module_of(source: str, mode: TraceMode) -> SimpleNamespace:
    """The module that a generated source is."""
    names: dict[str, Any] = {
        "__name__": "generated_by_inductor",
        "__builtins__": {**vars(builtins), "__import__": _import},
    }
    exec(compile(source, "<inductor>", "exec"), names)
    # The code asserts sizes, strides and alignments of real tensors; a trace has fake ones.
    names.update((name, _nothing) for name in list(names) if name.startswith("assert_"))
    names.update(
        empty_strided_cuda=empty_strided(mode, "device"),
        empty_strided_cpu=empty_strided(mode, "host"),
        empty_strided_cpu_pinned=empty_strided(mode, "host"),
        reinterpret_tensor=_reinterpreted,
        copy_if_misaligned=lambda tensor: tensor,
    )
    return SimpleNamespace(call=names["call"], runner=names.get("runner"), __file__="")


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def empty_strided(mode: TraceMode, target: str) -> Callable[..., torch.Tensor]:
    """A function that allocates a buffer, on the "device" or on the "host"."""
    placement = mode.placement

    def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        before, placement.target = placement.target, target
        try:
            with torch._C.DisableTorchFunction():
                return torch.empty_strided(size, stride, dtype=dtype, device=_CPU)
        finally:
            placement.target = before

    return empty


def _reinterpreted(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0
) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _import(
    name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
) -> Any:
    """Import a module; what launches kernels is replaced."""
    if name.split(".")[0] == "triton" or name == "torch._inductor.runtime.triton_heuristics":
        return _Anything()
    if name == "torch._inductor.async_compile":
        return SimpleNamespace(AsyncCompile=_Kernels)
    if name == "torch._C":
        return SimpleNamespace(**dict.fromkeys(fromlist, lambda *args: 0))
    return builtins.__import__(name, globals, locals, fromlist, level)


class _Anything:
    """Stands for a module that only kernels need."""

    def __getattr__(self, name: str) -> _Anything:
        return _Anything()


class _Kernels:
    """Replaces the compiler of kernels."""

    def triton(self, *args: Any, **kwargs: Any) -> Any:
        """A kernel that does nothing."""
        return SimpleNamespace(run=_nothing)

    def cpp_pybinding(self, *args: Any, **kwargs: Any) -> Any:
        """A kernel of the host that does nothing."""
        return _nothing

    def wait(self, scope: Any) -> None:
        """All kernels are there."""
