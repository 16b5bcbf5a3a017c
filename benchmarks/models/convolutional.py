"""Convolutional networks: for images, for volumes, for sound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.common import ChannelsFirstLayerNorm, Residual, Stack

Norm = Callable[[int], nn.Module]


def batch_norm(num_channels: int) -> nn.Module:
    """BatchNorm2d."""
    return nn.BatchNorm2d(num_channels)


def group_norm(num_channels: int) -> nn.Module:
    """GroupNorm of 32 groups."""
    return nn.GroupNorm(32, num_channels)


def vgg(
    depths: Sequence[int] = (2, 2, 3, 3, 3), *, num_classes: int = 1000, num_hidden: int = 4096
) -> nn.Sequential:
    """VGG16 (arXiv 1409.1556) without batch norm; dropout in the classifier."""
    layers: list[nn.Module] = []
    num_in = 3
    for stage, depth in enumerate(depths):
        num_out = min(64 * 2**stage, 512)
        for _ in range(depth):
            layers += [nn.Conv2d(num_in, num_out, 3, padding=1), nn.ReLU(inplace=True)]
            num_in = num_out
        layers.append(nn.MaxPool2d(2))
    layers += [
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(num_in * 49, num_hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(),
    ]
    layers += [
        nn.Linear(num_hidden, num_hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(num_hidden, num_classes),
    ]
    return nn.Sequential(*layers)


class ResNetBlock(nn.Module):
    """A block of arXiv 1512.03385: two 3x3 convolutions, or 1x1, 3x3, 1x1.

    Args:
        num_in: Channels of the input.
        num_mid: Channels inside.
        stride: Of the 3x3 convolution that comes first.
        is_bottleneck: Which of the two.
        norm: The normalisation.
    """

    def __init__(
        self, num_in: int, num_mid: int, *, stride: int, is_bottleneck: bool, norm: Norm
    ) -> None:
        super().__init__()
        num_out = num_mid * 4 if is_bottleneck else num_mid
        if is_bottleneck:
            convolutions = [
                (num_in, num_mid, 1, 1),
                (num_mid, num_mid, 3, stride),
                (num_mid, num_out, 1, 1),
            ]
        else:
            convolutions = [(num_in, num_mid, 3, stride), (num_mid, num_mid, 3, 1)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(i, o, k, s, padding=k // 2, bias=False) for i, o, k, s in convolutions
        )
        self.norms = nn.ModuleList(norm(o) for _, o, _, _ in convolutions)
        self.shortcut: nn.Module | None = None
        if stride > 1 or num_in != num_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride, bias=False), norm(num_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Run."""
        y = x
        for number, (convolution, norm) in enumerate(
            zip(self.convolutions, self.norms, strict=True)
        ):
            y = F.relu(y, inplace=True) if number else y
            y = norm(convolution(y))
        y += x if self.shortcut is None else self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    """ResNet-18, -34 (basic blocks), -50, -101 (bottlenecks).

    Args:
        depths: Blocks in each stage.
        is_bottleneck: Which blocks.
        norm: The normalisation.
        num_classes: Outputs.
    """

    def __init__(
        self,
        depths: Sequence[int],
        *,
        is_bottleneck: bool,
        norm: Norm = batch_norm,
        num_classes: int = 1000,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
            norm(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        blocks: list[nn.Module] = []
        num_in = 64
        for stage, depth in enumerate(depths):
            num_mid = 64 * 2**stage
            for number in range(depth):
                stride = 2 if stage > 0 and number == 0 else 1
                blocks.append(
                    ResNetBlock(
                        num_in, num_mid, stride=stride, is_bottleneck=is_bottleneck, norm=norm
                    )
                )
                num_in = num_mid * 4 if is_bottleneck else num_mid
        self.blocks = Stack(blocks)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run."""
        y: Tensor = self.head(self.blocks(self.stem(x)))
        return y


def _conv_norm(
    num_in: int, num_out: int, kernel_size: int, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    convolution = nn.Conv2d(
        num_in, num_out, kernel_size, stride, padding=kernel_size // 2, groups=groups, bias=False
    )
    return [convolution, nn.BatchNorm2d(num_out)]


class SqueezeExcite(nn.Module):
    """Channels scaled by what a small network makes of their means.

    Args:
        num_channels: Channels.
    """

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.scale = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(num_channels, num_channels // 4, 1),
            nn.SiLU(inplace=True), nn.Conv2d(num_channels // 4, num_channels, 1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Scale."""
        return torch.mul(x, self.scale(x))


def mobilenet(*, squeeze_excite: bool = False, num_classes: int = 1000) -> nn.Sequential:
    """MobileNetV2 (arXiv 1801.04381): inverted residuals with depthwise convolutions.

    With squeeze-excite and SiLU like EfficientNet.
    """

    def activation() -> nn.Module:
        return nn.SiLU(inplace=True) if squeeze_excite else nn.ReLU6(inplace=True)

    def block(num_in: int, num_out: int, stride: int, expansion: int) -> nn.Module:
        num_mid = num_in * expansion
        layers = [*_conv_norm(num_in, num_mid, 1), activation()] if expansion > 1 else []
        layers += [*_conv_norm(num_mid, num_mid, 3, stride, groups=num_mid), activation()]
        layers += [SqueezeExcite(num_mid)] if squeeze_excite else []
        layers += _conv_norm(num_mid, num_out, 1)
        return Residual(*layers) if stride == 1 and num_in == num_out else nn.Sequential(*layers)

    blocks: list[nn.Module] = []
    num_in = 32
    for expansion, num_out, depth, stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
        (6, 320, 1, 1)
    ):  # fmt: skip
        for number in range(depth):
            blocks.append(block(num_in, num_out, stride if number == 0 else 1, expansion))
            num_in = num_out
    stem = [*_conv_norm(3, 32, 3, 2), activation()]
    head = [
        *_conv_norm(num_in, 1280, 1),
        activation(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
    ]
    return nn.Sequential(*stem, Stack(blocks), *head, nn.Linear(1280, num_classes))


class DenseLayer(nn.Module):
    """A layer of DenseNet: its output joins its input.

    Args:
        num_in: Channels of the input.
        growth: Channels that it adds.
    """

    def __init__(self, num_in: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(num_in), nn.ReLU(inplace=True),
            nn.Conv2d(num_in, 4 * growth, 1, bias=False), nn.BatchNorm2d(4 * growth),
            nn.ReLU(inplace=True), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate."""
        return torch.cat([x, self.body(x)], dim=1)


def densenet(
    depths: Sequence[int] = (6, 12, 24, 16), *, growth: int = 32, num_classes: int = 1000
) -> nn.Sequential:
    """DenseNet-121 (arXiv 1608.06993)."""
    layers: list[nn.Module] = [
        *_conv_norm(3, 2 * growth, 7, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    num_channels = 2 * growth
    for stage, depth in enumerate(depths):
        layers.append(
            Stack(DenseLayer(num_channels + number * growth, growth) for number in range(depth))
        )
        num_channels += depth * growth
        layers += [nn.BatchNorm2d(num_channels), nn.ReLU(inplace=True)]
        if stage < len(depths) - 1:
            layers += [nn.Conv2d(num_channels, num_channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            num_channels //= 2
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_channels, num_classes)
    )


class UNet(nn.Module):
    """U-Net (arXiv 1505.04597): down, and up again by transposed convolutions and concatenation.

    Args:
        num_channels: At the first level; doubled at each further one.
        num_levels: How often the image is halved.
        num_classes: Outputs for each pixel.
    """

    def __init__(
        self, *, num_channels: int = 64, num_levels: int = 4, num_classes: int = 21
    ) -> None:
        super().__init__()
        sizes = [num_channels * 2**level for level in range(num_levels + 1)]
        self.down = nn.ModuleList(
            _double_convolution(i, o) for i, o in zip([3, *sizes], sizes, strict=False)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * size, size, 2, 2) for size in reversed(sizes[:-1])
        )
        self.join = nn.ModuleList(
            _double_convolution(2 * size, size) for size in reversed(sizes[:-1])
        )
        self.head = nn.Conv2d(num_channels, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Run."""
        skipped: list[Tensor] = []
        for level, down in enumerate(self.down):
            x = down(x if level == 0 else F.max_pool2d(x, 2))
            skipped.append(x)
        skipped.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skipped.pop(), up(x)], dim=1))
        y: Tensor = self.head(x)
        return y


