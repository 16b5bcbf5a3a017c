"""Kernels of sort, topk, median and scans.

They use CUB, whose scratch was measured on a virtual device and is approximate: its tiles depend on
the card.
"""

from __future__ import annotations

import torch

from memcallback.core.kernel import Kernel
from memcallback.core.units import round_up
from memcallback.cuda.op_call import (
    KernelBuilder,
    OpCall,
    Rule,
    dense_bytes,
    is_dense_in_any_order,
)
from memcallback.devices.catalogue import DeviceSpec

#: Values in a tile of `DeviceRadixSort` (onesweep) by major compute capability (7: and below), then
#: by bytes of a key with values of 8 bytes; `narrow`: both of 4.
_SORT_TILES: dict[int, dict[int | str, int]] = {
    9: {1: 5632, 2: 5632, 4: 5376, 8: 4608, "narrow": 5376},
    8: {1: 3072, 2: 3072, 4: 3072, 8: 3840, "narrow": 6144},
    7: {1: 2816, 2: 2816, 4: 2816, 8: 2816, "narrow": 8448},
}
#: Values in a tile where rows that were sorted together are separated again: keys of 8 bytes, one
#: pass over the row's bits.
_ROW_TILES = {9: 5760, 8: 3840, 7: 2816}
#: Values in a tile of `DeviceScan` by bytes of a value.
_SCAN_TILES = {1: 7680, 2: 3840, 4: 1920, 8: 896}
#: Values in a tile of `DeviceScan::InclusiveSumByKey`, keys and values of 4 bytes, by compute
#: capability. Measured on virtual devices of 7.5, 8.0, 8.6 and 9.0; later ones are taken for 9.0.
_BY_KEY_TILES = {(8, 0): 3840, (9, 0): 4032}
_OTHER_BY_KEY_TILES = 2304


