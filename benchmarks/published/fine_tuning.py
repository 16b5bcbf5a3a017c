"""Runs that fine-tuned Llama-3.2-3B with a method of PEFT, as steps.

huggingface/peft trains the model on MetaMathQA with each of its methods (`method_comparison`) and
publishes the largest reserved memory of the run. The facts are in `fine_tuning.jsonl`, one run a
line; the step is written from what its `run.py` does. The samples are sorted by length, the longest
first, 20 batches at a time, and the cache is emptied after every tenth batch. So the longest batch
of the run meets an empty cache, while the outputs of a short batch are kept.

The length of that batch was not published. It is the same in all runs, whose data and order are the
same, so it was taken from one of them, which is not compared.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import memcallback as mc

ROWS = Path(__file__).parent / "fine_tuning.jsonl"
#: Tokens in the longest batch: with these the run below comes nearest to what was measured, 0.11 %
#: too low. One token more is 0.98 % too high.
LENGTH = 704
CALIBRATED_BY = "peft-lora-rank32"
#: What the allocator had reserved before the model was loaded, for a module with two numbers. The
#: published figures leave it out.
RESERVED_BEFORE_BYTES = 2 * 2**20
#: The methods whose adapters cannot be made on the meta device, since they read values.
_NEED_VALUES = ("BOFT", "SHIRA", "UNILORA")
_LEFT_OUT = {
    "FROD": "its adapter is made by factorizing all weights, which takes their values",
}


def runs() -> list[dict[str, Any]]:
    """All runs."""
    return [json.loads(line) for line in ROWS.read_text().splitlines()]


def reason_left_out(case: dict[str, Any]) -> str | None:
    """Why a run is not compared; None if it is."""
    if case["id"] == CALIBRATED_BY:
        return f"the length of the longest batch, {LENGTH} tokens, was taken from it"
    return _LEFT_OUT.get(case["peft_config"].get("peft_type"))


class _OnHost:
    """A matrix on the host that each forward pass copies to the device."""

    def __init__(self, shape: torch.Size) -> None:
        self._shape = shape

    def to(self, like: Tensor) -> Tensor:
        """Copy it to the device."""
        return torch.empty(self._shape, device="cpu").to(like)


class EmptyingAdamW(torch.optim.AdamW):
    """AdamW after whose updates the cache is emptied.

    In `step_of` it is that of the last batch before the longest one, the shortest of 20. So what
    that batch has left is let go of, too: it is small.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], kept: list[Any], **options: Any) -> None:
        super().__init__(parameters, **options)
        self._kept = kept

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update, and empty the cache."""
        loss: float | None = super().step(closure)
        self._kept.clear()
        torch.cuda.empty_cache()
        return loss


def _model_of(config: dict[str, Any]) -> nn.Module:
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        llama: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128256,
                hidden_size=3072,
                intermediate_size=8192,
                num_hidden_layers=28,
                num_attention_heads=24,
                num_key_value_heads=8,
                head_dim=128,
                max_position_embeddings=131072,
                tie_word_embeddings=True,
            )
        )
        llama.to(torch.bfloat16)
    if not config:
        return llama  # type: ignore[no-any-return]  # a module
    device = "meta"
    if config["peft_type"] in _NEED_VALUES:
        device = "cpu"
        llama = llama.to_empty(device=device)  # nothing is written, so it takes no memory
        llama.tie_weights()
    with torch.device(device):
        model: Any = peft.get_peft_model(llama, peft.get_peft_config(dict(config)))
    # The parameters of an adapter move to the device of the model, these buffers do not.
    for module in [part for part in model.modules() if hasattr(part, "boft_P")]:
        shape = module.boft_P.shape
        del module.boft_P
        module.boft_P = _OnHost(shape)
    return model  # type: ignore[no-any-return]  # a module


def step_of(case: dict[str, Any]) -> mc.TrainingStep:
    """The longest step of a run."""
    config = case["peft_config"]
    model = _model_of(config).train()
    tokens = torch.zeros(case["batch"], LENGTH, dtype=torch.long, device="meta")
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.zeros_like(tokens),
    }
    kept: list[Any] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        kept[:] = [model(**batch, num_items_in_batch=batch["input_ids"].numel())]
        of_batch: Tensor = kept[0].loss
        return of_batch

    # AdaLoRA keeps three sums for each number of an adapter, of which it takes the ranks.
    sums = [
        torch.empty_like(parameter)
        for (name, parameter), _ in itertools.product(model.named_parameters(), range(3))
        if "lora_" in name and config.get("peft_type") == "ADALORA"
    ]
    return mc.TrainingStep(
        model,
        batch,
        loss=loss,
        optimizer=lambda parameters: EmptyingAdamW(parameters, kept, **case["optimizer"]),
        batch_size=case["batch"],
        clip_grad_norm=1.0,
        also=[sums] if sums else None,
    )
