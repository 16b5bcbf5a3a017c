"""Speech by an Emformer transducer with its loss (torchaudio)."""

from __future__ import annotations

from typing import Any

import torch
from torchaudio.functional import rnnt_loss
from torchaudio.models import emformer_rnnt_model

from programs import Program


def make() -> Program:
    """3 layers of width 256, 4 clips of 128 frames with 20 letters each."""
    model = emformer_rnnt_model(
        input_dim=80,
        encoding_dim=256,
        num_symbols=64,
        segment_length=16,
        right_context_length=4,
        time_reduction_input_dim=128,
        time_reduction_stride=4,
        transformer_num_heads=4,
        transformer_ffn_dim=512,
        transformer_num_layers=3,
        transformer_dropout=0.1,
        transformer_activation="gelu",
        transformer_left_context_length=30,
        transformer_max_memory_size=0,
        transformer_weight_init_scale_strategy="depthwise",
        transformer_tanh_on_mem=True,
        symbol_embedding_dim=128,
        num_lstm_layers=1,
        lstm_layer_norm=True,
        lstm_layer_norm_epsilon=1e-3,
        lstm_dropout=0.1,
    )
    batch = {
        "frames": torch.randn(4, 132, 80),
        "num_frames": torch.full((4,), 132, dtype=torch.int32),
        "letters": torch.randint(1, 63, (4, 20), dtype=torch.int32),
        "num_letters": torch.full((4,), 20, dtype=torch.int32),
    }
    return Program(model, batch, loss, ("torchaudio",))


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The loss of all alignments."""
    letters = torch.nn.functional.pad(batch["letters"], (1, 0))
    scores, num_scores, _, _ = model(
        batch["frames"], batch["num_frames"], letters, batch["num_letters"] + 1
    )
    total: torch.Tensor = rnnt_loss(scores, batch["letters"], num_scores, batch["num_letters"])
    return total
