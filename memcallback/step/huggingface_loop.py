"""Run the evaluation of a Trainer of transformers on a copy of its model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch


class Evaluation:
    """What `Trainer.evaluation_loop` does with each batch; it keeps what it concatenates."""

    def __init__(
        self,
        *,
        keeps_loss_alone: bool,
        concatenates_loss_alone: bool = False,
        preprocess: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self._keeps_loss_alone = keeps_loss_alone
        self._concatenates_loss_alone = concatenates_loss_alone
        self._preprocess = preprocess
        self._model: weakref.ref[Any] | None = None
        self._kept: dict[str, Any] = {}
        self._last: dict[str, Any] = {}

    def __call__(self, model: Any, inputs: Mapping[str, Any]) -> None:
        """Run a batch as `Trainer.prediction_step`, and keep its results."""
        if self._model is None or self._model() is not model:
            # Each trace has a copy of the model, and keeps nothing of the trace before.
            self._model, self._kept, self._last = weakref.ref(model), {}, {}
        # Variables of the loop hold the results of the batch before until now.
        self._last = self._results(model, inputs)
        for name, value in self._last.items():
            if name == "loss" or not self._concatenates_loss_alone:
                self._keep(name, value)

    def _results(self, model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        outputs = model(**inputs)
        results: dict[str, Any] = {}
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if loss is not None:
            batch_size = len(next(iter(inputs.values())))
            results["loss"] = loss.detach().mean().repeat(batch_size)
        if self._keeps_loss_alone:
            return results
        config = getattr(model, "config", None)
        ignored = ["loss", *(getattr(config, "keys_to_ignore_at_inference", None) or ())]
        if isinstance(outputs, Mapping):
            outputs = tuple(value for name, value in outputs.items() if name not in ignored)
        logits = _detached(outputs)
        if len(logits):
            logits = logits[0] if len(logits) == 1 else logits
            if self._preprocess is not None:
                logits = self._preprocess(logits, inputs.get("labels"))
            results["logits"] = logits
        if "labels" in inputs:
            results["labels"] = inputs["labels"]
        return results

    def _keep(self, name: str, value: Any) -> None:
        before = self._kept.get(name)
        self._kept[name] = value if before is None else _concatenated(before, value)


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return tuple(map(_detached, value)) if isinstance(value, (tuple, list)) else value


def _concatenated(before: Any, value: Any) -> Any:
    """As `nested_concat` of transformers, for tensors of equal length."""
    if isinstance(before, torch.Tensor):
        return torch.cat((before, value), dim=0)
    if isinstance(before, tuple):
        return tuple(map(_concatenated, before, value))
    return before