def radix_sort_bytes(major: int, key_bytes: int, value_bytes: int, bits: int, count: int) -> int:
    """Scratch of CUB's `DeviceRadixSort::SortPairs`.

    Second buffers of keys and values, digit counts, look-back of 1 KiB per tile.
    """
    if count <= 256 * max(1, min(19, 76 // max(key_bytes, value_bytes))):
        return 1 if count else 0
    tiles_of = _SORT_TILES[min(max(major, 7), 9)]
    tile = tiles_of["narrow"] if key_bytes == value_bytes == 4 else tiles_of[key_bytes]
    tiles, passes = -(-count // tile), -(-bits // 8)
    buffers = (
        round_up(count * key_bytes, 256) + round_up(count * value_bytes, 256) if passes > 1 else 0
    )
    return buffers + passes * 2048 + tiles * 1024 + 256 + 255


def scan_bytes(value_bytes: int, count: int) -> int:
    """Scratch of CUB's `DeviceScan`: a state per tile and 32 more.

    Each is 2 x 4 or 2 x 8 bytes; three arrays for halves.
    """
    states = -(-count // _SCAN_TILES.get(value_bytes, 448)) + 32
    if value_bytes == 2:
        return round_up(states * 4, 256) + 2 * round_up(states * 2, 256) + 511
    return round_up(states * (16 if value_bytes == 8 else 8), 256) + 511


def alloc_sort(
    kernel: KernelBuilder,
    major: int,
    key_bytes: int,
    value_bytes: int,
    count: int,
    bits: int | None = None,
) -> int:
    """Allocate the scratch of a radix sort over some bits of the keys, by default all."""
    constants = (major, key_bytes, value_bytes, 8 * key_bytes if bits is None else bits)
    return kernel.alloc(radix_sort_bytes(*constants, count))


def segmented_sort_bytes(key_bytes: int, count: int) -> int:
    """Scratch of CUB's segmented sort: second buffers of keys and positions."""
    return round_up(count * key_bytes, 256) + round_up(count * 8, 256) + 255


#: Values in a tile of `DeviceRadixSort` without values, by bytes of a key.
_KEYS_TILES: dict[int, dict[int, int]] = {
    9: {1: 9728, 2: 9728, 4: 6912, 8: 5760},
    8: {1: 8064, 2: 8064, 4: 8064, 8: 3840},
    7: {1: 5888, 2: 5888, 4: 5888, 8: 2816},
}


def radix_sort_keys_bytes(major: int, key_bytes: int, count: int) -> int:
    """Scratch of CUB's `DeviceRadixSort::SortKeys`; approximate for keys of 1 and 2 bytes."""
    tiles = -(-count // _KEYS_TILES[min(max(major, 7), 9)][key_bytes])
    buffer = round_up(count * key_bytes, 256) if key_bytes > 1 else 0
    return buffer + key_bytes * 2048 + tiles * 1024 + 256 + 255


#: Values in a tile of `DeviceRunLengthEncode`.
_RUN_TILE = 768


def _unique(call: OpCall) -> Kernel | None:
    """`compute_unique` (UniqueCub.cu): sorts values, with their places for an inverse.

    Counts need a run-length encoding. The scratch of other scans, some KiB, is left out.
    """
    x, _, has_inverse, has_counts = call.arguments
    if x.dtype is torch.bool or not x.numel():
        return None
    count, major = x.numel(), call.device.compute_capability[0]
    kernel = KernelBuilder()
    values, places = kernel.alloc(dense_bytes(x)), None
    if has_inverse:
        numbers, places = kernel.alloc(count * 8), kernel.alloc(count * 8)
        kernel.free(alloc_sort(kernel, major, x.element_size(), 8, count), numbers)
        kernel.output(1)
        kernel.free(kernel.alloc(count * 8))
    else:
        kernel.free(kernel.alloc(radix_sort_keys_bytes(major, x.element_size(), count)))
    kernel.output(0)
    length, runs = kernel.alloc(8), None
    if has_counts:
        kernel.output(2)
        runs = kernel.alloc(round_up((-(-count // _RUN_TILE) + 32) * 16, 256) + 255)
    kernel.free(runs, length, places, values)
    return kernel.build()


#: Longest row that one block sorts; number of rows from which CUB's segmented sort is used.
_ROW, _MANY_ROWS = 4096, 128


def _sort(call: OpCall) -> Kernel:
    """`sort_cuda_kernel` (Sort.cpp); `argsort` frees the values."""
    x, only_indices = call.arguments[0], call.name == "argsort"
    dim = next(a for a in call.arguments[1:] if isinstance(a, int) and not isinstance(a, bool))
    kernel = KernelBuilder()
    values = kernel.alloc(dense_bytes(x)) if only_indices else None
    kernel.output(*range(len(call.outputs)))
    _add_row_sort(kernel, call, x, dim)
    kernel.free(values)
    return kernel.build()


def _add_row_sort(kernel: KernelBuilder, call: OpCall, x: torch.Tensor, dim: int) -> None:
    """Allocate and free the scratch of sorted rows (`sort_cuda_kernel`, Sort.cpp).

    One block sorts up to 4,096 values, CUB longer rows. CUB reads and writes adjacent rows, for
    which `infer_dense_strides_dim_last` (Sorting.cpp) puts the sorted dimension last.
    """
    length = x.shape[dim] if x.ndim else 1
    rows = x.numel() // max(length, 1)
    if length <= _ROW:
        kernel.free(kernel.alloc(length * 8))
        return
    is_dense, strides = is_dense_in_any_order(x), _strides_with_last(x, dim)
    copies = [] if is_dense and x.stride(dim) == 1 else [kernel.alloc(dense_bytes(x))]
    of_result = x.stride() if is_dense else torch.empty_like(x, device="meta").stride()
    if copies and of_result != strides:
        copies += [kernel.alloc(dense_bytes(x)), kernel.alloc(x.numel() * 8)]
    _add_long_row_sort(kernel, call, x, length, rows)
    kernel.free(*reversed(copies))


def _strides_with_last(x: torch.Tensor, dim: int) -> tuple[int, ...]:
    """Strides of a dense copy whose rows along a dimension are adjacent."""
    dim %= x.ndim
    before = x.stride()
    order = sorted(range(x.ndim), key=lambda d: (d == dim, -before[d]))
    strides, step = [0] * x.ndim, 1
    for d in reversed(order):
        strides[d] = step
        step *= x.shape[d]
    return tuple(strides)


def _add_long_row_sort(
    kernel: KernelBuilder, call: OpCall, x: torch.Tensor, length: int, rows: int
) -> None:
    """Allocate and free the scratch of CUB (`launch_stable_sort_kernel`, SortStable.cu)."""
    major, key_bytes = call.device.compute_capability[0], x.element_size()
    numbers = kernel.alloc(x.numel() * 8)
    if rows == 1 or (rows < _MANY_ROWS and length >= 1_000_000):
        kernel.free(alloc_sort(kernel, major, key_bytes, 8, length), numbers)
    elif rows < _MANY_ROWS:
        # `segmented_sort_pairs_by_full_sort`: sorts all values with their rows, then by row.
        positions, keys = kernel.alloc(x.numel() * 8), kernel.alloc(dense_bytes(x))
        kernel.free(alloc_sort(kernel, major, key_bytes, 8, x.numel()), keys)
        tiles = -(-x.numel() // _ROW_TILES[min(max(major, 7), 9)])
        kernel.free(kernel.alloc(2048 + tiles * 1024 + 256 + 255), positions, numbers)
    else:
        kernel.free(kernel.alloc(segmented_sort_bytes(key_bytes, x.numel())), numbers)


def _median(call: OpCall) -> Kernel | None:
    """`median_impl` (native/cuda/Sorting.cpp): sorts all values; no scratch along a dimension.

    `nanmedian` counts the values that are no NaN, with a sum over a mask in 8 bytes each.
    """
    x, kernel = call.arguments[0], KernelBuilder()
    if len(call.outputs) > 1:
        return None
    copy = kernel.alloc_copy(x)
    values, positions, numbers = (
        kernel.alloc(dense_bytes(x)),
        kernel.alloc(x.numel() * 8),
        kernel.alloc(x.numel() * 8),
    )
    scratch = (
        alloc_sort(kernel, call.device.compute_capability[0], x.element_size(), 8, x.numel())
        if x.numel() > _ROW
        else None
    )
    kernel.free(scratch, numbers, positions, copy)
    if call.name == "median":
        is_no_number = kernel.alloc(1)
        kernel.output(0)
        kernel.free(is_no_number, values)
        return kernel.build()
    mask, count = kernel.alloc(x.numel()), kernel.alloc(8)
    kernel.free(kernel.alloc(x.numel() * 8))
    rest = [kernel.alloc(size) for size in (8, 4, 8)]
    kernel.free(rest[1], rest[0], count, mask)
    kernel.output(0)
    kernel.free(rest[2], values)
    return kernel.build()


def _scan(call: OpCall) -> Kernel:
    """`cumsum_cuda_kernel` and others (ScanKernels.cpp).

    Copy another dtype or layout; CUB scans a single row.
    """
    x, dim, output = call.arguments[0], call.arguments[1], call.outputs[0]
    kernel = KernelBuilder()
    kernel.output(0)
    copy = (
        kernel.alloc(x.numel() * output.element_size())
        if x.dtype != output.dtype or not x.is_contiguous()
        else None
    )
    if x.ndim and x.numel() == x.shape[dim]:
        kernel.free(kernel.alloc(scan_bytes(output.element_size(), x.numel())))
    kernel.free(copy)
    return kernel.build()


def _masked_scatter(call: OpCall) -> Kernel:
    """`masked_scatter__cuda` and `launch_masked_scatter_kernel` (IndexKernel).

    A source index per element, a mask of full size, a scan.
    """
    mask, source, filled = call.arguments[1], call.arguments[2], call.outputs[0]
    kernel = KernelBuilder()
    kernel.output(0)
    numbers = kernel.alloc(filled.numel() * 8)
    copies = [
        kernel.alloc(filled.numel()) if mask.shape != filled.shape else kernel.alloc_copy(mask),
        kernel.alloc_copy(source),
    ]
    scratch = kernel.alloc(scan_bytes(8, filled.numel()))
    kernel.free(scratch, *reversed(copies), numbers)
    return kernel.build()


#: (most slices, shortest slice that is given several blocks): `should_use_multiblock`.
_MULTIBLOCK = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
_LEAST_MULTIBLOCK = 400
#: Threads per block; blocks per multiprocessor, with 40 of its 65,536 registers per thread; fewest
#: and most values per thread.
_TOPK_THREADS, _TOPK_BLOCKS, _TOPK_ITEMS = 256, 6, (4, 64)


def add_topk(
    kernel: KernelBuilder, device: DeviceSpec, itemsize: int, num_slices: int, length: int
) -> None:
    """Allocate and free the scratch of `topk` (`mbtopk::launch`, TensorTopK.cu).

    None with one block per slice.
    """
    least = next(
        (at_least for at_most, at_least in _MULTIBLOCK if num_slices <= at_most), _LEAST_MULTIBLOCK
    )
    if length < least:
        return
    of_a_thread = -(
        -length * num_slices // (device.num_multiprocessors * _TOPK_BLOCKS * _TOPK_THREADS)
    )
    of_a_block = max(_TOPK_ITEMS[0], min(of_a_thread, _TOPK_ITEMS[1])) * _TOPK_THREADS
    num_blocks = num_slices * -(-length // of_a_block)
    digits = 8 if itemsize == 8 else 4
    sizes = (
        num_slices * itemsize,
        num_slices * 8,
        num_slices * 2 * digits,
        num_blocks * 512,
        num_slices * 1024,
        num_blocks * 4,
        num_blocks * 4,
    )
    temps = [kernel.alloc(size) for size in sizes]
    for _ in range(2):
        kernel.free(kernel.alloc(_scan_by_key_bytes(device, num_blocks)))
    kernel.free(*reversed(temps))


def _scan_by_key_bytes(device: DeviceSpec, count: int) -> int:
    """Scratch of CUB's `DeviceScan::InclusiveSumByKey`: a state and the last key of each tile."""
    capability = device.compute_capability
    if capability >= (9, 0):
        capability = (9, 0)
    tiles = -(-count // _BY_KEY_TILES.get(capability, _OTHER_BY_KEY_TILES))
    return round_up((tiles + 32) * 16, 256) + round_up((tiles + 1) * 4, 256) + 255


def _topk(call: OpCall) -> Kernel:
    """`topk_out_cuda` (TensorTopK.cpp): the outputs, then a contiguous copy of the input.

    Results that one block cannot sort are sorted after that.
    """
    x, dim, is_sorted = call.arguments[0], call.arguments[2], call.arguments[4]
    length = x.shape[dim] if x.ndim else 1
    kernel = KernelBuilder()
    kernel.output(0, 1)
    copy = kernel.alloc_copy(x)
    add_topk(
        kernel,
        call.device,
        x.element_size(),
        x.numel() // max(length, 1),
        length,
    )
    kernel.free(copy)
    largest = call.outputs[0]
    if is_sorted and largest.ndim and largest.shape[dim] > _ROW:
        positions, values = kernel.alloc(largest.numel() * 8), kernel.alloc(dense_bytes(largest))
        _add_row_sort(kernel, call, largest, dim)
        gathered = kernel.alloc(largest.numel() * 8)
        kernel.free(gathered, values, positions)
    return kernel.build()


RULES: dict[str, Rule] = {
    "_unique2": _unique,
    "sort": _sort,
    "topk": _topk,
    "masked_scatter": _masked_scatter,
    "masked_scatter_": _masked_scatter,
    "argsort": _sort,
    "median": _median,
    "nanmedian": _median,
    "cumsum": _scan,
    "cumprod": _scan,
    "logcumsumexp": _scan,
}
