"""Detects whether a PyTorch profiler runs in any thread of this process, or is about to start."""

from __future__ import annotations

import gc
import sys
import weakref

import torch
from torch.autograd.profiler import profile

from memcallback.core.torch_private import is_any_profiler_on, is_profiler_on


def is_anyone_profiling() -> bool:
    """Whether a profile runs, or is prepared by its schedule's warm-up."""
    return bool(is_profiler_on()) or is_any_profiler_on() or _profiles.any_entered()


class _Profiles:
    """PyTorch's profile objects, which alone show that a profile is prepared.

    Searching all objects of the process for them takes tens of milliseconds. But each of them
    refers to its class, so that a new one shows in the count of references to that.
    """

    def __init__(self) -> None:
        self._known: list[weakref.ref[profile]] = []
        self._counts: tuple[int, int] | None = None

    def any_entered(self) -> bool:
        """Whether one of them is prepared or runs."""
        alive = [one for known in self._known if (one := known()) is not None]
        if _counts(len(alive)) != self._counts:
            alive = [one for one in gc.get_referrers(profile) if type(one) is profile]
            self._known = [weakref.ref(one) for one in alive]
            self._counts = _counts(len(alive)) if _is_counted() else None
        return any(map(_is_entered, alive))


_profiles = _Profiles()


def _counts(num_known: int) -> tuple[int, int]:
    """How many refer to the class, but for known objects; and to that of profiles with a schedule.

    Those have an object of either class, so that one that takes the place of a mere reference to
    one class shows in the other.
    """
    return sys.getrefcount(profile) - num_known, sys.getrefcount(torch.profiler.profile)


def _is_counted() -> bool:
    """Whether a new object shows in the count, as it does not in every build of Python."""
    before = sys.getrefcount(profile)
    probe = profile.__new__(profile)
    is_counted = sys.getrefcount(profile) == before + 1
    del probe
    return is_counted


def _is_entered(one: profile) -> bool:
    state = vars(one)
    # One that accumulates events keeps its results when it is prepared again.
    has_ended = state.get("kineto_results") is not None and not state.get("acc_events")
    return bool(state.get("entered")) and not has_ended
