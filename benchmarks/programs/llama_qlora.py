"""QLoRA: Llama with weights of 4 bit (bitsandbytes) and LoRA (peft)."""

from __future__ import annotations

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from programs import Program, own_loss


def make() -> Program:
    """Llama of 4 layers whose linear layers, but the last, are quantized as it moves."""
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=8000,
    )
    model = LlamaForCausalLM(config)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and name != "lm_head":
                setattr(parent, name, quantized(layer))
    tokens = torch.randint(3, 8000, (4, 256))
    return Program(
        get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"])),
        {"input_ids": tokens, "labels": tokens.clone()},
        own_loss,
        ("transformers", "peft", "bitsandbytes"),
        precision="bf16-mixed",
    )


def quantized(layer: nn.Linear) -> nn.Module:
    """The layer with weights of 4 bit in normal floats, whose scales are quantized too."""
    new = bnb.nn.Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=False,
        compute_dtype=torch.bfloat16,
        quant_type="nf4",
    )
    new.weight = bnb.nn.Params4bit(
        layer.weight.data,
        requires_grad=False,
        quant_type="nf4",
        compress_statistics=True,
        module=new,
    )
    module: nn.Module = new
    return module
