"""The loss of a step that was given none: what the model makes of the batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from memcallback.holdings import tensors_in


def call_model(model: torch.nn.Module, batch: Any) -> Any:
    """What the model returns for a batch.

    Args:
        model: The model.
        batch: One batch. A mapping whose keys are arguments of the model's `forward`, as a tokenizer gives it, is handed over by name.
    """
    return model(**batch) if is_handed_over_by_name(model, batch) else model(batch)


def default_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The `loss` that the model returns, as models of transformers do where the batch has labels, or the sum of its floating-point outputs.

    Raises:
        ValueError: If it returns neither.
    """
    returned = call_model(model, batch)
    loss = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    outputs = [tensor for tensor in tensors_in(returned) if tensor.is_floating_point()]
    if not outputs:
        raise ValueError("The model returned no floating-point tensor, so there is nothing to train. Give loss=lambda model, batch: ...")
    return torch.stack([output.sum() for output in outputs]).sum()


def is_handed_over_by_name(model: torch.nn.Module, batch: Any) -> bool:
    """Whether a batch is a mapping whose keys are arguments of the model's `forward`."""
    if not isinstance(batch, Mapping):
        return False
    try:
        signature = inspect.signature(model.forward)
        signature.bind(**batch)
    except (TypeError, ValueError):  # it takes other arguments, or does not tell which
        return False
    # A wrapper takes anything.
    return all(parameter.kind is not parameter.VAR_POSITIONAL for parameter in signature.parameters.values())
