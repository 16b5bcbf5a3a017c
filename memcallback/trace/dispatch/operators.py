"""Helpers for an operator's call: name, tensors, FLOPs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import flop_registry

from memcallback.core.tensors import dense_parts

_aten = torch.ops.aten
#: Attention -> which of its arguments is the query; key and value follow it.
_QUERY_AT = {
    _aten._scaled_dot_product_flash_attention: 0,
    _aten._scaled_dot_product_efficient_attention: 0,
    _aten._scaled_dot_product_cudnn_attention: 0,
    _aten._scaled_dot_product_flash_attention_backward: 1,
    _aten._scaled_dot_product_efficient_attention_backward: 1,
    _aten._scaled_dot_product_cudnn_attention_backward: 1,
}


def num_flops(
    func: Any, args: Sequence[object], kwargs: Mapping[str, object], outputs: object
) -> int:
    """The floating-point operations of a call, by PyTorch's formulas; 0 where there is none, or
    none for such a call.
    """
    packet = func._overloadpacket
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    try:
        if packet in _QUERY_AT:
            args = _with_all_heads(args, _QUERY_AT[packet])
        return int(formula(*args, **kwargs, out_val=outputs))
    except Exception:  # lengths that nobody knows, or a formula that takes the call for a mistake: memory is known all the same
        return 0


def _with_all_heads(args: Sequence[Any], at: int) -> Sequence[Any]:
    """Shapes of key and value with as many heads as the query has, which formulas before PyTorch
    2.13 ask for.
    """
    heads = args[at].shape[1]
    return (
        *args[: at + 1],
        *((t.shape[0], heads, *t.shape[2:]) for t in args[at + 1 : at + 3]),
        *args[at + 3 :],
    )


def laid_out(
    outputs: Any, layouts: Sequence[tuple[Sequence[int], Sequence[int], torch.dtype] | None] | None
) -> Any:
    """What an operator returns, with the layouts that it has on CUDA."""
    if layouts is None:
        return outputs
    if isinstance(outputs, torch.Tensor):
        return _with_layout(outputs, layouts[0])
    return tuple(
        _with_layout(output, layout) for output, layout in zip(outputs, layouts, strict=True)
    )


def _with_layout(
    output: torch.Tensor | None, layout: tuple[Sequence[int], Sequence[int], torch.dtype] | None
) -> torch.Tensor | None:
    if (
        output is None
        or layout is None
        or (output.stride() == tuple(layout[1]) and output.dtype == layout[2])
    ):
        return output
    return output.new_empty_strided(layout[0], layout[1], dtype=layout[2])


def tensors_of(values: object) -> list[torch.Tensor]:
    """The tensors with a storage in what an operator takes or returns: themselves, in sequences of
    them, and the parts of sparse and nested ones.
    """
    if isinstance(values, torch.Tensor):
        return [*dense_parts(values)]
    found: list[torch.Tensor] = []
    if isinstance(values, (tuple, list)):
        for value in values:
            if isinstance(value, torch.Tensor):
                found.extend(dense_parts(value))
            elif isinstance(value, (tuple, list)):
                found.extend(tensors_of(value))
    return found


def is_of_numbers(func: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether an operator makes an empty tensor of 32-bit whole numbers, or works on real ones
    alone.
    """
    tensors = tensors_of((*args, *kwargs.values()))
    return not any(isinstance(tensor, FakeTensor) for tensor in tensors) and (
        bool(tensors) or kwargs.get("dtype") is torch.int32
    )


def name_of(func: Any) -> str:
    """The name of an operator, with its namespace."""
    return str(func._schema.name)
