"""YOLO11 nano with the losses of its own (ultralytics)."""

from __future__ import annotations

from typing import Any

import torch
from ultralytics.cfg import get_cfg
from ultralytics.nn.tasks import DetectionModel

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The sum of the losses of boxes, classes and distances."""
    losses, _ = model(batch)
    total: torch.Tensor = losses.sum()
    return total


def make() -> Program:
    """4 images of 320 x 320 with three boxes each."""
    model = DetectionModel("yolo11n.yaml", nc=10, verbose=False)
    model.args = get_cfg()
    batch = {
        "img": torch.rand(4, 3, 320, 320),
        "batch_idx": torch.arange(4.0).repeat_interleave(3),
        "cls": torch.randint(10, (12, 1)).float(),
        "bboxes": 0.25 + 0.25 * torch.rand(12, 4),
    }
    return Program(model, batch, loss, ("ultralytics",), needs_values=True)
