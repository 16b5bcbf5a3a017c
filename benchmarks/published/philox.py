"""The numbers that `torch.randn` draws on an H100 with a given seed, computed with NumPy.

Which expert a token goes to depends on random numbers, and with the seed they are known: PyTorch's
generator is Philox 4x32-10, each thread of its kernel has a subsequence, and `curand_normal4` makes
four normal numbers of one call.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BLOCK = 256  # threads
_MOST_BLOCKS = 132 * (2048 // _BLOCK)  # what the multiprocessors of an H100 hold
_FACTORS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)


def _num_threads(number: int) -> int:
    return _BLOCK * min(_MOST_BLOCKS, -(-number // _BLOCK))


def _num_calls(number: int) -> int:
    """How many calls of Philox each thread makes for so many normal numbers."""
    return (number - 1) // (_num_threads(number) * 4) + 1


def _philox(seed: int, call: int, threads: NDArray[np.uint64]) -> list[NDArray[np.uint64]]:
    zeros = np.zeros_like(threads)
    counter = [zeros + np.uint64(call), zeros, threads, zeros]
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = counter[0] * _FACTORS[0], counter[2] * _FACTORS[1]
        counter = [
            (second >> np.uint64(32)) ^ counter[1] ^ np.uint64(keys[0]),
            second & _LOW,
            (first >> np.uint64(32)) ^ counter[3] ^ np.uint64(keys[1]),
            first & _LOW,
        ]
        keys = [(key + step) & 0xFFFFFFFF for key, step in zip(keys, _WEYL, strict=True)]
    return counter


def normal_numbers(seed: int, before: list[int], number: int) -> NDArray[np.float64]:
    """The normal numbers of one call of `torch.randn`.

    Args:
        seed: The seed, set before the first call.
        before: How many numbers each earlier call drew.
        number: How many this one draws.
    """
    start = sum(map(_num_calls, before))
    num_threads = _num_threads(number)
    threads = np.arange(num_threads, dtype=np.uint64)
    drawn = []
    for call in range(_num_calls(number)):
        bits = _philox(seed, start + call, threads)
        for x, y in (bits[:2], bits[2:]):
            u = (x.astype(np.float64) + 0.5) * 2.0**-32
            angle = (y.astype(np.float64) + 0.5) * 2.0**-31 * np.pi
            radius = np.sqrt(-2 * np.log(u))
            drawn += [radius * np.sin(angle), radius * np.cos(angle)]
    return np.concatenate(drawn)[:number]
