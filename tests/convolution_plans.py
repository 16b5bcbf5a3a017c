"""Convolutions whose first plan was asked of cuDNN, and its answers."""

import gzip
import json
from functools import lru_cache
from pathlib import Path

from memcallback.cuda.convolution.call import Convolution, Direction

RECORDED = Path(__file__).parent / "recorded" / "plans"
CARDS = ("H200", "A100", "RTX 3090", "RTX 4090", "L4", "T4", "V100", "RTX 5090", "RTX PRO 6000")


def _read(name):
    return json.loads(gzip.decompress((RECORDED / f"{name}.json.gz").read_bytes()))


@lru_cache(maxsize=1)
def questions():
    """Convolutions with the shapes of their inputs: drawn at random, and `CASES`."""
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
            "questions"
        )
    ]


def first_plans(card, way):
    """For each question the engine's number and the workspace in bytes; None without a plan.

    `way` is "without" a device, "with" one, with one that is "hidden", or by the device's "handle",
    as PyTorch asks.
    """
    return _read(f"{card.replace(' ', '-')}.{way}")["first"]
