"""check_operands(): refuses operands of different dtypes, as PyTorch does and its fakes do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memcallback.cuda.op_call import OpCall

_aten = torch.ops.aten
#: The numbers of the arguments that must have the same dtype. PyTorch's own kernels check this, on
#: a CPU and on CUDA alike (`tests/trace/test_operand_types.py`).
_SAME: Mapping[Any, Sequence[int]] = {
    _aten.mm.default: (0, 1),
    _aten.addmm.default: (0, 1, 2),
    _aten.bmm.default: (0, 1),
    _aten.baddbmm.default: (0, 1, 2),
    _aten.addbmm.default: (0, 1, 2),
    _aten.mv.default: (0, 1),
    _aten.addmv.default: (0, 1, 2),
    _aten.dot.default: (0, 1),
    _aten.convolution.default: (0, 1, 2),
    _aten.index_add.default: (0, 3),
    _aten.index_add_.default: (0, 3),
}
#: Those whose second argument has the indices of classes, and the dtypes that these may have.
_OF_CLASSES = (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default)
_CLASSES = (torch.int64, torch.uint8)


def check_operands(call: OpCall) -> None:
    """Raise the RuntimeError that the training would end with, in words of our own."""
    if (numbers := _SAME.get(call.op)) is not None:
        arguments = call.arguments
        dtypes = [arguments[one].dtype for one in numbers if arguments[one] is not None]
        if any(dtype is not dtypes[0] for dtype in dtypes):
            raise RuntimeError(
                f"{call.operator} needs operands of the same dtype, got "
                f"{', '.join(map(str, dtypes))}"
            )
    elif call.op in _OF_CLASSES and (dtype := call.arguments[1].dtype) not in _CLASSES:
        raise RuntimeError(f"{call.operator} needs classes of torch.int64, got {dtype}")
