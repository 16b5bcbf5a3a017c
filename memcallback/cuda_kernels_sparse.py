"""The rule for sparse tensors: elements of equal indices are summed. What thrust takes was measured on a virtual device."""

from __future__ import annotations

from memcallback.cuda_kernels_plan import Call, Rule, Steps, round_up
from memcallback.kernels import Kernel
from memcallback.tensor_parts import dense_parts

#: Values in a tile of `DeviceMergeSort` with keys of 8 bytes.
_MERGE_TILE = 2048
#: Values in a tile of `DeviceSelect::UniqueByKey` with keys and values of 8 bytes, from compute capability 9.0, 8.0, and below.
_UNIQUE_TILES = {9: 9856, 8: 2688, 7: 640}


def _coalesce(call: Call) -> Kernel:
    """`_coalesce_sparse_cuda` (SparseCUDATensor.cu): flat indices are sorted with their positions; a single row of them becomes the output."""
    indices, values = dense_parts(call.args[0])
    num_rows, count = indices.shape
    steps = Steps()
    if count < 2:
        steps.make(1, 0)
        return steps.kernel
    flat = steps.take(count * 8) if num_rows > 1 else None
    if flat is None:
        steps.make(0)
    positions, offsets = steps.take(count * 8), steps.take(count * 8)
    partitions = (-(-count // _MERGE_TILE) + 1) * 4
    steps.give(steps.take(2 * round_up(count * 8, 256) + round_up(partitions, 256) + 255))
    states = (-(-count // _UNIQUE_TILES[min(max(call.device.compute_capability[0], 7), 9)]) + 32) * 16
    steps.give(steps.take(round_up(states, 256) + 512 + 255))
    steps.make(1)
    copy = steps.take_copy(values)
    if flat is not None:
        steps.make(0)
    steps.give(offsets, positions, flat, copy)
    return steps.kernel


RULES: dict[str, Rule] = {"_coalesce": _coalesce}
