"""AllocationProfile: the allocations of one thread on the CPU, while nobody else profiles.

PyTorch's profiler reports them, and a process can have one profile at a time: PyTorch crashes
where two meet. So ours begins only where there is no other, and ends as soon as another starts.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from typing import Any

import torch

from memcallback.core.torch_private import (
    DisableOptions,
    RecordScope,
    disable_profiler,
    drop_profiler,
    enable_profiler,
    is_profiler_on,
    prepare_profiler,
    replaced,
    require,
)
from memcallback.devices.other_profiles import is_anyone_profiling
from memcallback.devices.unknown_blocks import UnknownBlocks

#: The size of the storages that mark boundaries: one that no tensor is likely to have.
_MARK_BYTES = 7919
_CPU = torch.device("cpu")
#: What starts a profile. The first begins a session, of which a process has one; the others begin
#: with its thread alone.
_STARTS = ("prepare_profiler", "enable_profiler", "enable_legacy_profiler")
_NEEDED = (*_STARTS, "disable_profiler", "is_profiler_on", "RecordScope")
#: Held while ours begins, ends or gives way.
_lock = threading.RLock()


#: Of an allocation, the address and the bytes; of a release, the bytes are negative.
Change = tuple[int, int]


class AllocationProfile:
    """A profile of this thread, from `begin` to `end` or until another profile starts."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._marks: list[int] = []
        self._is_on = False
        self._of_thread = _ProfileOfThread()
        self._patches = ExitStack()
        self._unknown_blocks = UnknownBlocks()

    def begin(self) -> bool:
        """Begin, unless somebody else profiles; whether it did. A missing part raises."""
        global _open
        require(*_NEEDED)
        with _lock, ExitStack() as patches:
            if _profile_of_ours() is not None:
                return False
            for name in _STARTS:
                patches.enter_context(replaced(name, functools.partial(_giving_way, name)))
            # Only now: whoever starts from here on is noticed.
            if is_anyone_profiling():
                return False
            _of_thread.end = _EndOfThread(self._of_thread)
            _start()
            self._of_thread.is_on = True
            self._is_on, self._patches = True, patches.pop_all()
            _open = weakref.ref(self)
        return True

    def mark(self) -> None:
        """Mark a boundary."""
        unknown = self._unknown_blocks
        before_bytes = unknown.allocated_bytes
        # A storage without a tensor is no operator: no mode and no observer of the user's sees it.
        storage = torch.UntypedStorage(_MARK_BYTES)
        self._marks.append(storage.data_ptr())
        # A storage of our size is seen to be counted: the count beside it is what it is taken for.
        if unknown.allocated_bytes - before_bytes == _MARK_BYTES:
            unknown.restart()

    def end(self) -> list[list[Change]] | None:
        """The allocations before each mark, since the one before; None if they are not known."""
        global _open
        with _lock:
            self._patches.close()
            self._unknown_blocks.put_back()
            if not self._is_on:
                return None
            self._is_on, _open = False, None
            if threading.get_ident() != self._thread:
                return None  # only its own thread can end it
            if not is_profiler_on():
                self._of_thread.is_on = False
                return None  # somebody has ended it
            result = self._of_thread.end()
            if result is None:
                return None
            return _sections(result.experimental_event_tree(), self._marks)

    def give_way(self, *, is_session: bool) -> None:
        """End, as another profile starts: in this thread, or anywhere with a session."""
        if threading.get_ident() == self._thread:
            self.end()
        elif is_session and not self._of_thread.has_lost_session:
            self._of_thread.has_lost_session = True
            # Another thread cannot end ours, but the session, which PyTorch would else cancel with
            # a line on stderr: it joins it and ends that.
            enable_profiler(*_settings())
            disable_profiler()

    def __del__(self) -> None:
        with suppress(Exception):  # nobody would read of it, and PyTorch may be gone
            self.end()


class _ProfileOfThread:
    """Whether a thread's profile is on, and whether another thread has the session by now."""

    is_on = has_lost_session = False

    def end(self) -> Any:
        """End it in its thread; its result, or None without the session."""
        self.is_on = False
        if self.has_lost_session:
            # This ends ours and leaves that alone.
            drop_profiler(DisableOptions(True, False))
            return None
        return disable_profiler()


class _EndOfThread:
    """Is deleted in its thread as this ends, and ends a profile that nobody has ended there.

    Else PyTorch crashes the process at its end. Nobody but the thread may hold it.
    """

    def __init__(self, profile: _ProfileOfThread) -> None:
        self._profile = profile

    def __del__(self) -> None:
        with suppress(Exception):
            if self._profile.is_on and is_profiler_on():
                self._profile.end()


_of_thread = threading.local()
#: Ours, of which there is one; weak, so that one that is dropped without an end takes its patches
#: with it.
_open: weakref.ref[AllocationProfile] | None = None


def _profile_of_ours() -> AllocationProfile | None:
    return None if _open is None else _open()


@atexit.register
def _end_with_the_program() -> None:
    """End one that is still open: PyTorch's own end after Python's would crash the process."""
    with _lock, suppress(Exception):
        if (ours := _profile_of_ours()) is not None:
            ours.end()


def _giving_way(name: str, start: Callable[..., Any]) -> Callable[..., Any]:
    """A function that starts a profile, as it is, after ours has given way."""

    def starting(*args: Any, **kwargs: Any) -> Any:
        with _lock, suppress(Exception):  # their profile starts whatever becomes of ours
            if (ours := _profile_of_ours()) is not None:
                ours.give_way(is_session=name == "prepare_profiler")
        return start(*args, **kwargs)

    return starting


@functools.cache
def _settings() -> tuple[Any, frozenset[Any], frozenset[Any]]:
    """Of our profile: the configuration, the activities, and the scopes whose events are kept."""
    config = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True).config()
    # Allocations are reported whatever the scope, and operators, of which there are many, are not.
    return (
        config,
        frozenset({torch.profiler.ProfilerActivity.CPU}),
        frozenset({RecordScope.LITE_INTERPRETER}),
    )


def _start() -> None:
    config, activities, scopes = _settings()
    # PyTorch 2.13 prints two lines to stderr for each profile unless this is set when its profiler
    # is first used.
    is_unset = "KINETO_LOG_LEVEL" not in os.environ
    if is_unset:
        os.environ["KINETO_LOG_LEVEL"] = "6"
    try:
        prepare_profiler(config, activities)
        enable_profiler(config, activities, scopes)
    finally:
        if is_unset:
            del os.environ["KINETO_LOG_LEVEL"]


def _sections(events: Sequence[Any], marks: list[int]) -> list[list[Change]] | None:
    """Cut the events, which are in order, at the marks; None if they are not all there, once."""
    changes = [
        (one.ptr, one.alloc_size)
        for event in events
        if event.name == "[memory]" and (one := event.extra_fields).device == _CPU
    ]
    # A mark is allocated and released at once.
    found = [
        position
        for position, (first, second) in enumerate(pairwise(changes))
        if first[1] == _MARK_BYTES and second == (first[0], -_MARK_BYTES)
    ]
    if [changes[position][0] for position in found] != marks:
        return None
    starts = [0, *(position + 2 for position in found)]
    return [changes[start:end] for start, end in zip(starts, found, strict=False)]
