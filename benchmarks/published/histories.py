"""Recorded steady steps of real cards, beside their predictions.

The histories are other people's data and lie beside the checkout, in `../shared/published`. They
hold each request of one step after some steps of warm-up, and the segments that were reserved.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import memcallback as mc
from memcallback.core.allocation_trace import Alloc
from memcallback.devices.local import resolve
from memcallback.prediction.steady_state import last_windows

from .decoder import BATCH_SIZE, VOCABULARY, Decoder

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
allocator_history: Any = import_module("allocator_history")

_PRO_6000 = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"


class Recording(NamedTuple):
    """A published history.

    Attributes:
        name: The file, without its ending.
        card: The card; of one that its author does not name, one of that size.
        torch: PyTorch's version.
        context: Tokens in a sequence.
        is_bf16: Whether it ran under autocast.
        is_loss_bf16: Whether the loss was under autocast too.
    """

    name: str
    card: str
    torch: str
    context: int
    is_bf16: bool
    is_loss_bf16: bool


RECORDINGS = (
    *(
        Recording(
            f"linyun_xl_ctx{context}_full_step_{'bf16' if is_bf16 else 'none'}",
            _PRO_6000,
            "2.11.0",
            context,
            is_bf16,
            False,
        )
        for context in (128, 512)
        for is_bf16 in (False, True)
    ),
    *(
        Recording(
            f"aimetrics_memory_2.7b_train_seq128{'_bf16' if is_bf16 else ''}",
            "NVIDIA A100-SXM4-80GB",
            "2.8.0",
            128,
            is_bf16,
            True,
        )
        for is_bf16 in (False, True)
    ),
)


def step_of(recording: Recording) -> mc.TrainingStep:
    """The recorded step."""
    with torch.device("meta"):
        model = Decoder(recording.context)
        # The batch is on the device before the loop; what the step is given takes no memory.
        tokens = torch.zeros(BATCH_SIZE, recording.context, dtype=torch.long)
        model.register_buffer("inputs", tokens)
        model.register_buffer("targets", torch.zeros_like(tokens))
        batch = torch.zeros(BATCH_SIZE, 0)

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        model.logits = None
        with torch.autocast("cuda", torch.bfloat16, enabled=recording.is_bf16):
            logits = model(model.inputs)
        # Live to the end of the step, as a variable of a function that makes one step is.
        model.logits = logits
        with torch.autocast("cuda", torch.bfloat16, enabled=recording.is_loss_bf16):
            flat = logits.view(-1, VOCABULARY)
            flat = flat.float() if recording.is_bf16 and not recording.is_loss_bf16 else flat
            return nn.functional.cross_entropy(flat, model.targets.view(-1))

    return mc.TrainingStep(
        model,
        batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )


def card_of(recording: Recording) -> Any:
    """The card, with the rules of the recorded PyTorch."""
    card: Any = resolve(recording.card)
    major, minor = map(int, recording.torch.split(".")[:2])
    return replace(card, torch_version=(major, minor))


def _recorded(history: dict[str, Any]) -> tuple[int, int, list[int]]:
    """Peak allocated and reserved bytes of the recorded step, and its requests.

    The requests are put to the simulated allocator, which must hand out the recorded addresses.
    """
    replay = allocator_history.Replay(history)
    replay.allocator.reset_peaks()
    agreement = replay.run()
    assert not agreement.differences, agreement.differences[:3]
    stats = replay.allocator.stats()
    requests = [size_bytes for code, _, size_bytes, _ in history["events"] if code == "a"]
    return stats.peak_allocated_bytes or 0, stats.peak_reserved_bytes or 0, requests


def compare(folder: Path) -> Iterator[dict[str, Any]]:
    """Each history beside its prediction.

    Args:
        folder: Where the histories are.
    """
    for recording in RECORDINGS:
        allocated_bytes, reserved_bytes, recorded = _recorded(
            allocator_history.load(folder / f"{recording.name}.json.gz")
        )
        prediction = mc.predict(step_of(recording), device=card_of(recording))
        events = prediction.trace.at(BATCH_SIZE).events
        window = last_windows(events)[-1]
        requests = [
            event.size_bytes
            for event in events[window.start : window.stop]
            if isinstance(event, Alloc) and event.size_bytes
        ]
        yield {
            "name": recording.name,
            "card": recording.card,
            "torch": recording.torch,
            "allocated_bytes": (prediction.peak_allocated_bytes, allocated_bytes),
            "reserved_bytes": (prediction.peak_reserved_bytes, reserved_bytes),
            "num_requests": (len(requests), len(recorded)),
            "num_same_requests": sum(map(int.__eq__, requests, recorded)),
        }
