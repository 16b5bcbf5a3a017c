"""Kernels of embeddings, index_put, scatter and coalesce."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from memcallback.core.kernel import Kernel
from memcallback.core.tensors import dense_parts
from memcallback.core.units import round_up
from memcallback.cuda.kernels.reduction import Reducer, add_reduction
from memcallback.cuda.kernels.sort import alloc_sort, scan_bytes
from memcallback.cuda.op_call import KernelBuilder, OpCall, Rule, accumulate_bytes, dense_bytes

#: `thrust` allocates a tensor of this size for a count.
_COUNT_BYTES = 8


def _embedding(call: OpCall) -> Kernel | None:
    """`embedding_symint` (Embedding.cpp) flattens indices, which copies noncontiguous ones."""
    indices = call.arguments[1]
    if indices.ndim == 1 or indices.is_contiguous():
        return None
    kernel = KernelBuilder()
    copy = kernel.alloc_copy(indices)
    kernel.output(0)
    kernel.free(copy)
    return kernel.build()


def _embedding_backward(call: OpCall) -> Kernel | None:
    """`embedding_dense_backward_cuda` (Embedding.cu): sorts more than 3,072 indices.

    It sorts any number of them if gradients are scaled by frequency.
    """
    grad, indices, rows, _, scale = call.arguments[:5]
    kernel = KernelBuilder()
    count = indices.numel()
    adjacent, copy = kernel.alloc_copy(indices), kernel.alloc_copy(grad)
    if count <= 3072 and not scale:
        kernel.output(0)
        kernel.free(copy, adjacent)
        return kernel.build()
    sorted_, original = _sorted_indices(kernel, call, indices)
    counted = _counted(kernel, indices) if scale else None
    _sum_by_segment(kernel, call, grad, indices, rows, math.prod(grad.shape[indices.ndim :]))
    kernel.free(counted, original, sorted_, copy, adjacent)
    return kernel.build()


def _sorted_indices(kernel: KernelBuilder, call: OpCall, indices: torch.Tensor) -> tuple[int, int]:
    """Sort indices with their positions (`radix_sort_pairs`)."""
    size, count = indices.numel() * indices.element_size(), indices.numel()
    sorted_, original, positions = kernel.alloc(size), kernel.alloc(size), kernel.alloc(size)
    scratch = alloc_sort(
        kernel,
        call.device.compute_capability[0],
        indices.element_size(),
        indices.element_size(),
        count,
    )
    kernel.free(scratch, positions)
    return sorted_, original


def _counted(kernel: KernelBuilder, indices: torch.Tensor) -> int:
    """Count how often each index occurs, with two scans by key."""
    counted = kernel.alloc(indices.numel() * indices.element_size())
    for _ in range(2):
        kernel.free(kernel.alloc(scan_bytes(8, 1)))
    return counted


def _sum_by_segment(
    kernel: KernelBuilder,
    call: OpCall,
    grad: torch.Tensor,
    indices: torch.Tensor,
    rows: int,
    columns: int,
) -> None:
    """`embedding_backward_cuda_kernel` (EmbeddingBackwardKernel.cu).

    Sum segments of equal indices in parts of 10 rows, in the accumulation type.
    """
    count, size = indices.numel(), indices.element_size()
    kernel.output(0)
    offsets = kernel.alloc(count * size)
    num_segments = kernel.alloc(_COUNT_BYTES)
    keys = kernel.alloc(count * size)
    scratch = kernel.alloc(scan_bytes(8, 1))
    kernel.free(scratch, keys)
    per_segment, starts = (kernel.alloc(size * min(count, rows)) for _ in range(2))
    kernel.free(kernel.alloc(scan_bytes(size, 1)))
    num_parts = kernel.alloc(_COUNT_BYTES)
    num_parts_at_most = count // 10 + min(count, rows)
    part_offsets = kernel.alloc(num_parts_at_most * size)
    sums = kernel.alloc(num_parts_at_most * columns * accumulate_bytes(grad.dtype))
    kernel.free(sums, part_offsets, num_parts, starts, per_segment, num_segments, offsets)


def _embedding_bag(call: OpCall) -> Kernel:
    """`_embedding_bag_cuda` (EmbeddingBag.cu): bag sizes, bags of indices, output.

    The mode max also allocates the largest indices.
    """
    kernel = KernelBuilder()
    kernel.output(2, 1, *((0, 3) if call.outputs[3].numel() else (0,)))
    return kernel.build()


def _embedding_bag_dense_backward(call: OpCall) -> Kernel | None:
    grad, indices, _, _, _, rows, scale, mode = call.arguments[:8]
    return _bag_gradient(call, grad, indices, rows, scale, mode)


def _embedding_bag_backward(call: OpCall) -> Kernel | None:
    """`_embedding_bag_backward_symint` (EmbeddingBag.cpp) of a dense gradient.

    For a sparse one see decompositions/sparse.py.
    """
    grad, indices, _, _, _, _, rows, scale, mode = call.arguments[:9]
    return _bag_gradient(call, grad, indices, rows, scale, mode)


def _bag_gradient(
    call: OpCall, grad: torch.Tensor, indices: torch.Tensor, rows: int, scale: bool, mode: int
) -> Kernel | None:
    """`embedding_bag_backward_cuda_sum_avg` (EmbeddingBag.cu): always sorts; one pass for max."""
    if mode == 2:
        return None
    kernel = KernelBuilder()
    copy = kernel.alloc_copy(grad)
    sorted_, original = _sorted_indices(kernel, call, indices)
    counted = _counted(kernel, indices) if scale else None
    _sum_by_segment(kernel, call, grad, indices, rows, grad.shape[1])
    kernel.free(counted, original, sorted_, copy)
    return kernel.build()


def _without_data(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor] | None:
    """The index tensors on `meta`; None with a mask among them."""
    given = [index for index in indices if index is not None]
    if not given or any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return None
    return [
        torch.empty_strided(index.shape, index.stride(), dtype=index.dtype, device="meta")
        for index in given
    ]


def _is_int32(index: torch.Tensor) -> bool:
    return index.dtype == torch.int32


def _alloc_index_copies(kernel: KernelBuilder, indices: Sequence[torch.Tensor]) -> list[int]:
    """Copies in int64, and contiguous ones of indices with different strides.

    `make_info` (TensorAdvancedIndexingUtils.h), `AdvancedIndex` (TensorAdvancedIndexing.cpp).
    """
    indices = torch.broadcast_tensors(*indices)
    wide = [index.to(torch.int64) for index in indices]
    copies = {
        place: kernel.alloc(dense_bytes(wide[place]))
        for place, index in enumerate(indices)
        if _is_int32(index)
    }
    # A dimension more, as for the others of the tensor, takes no account of strides of single rows.
    if len({index.reshape(*index.shape, 1).stride() for index in wide}) > 1:
        for place, index in enumerate(wide):
            if not index.is_contiguous():
                before, copies[place] = copies.get(place), kernel.alloc(dense_bytes(index))
                kernel.free(before)
    return [copies[place] for place in sorted(copies)]


def _index(call: OpCall) -> Kernel | None:
    """`index` (TensorAdvancedIndexing.cpp) makes copies of its indices first."""
    indices = _without_data(call.arguments[1])
    if indices is None:
        return None
    kernel = KernelBuilder()
    copies = _alloc_index_copies(kernel, indices)
    kernel.output(0)
    kernel.free(*reversed(copies))
    return kernel.build()


def _index_put(call: OpCall) -> Kernel | None:
    """`_index_put_impl_` (TensorAdvancedIndexing.cpp) makes copies of its indices."""
    indices = _without_data(call.arguments[1])
    if indices is None:
        return None
    kernel = KernelBuilder()
    if call.outputs and call.name in ("index_put", "_unsafe_index_put"):
        kernel.output(0)
    if call.arguments[3]:
        _accumulate(kernel, call, indices)
    else:
        kernel.free(*_alloc_index_copies(kernel, indices))
    return kernel.build()


def _accumulate(kernel: KernelBuilder, call: OpCall, tensors: Sequence[torch.Tensor]) -> None:
    """`index_put_with_sort_kernel` (Indexing.cu), if values are added.

    Linear indices, a copy of the values, a sort with positions.
    """
    x, indices, values = call.arguments[:3]
    is_unsafe = call.name == "_index_put_impl_" and call.arguments[4]
    adjacent_x = kernel.alloc_copy(x)
    wide = [kernel.alloc(tensor.numel() * 8) for tensor in tensors if _is_int32(tensor)]
    tensors = torch.broadcast_tensors(*(tensor.to(torch.int64) for tensor in tensors))
    shape, count = tensors[0].shape, tensors[0].numel()
    linear: int | None = None
    for index in tensors:
        # Each index is checked: are its smallest and largest values in range?
        for _ in range(0 if is_unsafe else 2):
            bound, copy = kernel.alloc(8), kernel.alloc_copy(index)
            add_reduction(kernel, call.device, Reducer(8), 8, (count,), (1,), (True,))
            kernel.free(copy)
            kernel.free(kernel.alloc(1), bound)
        wrapped, offset = kernel.alloc(count * 8), kernel.alloc(count * 8)
        kernel.free(wrapped)
        if linear is None:
            linear = offset
        else:
            kernel.free(offset)
    kernel.free(*wide)
    dims = [i for i, t in enumerate(indices) if t is not None]
    kept = [d for d in range(x.ndim) if d >= len(indices) or indices[d] is None]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    sliced = [x.shape[d] for d in kept]
    whole = (
        [*shape, *sliced]
        if not adjacent
        else [*(x.shape[: dims[0]]), *shape, *(x.shape[dims[-1] + 1 :])]
    )
    expanded = values.numel() != math.prod(whole) or not values.is_contiguous()
    copies = [] if adjacent else [kernel.alloc(dense_bytes(x))]
    copies += [kernel.alloc(math.prod(whole) * values.element_size())] if expanded else []
    if not (tensors[0] + 1).is_contiguous():  # in the layout of the first index
        flat = kernel.alloc(count * 8)
        kernel.free(linear)
        linear = flat
    sorted_, original, positions = (kernel.alloc(count * 8) for _ in range(3))
    after = math.prod(x.shape[dims[-1] + 1 :]) if adjacent else math.prod(sliced)
    bits = (max(x.numel() - 1, 0) // max(after, 1)).bit_length()
    scratch = alloc_sort(kernel, call.device.compute_capability[0], 8, 8, count, max(bits, 1))
    kernel.free(scratch, positions, original, sorted_, *reversed(copies), linear, adjacent_x)


def _scatter_reduce(call: OpCall) -> Kernel | None:
    """`scatter_reduce_two` (TensorAdvancedIndexing.cpp): a mean also scatters ones for its counts.

    The counts are at least 1.
    """
    x, source, reduce = call.arguments[0], call.arguments[3], call.arguments[4]
    if reduce != "mean":
        return None
    kernel = KernelBuilder()
    kernel.output(0)
    ones, counts = kernel.alloc(dense_bytes(source)), kernel.alloc(dense_bytes(x))
    is_none = kernel.alloc(x.numel())
    kernel.free(is_none, counts, ones)
    return kernel.build()


def _index_reduce(call: OpCall) -> Kernel | None:
    """`index_reduce_func_cuda_impl` (Indexing.cu): a mean adds ones for its counts.

    The counts are at least 1.
    """
    x, source, reduce = call.arguments[0], call.arguments[3], call.arguments[4]
    if reduce != "mean":
        return None
    kernel = KernelBuilder()
    kernel.output(0)
    counts, ones = kernel.alloc(dense_bytes(x)), kernel.alloc(dense_bytes(source))
    kernel.free(ones)
    is_none = kernel.alloc(x.numel())
    kernel.free(is_none, counts)
    return kernel.build()


#: Values in a tile of `DeviceMergeSort` with keys of 8 bytes.
_MERGE_TILE = 2048
#: Values in a tile of `DeviceSelect::UniqueByKey` with keys and values of 8 bytes, by major compute
#: capability (7: and below).
_UNIQUE_TILES = {9: 9856, 8: 2688, 7: 640}


def _coalesce(call: OpCall) -> Kernel:
    """`_coalesce_sparse_cuda` (SparseCUDATensor.cu): sorts flat indices with their positions.

    A single row becomes the output.
    """
    indices, values = dense_parts(call.arguments[0])
    num_rows, count = indices.shape
    kernel = KernelBuilder()
    if count < 2:
        kernel.output(1, 0)
        return kernel.build()
    flat = kernel.alloc(count * 8) if num_rows > 1 else None
    if flat is None:
        kernel.output(0)
    positions, offsets = kernel.alloc(count * 8), kernel.alloc(count * 8)
    partitions = (-(-count // _MERGE_TILE) + 1) * 4
    kernel.free(kernel.alloc(2 * round_up(count * 8, 256) + round_up(partitions, 256) + 255))
    states = (
        -(-count // _UNIQUE_TILES[min(max(call.device.compute_capability[0], 7), 9)]) + 32
    ) * 16
    kernel.free(kernel.alloc(round_up(states, 256) + 512 + 255))
    kernel.output(1)
    copy = kernel.alloc_copy(values)
    if flat is not None:
        kernel.output(0)
    kernel.free(offsets, positions, flat, copy)
    return kernel.build()


RULES: dict[str, Rule] = {
    "index_reduce": _index_reduce,
    "index_reduce_": _index_reduce,
    "scatter_reduce": _scatter_reduce,
    "scatter_reduce_": _scatter_reduce,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "_embedding_bag": _embedding_bag,
    "_embedding_bag_forward_only": _embedding_bag,
    "_embedding_bag_dense_backward": _embedding_bag_dense_backward,
    "_embedding_bag_backward": _embedding_bag_backward,
    "index": _index,
    "index_put": _index_put,
    "index_put_": _index_put,
    "_unsafe_index_put": _index_put,
    "_index_put_impl_": _index_put,
    "_coalesce": _coalesce,
}
