"""asking_apart(): replays here, and has a child ask cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from memcallback.core.answers import Answers, NotAnswered, has_answers, with_answers
from memcallback.core.torch_private import has_cuda_context, is_cuda_initialized, is_cuda_refused
from memcallback.isolation.isolated import Report, can_isolate, run_isolated

T = TypeVar("T")

#: Most replays take milliseconds, some searches many seconds.
_TIMEOUT_S = 60.0
#: More than a training needs; a search for batch sizes asks some thousand questions.
_MOST_ANSWERS = 65536
_known: Answers = {}
#: Whether a child could not be had, or did not answer all. Then none is tried again.
_has_failed = False


def asking_apart(work: Callable[[], T]) -> T:
    """Run `work()`, which replays, here; what it has to ask cuDNN is asked in a child.

    Asked here, cuDNN would open a context on the card. It is asked here where this thread's card
    has one already, and what a child does not answer. The work is run up to three times, so it must
    give the same each time.
    """
    global _known, _has_failed
    if has_answers() or is_cuda_refused() or not can_isolate():
        return work()
    with suppress(NotAnswered):
        return with_answers(_known, work)
    if _has_failed or _has_context():
        return work()
    if len(_known) > _MOST_ANSWERS:
        _known = {}
    known = _known
    try:
        run_isolated(
            lambda report: _ask(work, report), timeout_s=_TIMEOUT_S, on_report=known.update
        )
    except Exception:  # no child can be had, or it was ended
        _has_failed = True
    return with_answers(known, work, on_new=lambda new: None)


def _has_context() -> bool:
    """Whether the card on which this thread works has a context of this process."""
    return is_cuda_initialized() and has_cuda_context(torch.cuda.current_device())


def _ask(work: Callable[[], object], report: Report) -> None:
    """Run the work and report each new answer; where it fails, it fails for the caller as well."""
    with suppress(Exception):
        with_answers(_known, work, on_new=report)
