"""Embeddings, index_put, scatter, sparse coalesce."""

from __future__ import annotations

import math

import torch

from memcallback.core.kernel import Kernel
from memcallback.core.tensors import dense_parts
from memcallback.core.units import round_up
from memcallback.cuda.kernels.call import Call, KernelBuilder, Rule, accumulate_bytes, dense_bytes
from memcallback.cuda.kernels.sort import scan_bytes, take_sort

#: `thrust` makes a tensor of one number for a count, with this size.
_COUNT_BYTES = 8


def _take_scan(steps: KernelBuilder, value_bytes: int, count: int) -> int:
    return steps.take(scan_bytes(value_bytes, count))


def _embedding(call: Call) -> Kernel | None:
    """`embedding_symint` (Embedding.cpp): indices of several dimensions are reshaped to one, which
    copies them if they are not adjacent.
    """
    indices = call.args[1]
    if indices.ndim == 1 or indices.is_contiguous():
        return None
    steps = KernelBuilder()
    copy = steps.take_copy(indices)
    steps.make(0)
    steps.give(copy)
    return steps.kernel


def _embedding_backward(call: Call) -> Kernel | None:
    """`embedding_dense_backward_cuda` (Embedding.cu): indices are sorted above 3,072 of them or
    where gradients are scaled by frequency.
    """
    grad, indices, rows, _, scale = call.args[:5]
    steps = KernelBuilder()
    count = indices.numel()
    adjacent, copy = steps.take_copy(indices), steps.take_copy(grad)
    if count <= 3072 and not scale:
        steps.make(0)
        steps.give(copy, adjacent)
        return steps.kernel
    sorted_, original = _sorted_indices(steps, call, indices)
    counted = _counted(steps, indices) if scale else None
    _sum_by_segment(steps, call, grad, indices, rows, math.prod(grad.shape[indices.ndim :]))
    steps.give(counted, original, sorted_, copy, adjacent)
    return steps.kernel


def _sorted_indices(steps: KernelBuilder, call: Call, indices: torch.Tensor) -> tuple[int, int]:
    """`radix_sort_pairs` of the indices with their positions."""
    size, count = indices.numel() * indices.element_size(), indices.numel()
    sorted_, original, positions = steps.take(size), steps.take(size), steps.take(size)
    scratch = take_sort(
        steps,
        call.device.compute_capability[0],
        indices.element_size(),
        indices.element_size(),
        count,
    )
    steps.give(scratch, positions)
    return sorted_, original


def _counted(steps: KernelBuilder, indices: torch.Tensor) -> int:
    """How often each index occurs: two scans by key."""
    counted = steps.take(indices.numel() * indices.element_size())
    for _ in range(2):
        steps.give(_take_scan(steps, 8, 1))
    return counted


def _sum_by_segment(
    steps: KernelBuilder,
    call: Call,
    grad: torch.Tensor,
    indices: torch.Tensor,
    rows: int,
    columns: int,
) -> None:
    """`embedding_backward_cuda_kernel` (EmbeddingBackwardKernel.cu): segments of equal indices, in
    parts of 10 rows, summed wide.
    """
    count, size = indices.numel(), indices.element_size()
    steps.make(0)
    offsets = steps.take(count * size)
    num_segments = steps.take(_COUNT_BYTES)
    keys = steps.take(count * size)
    scratch = _take_scan(steps, 8, 1)
    steps.give(scratch, keys)
    per_segment, starts = (steps.take(size * min(count, rows)) for _ in range(2))
    steps.give(_take_scan(steps, size, 1))
    num_parts = steps.take(_COUNT_BYTES)
    num_parts_at_most = count // 10 + min(count, rows)
    part_offsets = steps.take(num_parts_at_most * size)
    sums = steps.take(num_parts_at_most * columns * accumulate_bytes(grad.dtype))
    steps.give(sums, part_offsets, num_parts, starts, per_segment, num_segments, offsets)


def _embedding_bag(call: Call) -> Kernel:
    """`_embedding_bag_cuda` (EmbeddingBag.cu): sizes of bags, bags of indices, by mode the output
    before or after the largest indices.
    """
    steps = KernelBuilder()
    steps.make(2, 1, *((0, 3) if call.outputs[3].numel() else (0,)))
    return steps.kernel


def _embedding_bag_backward(call: Call) -> Kernel | None:
    """`embedding_bag_backward_cuda_sum_avg` (EmbeddingBag.cu): as an embedding's, always sorted;
    for the mode max one pass.
    """
    grad, indices = call.args[:2]
    rows, scale, mode = call.args[5:8]
    if mode == 2:
        return None
    steps = KernelBuilder()
    copy = steps.take_copy(grad)
    sorted_, original = _sorted_indices(steps, call, indices)
    counted = _counted(steps, indices) if scale else None
    _sum_by_segment(steps, call, grad, indices, rows, grad.shape[1])
    steps.give(counted, original, sorted_, copy)
    return steps.kernel


def _embedding_bag_backward_of_either_kind(call: Call) -> Kernel | None:
    """`_embedding_bag_backward_symint` (EmbeddingBag.cpp): one of two kinds; `sparse_operators`
    takes the sparse one apart.
    """
    grad, indices, _, to_bag, sizes, largest, rows, scale, mode, _, weights, padding = call.args
    dense = (grad, indices, to_bag, sizes, largest, rows, scale, mode, weights, padding)
    return _embedding_bag_backward(
        Call("_embedding_bag_dense_backward", dense, call.outputs, call.device)
    )


