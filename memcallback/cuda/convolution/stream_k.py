"""What a Hopper GPU takes for convolutions whose last tiles are shared among multiprocessors.

cuDNN computes a convolution as a product of matrices, in tiles, one for each cluster of
multiprocessors at a time. Where too few tiles remain for all clusters, several clusters share each
of them (stream-K): they split the sum, and keep partial sums in the workspace. How many clusters
run at once, a described device does not say: cuDNN then counts those of 18 multiprocessors.

We found these rules by asking cuDNN 9.19 on an H200 about products of many sizes (2026-11-27).
`tests/cuda/test_stream_k.py` says how often they are right for others, on an H200 and an H100:
seldom wrong, by one choice of how many share. Osama et al., https://arxiv.org/abs/2301.03598,
describe stream-K.
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
#: Engine, tile, step: plans that do not share after many rounds; we saw none beyond nine.
_FOR_FEW_ROUNDS = {(67, 128, 64, 32), (68, 128, 64, 32)}
#: The value of WORKSPACE with which clusters may share a tile.
_MAY_SHARE = 0

_DESCRIBED_MULTIPROCESSORS = 18
#: Multiprocessors of a cluster -> clusters that run at once on 132 multiprocessors: the driver's
#: cuOccupancyMaxActiveClusters on H200 and H100, for blocks that fill a multiprocessor
#: (`benchmarks/device_facts.py`).
_ACTIVE_CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15, 9: 9}
_ACTIVE_LARGE_CLUSTERS, _MEASURED_MULTIPROCESSORS = 7, 132

#: How long a sum must be, in costs of a level, for 2**n clusters to share it; by n. These and the
#: costs are what fits the answers best.
_NEEDED_LEVELS = (0, 1, 2, 3.08, 4.15, 5.3, 6, 7)
#: A counter at the start of the workspace, and the bytes that align it.
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
        alone = self.clusters < active
        return tiles, self._sharers_alone(most) if alone else self._sharers_at_end(most)

    def _sharers_alone(self, most: int) -> int:
        """Where all tiles run at once: the fewest steps, where a level of sums costs some."""
        most = min(most, self.steps)
        for sharers in range(most, 8, -1):
            if self.steps // sharers * self.step > 1024:
                return sharers
        level = self.cost_factor * (474 * self.clock_ratio + 125 * 16384 / self.area)
        return min(
            range(1, most + 1), key=lambda n: -(-self.steps // n) * self.step + level * _levels(n)
        )

    def _sharers_at_end(self, most: int) -> int:
        """Where others have run before: so many that sums stay long, and none has less to do."""
        level = self.cost_factor * (575 * self.clock_ratio - 15 + 84 * 16384 / self.area)
        levels = self.steps * self.step / level
        allowed = max(n for n, needed in enumerate(_NEEDED_LEVELS) if levels >= needed)
        sharers = min(most, 1 << allowed)
        if sharers & (sharers - 1) and levels < _NEEDED_LEVELS[_levels(sharers)] + 0.12:
            sharers = 1 << (_levels(sharers) - 1)
        sharers = min(sharers, self.steps * self.step // 128)
        if sharers < 2:
            return 0
        each = -(-self.steps // sharers)
        return -(-self.steps // each)


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
    other than 132 multiprocessors is counted in proportion; none was measured.
    """
    tiling = _tiling(convolution, input_shape, device, engine, knobs)
    if tiling is None or device.compute_capability != HOPPER:
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
    is_float32 = convolution.dtype == "float32"
    is_grouped = input_shape[1] != convolution.weight_shape[1]
    if engine != _ENGINES.get((convolution.direction, is_float32)) or is_grouped:
        return None
    tile = _TILES.get(knobs.get(Knob.TILE_SIZE, -1))
    step = _STEPS.get(knobs.get(Knob.TILE_K, -1))
    if tile is None or step is None:
        return None
    rows, columns, steps = _product(convolution, input_shape, tile[1], step)
    cluster = knobs.get(Knob.CLUSTER_M, 1), knobs.get(Knob.CLUSTER_N, 1)
    return _Tiling(
        clusters=-(-rows // (tile[0] * cluster[0])) * -(-columns // cluster[1]),
        steps=steps,
        step=step,
        area=prod(tile),
        cluster_size=prod(cluster),
        cost_factor=8 if convolution.dtype == "bfloat16" else 1,
        clock_ratio=device.clock_khz / device.memory_clock_khz,
        may_share=knobs.get(Knob.WORKSPACE) == _MAY_SHARE,
        most_rounds=5 if (engine, *tile, step) in _FOR_FEW_ROUNDS else sys.maxsize,
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
