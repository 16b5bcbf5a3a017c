"""Keeps PyTorch's line "Memory block of unknown size" off stderr while ours profiles.

A release during a profile of a block from before it makes PyTorch write that line, on the first
one of a process and on each 1,000th after it. The profile of a CPU's step needs none of these
blocks, and a user who did not ask for a profile can do nothing about them. PyTorch has no switch
for this line alone, but it counts what it would write. So that count starts anew at each boundary
of a step, at a number that writes nothing, and goes back to what it was when the profile ends.
"""

from __future__ import annotations

import ctypes

from memcallback.core.tensors import torch_version
from memcallback.core.torch_private import cpu_reporter_address

#: Words of 8 bytes in PyTorch's ProfiledCPUMemoryReporter, as GCC and glibc lay it out: a mutex of
#: five, a hash table of seven, the bytes allocated under a profile, releases of unknown blocks.
_ALLOCATED_BYTES, _NUM_UNKNOWN = 12, 13
#: The PyTorch versions in whose source the words were read; in others nothing is written.
_READ_IN = (2, 6), (2, 13)
#: After it the next 999 releases write nothing.
_QUIET = 1


class UnknownBlocks:
    """PyTorch's count of released blocks that its profiler does not know."""

    def __init__(self) -> None:
        oldest, newest = _READ_IN
        is_known = oldest <= torch_version() <= newest
        address = cpu_reporter_address() if is_known else None
        self._words = None if address is None else (ctypes.c_uint64 * 14).from_address(address)
        self._before: int | None = None

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated under profiles if the words are laid out as expected, else any number."""
        return 0 if self._words is None else self._words[_ALLOCATED_BYTES]

    def restart(self) -> None:
        """Count from a number that writes nothing; only where the words are known to be these."""
        if self._words is None:
            return
        if self._before is None:
            self._before = self._words[_NUM_UNKNOWN]
        self._words[_NUM_UNKNOWN] = _QUIET

    def put_back(self) -> None:
        """Put back the count as it was, so that other profiles write what they would."""
        if self._words is not None and self._before is not None:
            self._words[_NUM_UNKNOWN], self._before = self._before, None
