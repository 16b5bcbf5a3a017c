"""TabNet on rows of a table, with ghost batch norm and sparsemax (pytorch-tabnet)."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_tabnet.tab_network import TabNet
from torch.nn import functional as F

from programs import Program


def make() -> Program:
    """3 steps of width 64, 4096 rows of 54 columns in ghost batches of 256."""
    groups = torch.eye(54, device="cuda")  # no buffer: the library makes it where it trains
    model = TabNet(54, 7, n_d=64, n_a=64, virtual_batch_size=256, group_attention_matrix=groups)
    batch = torch.randn(4096, 54), torch.randint(0, 7, (4096,))
    return Program(model, batch, loss, ("pytorch-tabnet",), optimizer=torch.optim.Adam)


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy, less a part of the masks' loss."""
    rows, classes = batch
    scores, masks_loss = model(rows)
    total: torch.Tensor = F.cross_entropy(scores, classes) - 1e-3 * masks_loss
    return total
