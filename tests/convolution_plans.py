"""Convolutions whose first plan was asked of cuDNN, and its answers."""

import gzip
import json
from functools import lru_cache
from pathlib import Path

from memcallback.cuda.convolution.call import Convolution, Direction
from memcallback.cuda.convolution.stream_k import Knob

RECORDED = Path(__file__).parent / "recorded" / "plans"
CARDS = ("H200", "A100", "RTX 3090", "RTX 4090", "L4", "T4", "V100", "RTX 5090", "RTX PRO 6000")
#: Cards that were asked by their handles.
HOPPERS = ("H200", "H100")
#: The questions that the rules were found with (drawn at random, and `CASES`), others drawn anew,
#: and those of the models of `benchmarks/accuracy_configs.py`, at batch sizes of 1 to 128.
SETS = ("questions", "again", "trainings")
#: The knobs of the plans in `recorded/stream_k`, in their order.
KNOBS = (Knob.TILE_SIZE, Knob.TILE_K, Knob.CLUSTER_M, Knob.CLUSTER_N)


def product(direction, dtype, rows, columns, sums):
    """The convolution of one pixel that is a product of rows x columns, over so many sums."""
    shape, weight = {
        Direction.FORWARD: ((1, sums, rows, 1), (columns, sums, 1, 1)),
        Direction.BACKWARD_DATA: ((1, columns, rows, 1), (sums, columns, 1, 1)),
        Direction.BACKWARD_FILTER: ((1, columns, sums, 1), (rows, columns, 1, 1)),
    }[direction]
    convolution = Convolution(
        direction, weight, (0, 0), (1, 1), (1, 1), dtype=dtype, channels_last=True
    )
    return convolution, shape


def file_name(card, way, which):
    """Where the answers for a card are."""
    return f"{card.replace(' ', '-')}.{way}{'' if which == SETS[0] else f'.{which}'}.json.gz"


def _read(name):
    return json.loads(gzip.decompress((RECORDED / name).read_bytes()))


@lru_cache(maxsize=3)
def questions(which=SETS[0]):
    """Convolutions with the shapes of their inputs."""
    return [
        (
            Convolution(
                direction=Direction[direction],
                weight_shape=tuple(weight),
                padding=tuple(padding),
                stride=tuple(stride),
                dilation=tuple(dilation),
                dtype=dtype,
                channels_last=channels_last,
                allow_tf32=True,
                deterministic=False,
            ),
            tuple(shape),
        )
        for direction, dtype, weight, padding, stride, dilation, channels_last, shape in _read(
            f"{which}.json.gz"
        )
    ]


def first_plans(card, way, which=SETS[0]):
    """For each question the engine's number, the workspace in bytes, maybe knobs; or None.

    `way` is "without" a device, "with" one, with one that is "hidden", or by the device's "handle",
    as PyTorch asks. Knobs, [knob, value] each, are there for `HOPPERS` where `way` is "without" or
    "handle".
    """
    return _read(file_name(card, way, which))["first"]
