"""Agreement: the ranks of a search go on together, and stop together if one of them has failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from memcallback.core.interruptions import ENDS, raise_if_meant
from memcallback.diagnose.out_of_memory.errors import release_memory

_FAILED, _DONE = range(2)


class Agreement:
    """What the ranks of a search tell each other; all ask for the same, in the same order."""

    def __init__(self, device: torch.device, world_size: int) -> None:
        self._device = device
        self._is_alone = world_size == 1 or not dist.is_initialized()

    def smallest(self, *values: int) -> list[int]:
        """The minimum of each value over all ranks."""
        if self._is_alone:
            return list(values)
        is_host = "gloo" in dist.get_backend() or "mpi" in dist.get_backend()
        agreed = torch.tensor(values, device="cpu" if is_host else self._device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        return [int(value) for value in agreed.tolist()]

    @contextmanager
    def of_all(self, what: str) -> Iterator[None]:
        """Raise on all ranks if the context fails on one: there its own error, elsewhere another.

        Without it the other ranks would wait for the failed one for ever.
        """
        try:
            yield
        except ENDS as error:  # the user's code can fail, and end, in any way
            raise_if_meant(error)
            release_memory(self._device)  # the answer needs some
            self.smallest(_FAILED)
            raise
        if self.smallest(_DONE) == [_FAILED]:
            raise RuntimeError(f"{what} failed on another rank; see that rank's error.")
