"""leftovers(): global variables of the user's program that hold fake tensors of a prediction."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Collection
from types import FrameType, ModuleType

from memcallback.core.code_lines import is_library
from memcallback.core.torch_private import FakeTensor, FakeTensorMode
from memcallback.step.copies.fakes import live_modes
from memcallback.step.copies.program import own_modules

#: Objects that are searched below one global variable.
_MAX_OBJECTS = 100_000


def leftovers(known: Collection[FakeTensorMode]) -> list[str]:
    """The variables, such as `train.mask_cache`; empty in nearly all cases, and then fast.

    Fake tensors of modes that were known before are not searched for. Of several variables that
    lead to the same one the first is named.
    """
    if not live_modes().difference(known):
        return []
    gc.collect()  # a trace is full of cycles
    modes = {id(mode) for mode in live_modes().difference(known)}
    if not modes:
        return []
    seen: set[int] = set()
    return [
        f"{module.__name__}.{name}"
        for module in own_modules()
        for name, value in list(vars(module).items())
        if _holds_fakes(value, modes, seen)
    ]


def _holds_fakes(value: object, modes: set[int], seen: set[int]) -> bool:
    """Whether a fake tensor of one of these modes is among what a value alone refers to."""
    if id(value) in seen:
        return False
    seen.add(id(value))
    queue, last = deque([value]), len(seen) + _MAX_OBJECTS
    while queue and len(seen) < last:
        current = queue.popleft()
        if isinstance(current, FakeTensor) and id(current.fake_mode) in modes:
            return True
        for referent in gc.get_referents(current):
            if id(referent) not in seen and _is_own(referent):
                seen.add(id(referent))
                queue.append(referent)
    return False


def _is_own(value: object) -> bool:
    """Whether to search in a value: not in modules, nor in classes of libraries."""
    if isinstance(value, (ModuleType, FrameType)):
        return False
    if isinstance(value, type):
        file = getattr(sys.modules.get(value.__module__), "__file__", None)
        return file is not None and not is_library(file)
    # The globals of a function are searched as those of its module.
    return not (isinstance(value, dict) and "__builtins__" in value)
