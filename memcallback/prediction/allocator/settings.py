"""AllocatorSettings: PYTORCH_CUDA_ALLOC_CONF, and the sizes that follow from it.

It follows PyTorch 2.11: c10/core/AllocatorConfig.h and .cpp, c10/cuda/CUDAAllocatorConfig.h,
c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from memcallback.core.units import MiB, round_up

#: Block sizes are multiples of this. Source: `kMinBlockSize`, AllocatorConfig.h.
MIN_BLOCK_BYTES = 512
#: The largest block of the small pool; in the large pool, a rest above it is split off. Source:
#: `kSmallSize`, AllocatorConfig.h.
SMALL_SIZE_BYTES = MiB
#: A segment of the small pool, and a page of an expandable one. Source: `kSmallBuffer`,
#: AllocatorConfig.h.
SMALL_SEGMENT_BYTES = 2 * MiB
#: From this size on, a block gets a segment of its own. Source: `kMinLargeAlloc`,
#: AllocatorConfig.h.
MIN_LARGE_ALLOC_BYTES = 10 * MiB
#: The sizes of such segments are multiples of this. Source: `kRoundLarge`, AllocatorConfig.h.
ROUND_LARGE_BYTES = 2 * MiB
#: A segment for smaller blocks of the large pool. Source: `large_segment_size_`,
#: AllocatorConfig.h.
LARGE_SEGMENT_BYTES = 20 * MiB
#: Powers of two from 1 MiB on, each with its own rounding. Source: `kRoundUpPowerOfTwoIntervals`,
#: AllocatorConfig.cpp.
NUM_ROUNDUP_INTERVALS = 16
_NO_ROUNDUP = (0,) * NUM_ROUNDUP_INTERVALS
_LOG2_MIB = MiB.bit_length() - 1
_ITEM = re.compile(r"([^,:\[\]]+):(\[[^\[\]]*\]|[^,:\[\]]+)(?:,|$)")


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """How the allocator rounds, splits and grows. The defaults are PyTorch's.

    Attributes:
        large_segment_bytes: A segment for blocks of more than 1 MiB and less than 10 MiB, and a
            page of an expandable segment in the large pool; more than 10 MiB
            (`parseLargeSegmentSize`, AllocatorConfig.cpp).
        max_split_bytes: Free blocks of at least this size are not split and serve only requests of
            at least this size; None means no limit (`parseMaxSplitSize`, AllocatorConfig.cpp).
        max_non_split_rounding_bytes: How much larger than the request such a block may be; None
            means `large_segment_bytes` (`parseArgs`, AllocatorConfig.cpp).
        roundup_power2_divisions: For requests up to 2 MiB, up to 4 MiB and so on, 16 values in all:
            the number of steps to the next power of two; 0 and 1 mean no such rounding.
        expandable_segments: One segment for each stream and pool, which grows by pages, instead of
            one for each cudaMalloc.
        not_simulated: Settings that were given and that the simulation ignores or does not know. Of
            those that PyTorch 2.11 knows, `garbage_collection_threshold` and
            `per_process_memory_fraction` would change the real allocator's memory.
    """

    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int | None = None
    roundup_power2_divisions: tuple[int, ...] = _NO_ROUNDUP
    expandable_segments: bool = False
    not_simulated: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        large = self.large_segment_bytes
        if large <= MIN_LARGE_ALLOC_BYTES or large % ROUND_LARGE_BYTES:
            raise ValueError(
                f"large_segment_bytes is {large}; it must be a multiple of 2 MiB above 10 MiB: the "
                f"default is {LARGE_SEGMENT_BYTES}"
            )
        for name in ("max_split_bytes", "max_non_split_rounding_bytes"):
            value = getattr(self, name)
            if value is not None and value < large:
                raise ValueError(
                    f"{name} is {value}; it must be at least large_segment_bytes, {large}: raise "
                    "it, or leave it out"
                )
        if len(self.roundup_power2_divisions) != NUM_ROUNDUP_INTERVALS:
            raise ValueError(
                f"roundup_power2_divisions has {len(self.roundup_power2_divisions)} values; it "
                f"must have {NUM_ROUNDUP_INTERVALS}"
            )
        for value in self.roundup_power2_divisions:
            if value < 0 or value & (value - 1):
                raise ValueError(
                    f"roundup_power2_divisions has {value}; each must be a power of 2, or 0 for "
                    "none: try 4"
                )

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Parse PYTORCH_CUDA_ALLOC_CONF: `expandable_segments:True,max_split_size_mb:128`."""
        known: dict[str, Any] = {}
        not_simulated: list[str] = []
        for name, value in _items("".join(text.split())):
            if name in _PARSERS:
                field, parser = _PARSERS[name]
                known[field] = parser(name, value)
            elif name != "backend":  # perhaps of a newer PyTorch, which refuses what it lacks
                not_simulated.append(name)
            elif value != "native":
                raise ValueError(
                    f"backend:{value} is another allocator; only the native caching allocator is "
                    "simulated: leave backend out"
                )
        return cls(**known, not_simulated=tuple(not_simulated))

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> AllocatorSettings:
        """The settings of a process with these environment variables.

        PYTORCH_CUDA_ALLOC_CONF wins over PYTORCH_ALLOC_CONF (`instance`, CUDAAllocatorConfig.h).
        """
        return cls.parse(
            environ.get("PYTORCH_CUDA_ALLOC_CONF", environ.get("PYTORCH_ALLOC_CONF", ""))
        )

    def block_bytes(self, requested_bytes: int) -> int:
        """Round a request up to its block size (`round_size`, CUDACachingAllocator.cpp)."""
        if not self._has_divisions or requested_bytes < MIN_BLOCK_BYTES:
            return (requested_bytes + MIN_BLOCK_BYTES - 1) // MIN_BLOCK_BYTES * MIN_BLOCK_BYTES
        interval = min(
            max(requested_bytes.bit_length() - 1 - _LOG2_MIB, 0), NUM_ROUNDUP_INTERVALS - 1
        )
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and requested_bytes > MIN_BLOCK_BYTES * divisions:
            # `roundup_power2_next_division`: steps from the power of two below, at least 512 bytes.
            power = 1 << (requested_bytes.bit_length() - 1)
            return round_up(requested_bytes, power // divisions)
        return (requested_bytes + MIN_BLOCK_BYTES - 1) // MIN_BLOCK_BYTES * MIN_BLOCK_BYTES

    @cached_property
    def _has_divisions(self) -> bool:
        return any(divisions > 1 for divisions in self.roundup_power2_divisions)

    def segment_bytes(self, block_bytes: int) -> int:
        """The size of a new segment for a block (`get_allocation_size`)."""
        if block_bytes <= SMALL_SIZE_BYTES:
            return SMALL_SEGMENT_BYTES
        if block_bytes < MIN_LARGE_ALLOC_BYTES:
            return self.large_segment_bytes
        return round_up(block_bytes, ROUND_LARGE_BYTES)

    def splits(self, block_bytes: int, rest_bytes: int, *, is_small: bool) -> bool:
        """Whether the rest of a free block becomes a block of its own (`should_split`)."""
        if is_small or self.expandable_segments:
            return rest_bytes >= MIN_BLOCK_BYTES
        return rest_bytes > SMALL_SIZE_BYTES and (
            self.max_split_bytes is None or block_bytes < self.max_split_bytes
        )

    def serves(self, free_bytes: int, block_bytes: int) -> bool:
        """Whether `max_split_bytes` lets a free block serve a request (`get_free_block`)."""
        if self.max_split_bytes is None:
            return True
        if block_bytes < self.max_split_bytes:
            return free_bytes < self.max_split_bytes
        rounding_bytes = self.max_non_split_rounding_bytes or self.large_segment_bytes
        return free_bytes < block_bytes + rounding_bytes


def _items(text: str) -> list[tuple[str, str]]:
    """`name:value,name:[...]` as pairs."""
    items, position = [], 0
    while position < len(text):
        match = _ITEM.match(text, position)
        if match is None:
            raise ValueError(
                f"{text[position:]!r} is not name:value; settings look like "
                "expandable_segments:True,max_split_size_mb:128"
            )
        items.append((match[1], match[2]))
        position = match.end()
    return items


def _mib(name: str, value: str) -> int:
    if not value.isdecimal():
        raise ValueError(
            f"{name}:{value} is not a size; write a whole number of MiB, such as {name}:128"
        )
    return int(value) * MiB


def _flag(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"{name}:{value} is neither True nor False: write {name}:True")
    return value == "True"


def _power_of_2(name: str, value: str, *, least: int) -> int:
    if not value.isdecimal() or int(value) < least or int(value) & (int(value) - 1):
        raise ValueError(
            f"{value!r} in {name} is not a power of 2; write {name}:4 or {name}:[256:1,512:2,>:4]"
        )
    return int(value)


def _divisions(name: str, value: str) -> tuple[int, ...]:
    """Parse one value for all sizes, or `[256:1,512:2,>:4]`: by size in MiB, `>` for all above.

    Source: `parseRoundUpPower2Divisions`, AllocatorConfig.cpp.
    """
    if not value.startswith("["):
        return (_power_of_2(name, value, least=1),) * NUM_ROUNDUP_INTERVALS
    divisions, last, is_first = list(_NO_ROUNDUP), 0, True
    for item in value[1:-1].split(","):
        boundary, colon, value_text = item.partition(":")
        if not colon:
            raise ValueError(
                f"{item!r} in {name} is not size:divisions; write {name}:[256:1,512:2,>:4]"
            )
        steps = _power_of_2(name, value_text, least=0)
        if boundary == ">":
            divisions[last + 1 :] = [steps] * (NUM_ROUNDUP_INTERVALS - last - 1)
            continue
        last = min(_power_of_2(name, boundary, least=1).bit_length(), NUM_ROUNDUP_INTERVALS) - 1
        if is_first:
            divisions[:last] = [steps] * last
        divisions[last], is_first = steps, False
    return tuple(divisions)


_PARSERS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "expandable_segments": ("expandable_segments", _flag),
    "large_segment_size_mb": ("large_segment_bytes", _mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _mib),
    "max_split_size_mb": ("max_split_bytes", _mib),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
}
