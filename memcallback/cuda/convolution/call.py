"""A convolution call as data: memory layouts, geometry, the problem for cuDNN, the backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import NamedTuple

import torch

from memcallback.cuda.convolution import cudnn
from memcallback.cuda.op_call import OpCall
from memcallback.devices.catalogue import DeviceSpec

#: Bytes per element, by the dtype's name in torch.
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_INT_MAX = 2**31 - 1


@dataclass(frozen=True)
class Layout:
    """A tensor without its data.

    Attributes:
        shape: (batch, channels, *spatial), or a weight's.
        strides: In elements.
        dtype: Its name in torch, such as float32.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """The layout of a tensor."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(tuple(tensor.shape), tuple(tensor.stride()), dtype)

    @classmethod
    def dense(cls, shape: Sequence[int], dtype: str, *, channels_last: bool = False) -> Layout:
        """The layout of `torch.empty(shape, memory_format=...)`."""
        strides, step = [0] * len(shape), 1
        for dimension in _order(len(shape), channels_last):
            strides[dimension] = step
            step *= max(shape[dimension], 1)
        return cls(tuple(shape), tuple(strides), dtype)

    @property
    def size_bytes(self) -> int:
        """Size of a contiguous copy."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def is_contiguous(self, *, channels_last: bool) -> bool:
        """`Tensor.is_contiguous(memory_format=...)`, which ignores dimensions of size 1."""
        if prod(self.shape) == 0 and not channels_last:
            return True
        step = 1
        for dimension in _order(len(self.shape), channels_last):
            if self.shape[dimension] != 1:
                if self.strides[dimension] != step:
                    return False
                step *= self.shape[dimension]
        return True

    @property
    def is_channels_last(self) -> bool:
        """`is_channels_last_strides_2d_s4` and `_3d_s5` in c10/core/MemoryFormat.h."""
        if len(self.shape) not in (4, 5) or self.strides[1] == 0:
            return False
        least = 0
        for dimension in _order(len(self.shape), True):
            size, stride = self.shape[dimension], self.strides[dimension]
            if size == 0 or stride < least or (dimension == 0 and least == self.strides[1]):
                return False
            least = stride * max(size, 1)
        return True

    def unsqueezed(self) -> Layout:
        """View (N, C, L) as (N, C, 1, L): `Tensor.unsqueeze(2)`."""
        step = self.shape[2] * self.strides[2]
        return Layout(
            (*self.shape[:2], 1, self.shape[2]),
            (*self.strides[:2], step, self.strides[2]),
            self.dtype,
        )

    def squeezed(self) -> Layout:
        """View (N, C, 1, L) as (N, C, L)."""
        return Layout(
            (*self.shape[:2], *self.shape[3:]), (*self.strides[:2], *self.strides[3:]), self.dtype
        )


def _order(num_dims: int, channels_last: bool) -> list[int]:
    """Dimensions from the fastest to the slowest."""
    backwards = list(range(num_dims - 1, -1, -1))
    return [1, *backwards[:-2], 0] if channels_last else backwards


class Direction(Enum):
    """What cuDNN computes; the value is cuDNN's number of the operation."""

    FORWARD = 10
    BACKWARD_FILTER = 11
    BACKWARD_DATA = 12


