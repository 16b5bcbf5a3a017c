"""Whisper from spectrograms to tokens (transformers)."""

from __future__ import annotations

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from programs import Program, own_loss


def make() -> Program:
    """Whisper of 2 layers each way, 4 clips of 30 s."""
    config = WhisperConfig(
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        vocab_size=2000,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    batch = {
        "input_features": torch.randn(4, 80, 3000),
        "labels": torch.randint(3, 2000, (4, 32)),
    }
    return Program(WhisperForConditionalGeneration(config), batch, own_loss, ("transformers",))
