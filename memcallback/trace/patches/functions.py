"""Understand `.cuda()`, `.to("cuda")`, `.is_cuda` on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from memcallback.trace.dispatch.mode import TraceMode

_CPU = torch.device("cpu")


class CudaFunctions(TorchFunctionMode):
    """Understands devices in the calls of torch functions: `device="cuda"`, `.cuda()`, `.to(...)`,
    `.is_cuda`.

    It sees the calls that Python makes; what is called inside of C++ or of another torch function
    belongs to the call outside.
    """

    def __init__(self, mode: TraceMode) -> None:
        super().__init__()
        self._placement = placement = mode.placement
        is_on_device = placement.is_on_device
        self._special: dict[Any, Callable[..., Any]] = {
            torch.Tensor.to: self._to,
            torch.Tensor.cuda: lambda tensor, *args, **kwargs: self._moved(tensor, "device"),
            torch.Tensor.cpu: lambda tensor, *args, **kwargs: self._moved(tensor, "host"),
            torch.Tensor.pin_memory: lambda tensor, *args, **kwargs: tensor,
            torch.Tensor.is_pinned: lambda tensor, *args, **kwargs: False,
            torch.Tensor.get_device: lambda tensor: 0 if is_on_device(tensor) else -1,
            torch.Tensor.is_meta.__get__: placement.is_on_meta,  # type: ignore[attr-defined]
            torch.Tensor.is_cuda.__get__: is_on_device,  # type: ignore[attr-defined]
            torch.Tensor.is_cpu.__get__: lambda tensor: not is_on_device(tensor),  # type: ignore[attr-defined]
        }

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function, with its device understood."""
        kwargs = kwargs or {}
        placement = self._placement
        before = placement.arguments, placement.target, placement.reports_cuda_device
        placement.arguments = (*args, *kwargs.values())
        placement.reports_cuda_device = False
        try:
            special = self._special.get(func)
            if special is not None:
                return special(*args, **kwargs)
            if kwargs.get("device") is not None:
                placement.target = _place(kwargs["device"])
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
            return func(*args, **kwargs)
        finally:
            placement.arguments, placement.target, placement.reports_cuda_device = before

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """User code runs inside, though called from inside of a torch function, where this mode is
        off.
        """
        placement = self._placement
        before = placement.arguments, placement.target, placement.reports_cuda_device
        placement.arguments, placement.target, placement.reports_cuda_device = (
            None,
            None,
            True,
        )
        is_on = any(other is self for other in _get_current_function_mode_stack())
        try:
            with nullcontext() if is_on else self:
                yield
        finally:
            placement.arguments, placement.target, placement.reports_cuda_device = before

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`Tensor.to`: a type, a device, both, or another tensor to be like."""
        place, dtype = None, kwargs.get("dtype")
        for value in (*args, kwargs.get("device"), kwargs.get("other")):
            if isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, torch.Tensor):
                dtype, place = (
                    value.dtype,
                    "device" if self._placement.is_on_device(value) else "host",
                )
            elif isinstance(value, (str, torch.device)) or (
                isinstance(value, int) and not isinstance(value, bool)
            ):
                place = _place(value)
        rest = {name: kwargs[name] for name in ("copy", "memory_format") if name in kwargs}
        place = place or ("device" if self._placement.is_on_device(tensor) else "host")
        self._placement.target = place
        is_there = self._placement.is_on_device(tensor) is (place == "device")
        if dtype is not None and dtype != tensor.dtype:
            # CUDA copies to the device first and converts there; the host converts first
            # (Tensor.to, aten/native/TensorConversions.cpp).
            return tensor.to(dtype, **rest)
        return tensor.to(tensor.dtype, **rest) if is_there else tensor.clone()

    def _moved(self, tensor: torch.Tensor, place: str) -> torch.Tensor:
        self._placement.target = place
        return (
            tensor
            if self._placement.is_on_device(tensor) is (place == "device")
            else tensor.clone()
        )


def _place(device: Any) -> str:
    """Where a device is: "device" or "host"."""
    if isinstance(device, int):
        return "device"
    return "device" if torch.device(device).type == "cuda" else "host"
