"""Operators on sparse COO tensors, decomposed into dense ones.

Fakes of sparse tensors keep their indices and values, but most of PyTorch's fake kernels return
empty sparse tensors. The decompositions follow `SparseTensor.cpp`,
`SparseTensorMath.cpp` and `cuda/SparseCUDATensorMath.cu` in aten/src/ATen/native/sparse, and the
recorded allocations of the CUDA build of PyTorch 2.11 (tests/recorded/sparse.json). How many
elements remain when equal indices are summed depends on values: trace/dispatch/placeholders.py has
the upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memcallback.core.tensors import dense_parts, sparse_tensor
from memcallback.cuda.op_call import OpCall

_aten = torch.ops.aten
#: Operators whose fake kernels are right for sparse tensors: they read the parts, or make a tensor
#: of given parts or none.
_NATIVE = frozenset(
    (
        *(
            "_sparse_coo_tensor_with_dims_and_tensors",
            "_sparse_coo_tensor_with_dims",
            "empty_like",
            "zeros_like",
            "detach",
            "alias",
        ),
        *(
            "_indices",
            "_values",
            "indices",
            "values",
            "_nnz",
            "is_coalesced",
            "_coalesced_",
            "_coalesce",
            "is_same_size",
        ),
        *("sparse_dim", "dense_dim", "_dimI", "_dimV", "sym_size", "sym_numel"),
    )
)


def sparse_decomposition(call: OpCall) -> Callable[..., Any] | None:
    """The decomposition of an operator that takes or makes sparse tensors; None for any other."""
    op, values = call.op, (*call.args, *call.kwargs.values())
    if op in _FROM_DENSE:
        return _FROM_DENSE[op](call.args)
    layouts = {value.layout for value in values if isinstance(value, torch.Tensor)}
    if layouts <= {torch.strided} or call.name in _NATIVE:
        return None
    rule = _RULES.get(call.name)
    if rule is not None and layouts <= {torch.strided, torch.sparse_coo}:
        return rule
    if op._can_decompose():
        return op.decompose  # type: ignore[no-any-return]
    names = ", ".join(sorted(str(layout) for layout in layouts if layout is not torch.strided))
    raise NotImplementedError(
        f"{op} on a tensor of layout {names} is not supported. Use an operator that takes "
        "torch.sparse_coo (torch.sparse.mm, +, *, coalesce), or make the tensor dense with "
        "to_dense()"
    )


def _like(
    sparse: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    *,
    is_coalesced: bool | None = None,
) -> torch.Tensor:
    return sparse_tensor(
        indices,
        values,
        sparse.shape,
        is_coalesced=sparse.is_coalesced() if is_coalesced is None else is_coalesced,
    )


def _put(sparse: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Give a sparse tensor the parts of another one."""
    sparse.data = source
    return sparse


def _flat_indices(sparse: torch.Tensor) -> torch.Tensor:
    """`flatten_indices`: one number per element; a single row of indices is returned as it is."""
    indices = sparse._indices()
    return indices.squeeze(0) if indices.shape[0] == 1 else indices.new_empty(indices.shape[1])


def _clone(sparse: torch.Tensor, *, memory_format: object = None) -> torch.Tensor:
    values = sparse._values().clone()
    return _like(sparse, sparse._indices().clone(), values)


def _to_copy(
    sparse: torch.Tensor, *, dtype: torch.dtype | None = None, **options: object
) -> torch.Tensor:
    indices = sparse._indices().clone()
    return _like(sparse, indices, _aten._to_copy.default(sparse._values(), dtype=dtype))


