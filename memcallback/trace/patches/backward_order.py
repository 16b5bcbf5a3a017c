"""Order of create_graph nodes as on CUDA.

Of the nodes that can run, autograd takes the one with the highest sequence number
(torch/csrc/autograd/engine.cpp, `CompareNodeTaskTime`), and each thread counts its own
(ATen/SequenceNumber.cpp). A backward pass runs in the thread of its device on CUDA, and in the
thread that calls it on a CPU. So once a training has run a while, the nodes that the device's
thread has made come before all others if it makes more of them than the thread that trains, and
after all others if it makes fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

#: Above the number of any other node, below that of those which accumulate gradients.
_ABOVE_ALL = 2**48


class BackwardNodes:
    """Numbers the nodes that backward passes make, once a pass without them has ended a first step.

    Those that come after all others get the numbers that such nodes had in that first step.
    """

    def __init__(self) -> None:
        self._begin = self._now()
        self._num_made = 0
        #: How many more of them there are than other nodes, up to the last pass that made none.
        self._surplus = 0
        self._reserved: list[range] = []
        self._num_used = 0

    @staticmethod
    def _now() -> int:
        number: int = torch._C._autograd._get_sequence_nr()
        return number

    def run(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass, and number the nodes that it makes."""
        begin = self._now()
        gradients = backward(*args, **kwargs)
        made = range(begin, self._now())
        roots = [
            gradient.grad_fn
            for gradient in gradients or ()
            if isinstance(gradient, torch.Tensor) and gradient.grad_fn is not None
        ]
        if not roots:
            self._num_used = 0
            self._surplus = 2 * self._num_made - (made.stop - self._begin)
            return gradients
        self._num_made += len(made)
        if self._num_used == len(self._reserved):
            self._reserved.append(made)
        lower = self._reserved[self._num_used]
        self._num_used += 1
        if self._surplus > 0:
            _renumber(roots, made, _ABOVE_ALL + begin)
        elif self._surplus < 0 and lower is not made and len(made) <= len(lower):
            _renumber(roots, made, lower.start)
        return gradients


def _renumber(roots: Iterable[Any], made: range, begin: int) -> None:
    """Number the nodes with numbers in a range, which can be reached from some of them, from
    another number on.
    """
    pending, seen = list(roots), set()
    while pending:
        node = pending.pop()
        if node is None or node in seen or node._sequence_nr() not in made:
            continue
        seen.add(node)
        pending.extend(following for following, _ in node.next_functions)
    for node in seen:
        node._set_sequence_nr(node._sequence_nr() - made.start + begin)
