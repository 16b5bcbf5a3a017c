"""Small models, each named for what it tests; and VGG16, which the source articles work through."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

# Numbers are output channels of a 3x3 convolution, "M" is a 2x2 max pooling: configuration D of
# arXiv 1409.1556.
VGG16_CONFIGURATION = [
    64,
    64,
    "M",
    128,
    128,
    "M",
    256,
    256,
    256,
    "M",
    512,
    512,
    512,
    "M",
    512,
    512,
    512,
    "M",
]


def vgg16() -> nn.Sequential:
    layers: list[nn.Module] = []
    num_channels = 3
    for item in VGG16_CONFIGURATION:
        if item == "M":
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(num_channels, item, 3, padding=1), nn.ReLU(inplace=True)]
            num_channels = item
    classifier = [
        nn.Linear(512 * 7 * 7, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, 1000),
    ]
    return nn.Sequential(*layers, nn.Flatten(), *classifier)


class FunctionalCalls(nn.Module):
    """No ReLU, addition, concatenation or flattening of it is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.first(x)) + x
        y = y.relu()
        y = torch.cat([x, y], dim=1)
        return self.second(y.flatten(1))


class Block(nn.Module):
    """A functional call inside a submodule, which is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block1 = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block1(self.block1(x))


class TiedWeights(nn.Module):
    """The embedding's weight is the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


class OwnParameterBesideChildren(nn.Module):
    """A scale that belongs to the module itself, and a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.never_called = nn.Linear(8, 123)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


class DataDependent(nn.Module):
    """Reads a value of a tensor, in one of several ways."""

    def __init__(self, read: str = "item") -> None:
        super().__init__()
        self.read = read
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.read == "item":
            return y * y.sum().item()
        if self.read == "mask":
            return y[y > 0]
        if self.read == "numpy":
            return torch.from_numpy(y.detach().numpy())
        return y.nonzero()


def standard_convolution(num_in: int, num_out: int, kernel_size: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(num_in, num_out, kernel_size, padding="same", bias=False))


def depthwise_separable_convolution(num_in: int, num_out: int, kernel_size: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(num_in, num_in, kernel_size, padding="same", groups=num_in, bias=False),
        nn.Conv2d(num_in, num_out, 1, bias=False),
    )
