"""Streams and events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from memcallback.step.module_follower import SequenceLog
from memcallback.trace.dispatch.mode import CUDA, TraceMode

#: What autograd says of nodes that are not in its sequence.
_NO_NUMBER = 2**64 - 1
_HELD_BACK = "Tensor.record_stream holds memory back until another stream is done with it: it was taken to be free at once"


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class Streams:
    """The streams of a trace, by number in the order in which they were made, and which of them is
    current.

    A node of autograd runs in the stream in which it was made, whatever is current where the
    backward pass is begun (`evaluate_function` in torch/csrc/autograd/engine.cpp).

    Attributes:
        default: The default stream, of number 0.
    """

    def __init__(self, mode: TraceMode) -> None:
        self._mode = mode
        self._numbers = count()
        self.default = self._current = self.new()
        self._of_nodes = SequenceLog(self.default)
        # The number of the autograd node whose stream was made current.
        self._node: int | None = None

    def new(self) -> Stream:
        """Another stream."""
        return Stream(self, next(self._numbers))

    @property
    def current(self) -> Stream:
        """The stream that is current."""
        self._follow()
        return self._current

    def set(self, stream: Stream | None) -> None:
        """Make a stream the current one; None leaves it as it is."""
        if stream is None:
            return
        self._follow()
        self._set(stream)
        self._mode.follow_streams = self._follow

    def _set(self, stream: Stream) -> None:
        self._current = stream
        self._mode.ledger.stream = stream.stream_id
        self._of_nodes.add(stream)

    def _follow(self) -> None:
        """See whether another autograd node runs."""
        node = torch._C._current_autograd_node()
        number = None if node is None else node._sequence_nr()
        # What accumulates gradients has no number: it follows the node that made them.
        if number is None or number >= _NO_NUMBER or number == self._node:
            return
        self._node = number
        self._set(self._of_nodes.at(number))

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """A backward pass runs inside, after which the stream that is current here is so again."""
        before, node = self.current, self._node
        try:
            yield
        finally:
            self._node = node
            self._set(before)

    @contextmanager
    def entered(self, stream: Stream | None) -> Iterator[None]:
        """A stream is current inside."""
        before = self.current
        self.set(stream)
        try:
            yield
        finally:
            self.set(before)

    def hold_back(self, tensor: torch.Tensor, s: Stream) -> None:
        """Say what `Tensor.record_stream` does: when a stream is done is a matter of time, of which
        a trace knows nothing.
        """
        with torch._C.DisableTorchFunction():
            entry = self._mode.ledger.find(tensor)
        if entry is not None and not entry.is_host and entry.stream != s.stream_id:
            self._mode.assumed[_HELD_BACK] = None


class Stream:
    """In place of a stream: what is asked of it is done at once."""

    device, device_index, priority = CUDA, 0, 0

    def __init__(self, streams: Streams, number: int) -> None:
        self.stream_id = self.cuda_stream = number
        self._streams = streams
        self._before: list[Stream] = []

    def query(self) -> bool:
        """Whether it is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether a graph is recorded."""
        return False

    def record_event(self, event: Any = None) -> Any:
        """An event at which it is."""
        return event or Event()

    wait_event = wait_stream = synchronize = _nothing

    def __enter__(self) -> Stream:
        """It is current inside."""
        self._before.append(self._streams.current)
        self._streams.set(self)
        return self

    def __exit__(self, *exception: object) -> None:
        """The one before is current again."""
        self._streams.set(self._before.pop())


class Event:
    """In place of an event: it has happened, and no time went by."""

    device, cuda_event = CUDA, 0

    def query(self) -> bool:
        """Whether it has happened."""
        return True

    def elapsed_time(self, end_event: Any) -> float:
        """How long after it another one happened, in milliseconds."""
        return 0.0

    record = wait = synchronize = _nothing


def about_streams(streams: Streams) -> dict[str, Callable[..., Any]]:
    """What stands in for functions of `torch.cuda` that are about streams, by their names."""
    return {
        "current_stream": lambda device=None: streams.current,
        "default_stream": lambda device=None: streams.default,
        "set_stream": streams.set,
        "stream": streams.entered,
        "StreamContext": streams.entered,
        "synchronize": _nothing,
        "is_current_stream_capturing": lambda: False,
    }