@dataclass(frozen=True)
class Convolution:
    """A problem for cuDNN: a convolution without the shape of its input.

    Names are those of the forward direction. Backward, `x` is the input or its gradient, and `w`
    the weight or its gradient. A transposed convolution is the backward of data. The number of
    groups follows from the channels of `x` and `w`.

    Attributes:
        direction: What is computed.
        weight_shape: (output channels, input channels per group, *kernel).
        padding: On both sides, one number for every spatial dimension.
        stride: Like `padding`.
        dilation: Like `padding`.
        dtype: Its name in torch: float32, float64, float16 or bfloat16.
        channels_last: Whether tensors are laid out as (N, *spatial, C), else (N, C, *spatial).
        allow_tf32: As `torch.backends.cudnn.allow_tf32`, which is True by default.
        deterministic: As `torch.backends.cudnn.deterministic`.
    """

    direction: Direction
    weight_shape: tuple[int, ...]
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    dtype: str = "float32"
    channels_last: bool = False
    allow_tf32: bool = True
    deterministic: bool = False

    def output_shape(self, input_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of `y`: `conv_output_size` in ATen/native/ConvUtils.h."""
        geometry = zip(
            input_shape[2:],
            self.weight_shape[2:],
            self.padding,
            self.stride,
            self.dilation,
            strict=True,
        )
        spatial = (
            (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, pad, stride, dilation in geometry
        )
        return (input_shape[0], self.weight_shape[0], *spatial)


class CudnnFlags(NamedTuple):
    """The flags of `torch.backends.cudnn` that a convolution depends on."""

    enabled: bool
    deterministic: bool
    allow_tf32: bool

    @classmethod
    def now(cls) -> CudnnFlags:
        """The flags as they are set now; TF32 as `allowTF32CuDNN` in ATen/Context.cpp."""
        flags = torch.backends.cudnn
        precision = getattr(getattr(flags, "conv", None), "fp32_precision", None)
        return cls(
            enabled=flags.enabled,
            deterministic=flags.deterministic or torch.are_deterministic_algorithms_enabled(),
            allow_tf32=flags.allow_tf32 if precision is None else precision == "tf32",
        )


class Backend(Enum):
    """Which code computes a convolution on CUDA."""

    CUDNN = "cudnn"
    DEPTHWISE = "depthwise"
    EMPTY = "empty"
    SLOW = "slow"


@dataclass(frozen=True)
class ConvolutionCall:
    """One call of `aten.convolution`, `aten._convolution` or `aten.convolution_backward`.

    Attributes:
        input: The input as it was passed.
        weight: The weight; a 1d weight is viewed as 2d, (O, I, 1, K).
        gradient: The output's gradient, viewed like the weight; in the forward pass, the input.
        padding: One number for each spatial dimension, at least two of them.
        stride: Like `padding`.
        dilation: Like `padding`.
        output_padding: Like `padding`; of a transposed convolution.
        transposed: Whether it is transposed.
        groups: The number of groups.
        is_backward: Whether it is `aten.convolution_backward`.
        is_1d: Whether it has one spatial dimension.
        has_bias: Whether it adds a bias, or returns the gradient of one.
        mask: Backward, which gradients are returned: input, weight, bias.
        flags: The flags of cuDNN.
    """

    input: Layout
    weight: Layout
    gradient: Layout
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    transposed: bool
    groups: int
    is_backward: bool
    is_1d: bool
    has_bias: bool
    mask: tuple[bool, bool, bool]
    flags: CudnnFlags

    @classmethod
    def of(cls, call: OpCall) -> ConvolutionCall | None:
        """Read an operator's call; None for dtypes that CUDA does not convolve."""
        args = call.by_name
        input_, weight = Layout.of(args["input"]), Layout.of(args["weight"])
        if input_.dtype not in ITEM_BYTES or weight.dtype not in ITEM_BYTES:
            return None
        is_backward = "grad_output" in args
        gradient = Layout.of(args["grad_output"]) if is_backward else input_
        num_dims = len(weight.shape) - 2
        is_1d = num_dims == 1

        def expanded(name: str, first: int) -> tuple[int, ...]:
            values = tuple(int(value) for value in args[name])
            values = values * num_dims if len(values) == 1 else values
            return (first, *values) if is_1d else values

        flags = call.flags if isinstance(call.flags, CudnnFlags) else CudnnFlags.now()
        mask = args.get("output_mask", (True, False, False))
        return cls(
            input=input_,
            weight=weight.unsqueezed() if is_1d else weight,
            gradient=gradient.unsqueezed() if is_1d else gradient,
            padding=expanded("padding", 0),
            stride=expanded("stride", 1),
            dilation=expanded("dilation", 1),
            output_padding=expanded("output_padding", 0),
            transposed=bool(args["transposed"]),
            groups=int(args["groups"]),
            is_backward=is_backward,
            is_1d=is_1d,
            has_bias=bool(mask[-1]) if is_backward else args["bias"] is not None,
            mask=tuple(mask),
            flags=CudnnFlags(
                enabled=args.get("cudnn_enabled", flags.enabled),
                deterministic=args.get("deterministic", flags.deterministic),
                allow_tf32=args.get("allow_tf32", flags.allow_tf32),
            ),
        )

    @property
    def is_3d(self) -> bool:
        """Whether it has three spatial dimensions."""
        return len(self.stride) == 3

    @property
    def view(self) -> Layout:
        """The input as the backend sees it; a 1d input has been made contiguous."""
        return (
            Layout.dense(self.input.shape, self.input.dtype).unsqueezed()
            if self.is_1d
            else self.input
        )

    @property
    def x_shape(self) -> tuple[int, ...]:
        """The shape of cuDNN's `x`: the input, or the output if transposed (`conv_input_size`)."""
        view = self.view.shape
        if not self.transposed:
            return view
        geometry = zip(
            view[2:],
            self.weight.shape[2:],
            self.padding,
            self.output_padding,
            self.stride,
            self.dilation,
            strict=True,
        )
        spatial = (
            (size - 1) * stride - 2 * pad + dilation * (kernel - 1) + 1 + extra
            for size, kernel, pad, extra, stride, dilation in geometry
        )
        return (view[0], self.weight.shape[1] * self.groups, *spatial)

    @property
    def y_shape(self) -> tuple[int, ...]:
        """The shape of cuDNN's `y`: the output, or the input if transposed."""
        return (
            self.view.shape
            if self.transposed
            else self.problem(Direction.FORWARD, False).output_shape(self.x_shape)
        )

    def problem(self, direction: Direction, channels_last: bool) -> Convolution:
        """The problem for cuDNN."""
        return Convolution(
            direction=direction,
            weight_shape=self.weight.shape,
            padding=self.padding,
            stride=self.stride,
            dilation=self.dilation,
            dtype=self.input.dtype,
            channels_last=channels_last,
            allow_tf32=self.flags.allow_tf32,
            deterministic=self.flags.deterministic,
        )

    @property
    def suggests_channels_last(self) -> bool:
        """`cudnn_conv_suggest_memory_format` in ATen/native/ConvUtils.h, of input and weight."""
        if "float64" in (self.input.dtype, self.weight.dtype):
            return False
        return self.view.is_channels_last or self.weight.is_channels_last

    def backend(self, device: DeviceSpec) -> Backend:
        """`_select_conv_backend` in ATen/native/Convolution.cpp."""
        if 0 in self.view.shape[:2]:
            return Backend.EMPTY
        if (
            not self.transposed
            and 1 < self.groups == self.view.shape[1]
            and self.weight.shape[0] % self.groups == 0
        ):
            return Backend.CUDNN if self._uses_cudnn_depthwise(device) else Backend.DEPTHWISE
        return Backend.CUDNN if self._uses_cudnn(device) else Backend.SLOW

    def _uses_cudnn(self, device: DeviceSpec) -> bool:
        """`ConvParams::use_cudnn`."""
        version = cudnn.version()
        if not self.flags.enabled:
            return False
        if (
            version is not None
            and version < 91500
            and self.is_3d
            and not self.suggests_channels_last
            and "float16" in self.input.dtype
        ):
            return set(self.weight.shape[2:]) == {1} and not self._pads_output_much()
        if "bfloat16" in (self.input.dtype, self.weight.dtype) and device.compute_capability[0] < 8:
            return False
        return not self._pads_output_much()

    def _pads_output_much(self) -> bool:
        return any(
            extra >= stride for extra, stride in zip(self.output_padding, self.stride, strict=True)
        )

    def _uses_cudnn_depthwise(self, device: DeviceSpec) -> bool:
        """`ConvParams::use_cudnn_depthwise`: always for channels last, else for some float16."""
        if not self.flags.enabled:
            return False
        if prod(self.view.shape) > _INT_MAX:
            return not self.suggests_channels_last or (cudnn.version() or 0) <= 91000
        if self.suggests_channels_last:
            return True
        is_half = self.input.dtype == self.weight.dtype == "float16"
        is_plain = (
            not self.is_3d
            and set(self.dilation) == {1}
            and (self.stride[0] == self.stride[1] or self.view.shape[2] == 1)
        )
        return (
            self._uses_cudnn(device)
            and is_half
            and is_plain
            and self.view.shape[1] >= 32
            and self._is_work_for_cudnn()
        )

    def _is_work_for_cudnn(self) -> bool:
        """`check_cudnn_depthwise_workload_with_filter`."""
        batch, channels, height, width = self.view.shape
        stride, kernel = self.stride[1], self.weight.shape[3]
        if height == 1 and stride == 1:
            return True
        if (
            self.weight.shape[2] != kernel
            or kernel not in (1, 3, 5)
            or width < 7
            or stride not in (1, 2)
        ):
            return False
        if stride == 1:
            return True
        if kernel == 1:
            return width <= 28 if batch == 1 else batch <= 16 and channels >= 128 and width <= 7
        return batch == 1 or channels >= 512 or (channels >= 256 and width >= 28)
