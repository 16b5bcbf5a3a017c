"""The workspace of a convolution: cuDNN's own answer, or an estimate where none is installed."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from memcallback import cudnn
from memcallback.convolution_layout import ITEM_BYTES
from memcallback.cudnn import Convolution, Direction
from memcallback.devices import DeviceSpec


def workspace_or_estimate_bytes(convolution: Convolution, input_shape: Sequence[int], device: DeviceSpec) -> int:
    """The workspace of a convolution in bytes: cuDNN's answer, or the estimate.

    Args:
        convolution: What is computed.
        input_shape: The shape of cuDNN's `x`, (batch, channels, *spatial).
        device: Where.
    """
    size_bytes = cudnn.workspace_bytes(convolution, input_shape, device)
    return estimated_workspace_bytes(convolution, input_shape, device) if size_bytes is None else size_bytes


def estimated_workspace_bytes(convolution: Convolution, input_shape: Sequence[int], device: DeviceSpec) -> int:
    """What a workspace may be where no cuDNN can tell.

    Tensor cores want channels last, so their kernels copy every tensor that lies otherwise, and the kernels without them copy
    those that do; a gradient of weights may be summed up in float32, twice. This is no upper bound: of the 1,969 answers of
    cuDNN 9.19 recorded in tests/recorded/convolutions (H200, A100 and T4, three dtypes, both layouts) 84 % are at most 1 MiB
    above the estimate, 99 % at most 25 MiB, the worst 128 MiB; the estimates together are 1.18 times the answers.

    Args:
        convolution: What is computed.
        input_shape: The shape of cuDNN's `x`, (batch, channels, *spatial).
        device: Where.
    """
    capability = device.compute_capability
    is_float32 = convolution.dtype == "float32"
    on_tensor_cores = convolution.dtype != "float64" and capability >= ((8, 0) if is_float32 else (7, 5))
    if is_float32 and not convolution.allow_tf32:
        on_tensor_cores = False
    num_weights = prod(convolution.weight_shape)
    num_elements = prod(input_shape) + prod(convolution.output_shape(input_shape)) + num_weights
    copies_bytes = num_elements * ITEM_BYTES[convolution.dtype]
    if convolution.channels_last:
        reads_as_is = on_tensor_cores and (not is_float32 or capability >= (9, 0))
        return 8 * num_weights if reads_as_is else copies_bytes
    if not on_tensor_cores:
        return 0
    return copies_bytes + (8 * num_weights if convolution.direction is Direction.BACKWARD_FILTER else 0)