def _double_convolution(num_in: int, num_out: int) -> nn.Module:
    return nn.Sequential(
        *_conv_norm(num_in, num_out, 3), nn.ReLU(inplace=True), *_conv_norm(num_out, num_out, 3),
        nn.ReLU(inplace=True)
    )  # fmt: skip


class ConvNeXtBlock(nn.Module):
    """A block of arXiv 2201.03545: depthwise 7x7, then two linear layers over the channels.

    Args:
        num_channels: Channels.
    """

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(num_channels, num_channels, 7, padding=3, groups=num_channels)
        self.norm = nn.LayerNorm(num_channels)
        self.expand = nn.Linear(num_channels, 4 * num_channels)
        self.contract = nn.Linear(4 * num_channels, num_channels)
        self.scale = nn.Parameter(torch.full((num_channels,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        """Run."""
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.scale * self.contract(F.gelu(self.expand(self.norm(y))))
        return torch.add(x, y.permute(0, 3, 1, 2))


def convnext(
    depths: Sequence[int] = (3, 3, 9, 3), *, num_channels: int = 96, num_classes: int = 1000
) -> nn.Sequential:
    """ConvNeXt-T."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, num_channels, 4, 4),
        ChannelsFirstLayerNorm(num_channels),
    ]
    for stage, depth in enumerate(depths):
        if stage:
            layers += [
                ChannelsFirstLayerNorm(num_channels),
                nn.Conv2d(num_channels, 2 * num_channels, 2, 2),
            ]
            num_channels *= 2
        layers.append(Stack(ConvNeXtBlock(num_channels) for _ in range(depth)))
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(num_channels),
        nn.Linear(num_channels, num_classes)
    )  # fmt: skip


def autoencoder(*, num_channels: int = 64) -> nn.Sequential:
    """Strided convolutions and transposed ones, without any normalisation."""
    sizes = [3, num_channels, 2 * num_channels, 4 * num_channels, 8 * num_channels]
    layers: list[nn.Module] = []
    for num_in, num_out in pairwise(sizes):
        layers += [nn.Conv2d(num_in, num_out, 4, 2, padding=1), nn.LeakyReLU(0.2)]
    for num_in, num_out in zip(sizes[:0:-1], sizes[-2::-1], strict=True):
        layers += [
            nn.ConvTranspose2d(num_in, num_out, 4, 2, padding=1),
            nn.Sigmoid() if num_out == 3 else nn.ReLU(),
        ]
    return nn.Sequential(*layers)


def video_network(*, num_channels: int = 32, num_classes: int = 400) -> nn.Sequential:
    """3-D convolutions with batch norm, like C3D (arXiv 1412.0767)."""
    layers: list[nn.Module] = []
    num_in = 3
    for stage in range(4):
        num_out = num_channels * 2**stage
        layers += [
            nn.Conv3d(num_in, num_out, 3, padding=1),
            nn.BatchNorm3d(num_out),
            nn.ReLU(),
            nn.MaxPool3d((1, 2, 2) if stage == 0 else 2),
        ]
        num_in = num_out
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(num_in, num_classes)
    )
