"""DeiT III with layer scale and rates that decay by layer (timm)."""

from __future__ import annotations

import re
from typing import Any

import torch
from timm import create_model
from torch.nn import functional as F

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Binary cross entropy of mixed targets."""
    images, targets = batch
    return F.binary_cross_entropy_with_logits(model(images), targets)


def make() -> Program:
    """6 layers of width 384, 12 images of 160 x 160, bf16 autocast."""
    depth = 6
    model = create_model(
        "deit3_small_patch16_224", depth=depth, img_size=160, num_classes=50, drop_path_rate=0.05
    )
    names = [name for name, one in model.named_parameters() if one.requires_grad]

    def decayed(parameters: Any) -> torch.optim.Optimizer:
        by_kind: dict[tuple[int, bool], list[Any]] = {}
        for name, one in zip(names, parameters, strict=True):
            block = re.match(r"blocks\.(\d+)\.", name)
            is_late = name.startswith(("norm", "fc_norm", "head"))
            layer = int(block[1]) + 1 if block else depth + 1 if is_late else 0
            by_kind.setdefault((layer, one.ndim > 1), []).append(one)
        return torch.optim.AdamW(
            [
                {
                    "params": those,
                    "lr": 1e-3 * 0.75 ** (depth + 1 - layer),
                    "weight_decay": 0.05 if has_decay else 0.0,
                }
                for (layer, has_decay), those in by_kind.items()
            ]
        )

    batch = torch.randn(12, 3, 160, 160), torch.rand(12, 50).softmax(-1)
    return Program(model, batch, loss, ("timm",), optimizer=decayed, precision="bf16-mixed")
