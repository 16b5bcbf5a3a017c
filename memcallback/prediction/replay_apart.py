"""replay_apart(): replays here, and has a child ask cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from memcallback.core.answers import Answers, NotAnswered, answered_by, is_answered
from memcallback.core.errors import PredictionError
from memcallback.core.torch_private import has_cuda_context, is_cuda_initialized
from memcallback.isolation.isolated import can_isolate, run_isolated

T = TypeVar("T")


#: Most replays take milliseconds, some searches many seconds.
_TIMEOUT_S = 60.0


def replay_apart(work: Callable[[], T]) -> T:
    """Run `work()`, which replays, here; what it has to ask cuDNN is asked in a child.

    Asked here, cuDNN would open a context on the card. It is asked here where this thread's card
    has one already, and where no child can be had. The work is run up to three times, so it must
    give the same each time.
    """
    if is_answered() or not can_isolate() or _has_context():
        return work()
    with suppress(NotAnswered), answered_by({}, may_ask=False):
        return work()
    try:
        answers = run_isolated(lambda report: _answers_to(work), timeout_s=_TIMEOUT_S)
    except PredictionError:
        return work()
    with answered_by(answers, may_ask=False):
        return work()


def _has_context() -> bool:
    """Whether the card on which this thread works has a context of this process."""
    return is_cuda_initialized() and has_cuda_context(torch.cuda.current_device())


def _answers_to(work: Callable[[], object]) -> Answers:
    """What the work has to ask cuDNN, and the answers; if it fails, up to there."""
    answers: Answers = {}
    with suppress(Exception), answered_by(answers, may_ask=True):
        work()
    return answers