def _index_put(call: Call) -> Kernel | None:
    """`index_put_with_sort_kernel` (Indexing.cu) where values are added: linear indices, a copy of
    the values, a sort with positions.
    """
    x, indices, values = call.args[:3]
    accumulate = call.args[3]
    is_unsafe = call.name == "_index_put_impl_" and call.args[4]
    tensors = [t for t in indices if t is not None]
    if not accumulate or not tensors or any(t.dtype in (torch.bool, torch.uint8) for t in tensors):
        return None
    steps = KernelBuilder()
    if call.outputs and call.name in ("index_put", "_unsafe_index_put"):
        steps.make(0)
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    count = math.prod(shape)
    linear: int | None = None
    for index in tensors:
        # Each index is checked: its smallest and largest value, and whether they are in range.
        for _ in range(0 if is_unsafe else 2):
            bound = steps.take(index.element_size())
            steps.give(steps.take(1), bound)
        wrapped, offset = steps.take(count * 8), steps.take(count * 8)
        steps.give(wrapped)
        if linear is None:
            linear = offset
        else:
            steps.give(offset)
    places = [i for i, t in enumerate(indices) if t is not None]
    kept = [d for d in range(x.ndim) if d >= len(indices) or indices[d] is None]
    adjacent = places == list(range(places[0], places[0] + len(places)))
    sliced = [x.shape[d] for d in kept]
    whole = (
        [*shape, *sliced]
        if not adjacent
        else [*(x.shape[: places[0]]), *shape, *(x.shape[places[-1] + 1 :])]
    )
    expanded = values.numel() != math.prod(whole) or not values.is_contiguous()
    copies = [] if adjacent else [steps.take(dense_bytes(x))]
    copies += [steps.take(math.prod(whole) * values.element_size())] if expanded else []
    sorted_, original, positions = (steps.take(count * 8) for _ in range(3))
    after = math.prod(x.shape[places[-1] + 1 :]) if adjacent else math.prod(sliced)
    bits = (max(x.numel() - 1, 0) // max(after, 1)).bit_length()
    scratch = take_sort(steps, call.device.compute_capability[0], 8, 8, count, max(bits, 1))
    steps.give(scratch, positions, original, sorted_, *reversed(copies), linear)
    return steps.kernel


def _scatter_reduce(call: Call) -> Kernel | None:
    """`scatter_reduce_two` (TensorAdvancedIndexing.cpp): for a mean ones are scattered too, and
    where none came the count is 1.
    """
    x, source, reduce = call.args[0], call.args[3], call.args[4]
    if reduce != "mean":
        return None
    steps = KernelBuilder()
    steps.make(0)
    ones, counts = steps.take(dense_bytes(source)), steps.take(dense_bytes(x))
    is_none = steps.take(x.numel())
    steps.give(is_none, counts, ones)
    return steps.kernel


RULES: dict[str, Rule] = {
    "scatter_reduce": _scatter_reduce,
    "scatter_reduce_": _scatter_reduce,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "_embedding_bag": _embedding_bag,
    "_embedding_bag_forward_only": _embedding_bag,
    "_embedding_bag_dense_backward": _embedding_bag_backward,
    "_embedding_bag_backward": _embedding_bag_backward_of_either_kind,
    "index_put": _index_put,
    "index_put_": _index_put,
    "_unsafe_index_put": _index_put,
    "_index_put_impl_": _index_put,
}
#: Values in a tile of `DeviceMergeSort` with keys of 8 bytes.
_MERGE_TILE = 2048
#: Values in a tile of `DeviceSelect::UniqueByKey` with keys and values of 8 bytes, from compute
#: capability 9.0, 8.0, and below.
_UNIQUE_TILES = {9: 9856, 8: 2688, 7: 640}


def _coalesce(call: Call) -> Kernel:
    """`_coalesce_sparse_cuda` (SparseCUDATensor.cu): flat indices are sorted with their positions;
    a single row of them becomes the output.
    """
    indices, values = dense_parts(call.args[0])
    num_rows, count = indices.shape
    steps = KernelBuilder()
    if count < 2:
        steps.make(1, 0)
        return steps.kernel
    flat = steps.take(count * 8) if num_rows > 1 else None
    if flat is None:
        steps.make(0)
    positions, offsets = steps.take(count * 8), steps.take(count * 8)
    partitions = (-(-count // _MERGE_TILE) + 1) * 4
    steps.give(steps.take(2 * round_up(count * 8, 256) + round_up(partitions, 256) + 255))
    states = (
        -(-count // _UNIQUE_TILES[min(max(call.device.compute_capability[0], 7), 9)]) + 32
    ) * 16
    steps.give(steps.take(round_up(states, 256) + 512 + 255))
    steps.make(1)
    copy = steps.take_copy(values)
    if flat is not None:
        steps.make(0)
    steps.give(offsets, positions, flat, copy)
    return steps.kernel


SPARSE_RULES: dict[str, Rule] = {"_coalesce": _coalesce}
