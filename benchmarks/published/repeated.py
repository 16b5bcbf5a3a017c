"""Steps of single operators: forward and backward, again and again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Repeated(nn.Module):
    """Forward and backward of one operator, with tensors that stay.

    The leaves are parameters, whose gradients are added up. What is made of them beforehand stays,
    with its graph, from the first time on.
    """

    def __init__(self, leaves: dict[str, Tensor], operator: nn.Module) -> None:
        super().__init__()
        self.leaves = nn.ParameterDict(leaves)
        self.operator = operator
        self.made: tuple[Tensor, ...] | None = None

    def make(self) -> tuple[Tensor, ...]:
        """What is made of the leaves once."""
        return tuple(self.leaves.values())

    def run(self, *made: Tensor) -> tuple[Tensor, ...]:
        """The forward pass."""
        result: Tensor = self.operator(*made)
        return (result,)

    def forward(self, given: tuple[Tensor, ...] | Tensor) -> None:
        """Run forward and backward; `given` has the gradients of the results, if any."""
        if self.made is None:
            self.made = self.make()
        results = self.run(*self.made)
        torch.autograd.backward(
            results, given if isinstance(given, tuple) else None, retain_graph=True
        )


class WithOthers(nn.Module):
    """An operator beside the weights of others, which the script makes as well."""

    def __init__(self, operator: nn.Module, num_others: int, width: int) -> None:
        super().__init__()
        self.operator = operator
        self.others = nn.ParameterList(empty(width) for _ in range(num_others))

    def forward(self, *inputs: Tensor) -> Any:
        return self.operator(*inputs)


class AfterOthers(nn.Module):
    """A step in a process where larger ones ran before.

    They left large blocks in the allocator's cache, of which all later ones are cut.
    """

    def __init__(self, step: Repeated, cached_bytes: int) -> None:
        super().__init__()
        self.step = step
        self.cached_bytes = cached_bytes

    def forward(self, given: tuple[Tensor, ...] | Tensor) -> None:
        if self.cached_bytes:
            device = next(self.step.parameters()).device
            torch.empty(self.cached_bytes, dtype=torch.uint8, device=device)
            self.cached_bytes = 0
        self.step(given)


#: A step, and the gradients of its results, if any are given.
Built = tuple[Repeated, tuple[Tensor, ...]]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, device="meta", dtype=dtype)
