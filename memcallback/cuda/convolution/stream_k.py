"""What a Hopper GPU takes for convolutions whose last tiles are shared among multiprocessors.

Some of cuDNN's plans compute a convolution as a product of matrices, in tiles: each cluster of
multiprocessors computes one tile at a time, or some side by side. Where too few tiles remain for
all clusters, several clusters share each of them (stream-K): they split the sum, and keep partial
sums in the workspace. Then they add these pairwise, in levels. How many clusters run at once, a
described device does not say: cuDNN then counts those of 18 multiprocessors.

The rules are fitted to what cuDNN 9.19 answered on an H200, and for described devices with other
clocks (2026-11-27). `tests/cuda/test_stream_k.py` says how often they are right for others, on an
H200 and an H100; where they are wrong for a product, it is by less than 4 MiB. Grouped convolutions
keep cuDNN's answer. Osama et al., https://arxiv.org/abs/2301.03598, describe stream-K.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod

from memcallback.cuda.convolution.call import Convolution, Direction
from memcallback.devices.catalogue import DeviceSpec

#: The compute capability of the devices whose plans share tiles so.
HOPPER = (9, 0)

_FLOAT32_BYTES = 4


class Knob(IntEnum):
    """Choices of a plan: `cudnnBackendKnobType_t` in cudnn_graph.h."""

    TILE_SIZE = 2
    TILE_K = 13
    WORKSPACE = 25
    CLUSTER_M = 27
    CLUSTER_N = 28


#: Direction, whether in float32 -> the engine that works so.
_ENGINES = {
    (Direction.FORWARD, False): 62,
    (Direction.BACKWARD_DATA, False): 67,
    (Direction.BACKWARD_FILTER, False): 65,
    (Direction.FORWARD, True): 67,
    (Direction.BACKWARD_DATA, True): 71,
    (Direction.BACKWARD_FILTER, True): 68,
}
#: The value of TILE_SIZE -> rows and columns of a tile.
_TILES = {
    0: (128, 128),
    1: (128, 64),
    3: (256, 128),
    4: (256, 64),
    5: (64, 64),
    6: (128, 256),
    7: (64, 128),
    9: (64, 256),
    16: (256, 32),
    18: (64, 192),
    20: (256, 96),
}
#: The value of TILE_K -> how many products are summed in one step.
_STEPS = {0: 32, 1: 64}
#: Direction, engine, tile, step: plans that share no tiles after more rounds of all clusters than
#: `_FEW_ROUNDS`. We saw them share after up to 3.2 rounds, and not after 5.2 and more.
_FOR_FEW_ROUNDS = {
    (Direction.BACKWARD_DATA, 67, 128, 64, 32),
    (Direction.BACKWARD_FILTER, 68, 128, 64, 32),
}
_FEW_ROUNDS = 5
#: The value of WORKSPACE with which clusters may share a tile.
_MAY_SHARE = 0

_DESCRIBED_MULTIPROCESSORS = 18
#: Multiprocessors of a cluster -> clusters that run at once on 132 multiprocessors: the driver's
#: cuOccupancyMaxActiveClusters on H200 and H100, for blocks that fill a multiprocessor
#: (`benchmarks/device_facts.py`).
_ACTIVE_CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15, 9: 9}
_ACTIVE_LARGE_CLUSTERS, _MEASURED_MULTIPROCESSORS = 7, 132

#: By n: 2**n clusters share a sum only if it is so many times as long as a level costs; for
#: numbers between the powers of two, by `_BETWEEN` more. Fitted.
_NEEDED_LEVELS = (0, 1, 2, 3.08, 4.15, 5.3, 6, 7)
_BETWEEN = 0.12
#: A counter, the bytes that align the workspace, and those before the counters of shared tiles.
_COUNTER_BYTES, _ALIGNMENT_BYTES, _COUNTERS_BYTES = 4, 127, 32


@dataclass(frozen=True)
class _Tiling:
    """How a plan cuts a product.

    Attributes:
        clusters: How many tiles of clusters there are.
        steps: The steps of each sum.
        step: The products of one step.
        area: The numbers of one tile.
        cluster_size: The tiles that a cluster computes side by side.
        cost_factor: 1, or 8 in bfloat16, where cuDNN shares only sums that are 8 times as long.
        clock_ratio: The multiprocessors' clock divided by the memory's.
        may_share: Whether the plan may share tiles.
        most_rounds: After so many rounds of all clusters, no tile is shared any more.
    """

    clusters: int
    steps: int
    step: int
    area: int
    cluster_size: int
    cost_factor: int
    clock_ratio: float
    may_share: bool
    most_rounds: int

    def workspace_bytes(self, active: int) -> int:
        """Partial sums, and the counters of those who wait for them, with `active` clusters."""
        is_long = self.clusters > 2 * active
        size_bytes = _COUNTER_BYTES + _ALIGNMENT_BYTES if is_long else 0
        tiles, sharers = self._shared(active)
        if sharers < 2:
            return size_bytes
        sums_bytes = _FLOAT32_BYTES * self.area * self.cluster_size * tiles * sharers
        waits_bytes = _COUNTER_BYTES * self.cluster_size * tiles * _pairs(sharers)
        size_bytes += sums_bytes + waits_bytes + _COUNTERS_BYTES
        return size_bytes if is_long else size_bytes + _ALIGNMENT_BYTES

    def _shared(self, active: int) -> tuple[int, int]:
        """How many tiles of clusters are shared, and among how many clusters each."""
        tiles = self.clusters % active if active else 0
        if not self.may_share or tiles == 0 or 2 * tiles > active:
            return 0, 0
        if self.clusters > self.most_rounds * active:
            return 0, 0
        most = active // tiles
        is_one_round = self.clusters < active
        return tiles, self._in_one_round(most) if is_one_round else self._after_others(most)

    def _in_one_round(self, most: int) -> int:
        """How many share a tile where all run at once: the fewest steps and costs (fitted)."""
        most = min(most, self.steps)
        for sharers in range(most, 8, -1):
            if self.steps // sharers * self.step > 1024:
                return sharers
        level = self.cost_factor * (474 * self.clock_ratio + 125 * 16384 / self.area)
        return min(
            range(1, most + 1), key=lambda n: -(-self.steps // n) * self.step + level * _levels(n)
        )

    def _after_others(self, most: int) -> int:
        """How many share a tile after full rounds: parts of a sum stay long and alike (fitted)."""
        level = self.cost_factor * (575 * self.clock_ratio - 15 + 84 * 16384 / self.area)
        levels = self.steps * self.step / level
        allowed = max(n for n, needed in enumerate(_NEEDED_LEVELS) if levels >= needed)
        sharers = min(most, 1 << allowed)
        if sharers & (sharers - 1) and levels < _NEEDED_LEVELS[_levels(sharers)] + _BETWEEN:
            sharers = 1 << (_levels(sharers) - 1)
        sharers = min(sharers, self.steps * self.step // 128)
        if sharers < 2:
            return 0
        each = -(-self.steps // sharers)
        return -(-self.steps // each)


def has_rule(convolution: Convolution, device: DeviceSpec, engine: int) -> bool:
    """Whether an engine's plans may share tiles on the device."""
    is_float32 = convolution.dtype == "float32"
    return device.compute_capability == HOPPER and engine == _ENGINES.get(
        (convolution.direction, is_float32)
    )


