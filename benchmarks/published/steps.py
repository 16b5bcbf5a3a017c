"""The published cases: facts, one a line of `cases.jsonl`, and the steps that they describe.

Each case names its source and commit, card, PyTorch, what the figure counts (`measured`) and how
far it can be trusted: A if the program was published whole, B if a part of it was inferred, C if a
part is a guess. The steps are written from those descriptions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import memcallback as mc

CASES = Path(__file__).parent / "cases.jsonl"
_TIMM = "SGD(lr=1e-4,momentum=0.9,nesterov=True,foreach=False)"
#: What a case says of its optimizer, up to the first bracket or blank -> the optimizer.
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": partial(torch.optim.Adam, lr=1e-3),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-3),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3),
    "SGD": partial(torch.optim.SGD, lr=1e-3),
    "transformers.AdamW": partial(torch.optim.AdamW, lr=1e-3, foreach=False),
}
#: A word of a case -> why such cases are left out.
_LEFT_OUT = {
    "Adafactor": "transformers' Adafactor of 2022 is another program than today's",
    "adafactor": "transformers' Adafactor of 2022 is another program than today's",
    "bitsandbytes": "bitsandbytes' Adam8bit is made on a card alone",
    "LoRA": "litgpt's own model and its loss in chunks are described in words alone",
    "packed": "torchtune's own model and its packed mask are described in words alone",
}


class _KeepingGradients:
    """Sets gradients to 0, as the default was before PyTorch 2.0."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's own."""
        super().zero_grad(set_to_none=False)  # type: ignore[misc]  # an optimizer's


class _SGD(_KeepingGradients, torch.optim.SGD):
    pass


class _AdamW(_KeepingGradients, torch.optim.AdamW):
    pass


class _Names(dict[str, Any]):
    """What a case's model may name: three libraries, and classes of transformers."""

    def __missing__(self, name: str) -> Any:
        if name in ("timm", "torchvision"):
            return __import__(name)
        return getattr(__import__("transformers"), name)


def cases() -> list[dict[str, Any]]:
    """All cases."""
    return [json.loads(line) for line in CASES.read_text().splitlines()]


def reason_left_out(case: dict[str, Any]) -> str | None:
    """Why a case is not compared; None if it is."""
    text = f"{case['id']} {case['model']} {case['optimizer']}"
    return next((reason for word, reason in _LEFT_OUT.items() if word in text), None)


def program(case: dict[str, Any]) -> str:
    """What cases with the same trace have in common."""
    return json.dumps(
        [case[key] for key in ("source", "model", "input_shape", "optimizer", "precision")]
        + [case["channels_last"], "ckpt" in case["id"], "ga4" in case["id"]]
    )


def _optimizer_of(case: dict[str, Any]) -> Callable[..., torch.optim.Optimizer] | None:
    text = case["optimizer"]
    if text.startswith("none"):
        return None
    if "nesterov" in text:
        is_timm = text == _TIMM
        foreach = False if is_timm else None
        sgd = _SGD if is_timm else torch.optim.SGD
        return partial(sgd, lr=1e-4, momentum=0.9, nesterov=True, foreach=foreach)
    if case["source"].startswith("huggingface/transformers"):
        return partial(_AdamW, lr=1e-3, foreach=False)
    return _OPTIMIZERS[text.split("(")[0].split()[0]]


def _model_of(case: dict[str, Any]) -> nn.Module:
    is_of_transformers = case["lib"] == "transformers"
    if case["lib"] == "timm":
        # timm of 2022 writes attention out.
        __import__("timm").layers.set_fused_attn(not case["source"].startswith("timm"))
    with torch.device("meta" if is_of_transformers else "cpu"):
        model: nn.Module = eval(case["model"], {"__builtins__": {}}, _Names(nn=nn))
    if case["source"].startswith("huggingface/transformers"):
        model.set_attn_implementation("eager")  # type: ignore[operator]  # as in 2022
    if "ckpt" in case["id"]:
        model.gradient_checkpointing_enable()  # type: ignore[operator]  # a model of transformers
    if case["channels_last"]:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # lacks it
    return model.train()


def _batch_of(case: dict[str, Any]) -> dict[str, Tensor]:
    """Inputs and targets; a model of transformers gets them by its own names."""
    shape = (case["batch"], *case["input_shape"])
    inputs = torch.zeros(shape, dtype=getattr(torch, case["input_dtype"]), device="meta")
    if case["channels_last"]:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    samples = torch.zeros(case["batch"], dtype=torch.long, device="meta")
    if case["lib"] != "transformers":
        return {"inputs": inputs, "targets": samples}
    if inputs.is_floating_point():
        return {"pixel_values": inputs, "labels": samples}
    is_one_label = "SequenceClassification" in case["model"]
    return {
        "input_ids": inputs,
        "attention_mask": torch.ones_like(inputs),
        "labels": samples if is_one_label else torch.zeros_like(inputs),
    }


def _loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss; what the model returns is live until the next step, as a loop's variable is."""
    if "inputs" not in batch:
        model.outputs = model(**batch)
        loss: Tensor = model.outputs.loss
        return loss
    outputs = model(batch["inputs"])
    model.outputs = outputs
    # Inception and GoogLeNet of torchvision return their auxiliary outputs, too.
    logits = outputs if isinstance(outputs, Tensor) else outputs[0]
    return nn.functional.cross_entropy(logits, batch["targets"])


def _forward_alone(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch["inputs"]).sum()
    return loss


def step_of(case: dict[str, Any]) -> mc.TrainingStep:
    """The step that a case describes."""
    is_of_trainer = case["source"].startswith(("huggingface.co", "huggingface/transformers"))
    return mc.TrainingStep(
        _model_of(case),
        _batch_of(case),
        loss=_forward_alone if "forward only" in case["optimizer"] else _loss,
        optimizer=_optimizer_of(case),
        precision="16-mixed" if case["precision"].startswith("amp_fp16") else "32-true",
        batch_size=case["batch"],
        accumulate=4 if "ga4" in case["id"] else 1,
        clip_grad_norm=1.0 if is_of_trainer else None,
    )
