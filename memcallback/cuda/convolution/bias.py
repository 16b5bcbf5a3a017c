"""Scratch of the bias gradient."""

from __future__ import annotations

from dataclasses import dataclass

from memcallback.core.units import round_down_to_power_of_2
from memcallback.cuda.convolution.layout import ITEM_BYTES, Layout
from memcallback.devices.catalogue import DeviceSpec

_WARP, _MAX_THREADS = 32, 512
_MIN_VALUES, _MAX_VALUES = 16, 256


@dataclass
class _Dimension:
    size: int
    stride: int
    reduced: bool


def bias_gradient_scratch(gradient: Layout, device: DeviceSpec) -> tuple[int, ...]:
    """The scratch of `gradient.sum((0, 2, 3, ...))`, in bytes, in the order in which it is taken.

    A reduction whose outputs are too few to fill the device is split over thread blocks; these meet
    in a buffer and a semaphore each: `setReduceConfig` and `gpu_reduce_kernel` in
    ATen/native/cuda/Reduce.cuh. Sums of more than 2^31 elements, which PyTorch splits, are taken
    for one.
    """
    dimensions = _coalesced(gradient)
    reduced = [one for one in dimensions if one.reduced]
    kept = [one for one in dimensions if not one.reduced]
    num_inputs = _product(reduced)
    num_outputs = _product(kept)
    if num_inputs * num_outputs == 0:
        return ()
    sum_bytes = 8 if gradient.dtype == "float64" else 4

    along_input = not kept or (bool(reduced) and reduced[0].stride < kept[0].stride)
    width, height, vector = (
        (num_inputs, num_outputs, 1) if along_input else (num_outputs, num_inputs, 1)
    )
    fastest = (reduced if along_input else kept)[0]
    if fastest.stride == 1 and along_input and width >= 128 and len(reduced) == 1:
        width //= 4 if ITEM_BYTES[gradient.dtype] > 2 else 8
    elif fastest.stride == 1 and not along_input:
        vector = _output_vector(dimensions, kept[0])
        width //= vector
    block_width, block_height = _block(width, height, _MAX_THREADS // vector)
    step_input = block_width if along_input else 1
    step_output = 1 if along_input else block_width

    if -(-num_inputs // step_input) < min(block_height * 16, _MAX_VALUES):
        return ()
    step_input *= block_height
    values = -(-num_inputs // step_input)
    target = device.num_multiprocessors * (
        device.max_threads_per_multiprocessor // (block_width * block_height)
    )
    grid = -(-(num_outputs // vector) // step_output)
    if values < _MAX_VALUES or grid > target:
        return ()
    blocks = max(min(-(-target // grid), -(-values // _MIN_VALUES)), -(-values // _MAX_VALUES))
    if blocks <= 1:
        return ()
    buffer = sum_bytes * num_outputs * blocks * (1 if along_input else block_width * vector)
    return (buffer, 4 * grid)


def _coalesced(gradient: Layout) -> list[_Dimension]:
    """The dimensions as `TensorIterator` has them: reduced ones first, fastest first, neighbours
    that are one run joined.
    """
    dimensions = [
        _Dimension(size, stride, d != 1)
        for d, (size, stride) in enumerate(zip(gradient.shape, gradient.strides, strict=True))
    ]
    dimensions.reverse()
    dimensions.sort(key=lambda one: (not one.reduced, one.stride))
    joined = dimensions[:1]
    for one in dimensions[1:]:
        last = joined[-1]
        if last.size == 1:
            joined[-1] = one
        elif one.size == 1:
            continue
        elif last.reduced == one.reduced and last.size * last.stride == one.stride:
            last.size *= one.size
        else:
            joined.append(one)
    return joined


def _product(dimensions: list[_Dimension]) -> int:
    result = 1
    for one in dimensions:
        result *= one.size
    return result


def _output_vector(dimensions: list[_Dimension], fastest: _Dimension) -> int:
    """`get_output_vec_size`: how many outputs one load can serve."""
    vector = 4
    for number in (fastest.size, *(one.stride for one in dimensions if one is not fastest)):
        while number % vector:
            vector //= 2
    return vector


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """`ReduceConfig::set_block_dimension`."""
    width, height = (
        round_down_to_power_of_2(min(width, most)),
        round_down_to_power_of_2(min(height, most)),
    )
    block_height = min(height, most // min(width, _WARP))
    return min(width, most // block_height), block_height
