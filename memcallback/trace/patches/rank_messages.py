"""Objects that ranks send each other before training, such as the shapes between pipeline stages.

A rank that waits for an object (`torch.distributed.recv_object_list`) is abandoned, its sender is
traced until it sends the object, and the rank is traced anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from memcallback.core.errors import PredictionError
from memcallback.trace.patches.patching import Patch

T = TypeVar("T")


class Message(NamedTuple):
    """The `number`-th message from one rank to another, from 0."""

    sender: int
    receiver: int
    number: int


# BaseExceptions, so that no code in between catches them.
class _MissingError(BaseException):
    """The traced rank waits for a message that is not known yet."""

    def __init__(self, message: Message) -> None:
        super().__init__(message)
        self.message = message


class _SentError(BaseException):
    """The traced rank has sent the wanted message."""

    def __init__(self, objects: list[Any]) -> None:
        super().__init__()
        self.objects = objects


@dataclass(frozen=True)
class _TensorShape:
    """A tensor of a message, which outlives the fake tensor mode of its sender."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _TensorShape:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)

    def on_meta(self) -> torch.Tensor:
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return tensor.requires_grad_(self.requires_grad)


class Messages:
    """The messages of one rank while it is traced: those it may receive, and one that is wanted."""

    def __init__(
        self, rank: int, known: Mapping[Message, list[Any]], wanted: Message | None
    ) -> None:
        self._rank, self._known, self._wanted = rank, known, wanted
        self._num_messages: Counter[tuple[int, int]] = Counter()

    def patches(self) -> Iterator[Patch]:
        """Replace the functions that send and receive objects, for one attempt to trace."""
        self._num_messages.clear()

        def send(
            objects: list[Any],
            dst: int | None = None,
            group: Any = None,
            device: Any = None,
            group_dst: int | None = None,
            **_: Any,
        ) -> None:
            if self._next(self._rank, _global_rank(group, dst, group_dst)) == self._wanted:
                raise _SentError(tree_map_only(torch.Tensor, _TensorShape.of, [*objects]))

        def receive(
            objects: list[Any],
            src: int | None = None,
            group: Any = None,
            device: Any = None,
            group_src: int | None = None,
            **_: Any,
        ) -> int:
            sender = _global_rank(group, src, group_src)
            message = self._next(sender, self._rank)
            if message not in self._known:
                raise _MissingError(message)
            known = self._known[message]
            objects[:] = tree_map_only(_TensorShape, _TensorShape.on_meta, known)
            return sender

        yield dist, "send_object_list", send
        yield dist, "recv_object_list", receive

    def _next(self, sender: int, receiver: int) -> Message:
        number = self._num_messages[sender, receiver]
        self._num_messages[sender, receiver] += 1
        return Message(sender, receiver, number)


def _global_rank(group: Any, rank: int | None, group_rank: int | None) -> int:
    if rank is not None:
        return rank
    if group_rank is None:
        raise NotImplementedError("receiving from any rank is not supported: name the sender")
    whole: Any = group or dist.group.WORLD
    return dist.get_global_rank(whole, group_rank)


def with_messages(trace_rank: Callable[[int, Messages], T], rank: int) -> T:
    """Trace a rank, and first those whose messages it waits for."""
    known: dict[Message, list[Any]] = {}
    awaited: list[Message] = []

    def trace(rank: int, wanted: Message | None) -> T:
        while True:
            try:
                return trace_rank(rank, Messages(rank, known, wanted))
            except _MissingError as missing:
                message = missing.message
            if message in awaited:
                raise PredictionError(
                    "The step could not be traced: "
                    f"ranks {message.receiver} and {message.sender} wait for each other. "
                    "Let one of them send before it receives."
                )
            awaited.append(message)
            known[message] = objects_of(message)
            awaited.pop()

    def objects_of(message: Message) -> list[Any]:
        try:
            trace(message.sender, message)
        except _SentError as sent:
            return sent.objects
        except PredictionError as error:
            raise PredictionError(
                f"Rank {message.sender}, for which rank {message.receiver} waits: {error}"
            ) from error
        raise PredictionError(
            f"The step could not be traced: rank {message.receiver} waits for an object from rank "
            f"{message.sender}, which sends none. Let rank {message.sender} send it, or rank "
            f"{message.receiver} not wait."
        )

    return trace(rank, None)
