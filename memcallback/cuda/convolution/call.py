"""A convolution call: layouts, geometry, backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import torch

from memcallback.cuda.convolution import workspace as cudnn
from memcallback.cuda.convolution.layout import ITEM_BYTES, Layout
from memcallback.cuda.convolution.workspace import Convolution, Direction
from memcallback.devices.catalogue import DeviceSpec

_INT_MAX = 2**31 - 1


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
        input: As it was given.
        weight: A 1d one is seen as 2d, (O, I, 1, K).
        gradient: Of the output; a 1d one is seen as 2d. Forward, the input stands for it.
        padding: For each spatial dimension, at least two of them, as `stride` and `dilation`.
        stride: See `padding`.
        dilation: See `padding`.
        output_padding: See `padding`; of a transposed convolution.
        transposed: Whether it is one.
        groups: The number of groups.
        is_backward: Whether it is `aten.convolution_backward`.
        is_1d: Whether it has one spatial dimension.
        has_bias: Whether a bias is added, or its gradient asked for.
        mask: Backward, which gradients are asked for: input, weight, bias.
        enabled: Whether cuDNN is to be used.
        deterministic: Whether only deterministic algorithms are.
        allow_tf32: Whether float32 may be computed in TF32.
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
    enabled: bool
    deterministic: bool
    allow_tf32: bool

    @classmethod
    def of(cls, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ConvolutionCall | None:
        """The call, or None if the operator is no convolution or its dtype none that CUDA
        convolves.
        """
        aten = torch.ops.aten
        if op not in (
            aten.convolution.default,
            aten._convolution.default,
            aten.convolution_backward.default,
        ):
            return None
        given = {
            argument.name: value
            for argument, value in zip(op._schema.arguments, args, strict=False)
        } | dict(kwargs)
        input_, weight = _layout(given["input"]), _layout(given["weight"])
        if input_.dtype not in ITEM_BYTES or weight.dtype not in ITEM_BYTES:
            return None
        gradient = _layout(given["grad_output"]) if "grad_output" in given else input_
        dimensions = len(weight.shape) - 2
        is_1d = dimensions == 1

        def expanded(name: str, first: int) -> tuple[int, ...]:
            values = tuple(int(value) for value in given[name])
            values = values * dimensions if len(values) == 1 else values
            return (first, *values) if is_1d else values

        return cls(
            input=input_,
            weight=weight.unsqueezed() if is_1d else weight,
            gradient=gradient.unsqueezed() if is_1d else gradient,
            padding=expanded("padding", 0),
            stride=expanded("stride", 1),
            dilation=expanded("dilation", 1),
            output_padding=expanded("output_padding", 0),
            transposed=bool(given["transposed"]),
            groups=int(given["groups"]),
            is_backward="grad_output" in given,
            is_1d=is_1d,
            has_bias=given.get("bias") is not None or bool(given.get("output_mask", (False,))[-1]),
            mask=tuple(given.get("output_mask", (True, False, False))),
            enabled=given.get("cudnn_enabled", torch.backends.cudnn.enabled),
            deterministic=given.get(
                "deterministic",
                torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
            ),
            allow_tf32=given.get("allow_tf32", _allow_tf32()),
        )

    @property
    def is_3d(self) -> bool:
        """Whether it has three spatial dimensions."""
        return len(self.stride) == 3

    @property
    def view(self) -> Layout:
        """The input as the backend sees it; that of a 1d convolution has been made contiguous."""
        return (
            Layout.dense(self.input.shape, self.input.dtype).unsqueezed()
            if self.is_1d
            else self.input
        )

    @property
    def x_shape(self) -> tuple[int, ...]:
        """The shape of the wide end, cuDNN's `x`: the input, or the output of a transposed
        convolution (`conv_input_size`).
        """
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
        """The shape of the narrow end, cuDNN's `y`: the output, or the input of a transposed
        convolution.
        """
        return (
            self.view.shape
            if self.transposed
            else self.problem(Direction.FORWARD, False).output_shape(self.x_shape)
        )

    def problem(self, direction: Direction, channels_last: bool) -> Convolution:
        """What cuDNN is asked for."""
        return Convolution(
            direction=direction,
            weight_shape=self.weight.shape,
            padding=self.padding,
            stride=self.stride,
            dilation=self.dilation,
            dtype=self.input.dtype,
            channels_last=channels_last,
            allow_tf32=self.allow_tf32,
            deterministic=self.deterministic,
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
            return Backend.CUDNN if self._cudnn_does_depthwise(device) else Backend.DEPTHWISE
        return Backend.CUDNN if self._cudnn_does(device) else Backend.SLOW

    def _cudnn_does(self, device: DeviceSpec) -> bool:
        """`ConvParams::use_cudnn`."""
        version = cudnn.version()
        if not self.enabled:
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

    def _cudnn_does_depthwise(self, device: DeviceSpec) -> bool:
        """`ConvParams::use_cudnn_depthwise`: channels last always, else some float16."""
        if not self.enabled:
            return False
        if prod(self.view.shape) > _INT_MAX:
            return not self.suggests_channels_last or (cudnn.version() or 0) <= 91000
        if self.suggests_channels_last:
            return True
        half = self.input.dtype == self.weight.dtype == "float16"
        plain = (
            not self.is_3d
            and set(self.dilation) == {1}
            and (self.stride[0] == self.stride[1] or self.view.shape[2] == 1)
        )
        return (
            self._cudnn_does(device)
            and half
            and plain
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


def _layout(tensor: torch.Tensor) -> Layout:
    return Layout(
        tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch.")
    )


def _allow_tf32() -> bool:
    """`allowTF32CuDNN(Float32Op::CONV)` in ATen/Context.cpp."""
    precision = getattr(getattr(torch.backends.cudnn, "conv", None), "fp32_precision", None)
    if precision is not None:
        return bool(precision == "tf32")
    return bool(torch.backends.cudnn.allow_tf32)
