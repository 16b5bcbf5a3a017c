"""Orders the nodes of a backward pass with create_graph as on CUDA.

Of the nodes that can run, autograd runs the one with the highest sequence number
(torch/csrc/autograd/engine.cpp, `CompareNodeTaskTime`), and each thread counts its own
(ATen/SequenceNumber.cpp). A backward pass runs in a thread of its device on CUDA, and in the
calling thread on a CPU. So after some training on CUDA, the nodes that the device's thread created
run before all others if that thread creates more nodes than the training's thread, and after all
others if it creates fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

#: Above the number of any other node, below that of the nodes that accumulate gradients.
_ABOVE_ALL = 2**48


def is_in_own_thread() -> bool:
    """Whether a backward pass on CUDA runs in a thread of its own, as PyTorch has it by default.

    It does not after `torch.autograd.set_multithreading_enabled(False)`, nor in compiled autograd.
    Inference mode sets the same, and runs no backward pass.
    """
    return torch.is_inference_mode_enabled() or bool(torch._C._is_multithreading_enabled())


class BackwardNodes:
    """Numbers the nodes that backward passes create, from the second step on.

    A backward pass that creates none ends the first step. Nodes that run after all others get the
    numbers that such nodes had in the first step.
    """

    def __init__(self) -> None:
        self._start = self._next_number()
        self._num_created = 0
        #: Nodes of backward passes minus other nodes, at the last pass that created none.
        self._surplus = 0
        self._reserved: list[range] = []
        self._num_used = 0

    @staticmethod
    def _next_number() -> int:
        number: int = torch._C._autograd._get_sequence_nr()
        return number

    def run(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass, and number the nodes that it creates."""
        start = self._next_number()
        gradients = backward(*args, **kwargs)
        created = range(start, self._next_number())
        roots = [
            gradient.grad_fn
            for gradient in gradients or ()
            if isinstance(gradient, torch.Tensor) and gradient.grad_fn is not None
        ]
        if not roots:
            self._num_used = 0
            self._surplus = 2 * self._num_created - (created.stop - self._start)
            return gradients
        self._num_created += len(created)
        if self._num_used == len(self._reserved):
            self._reserved.append(created)
        lower = self._reserved[self._num_used]
        self._num_used += 1
        if self._surplus > 0:
            _renumber(roots, created, _ABOVE_ALL + start)
        elif self._surplus < 0 and lower is not created and len(created) <= len(lower):
            _renumber(roots, created, lower.start)
        return gradients


def _renumber(roots: Iterable[Any], numbers: range, start: int) -> None:
    """Renumber, from `start` on, the nodes behind some roots that have numbers in a range."""
    pending, seen = list(roots), set()
    while pending:
        node = pending.pop()
        if node is None or node in seen or node._sequence_nr() not in numbers:
            continue
        seen.add(node)
        pending.extend(following for following, _ in node.next_functions)
    for node in seen:
        node._set_sequence_nr(node._sequence_nr() - numbers.start + start)
