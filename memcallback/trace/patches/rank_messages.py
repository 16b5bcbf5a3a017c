"""Objects that ranks send each other before training (pipeline shape exchange).

A pipeline's stages tell each other the shapes of what they hand on
(`torch.distributed.send_object_list`). Who waits for such an object is given up, the rank that
sends it is traced until it does, and the one that waited is traced anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from memcallback.core.errors import PredictionError

T = TypeVar("T")


class Message(NamedTuple):
    """Which message: from which rank to which, and how many between the two came before it."""

    sender: int
    receiver: int
    number: int


# No errors, so that nothing in between catches them.
class _IsMissing(BaseException):
    """A message was waited for that is not known yet."""

    def __init__(self, message: Message) -> None:
        super().__init__(message)
        self.message = message


class _IsSent(BaseException):
    """The message that was looked for was sent."""

    def __init__(self, objects: list[Any]) -> None:
        super().__init__()
        self.objects = objects


@dataclass(frozen=True)
class _Described:
    """A tensor without values, of no fake tensor mode."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Messages:
    """The messages of one rank while it is traced."""

    def __init__(
        self, rank: int, known: Mapping[Message, list[Any]], wanted: Message | None
    ) -> None:
        self._rank, self._known, self._wanted = rank, known, wanted
        self._num: Counter[tuple[int, int]] = Counter()

    def send(self, objects: Sequence[Any], receiver: int) -> None:
        """A rank sends some objects to another, as `torch.distributed.send_object_list`."""
        if self._next(self._rank, receiver) == self._wanted:
            raise _IsSent([tree_map_only(torch.Tensor, _described, one) for one in objects])

    def receive(self, objects: list[Any], sender: int) -> None:
        """A rank waits for as many objects as there are in a list, and has them in it then, as
        `torch.distributed.recv_object_list`.
        """
        message = self._next(sender, self._rank)
        if message not in self._known:
            raise _IsMissing(message)
        objects[:] = [tree_map_only(_Described, _on_meta, one) for one in self._known[message]]

    def _next(self, sender: int, receiver: int) -> Message:
        number = self._num[sender, receiver]
        self._num[sender, receiver] += 1
        return Message(sender, receiver, number)


def with_messages(trace_rank: Callable[[int, Messages], T], rank: int) -> T:
    """Trace a rank, and before it those whose messages it waits for."""
    known: dict[Message, list[Any]] = {}
    waited_for: list[Message] = []

    def trace(rank: int, wanted: Message | None) -> T:
        while True:
            try:
                return trace_rank(rank, Messages(rank, known, wanted))
            except _IsMissing as error:
                message = error.message
            if message in waited_for:
                raise PredictionError(
                    f"The step could not be traced: ranks {message.receiver} and {message.sender} wait for each other. Let one of them send before "
                    "it receives."
                )
            waited_for.append(message)
            known[message] = sent(message)
            waited_for.pop()

    def sent(message: Message) -> list[Any]:
        try:
            trace(message.sender, message)
        except _IsSent as found:
            return found.objects
        except PredictionError as error:
            raise PredictionError(
                f"Rank {message.sender}, for which rank {message.receiver} waits: {error}"
            ) from error
        raise PredictionError(
            f"The step could not be traced: rank {message.receiver} waits for an object from rank {message.sender}, which sends it none. Let it "
            "send one, or let the other not wait."
        )

    return trace(rank, None)


def _described(tensor: torch.Tensor) -> _Described:
    return _Described(
        tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad
    )


def _on_meta(described: _Described) -> torch.Tensor:
    made = torch.empty_strided(
        described.shape, described.stride, dtype=described.dtype, device="meta"
    )
    return made.requires_grad_(described.requires_grad)
