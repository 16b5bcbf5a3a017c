"""Rules for sort and scan.

They rest on CUB, whose scratch was measured on a virtual device and is approximate: tiles depend on the card.
"""

from __future__ import annotations

from memcallback.cuda_kernels_plan import Call, Rule, Steps, dense_bytes, round_up
from memcallback.kernels import Kernel

#: Values in a tile of `DeviceRadixSort` (onesweep) from compute capability 9.0, 8.0, and below, by the bytes of a key with values of
#: 8 bytes; `narrow`: both of 4.
_SORT_TILES: dict[int, dict[int | str, int]] = {
    9: {1: 5632, 2: 5632, 4: 5376, 8: 4608, "narrow": 5376},
    8: {1: 3072, 2: 3072, 4: 3072, 8: 3840, "narrow": 6144},
    7: {1: 2816, 2: 2816, 4: 2816, 8: 2816, "narrow": 8448},
}
#: Values in a tile of `DeviceScan` by bytes of a value.
_SCAN_TILES = {1: 7680, 2: 3840, 4: 1920, 8: 896}


def radix_sort_bytes(major: int, key_bytes: int, value_bytes: int, bits: int, count: int) -> int:
    """Scratch of CUB's `DeviceRadixSort::SortPairs`: second buffers of keys and values, digit counts, look-back of 1 KiB a tile.

    Args:
        major: Of the compute capability.
        key_bytes: Of a key.
        value_bytes: Of a value.
        bits: How many bits of a key are looked at, 8 in a pass; a single pass needs no second buffers.
        count: How many pairs; few of them are sorted by one block without scratch.
    """
    if count <= 256 * max(1, min(19, 76 // max(key_bytes, value_bytes))):
        return 1 if count else 0
    tiles_of = _SORT_TILES[min(max(major, 7), 9)]
    tile = tiles_of["narrow"] if key_bytes == value_bytes == 4 else tiles_of[key_bytes]
    tiles, passes = -(-count // tile), -(-bits // 8)
    buffers = round_up(count * key_bytes, 256) + round_up(count * value_bytes, 256) if passes > 1 else 0
    return buffers + passes * 2048 + tiles * 1024 + 256 + 255


def scan_bytes(value_bytes: int, count: int) -> int:
    """Scratch of CUB's `DeviceScan`: the state of each tile and of 32 more; one word of 2 x 4 or 2 x 8 bytes, three arrays for halves."""
    states = -(-count // _SCAN_TILES.get(value_bytes, 448)) + 32
    if value_bytes == 2:
        return round_up(states * 4, 256) + 2 * round_up(states * 2, 256) + 511
    return round_up(states * (16 if value_bytes == 8 else 8), 256) + 511


def take_sort(steps: Steps, major: int, key_bytes: int, value_bytes: int, count: int, bits: int | None = None) -> int:
    """Take the scratch of a radix sort, of so many bits of the keys or of all; the number to give it back by."""
    constants = (major, key_bytes, value_bytes, 8 * key_bytes if bits is None else bits)
    return steps.take(radix_sort_bytes(*constants, count))


def segmented_sort_bytes(key_bytes: int, count: int) -> int:
    """What CUB's segmented sort takes: keys and positions once more."""
    return round_up(count * key_bytes, 256) + round_up(count * 8, 256) + 255


def _sort(call: Call) -> Kernel:
    """`sort_stable_kernel` (Sort.cu): rows of up to 4,096 values by one block each, longer ones by CUB."""
    x, only_indices = call.args[0], call.name == "argsort"
    dim = next(a for a in call.args[1:] if isinstance(a, int) and not isinstance(a, bool))
    length = x.shape[dim] if x.ndim else 1
    rows = x.numel() // max(length, 1)
    steps = Steps()
    values = steps.take(dense_bytes(x)) if only_indices else None
    steps.make(*range(len(call.outputs)))
    if length <= 4096:
        steps.give(steps.take(length * 8), values)
        return steps.kernel
    numbers = steps.take(dense_bytes(x) // x.element_size() * 8)
    if rows == 1 or (rows <= 128 and length >= 1_000_000):
        scratch = take_sort(steps, call.device.compute_capability[0], x.element_size(), 8, length)
    else:
        scratch = steps.take(segmented_sort_bytes(x.element_size(), x.numel()))
    steps.give(scratch, numbers, values)
    return steps.kernel


def _scan(call: Call) -> Kernel:
    """`cumsum_cuda_kernel` and its like (ScanKernels.cpp): another type or layout is copied; a single row is scanned by CUB."""
    x, dim, output = call.args[0], call.args[1], call.outputs[0]
    steps = Steps()
    steps.make(0)
    copy = steps.take(x.numel() * output.element_size()) if x.dtype != output.dtype or not x.is_contiguous() else None
    if x.ndim and x.numel() == x.shape[dim]:
        steps.give(steps.take(scan_bytes(output.element_size(), x.numel())))
    steps.give(copy)
    return steps.kernel


RULES: dict[str, Rule] = {"sort": _sort, "argsort": _sort, "cumsum": _scan, "cumprod": _scan, "logcumsumexp": _scan}
