"""A student learns from a frozen teacher, with metrics and accumulation (Lightning)."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torchmetrics import AUROC, Accuracy

from trainers import Trained, by_lightning

LIBRARIES = ("lightning", "torchmetrics")
BATCH_SIZE, WIDTH, NUM_CLASSES = 64, 1024, 100


def network(width: int) -> nn.Sequential:
    """Two layers and a head."""
    return nn.Sequential(
        nn.Linear(WIDTH, width),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, NUM_CLASSES),
    )


class Student(LightningModule):
    """Its training step returns its logits, too."""

    def __init__(self) -> None:
        super().__init__()
        self.student = network(1024)
        self.teacher = network(4096).requires_grad_(False)
        options: dict[str, Any] = {"task": "multiclass", "num_classes": NUM_CLASSES}
        self.accuracy, self.area = Accuracy(**options), AUROC(**options)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            wanted = self.teacher(batch[0]).softmax(-1)
        logits = self.student(batch[0])
        loss = F.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean")
        self.accuracy(logits, wanted.argmax(-1))
        self.log_dict({"loss": loss, "accuracy": self.accuracy})
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.student(batch[0])
        self.area.update(logits, self.teacher(batch[0]).argmax(-1))

    def on_validation_epoch_end(self) -> None:
        self.area.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.student.parameters())


def train() -> Trained:
    """64 rows to a batch, two batches to an update, bf16."""
    rows = torch.randn(6 * BATCH_SIZE, WIDTH)
    return by_lightning(
        Student(), rows, BATCH_SIZE, precision="bf16-mixed", accumulate_grad_batches=2
    )