def workspace_on_device_bytes(
    convolution: Convolution,
    input_shape: Sequence[int],
    device: DeviceSpec,
    engine: int,
    knobs: Mapping[int, int],
    described_bytes: int,
) -> int:
    """The workspace of a plan on the device, from what cuDNN says for the described device."""
    call = convolution, input_shape, device, engine, knobs
    on_device, described = stream_k_bytes(*call), stream_k_bytes(*call, is_described=True)
    if on_device is None or described is None or described > described_bytes:
        return described_bytes
    return described_bytes - described + on_device


def stream_k_bytes(
    convolution: Convolution,
    input_shape: Sequence[int],
    device: DeviceSpec,
    engine: int,
    knobs: Mapping[int, int],
    *,
    is_described: bool = False,
) -> int | None:
    """What a plan takes of its workspace to share tiles; None if no plan of this kind is known.

    A plan is its engine's number, among those for the direction, and what it chooses (`Knob` ->
    value). With `is_described` it is counted as cuDNN does for a described device. A device with
    other than 132 multiprocessors is counted in proportion; none was measured, nor other clocks
    than those of H200 and H100.
    """
    tiling = _tiling(convolution, input_shape, device, engine, knobs)
    if tiling is None:
        return None
    if is_described:
        return tiling.workspace_bytes(_DESCRIBED_MULTIPROCESSORS // tiling.cluster_size)
    active = _ACTIVE_CLUSTERS.get(tiling.cluster_size, _ACTIVE_LARGE_CLUSTERS)
    return tiling.workspace_bytes(active * device.num_multiprocessors // _MEASURED_MULTIPROCESSORS)


def _tiling(
    convolution: Convolution,
    input_shape: Sequence[int],
    device: DeviceSpec,
    engine: int,
    knobs: Mapping[int, int],
) -> _Tiling | None:
    """How the plan cuts the product; None if it is another engine's or not known."""
    is_grouped = input_shape[1] != convolution.weight_shape[1]
    if is_grouped or not has_rule(convolution, device, engine):
        return None
    tile = _TILES.get(knobs.get(Knob.TILE_SIZE, -1))
    step = _STEPS.get(knobs.get(Knob.TILE_K, -1))
    cluster = knobs.get(Knob.CLUSTER_M, 1), knobs.get(Knob.CLUSTER_N, 1)
    if tile is None or step is None or min(cluster) < 1:
        return None
    rows, columns, steps = _product(convolution, input_shape, tile[1], step)
    if steps == 0:
        return None
    key = (convolution.direction, engine, *tile, step)
    return _Tiling(
        clusters=-(-rows // (tile[0] * cluster[0])) * -(-columns // cluster[1]),
        steps=steps,
        step=step,
        area=prod(tile),
        cluster_size=prod(cluster),
        cost_factor=8 if convolution.dtype == "bfloat16" else 1,
        clock_ratio=device.clock_khz / device.memory_clock_khz,
        may_share=knobs.get(Knob.WORKSPACE) == _MAY_SHARE,
        most_rounds=_FEW_ROUNDS if key in _FOR_FEW_ROUNDS else sys.maxsize,
    )


def _product(
    convolution: Convolution, input_shape: Sequence[int], tile_columns: int, step: int
) -> tuple[int, int, int]:
    """The rows of the product, its columns of tiles, and the steps of each sum.

    Tiles and steps do not reach from one element of the kernel into the next.
    """
    out_channels, in_channels, *kernel = convolution.weight_shape
    elements = prod(kernel)
    outputs = convolution.output_shape(input_shape)
    output_pixels = outputs[0] * prod(outputs[2:])
    if convolution.direction is Direction.FORWARD:
        return output_pixels, -(-out_channels // tile_columns), elements * -(-in_channels // step)
    if convolution.direction is Direction.BACKWARD_DATA:
        input_pixels = input_shape[0] * prod(input_shape[2:])
        return input_pixels, -(-in_channels // tile_columns), elements * -(-out_channels // step)
    return out_channels, elements * -(-in_channels // tile_columns), -(-output_pixels // step)


def _levels(sharers: int) -> int:
    """How many times sums are added pairwise until one is left."""
    return (sharers - 1).bit_length()


def _pairs(sharers: int) -> int:
    """How many sums are waited for, in all levels."""
    count = 0
    while sharers > 1:
        sharers = (sharers + 1) // 2
        count += sharers
    return count
