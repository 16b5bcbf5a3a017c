"""Operators whose fake kernels refuse arguments that the device takes: what they give then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_aten = torch.ops.aten
#: Rows of what grouped matrix products give begin at multiples of so many bytes.
_ROW_BYTES = 16


def given_instead(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_cuda: bool) -> torch.Tensor | None:
    """What an operator gives whose fake kernel cannot be asked; None for every operator that has one that can.

    Args:
        op: The operator below autograd.
        args: Its arguments, fakes among them.
        kwargs: Its keyword arguments.
        is_cuda: Whether the fakes stand for tensors of a CUDA device.
    """
    if op is _aten.histc.default and is_cuda:  # the fake kernel refuses whole numbers, as a CPU does
        return args[0].new_empty(args[1] if len(args) > 1 else kwargs.get("bins", 100))  # type: ignore[no-any-return]
    if op is _GROUPED_MM:
        return _grouped_mm(*args, **kwargs)
    return None


#: PyTorch 2.6 has none.
_GROUPED_MM = getattr(getattr(_aten, "_grouped_mm", None), "default", object())


def _grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`create_grouped_gemm_output_tensor` (GroupedMMUtils.h): of any dtype, where the fake kernel knows bfloat16 alone; rows padded."""
    shape = [mat_a.shape[-2], mat_b.shape[-1]]
    if mat_a.dim() == mat_b.dim():
        shape.insert(0, mat_a.shape[0] if offs is None else offs.shape[0])
    dtype = out_dtype or mat_a.dtype
    multiple = _ROW_BYTES // dtype.itemsize
    padded = -(-shape[-1] // multiple) * multiple
    return mat_a.new_empty_strided(shape, [shape[-2] * padded, padded, 1][-len(shape) :], dtype=dtype)
