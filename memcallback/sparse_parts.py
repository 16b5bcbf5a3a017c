"""Sparse tensors (COO) as the dense ones that they consist of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_CPU = torch.device("cpu")


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that own the storages of a tensor: itself, or the indices and values of a sparse one."""
    return (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else (tensor,)


def sparse_tensor(indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int], *, is_coalesced: bool = False) -> torch.Tensor:
    """A sparse tensor of these very indices, of shape (sparse dimensions, elements), and values, of shape (elements, *dense dimensions)."""
    made: torch.Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default(
        *(indices.shape[0], values.dim() - 1, list(shape), indices, values),
        **{"dtype": values.dtype, "layout": torch.sparse_coo, "device": _CPU, "is_coalesced": is_coalesced},
    )
    return made
