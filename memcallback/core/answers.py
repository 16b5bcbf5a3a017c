"""Known answers of a library, used where a question to it would change this process.

A question to cuDNN, for example, opens a CUDA context.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, NamedTuple, TypeAlias, TypeVar

_Value = TypeVar("_Value")
#: Question -> answer.
Answers: TypeAlias = dict[Hashable, Any]
#: None is an answer.
_UNKNOWN = object()


class NotAnswered(Exception):
    """A question has no answer yet, and is not to be asked here."""


class _Source(NamedTuple):
    """Where answers come from, and who gets those that are new; None if nobody may ask."""

    answers: Answers
    on_new: Callable[[Answers], None] | None


#: None where each question is asked.
_source: ContextVar[_Source | None] = ContextVar("memcallback_answers", default=None)


def answer(question: Hashable, ask: Callable[[], _Value]) -> _Value:
    """The answer to a question: the one that is there, or else by asking."""
    source = _source.get()
    if source is None:
        return ask()
    known = source.answers.get(question, _UNKNOWN)
    if known is not _UNKNOWN:
        return known  # type: ignore[no-any-return]
    if source.on_new is None:
        raise NotAnswered(question)
    source.answers[question] = value = ask()
    source.on_new({question: value})
    return value


def with_answers(
    answers: Answers, work: Callable[[], _Value], on_new: Callable[[Answers], None] | None = None
) -> _Value:
    """Run the work with known answers.

    With `on_new` the work may ask what is not known, and `on_new` gets each new answer. Without it,
    an unknown answer raises NotAnswered.
    """

    def run() -> _Value:
        _source.set(_Source(answers, on_new))
        return work()

    # In a copy of the context: an interrupt can leave nothing set in the caller's.
    return copy_context().run(run)


@contextmanager
def asking_here() -> Iterator[None]:
    """Ask each question here, once."""
    token = _source.set(_Source({}, lambda new: None))
    try:
        yield
    finally:
        _source.reset(token)


def has_answers() -> bool:
    """Whether the code that runs now has a dictionary of known answers."""
    return _source.get() is not None
