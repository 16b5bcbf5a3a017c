"""Runs that fine-tuned FLUX.2-klein-base-4B with a method of PEFT, as steps.

huggingface/peft trains the transformer of this image model with its methods on 14 pictures
(`method_comparison/image-gen`) and publishes the largest reserved memory of the run. The facts are
in `image_fine_tuning.jsonl`, one run a line; the step is written from what its `run.py` does.
Prompts and pictures are encoded beforehand and stay on the device, as does the model that judges
pictures (DINOv2). Each block of the transformer is checkpointed.

The cache is emptied after every 25th step. So the second of two traced updates is repeated, and the
allocator replays the 100 updates before the first evaluation, which is not predicted: it leaves
other free blocks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import memcallback as mc
from memcallback.core.allocation_trace import Alloc, EmptyCache, Event, Free, not_freed
from memcallback.prediction.replay import replay_on
from memcallback.prediction.steady_state import last_windows, pairs_of

ROWS = Path(__file__).parent / "image_fine_tuning.jsonl"
NUM_PICTURES, CHANNELS, SIDE = 14, 128, 32
NUM_TOKENS, TEXT_WIDTH = 512, 7680
NUM_JUDGE_PARAMETERS = 86_580_480
#: Updates from one emptied cache to the next, and until the first evaluation.
EMPTIED_EVERY, NUM_UPDATES = 25, 100
#: The methods whose adapters cannot be made on the meta device, since they read values.
_NEED_VALUES = ("BOFT", "SHIRA")
_LEFT_OUT = {
    "FROD": "its adapter is made by factorizing all weights, which takes their values",
}


def runs() -> list[dict[str, Any]]:
    """All runs."""
    return [json.loads(line) for line in ROWS.read_text().splitlines()]


def reason_left_out(case: dict[str, Any]) -> str | None:
    """Why a run is not compared; None if it is."""
    return _LEFT_OUT.get(case["peft_config"]["peft_type"])


def _model_of(config: dict[str, Any]) -> nn.Module:
    import peft
    from diffusers import Flux2Transformer2DModel

    with torch.device("meta"):
        transformer: Any = Flux2Transformer2DModel(
            in_channels=CHANNELS,
            num_layers=5,
            num_single_layers=20,
            num_attention_heads=24,
            joint_attention_dim=TEXT_WIDTH,
            guidance_embeds=False,
        )
        transformer.to(torch.bfloat16)
    transformer.enable_gradient_checkpointing()
    device = "meta"
    if config["peft_type"] in _NEED_VALUES:
        device = "cpu"
        transformer = transformer.to_empty(device=device)  # nothing is written
    with torch.device(device):
        model: nn.Module = peft.get_peft_model(transformer, peft.get_peft_config(dict(config)))
    return model


class _Loop:
    """The loop's step. What its variables name lives until they name the next step's."""

    def __init__(self, model: Any) -> None:
        self.variables: dict[str, Tensor] = {}
        with torch.device("meta"):
            latents = torch.zeros(NUM_PICTURES, CHANNELS, SIDE, SIDE, dtype=torch.bfloat16)
            prompts = torch.zeros(NUM_PICTURES, NUM_TOKENS, TEXT_WIDTH, dtype=torch.bfloat16)
            text_ids = torch.zeros(NUM_PICTURES, NUM_TOKENS, 4, dtype=torch.long)
            judge = torch.zeros(NUM_JUDGE_PARAMETERS)
        for name, cached in zip(
            ("latents", "prompts", "text_ids", "judge"),
            (latents, prompts, text_ids, judge),
            strict=True,
        ):
            model.register_buffer(f"cached_{name}", cached, persistent=False)

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        """The mean squared error of what the model predicts for a batch: noise less latents."""
        size, device, now = len(batch), model.cached_latents.device, self.variables
        chosen = torch.zeros(size, dtype=torch.long, device=device)
        now["latents"] = latents = model.cached_latents.index_select(0, chosen)
        now["prompts"] = prompts = model.cached_prompts.index_select(0, chosen)
        now["text_ids"] = text_ids = model.cached_text_ids.index_select(0, chosen)
        now["image_ids"] = image_ids = torch.zeros(
            size, SIDE * SIDE, 4, dtype=torch.long, device=device
        )
        now["noise"] = noise = torch.randn_like(latents)
        share = torch.zeros(size, 1, 1, 1, dtype=latents.dtype, device=device)
        now["noisy"] = noisy = (1 - share) * latents + share * noise
        (found,) = model(
            hidden_states=noisy.flatten(2).permute(0, 2, 1),
            timestep=torch.zeros(size, device=device),
            encoder_hidden_states=prompts,
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )
        now["found"] = found = found.permute(0, 2, 1).reshape(latents.shape)
        now["target"] = target = noise - latents
        squares = torch.ones_like(share).float() * (found.float() - target.float()) ** 2
        return torch.mean(squares.reshape(size, -1), 1).mean()


def step_of(case: dict[str, Any]) -> mc.TrainingStep:
    """The step of a run."""
    config = case["peft_config"]
    model = _model_of(config).train()
    loop = _Loop(model)
    # AdaLoRA keeps three sums for each number of an adapter, of which it takes the ranks.
    sums = [
        torch.empty_like(parameter)
        for (name, parameter), _ in itertools.product(model.named_parameters(), range(3))
        if "lora_" in name and config["peft_type"] == "ADALORA"
    ]

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, **case["optimizer"])

    return mc.TrainingStep(
        model,
        torch.zeros(case["batch"], 0),
        loss=loop.loss,
        optimizer=optimizer,
        clip_grad_norm=1.0,
        also=[sums] if sums else None,
    )


def peak_reserved_bytes(prediction: mc.Prediction) -> int:
    """The largest reserved memory of the updates before the first evaluation."""
    events = _updates(prediction.trace.at(prediction.batch_size).events)
    steps = replay_on(events, prediction.device, prediction.settings, None).steps
    return max(window.peak_reserved_bytes or 0 for step in steps for window in step.windows)


def _updates(events: Sequence[Event]) -> list[Event]:
    """The events of all these updates: the traced second one is repeated, with ids of its own."""
    window = last_windows(events)[-1]
    update = events[window.start : window.stop]
    before, after = not_freed(events[: window.start]), not_freed(events[: window.stop])
    pairs = pairs_of(
        [alloc for alloc in before if alloc not in after],
        [alloc for alloc in after if alloc not in before],
    )
    if pairs is None:
        raise ValueError("the second update frees other storages than it leaves to the next one")
    run = list(events[: window.stop])
    ids = itertools.count(1 + max(event.id for event in run if isinstance(event, Alloc)))
    names: dict[int, int] = {}
    for number in range(window.number + 1, NUM_UPDATES + 1):
        names = {freed: names.get(left, left) for freed, left in pairs}
        for event in update:
            if isinstance(event, Alloc):
                names[event.id] = next(ids)
                event = event._replace(id=names[event.id])
            elif isinstance(event, Free):
                event = Free(names.get(event.id, event.id))
            run.append(event)
        if number % EMPTIED_EVERY == 0:
            run.append(EmptyCache())
    return run
