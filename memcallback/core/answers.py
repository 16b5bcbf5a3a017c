"""Answers of a library that another process has asked, for one that is not to ask itself.

A question makes cuDNN open a context on the card that it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias, TypeVar

_Value = TypeVar("_Value")
#: Question -> answer.
Answers: TypeAlias = dict[Hashable, Any]


class NotAnswered(Exception):
    """A question has no answer yet, and is not to be asked here."""


class _Source(NamedTuple):
    """Where answers come from."""

    answers: Answers
    may_ask: bool


#: None where each question is asked.
_source: ContextVar[_Source | None] = ContextVar("memcallback_answers", default=None)


def answer(question: Hashable, ask: Callable[[], _Value]) -> _Value:
    """The answer to a question: one that is there, or else by asking."""
    source = _source.get()
    if source is None:
        return ask()
    if question not in source.answers:
        if not source.may_ask:
            raise NotAnswered(question)
        source.answers[question] = ask()
    value: _Value = source.answers[question]
    return value


@contextmanager
def answered_by(answers: Answers, *, may_ask: bool) -> Iterator[None]:
    """Take answers from a dictionary; where asking is allowed, new ones are added to it."""
    token = _source.set(_Source(answers, may_ask))
    try:
        yield
    finally:
        _source.reset(token)


def is_answered() -> bool:
    """Whether answers come from a dictionary."""
    return _source.get() is not None
