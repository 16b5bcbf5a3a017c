"""Plans that cuDNN offers only where it finds a CUDA device, by rules.

We asked cuDNN 9.19 for its first plan of 2,535 convolutions, for nine cards, on a machine with an
H200 and on one without a device (`tests/recorded/plans`, 2026-11-27). Most answers that differ are
of two kinds: products of matrices by cuBLASLt for convolutions of one pixel, and depthwise
convolutions. With these rules and those of stream_k.py 836 answers are more than 1 MiB too low and
265 too high; without any 724 and 2,534 (`tests/cuda/test_convolution_plans.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from memcallback.cuda.convolution.call import ITEM_BYTES, Convolution, Direction
from memcallback.cuda.convolution.stream_k import HOPPER
from memcallback.devices.catalogue import DeviceSpec

_FLOAT32_BYTES = 4
_FEW_CHANNELS = 32
_SMALL_KERNEL, _MANY_PIXELS = 25, 48
#: For a depthwise weight gradient in channels last cuDNN keeps this many partial sums for each
#: sample, with the channels rounded up to a multiple of the second number.
_PARTIAL_SUMS, _CHANNEL_GROUP = 8, 32


def workspace_that_needs_device_bytes(
    convolution: Convolution, input_shape: Sequence[int], device: DeviceSpec
) -> int | None:
    """The workspace of the first plan, if cuDNN offers it only where there is a device; else None.

    `tests/cuda/test_convolution_plans.py` says how often the rules are right.
    """
    if 0 in input_shape or not _was_asked(convolution, device):
        return None
    groups = input_shape[1] // convolution.weight_shape[1]
    if _is_pointwise(convolution) and groups == 1:
        return _pointwise_bytes(convolution, input_shape, device)
    if groups > 1 and convolution.weight_shape[:2] == (input_shape[1], 1):
        return _depthwise_bytes(convolution, input_shape, device)
    return None


def _was_asked(convolution: Convolution, device: DeviceSpec) -> bool:
    """Whether the rules were found with such flags and dtypes."""
    if convolution.deterministic or (convolution.dtype == "float32" and not convolution.allow_tf32):
        return False
    return convolution.dtype in ("float32", "float16") or (
        convolution.dtype == "bfloat16" and device.compute_capability >= (8, 0)
    )


def _is_pointwise(convolution: Convolution) -> bool:
    """Whether it reads one pixel for each that it writes: a product of matrices."""
    return (
        prod(convolution.weight_shape[2:]) == 1
        and set(convolution.stride) == {1}
        and not any(convolution.padding)
    )


def _pointwise_bytes(
    convolution: Convolution, input_shape: Sequence[int], device: DeviceSpec
) -> int | None:
    """Forward and input gradient take none; the weight gradient keeps one sum for each sample.

    In channels last the weight gradient is one product for all samples. cuBLASLt may split it;
    its workspace is not known.
    """
    if convolution.direction is not Direction.BACKWARD_FILTER:
        return 0
    if convolution.channels_last:
        return None
    out_channels, in_channels = convolution.weight_shape[:2]
    sums_bytes = _FLOAT32_BYTES * out_channels * in_channels
    sample_bytes = (
        ITEM_BYTES[convolution.dtype] * prod(input_shape[2:]) * (out_channels + in_channels)
    )
    # Beyond these limits cuDNN prefers a plan that needs less, or reads few channels in float32
    # with one that needs far more.
    is_first = (
        sums_bytes <= sample_bytes
        and device.compute_capability >= (7, 5)
        and (convolution.dtype != "float32" or in_channels > _FEW_CHANNELS)
    )
    return input_shape[0] * sums_bytes if is_first else None


def _depthwise_bytes(
    convolution: Convolution, input_shape: Sequence[int], device: DeviceSpec
) -> int | None:
    if len(input_shape) != 4:
        return None
    is_half = convolution.dtype != "float32"
    if convolution.direction is Direction.FORWARD:
        return 0
    if convolution.direction is Direction.BACKWARD_DATA:
        is_offered = convolution.channels_last or (is_half and set(convolution.stride) == {1})
        return 0 if is_offered else None
    if not is_half:
        return None
    if not convolution.channels_last:
        return None if _is_copied(convolution, input_shape, device) else 0
    if device.compute_capability < (7, 5):
        return 0
    channels = -(-input_shape[1] // _CHANNEL_GROUP) * _CHANNEL_GROUP
    sums_bytes = _FLOAT32_BYTES * channels * prod(convolution.weight_shape[2:])
    return _PARTIAL_SUMS * input_shape[0] * sums_bytes


def _is_copied(convolution: Convolution, input_shape: Sequence[int], device: DeviceSpec) -> bool:
    """Whether Hopper copies the tensors of a depthwise weight gradient into channels last.

    Of 24 convolutions in float16 for which cuDNN names such a plan without a device, an H200 copied
    in 9, with 64 pixels or more for each channel; the other 15 had 33 at most.
    """
    outputs = convolution.output_shape(input_shape)
    pixels = outputs[0] * prod(outputs[2:])
    return (
        device.compute_capability == HOPPER
        and convolution.dtype == "float16"
        and set(convolution.stride) == {1}
        and prod(convolution.weight_shape[2:]) <= _SMALL_KERNEL
        and pixels > _MANY_PIXELS * input_shape[1]
    )
