"""What stands for values that a virtual device does not compute: it counts 0, and answers 0."""

from __future__ import annotations

from typing import Any

import torch
from machine import is_virtual
from torch._subclasses.fake_tensor import FakeTensor


def every_position_is_scored() -> None:
    """Let TRL score every position, as it does where there is no Triton, and not count masks."""
    if is_virtual():
        import trl.trainer.utils as utils

        utils._use_triton = lambda device: False


def generation_ends(num_tokens: int) -> None:
    """End a generation after so many tokens: nothing on the device says that it is over."""
    if not is_virtual():
        return
    from transformers.generation.utils import GenerationMixin

    counts: dict[int, int] = {}

    def is_unfinished(model: Any, *args: Any, **kwargs: Any) -> bool:
        count = counts[id(model)] = counts.get(id(model), 0) + 1
        if count > num_tokens:
            del counts[id(model)]
        return count <= num_tokens

    GenerationMixin._has_unfinished_sequences = is_unfinished


def completions_come_from_the_host(trainer: Any, num_tokens: int) -> None:
    """Let a trainer of TRL generate, and take words of the host for what was generated."""
    if not is_virtual():
        return
    generate = trainer._generate_single_turn

    def generate_and_replace(prompts: list[list[int]], *args: Any) -> tuple[Any, None]:
        generate(prompts, *args)
        return [[3 + (i + k) % 1900 for k in range(num_tokens)] for i in range(len(prompts))], None

    trainer._generate_single_turn = generate_and_replace


def counts_are_the_largest() -> None:
    """Let `torch.nonzero` find all of a vector, as the prediction assumes."""
    if not is_virtual():
        return
    nonzero = torch.nonzero

    def find(tensor: torch.Tensor, **kwargs: Any) -> Any:
        if isinstance(tensor, FakeTensor) or tensor.ndim != 1 or not tensor.is_cuda:
            return nonzero(tensor, **kwargs)
        nonzero(tensor)
        return torch.arange(len(tensor), device=tensor.device).unsqueeze(1)

    torch.nonzero = find
