"""The training step of a Hugging Face Trainer as a `TrainingStep`, from what its callbacks are given and what its model is called with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memcallback.steps import Loss, TrainingStep, is_sharded


def step_of(
    model: torch.nn.Module,
    inputs: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None,
    args: Any,
    *,
    loss: Loss | None = None,
    batch_size: int | None = None,
) -> TrainingStep:
    """The step that a Trainer is about to run.

    A model that accelerate has prepared enters autocast itself; so does the copy that is traced.

    Args:
        model: The Trainer's model.
        inputs: What it is called with.
        optimizer: The Trainer's optimizer, None if it has none of PyTorch's.
        args: Its `TrainingArguments`.
        loss: The loss as a function of the model and the inputs, None for the one that the model returns.
        batch_size: Samples in a batch, None to infer them.
    """
    if is_sharded(model):
        return TrainingStep(model, inputs, batch_size=batch_size)
    return TrainingStep(
        model,
        dict(inputs),
        loss=loss or loss_of_model,
        optimizer=optimizer,
        precision="16-mixed" if args.fp16 else "bf16-mixed" if args.bf16 else "32-true",
        batch_size=batch_size,
        accumulate=args.gradient_accumulation_steps,
        clip_grad_norm=args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else None,
    )


def loss_of_model(model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The loss that a model returns, as `Trainer.compute_loss` takes it."""
    outputs = model(**inputs)
    if isinstance(outputs, dict) and "loss" not in outputs:
        raise ValueError(
            f"the model returns no loss for {', '.join(inputs)}, and how the Trainer computes it is not known. Give it: "
            "MemoryTrainerCallback(loss=lambda model, inputs: ...)"
        )
    loss: torch.Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    return loss


def notes_on(inputs: Mapping[str, Any]) -> tuple[str, ...]:
    """What the prediction assumes of the inputs, one sentence each."""
    if "attention_mask" not in inputs:
        return ()
    return (
        "Predicted with padding in the batch: where the attention mask is all ones, transformers may leave it out, and less is needed.",
    )
