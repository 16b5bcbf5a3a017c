"""What several architectures share."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

#: Whether the blocks of a model are computed again in the backward pass, and by which of the two
#: ways of PyTorch.
Checkpointing = Literal["none", "reentrant", "non_reentrant"]


class Stack(nn.ModuleList):
    """Blocks that run one after the other; with checkpointing only their inputs are kept.

    Attributes:
        checkpointing: How.
    """

    checkpointing: Checkpointing = "none"

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """Run all blocks; `rest` goes to each of them."""
        for block in self:
            if self.checkpointing == "none":
                x = block(x, *rest)
            else:
                x = checkpoint(block, x, *rest, use_reentrant=self.checkpointing == "reentrant")
        return x


class Residual(nn.Module):
    """`x + body(x)`.

    Args:
        *body: Layers.
    """

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        """Add."""
        return torch.add(x, self.body(x))


class ChannelsFirstLayerNorm(nn.LayerNorm):
    """LayerNorm over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
