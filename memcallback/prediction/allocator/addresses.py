"""The addresses of segments, in the order in which NVIDIA's driver gives them out.

Of free blocks of one size the allocator takes the one with the lowest address. So the order of the
segments decides which blocks stay whole, and in the end how much is reserved.
"""

from __future__ import annotations

from bisect import insort

from memcallback.core.units import MiB, round_up

#: New segments lie below, those that there are already above.
_MIDDLE = 1 << 46
#: cudaMalloc returns multiples of this, as in all recorded histories.
_ALIGNMENT_BYTES = 2 * MiB
#: The driver reserves ranges of addresses in multiples of this.
_RANGE_BYTES = 32 * MiB
#: What segments get of the range of 512 MiB into which the driver loads kernels.
_BESIDE_KERNELS_BYTES = 384 * MiB


class Addresses:
    """What the driver does under Linux, as seen in histories of real GPUs.

    Each range lies below the one before. A segment begins where the newest range with room for it
    is free, else a new range. On an H100 (driver 580.159.04, `tests/recorded/allocator_h100`)
    all 69 segments that could lie in several ranges lie in the newest, and none of 109 has a new
    range where another had room. The second range is that of kernels. How much of it segments get
    was fitted to the trainings without convolutions on a real H200 (docs/real-gpus.md). Addresses
    that are given back are not used again here.
    """

    __slots__ = ("_above", "_has_kernels", "_lowest", "_rests")

    def __init__(self) -> None:
        self._above = self._lowest = _MIDDLE
        self._has_kernels = False
        #: What is free at the end of ranges: the addresses by size, the newest first.
        self._rests: dict[int, list[int]] = {}

    def known(self, size_bytes: int) -> int:
        """The address of a segment that there is already: above the one before, by address."""
        self._has_kernels = True
        address = self._above
        self._above += round_up(size_bytes, _ALIGNMENT_BYTES)
        return address

    def new(self, size_bytes: int) -> int:
        """The address of a new segment."""
        size_bytes = round_up(size_bytes, _ALIGNMENT_BYTES)
        if self._lowest < _MIDDLE and not self._has_kernels:
            self._has_kernels = True
            self._add_range(_BESIDE_KERNELS_BYTES)
        fitting = [rest_bytes for rest_bytes in self._rests if rest_bytes >= size_bytes]
        if not fitting:
            fitting.append(self._add_range(size_bytes))
        rest_bytes = min(fitting, key=lambda rest_bytes: self._rests[rest_bytes][0])
        rests = self._rests[rest_bytes]
        address = rests.pop(0)
        if not rests:
            del self._rests[rest_bytes]
        self._add_rest(address + size_bytes, rest_bytes - size_bytes)
        return address

    def _add_range(self, size_bytes: int) -> int:
        """Reserve a range for so much; its size."""
        range_bytes = round_up(size_bytes, _RANGE_BYTES)
        self._lowest -= range_bytes
        self._add_rest(self._lowest, range_bytes)
        return range_bytes

    def _add_rest(self, address: int, size_bytes: int) -> None:
        if size_bytes:
            insort(self._rests.setdefault(size_bytes, []), address)
