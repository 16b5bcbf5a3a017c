"""A language model with rotary embeddings, without flash attention (x_transformers)."""

from __future__ import annotations

from typing import Any

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

from programs import Program


def loss(model: Any, tokens: Any) -> torch.Tensor:
    """The loss that the wrapper computes."""
    own: torch.Tensor = model(tokens)
    return own


def make() -> Program:
    """4 layers of width 256, RMSNorm and SwiGLU, 4 sequences of 257 tokens."""
    layers = Decoder(
        dim=256,
        depth=4,
        heads=8,
        rotary_pos_emb=True,
        attn_flash=False,
        use_rmsnorm=True,
        ff_glu=True,
        ff_swish=True,
    )
    model = TransformerWrapper(num_tokens=4000, max_seq_len=256, attn_layers=layers)
    tokens = torch.randint(4000, (4, 257))
    return Program(AutoregressiveWrapper(model), tokens, loss, ("x_transformers",))
