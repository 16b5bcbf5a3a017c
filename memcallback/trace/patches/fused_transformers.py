"""Lets `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` call their fused operators.

They ask `torch.overrides.has_torch_function`, which is true for all tensors while a function mode
is active, as ours are in a trace. The layer also asks for hooks, and ours follow its modules.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from memcallback.step.hooks import Hook
from memcallback.trace.dispatch.mode import TraceMode
from memcallback.trace.patches.patching import Patch, original_if_compiled

_NESTED = (
    "nn.TransformerEncoder is predicted with the padding of its batch. In evaluation mode a device "
    "may leave the padding out, which needs less."
)
_OURS = "memcallback."


def fused_transformer_patches(mode: TraceMode) -> Iterator[Patch]:
    """Let functions that ask for overrides see those of the user alone."""

    @original_if_compiled
    def has_torch_function(relevant_args: Iterable[Any]) -> bool:
        if _calls(nn.TransformerEncoder.forward):
            mode.assumed[_NESTED] = None
            return True
        modes: list[TorchFunctionMode] = _get_current_function_mode_stack()
        return any(not type(each).__module__.startswith(_OURS) for each in modes) or any(
            _overrides(type(each)) for each in relevant_args
        )

    def modules(layer: nn.Module, *args: Any, **options: Any) -> Iterator[nn.Module]:
        every = nn.Module.modules(layer, *args, **options)
        return filter(_has_hooks, every) if _calls(nn.TransformerEncoderLayer.forward) else every

    yield torch.overrides, "has_torch_function", has_torch_function
    yield nn.TransformerEncoderLayer, "modules", modules


def _has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks for its forward pass that are not ours."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return not all(isinstance(hook, Hook) for hook in hooks)


def _overrides(kind: type) -> bool:
    own = getattr(kind, "__torch_function__", None)
    plain = (torch.Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
    return own is not None and own not in plain


def _calls(function: Any) -> bool:
    """Whether a function called ours, with a wrapper or two in between."""
    frame = sys._getframe(1)
    for _ in range(4):
        if frame is None or frame.f_code is function.__code__:
            return frame is not None
        frame = frame.f_back  # type: ignore[assignment]
    return False
