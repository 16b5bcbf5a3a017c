"""generator_state(): gives a random number generator its state back."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def generator_state(obj: Any) -> Callable[[], object] | None:
    """Restore a generator of PyTorch, Python or NumPy as it is now; None for any other object."""
    if isinstance(obj, torch.Generator):
        return partial(obj.set_state, obj.get_state())
    if isinstance(obj, random.Random) and not isinstance(obj, random.SystemRandom):
        return partial(obj.setstate, obj.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(obj, numpy.random.RandomState):
        return partial(obj.set_state, obj.get_state())
    if isinstance(obj, numpy.random.Generator):
        obj = obj.bit_generator
    if isinstance(obj, numpy.random.BitGenerator):
        return partial(setattr, obj, "state", obj.state)
    return None
