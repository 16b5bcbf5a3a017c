"""Count the FLOPs of an operator, and the bytes that a rank sends in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from memcallback.core.torch_private import c10d_bindings, resolve_process_group
from memcallback.cuda.op_call import OpCall, tensors_of

_aten = torch.ops.aten
#: Attention operator -> the position of the query; key and value follow it.
_QUERY_AT = {
    _aten._scaled_dot_product_flash_attention: 0,
    _aten._scaled_dot_product_efficient_attention: 0,
    _aten._scaled_dot_product_cudnn_attention: 0,
    _aten._scaled_dot_product_flash_attention_backward: 1,
    _aten._scaled_dot_product_efficient_attention_backward: 1,
    _aten._scaled_dot_product_cudnn_attention_backward: 1,
}


def num_flops(call: OpCall) -> int:
    """The floating-point operations of a call by PyTorch's formulas; 0 without a formula."""
    args, packet = call.args, call.op._overloadpacket
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    try:
        if packet in _QUERY_AT:
            args = _with_all_heads(args, _QUERY_AT[packet])
        return int(formula(*args, **call.kwargs, out_val=call.result))
    except Exception:  # unknown lengths, or a formula that refuses the call: memory is known anyway
        return 0


def _with_all_heads(args: Sequence[Any], at: int) -> Sequence[Any]:
    """Give key and value as many heads as the query, which formulas before PyTorch 2.13 need."""
    heads = args[at].shape[1]
    return (
        *args[: at + 1],
        *((t.shape[0], heads, *t.shape[2:]) for t in args[at + 1 : at + 3]),
        *args[at + 3 :],
    )


#: Collective -> bytes that a rank sends per byte of a tensor; whether that is multiplied by
#: (ranks - 1) / ranks; the position of the tensor that is reduced, scattered or gathered, -1 for
#: the result. From nccl-tests, doc/PERFORMANCE.md (bus bandwidth).
_SENT: dict[str, tuple[float, bool, int]] = {
    "allreduce_": (2.0, True, 0),
    "allgather_": (1.0, True, 0),
    "_allgather_base_": (1.0, True, 0),
    "reduce_scatter_": (1.0, True, 1),
    "_reduce_scatter_base_": (1.0, True, 1),
    "alltoall_": (1.0, True, 1),
    "alltoall_base_": (1.0, True, 1),
    "broadcast_": (1.0, False, 0),
    "send": (1.0, False, 0),
    "all_reduce": (2.0, True, 0),
    "all_reduce_": (2.0, True, 0),
    "all_gather_into_tensor": (1.0, True, -1),
    "reduce_scatter_tensor": (1.0, True, 0),
    "all_to_all_single": (1.0, True, 0),
}


def sent_bytes(call: OpCall) -> int:
    """The bytes that a rank sends in a collective, by ring formulas; 0 for other operators."""
    namespace, _, name = call.operator.partition("::")
    formula = _SENT.get(name) if namespace in ("c10d", "_c10d_functional") else None
    if formula is None:
        return 0
    factor, is_shared, position = formula
    num_bytes = sum(
        tensor.numel() * tensor.element_size()
        for tensor in tensors_of([call.result if position < 0 else call.args[position]])
    )
    num_ranks = _num_ranks(call.args)
    return int(factor * num_bytes * ((num_ranks - 1) / num_ranks if is_shared else 1))


def _num_ranks(args: Sequence[Any]) -> int:
    """The ranks of the process group among the arguments: an object, or a name that comes last."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return int(c10d_bindings.ProcessGroup.unbox(argument).size())
    return int(resolve_process_group(args[-1]).size())