def _copy_(sparse: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return _put(sparse, _clone(source))


def _zero_(sparse: torch.Tensor) -> torch.Tensor:
    return _put(
        sparse, _like(sparse, sparse._indices()[:, :0].clone(), sparse._values()[:0].clone())
    )


def _add_into(dense: torch.Tensor, sparse: torch.Tensor, alpha: Any) -> torch.Tensor:
    """`add_out_dense_sparse_cuda`: adds coalesced elements one by one, others by `index_add_`."""
    values = sparse._values()
    if values.dtype != dense.dtype:
        values = values.to(dense.dtype)
    if sparse.is_coalesced():
        if sparse.dense_dim():
            values.contiguous()
        return dense
    num_rows = math.prod(sparse.shape[: sparse.sparse_dim()])
    rows = dense.view(num_rows, -1) if dense.numel() else dense.view(num_rows, 0)
    rows.index_add_(
        0, _flat_indices(sparse), values.reshape(values.shape[0], rows.shape[1]), alpha=alpha
    )
    return dense


def _sum_of_sparse(input: torch.Tensor, other: torch.Tensor, alpha: Any) -> torch.Tensor:
    """`add_out_sparse_cuda`: the elements of both, coalesced if they exceed the tensor's size."""
    values = other._values() if alpha == 1 else other._values() * alpha
    indices = torch.cat([input._indices(), other._indices()], 1)
    total = _like(input, indices, torch.cat([input._values(), values]), is_coalesced=False)
    return total.coalesce() if total._nnz() > math.prod(total.shape) else total


def _add(input: torch.Tensor, other: torch.Tensor, *, alpha: Any = 1) -> torch.Tensor:
    return (
        _add_into(input.clone(), other, alpha)
        if input.layout is torch.strided
        else _sum_of_sparse(input, other, alpha)
    )


def _add_(input: torch.Tensor, other: torch.Tensor, *, alpha: Any = 1) -> torch.Tensor:
    return (
        _add_into(input, other, alpha)
        if input.layout is torch.strided
        else _put(input, _sum_of_sparse(input, other, alpha))
    )


def _times(sparse: torch.Tensor, other: Any) -> torch.Tensor:
    """`_mul_dense_sparse_out`: select the dense elements at the sparse tensor's indices."""
    if isinstance(other, torch.Tensor) and other.layout is not torch.strided:
        raise NotImplementedError(
            "The elementwise product of two sparse tensors is not supported. Make one dense with "
            "to_dense()"
        )
    if isinstance(other, torch.Tensor) and other.dim() > sparse.dense_dim():
        other = _aten.index.Tensor(other, list(sparse._indices().unbind(0)))
    indices = sparse._indices().clone()
    return _like(sparse, indices, sparse._values() * other)


def _mul(input: Any, other: Any) -> torch.Tensor:
    is_first = isinstance(input, torch.Tensor) and input.layout is torch.sparse_coo
    return _times(input, other) if is_first else _times(other, input)


def _div(sparse: torch.Tensor, other: Any, **options: object) -> torch.Tensor:
    indices = sparse._indices().clone()
    return _like(sparse, indices, sparse._values() / other)


def _pow(sparse: torch.Tensor, exponent: Any) -> torch.Tensor:
    sparse = sparse.coalesce()
    indices = sparse._indices().clone()
    return _like(sparse, indices, sparse._values() ** exponent)


def _neg(sparse: torch.Tensor) -> torch.Tensor:
    copy = _clone(sparse)
    copy._values().neg_()
    return copy


def _unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`coalesced_unary_ufunc`, for functions with f(0) = 0."""

    def operator(sparse: torch.Tensor) -> torch.Tensor:
        sparse = sparse.coalesce()
        values = function(sparse._values())
        return _like(sparse, sparse._indices().clone(), values)

    return operator


def _in_place(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Apply an in-place function to the values."""

    def operator(sparse: torch.Tensor, *args: Any) -> torch.Tensor:
        function(sparse._values(), *args)
        return sparse

    return operator


def _sum(sparse: torch.Tensor, *dims: Any, **options: Any) -> torch.Tensor:
    if dims:
        raise NotImplementedError(
            "The sum of a sparse tensor is supported over all dimensions only. Sum its values(), "
            "or make it dense with to_dense()"
        )
    total: torch.Tensor = sparse._values().sum(**options)
    return total


def _norm(sparse: torch.Tensor, p: Any = 2, *dims: Any, **options: Any) -> torch.Tensor:
    if any(dims):
        raise NotImplementedError(
            "The norm of a sparse tensor is supported over all dimensions only. Make it dense with "
            "to_dense()"
        )
    norm: torch.Tensor = sparse.coalesce()._values().norm(p)
    return norm


def _sparse_mask(dense: torch.Tensor, mask: torch.Tensor, *rest: object) -> torch.Tensor:
    """`sparse_mask`: a dense tensor times sparse ones, or a search for the mask's elements."""
    if dense.layout is not torch.strided:
        return _searched(dense, mask)
    values = mask._values()
    ones = values.new_ones(1).expand_as(values)
    return _times(
        sparse_tensor(mask._indices(), ones, mask.shape, is_coalesced=mask.is_coalesced()), dense
    )


def _searched(sparse: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`_sparse_binary_op_intersection_kernel_impl` (SparseBinaryOpIntersectionCommon.h)."""
    indices, values = dense_parts(sparse)
    count, num_searched = values.shape[0], mask._values().shape[0]
    longest, scratch = max(count, num_searched), list[torch.Tensor]()
    sizes = [longest, count, 2 * num_searched]
    if not sparse.is_coalesced():
        flat = _flat_indices(sparse)
        order = flat.sort()[1]
        indices, values = indices.index_select(1, order), values.index_select(0, order)
        scratch.append(flat.index_select(0, order))
        del flat, order
        del sizes[1]
    scratch += [indices.new_empty(size) for size in sizes]
    indices.new_empty(1)
    result = _like(mask, mask._indices().clone(), mask._values().new_empty(mask._values().shape))
    del scratch
    return result


def _to_dense(
    sparse: torch.Tensor, dtype: torch.dtype | None = None, masked_grad: object = None
) -> torch.Tensor:
    return _add_into(sparse._values().new_zeros(sparse.shape, dtype=dtype), sparse, 1)


def _to_sparse(
    dense: torch.Tensor, sparse_dim: int | None = None, **options: object
) -> torch.Tensor:
    """`dense_to_sparse`: the nonzero elements, at most all."""
    if options.get("layout") not in (None, torch.sparse_coo) or sparse_dim not in (
        None,
        dense.dim(),
    ):
        raise NotImplementedError(
            "to_sparse() is supported for the layout torch.sparse_coo with all dimensions sparse. "
            "Use that"
        )
    nonzero = dense.nonzero().t()  # live until the end, as in C++
    indices = nonzero.clone()
    return sparse_tensor(
        indices, _aten.index.Tensor(dense, list(indices.unbind(0))), dense.shape, is_coalesced=True
    )


def _transpose(sparse: torch.Tensor, first: int = 0, second: int = 1) -> torch.Tensor:
    """`transpose_sparse_` on a clone: swap two rows of indices."""
    num_dims = sparse.dim()
    first, second = first % num_dims, second % num_dims
    if max(first, second) >= sparse.sparse_dim():
        raise NotImplementedError(
            "transpose of a sparse tensor is supported for its sparse dimensions only. Transpose "
            "its values"
        )
    copy = _clone(sparse)
    if first == second:
        return copy
    copy._indices()[first].clone()
    shape = list(sparse.shape)
    shape[first], shape[second] = shape[second], shape[first]
    return sparse_tensor(copy._indices(), copy._values(), shape)


def _product_into(result: torch.Tensor, sparse: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """`s_addmm_out_sparse_dense_cuda`: int32 indices for cuSPARSE, and a result by column."""
    sparse = sparse.coalesce()
    rows, columns = sparse._indices().unbind(0)
    starts = rows.new_empty(sparse.shape[0] + 1, dtype=torch.int32)
    _aten._to_copy.default(rows, dtype=torch.int32)
    numbers = _aten._to_copy.default(columns, dtype=torch.int32)
    by_column = result.t().clone(memory_format=torch.contiguous_format)
    right = dense if dense.stride(1) == 1 or dense.t().is_contiguous() else dense.contiguous()
    del right, by_column, numbers, starts
    return result


def _addmm(
    bias: torch.Tensor, matrix: torch.Tensor, other: torch.Tensor, *rest: Any, **options: Any
) -> torch.Tensor:
    if matrix.layout is not torch.sparse_coo or other.layout is not torch.strided:
        raise NotImplementedError(
            "addmm needs a first matrix in layout torch.sparse_coo and a dense second one. "
            "Otherwise make all of its tensors dense with to_dense()"
        )
    return _product_into(bias.new_empty(matrix.shape[0], other.shape[1]), matrix, other)


def _mm(matrix: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`_sparse_mm`: zeros plus the product; transposed if the second matrix is sparse."""
    if matrix.layout is torch.strided:
        return _mm(_transpose(other), matrix.t()).t()
    return _addmm(other.new_zeros(matrix.shape[0], other.shape[1]), matrix, other)


def _mv(sparse: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    return _mm(sparse, vector.unsqueeze(1)).squeeze(1)


def _embedding_bag_backward(args: Sequence[object]) -> Callable[..., Any] | None:
    return _embedding_bag_sparse_backward if args[9] else None


def _embedding_bag_sparse_backward(
    grad: Any, indices: Any, offsets: Any, to_bag: Any, sizes: Any, largest: Any, *rest: Any
) -> Any:
    num_weights, scale, mode, _, *more = rest
    return _aten._embedding_bag_sparse_backward.default.decompose(
        grad, indices, offsets, to_bag, sizes, num_weights, scale, mode, *more
    )


#: Operators on dense tensors that return sparse ones.
_FROM_DENSE: dict[Any, Callable[[Sequence[object]], Callable[..., Any] | None]] = {
    _aten._embedding_bag_backward.default: _embedding_bag_backward,
    _aten._to_sparse.default: lambda args: _to_sparse,
    _aten._to_sparse.sparse_dim: lambda args: _to_sparse,
}
_UNARY = (
    *(
        "abs",
        "asin",
        "asinh",
        "atan",
        "atanh",
        "ceil",
        "deg2rad",
        "erf",
        "erfinv",
        "expm1",
        "floor",
        "frac",
        "isinf",
        "isnan",
        "log1p",
    ),
    *("rad2deg", "relu", "round", "sgn", "sign", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
_RULES: dict[str, Callable[..., Any]] = {
    **{name: _unary(getattr(_aten, name)) for name in _UNARY},
    **{
        f"{name}_": _in_place(getattr(torch.Tensor, f"{name}_"))
        for name in (*_UNARY, "neg", "div")
        if hasattr(torch.Tensor, f"{name}_")
    },
    "clone": _clone,
    "_to_copy": _to_copy,
    "copy_": _copy_,
    "zero_": _zero_,
    "add": _add,
    "add_": _add_,
    "sub": lambda one, other, *, alpha=1: _add(one, other, alpha=-alpha),
    "sub_": lambda one, other, *, alpha=1: _add_(one, other, alpha=-alpha),
    "mul": _mul,
    "mul_": lambda sparse, other: _put(sparse, _times(sparse, other)),
    "div": _div,
    "neg": _neg,
    "pow": _pow,
    "sum": _sum,
    "norm": _norm,
    "native_norm": _norm,
    "sparse_mask": _sparse_mask,
    "_to_dense": _to_dense,
    "t": _transpose,
    "transpose": _transpose,
    "mm": _mm,
    "mv": _mv,
    "addmm": _addmm,
    "_sparse_addmm": _addmm,
}
