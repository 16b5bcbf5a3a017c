"""predict_apart(): runs a prediction in a child process, or here with what can be done here."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

from memcallback.core.answers import asking_here
from memcallback.core.errors import warn_and_go_on
from memcallback.isolation.child import is_in_child
from memcallback.isolation.isolated import (
    TICK_S,
    TIMEOUT_S,
    can_isolate,
    check_timeout,
    run_isolated,
)
from memcallback.prediction.leftovers import leftovers
from memcallback.prediction.predict_here import load_tracer
from memcallback.prediction.progress import ProgressLine, TraceProgress
from memcallback.step.copies.fakes import live_modes
from memcallback.step.copies.modes import without_modes

T = TypeVar("T")


def predict_apart(
    work: Callable[[TraceProgress], T],
    *,
    isolate: bool = True,
    timeout_s: float = TIMEOUT_S,
    progress: TraceProgress | None = None,
    of: str = "traces",
) -> T:
    """Run `work(progress)`, which traces, in a child; the caller's progress is called here.

    Without a progress of the caller's a `ProgressLine` says how many of what are done.
    """
    check_timeout(timeout_s)
    if progress is None and not is_in_child():
        with ProgressLine(of) as line:
            return predict_apart(work, isolate=isolate, timeout_s=timeout_s, progress=line)
    if isinstance(progress, ProgressLine):
        progress.say("tracing")
    if not isolate or not can_isolate():
        return _here(work, progress)
    # What a child imports is gone with it.
    load_tracer()
    last: list[tuple[int, int]] = []

    def on_report(done_of_all: tuple[int, int]) -> None:
        last[:] = [done_of_all]
        _tell(progress, *done_of_all)

    def on_tick(_: float) -> None:
        if isinstance(progress, ProgressLine):
            progress.tick()
        elif progress is not None and last:
            progress(*last[0])

    return run_isolated(
        lambda report: work(lambda done, num_all: report((done, num_all))),
        timeout_s=timeout_s,
        on_report=on_report,
        on_tick=on_tick,
    )


def _tell(progress: TraceProgress | None, num_done: int, num_all: int) -> None:
    """Call a progress; one of the caller's own not before something is done."""
    if progress is not None and (num_done or isinstance(progress, ProgressLine)):
        progress(num_done, num_all)


def report_progress(say: Callable[[str], None], of: str = "traces") -> Callable[[int, int], None]:
    """A `progress` for `predict` that reports as a part of a sentence, at most every 2 s."""
    start = last = perf_counter()

    def progress(num_done: int, num_all: int) -> None:
        nonlocal last
        now = perf_counter()
        if now - last > TICK_S:
            last = now
            say(f"{num_done} of {num_all} {of} after {now - start:.1f} s")

    return progress


def _here(work: Callable[[TraceProgress], T], progress: TraceProgress | None) -> T:
    """Run it in this process, and warn of fake tensors that the user's program has kept."""
    known = live_modes()
    try:
        # Here means here: not one replay of it starts a process.
        with asking_here(), without_modes():
            return work(lambda done, num_all: _tell(progress, done, num_all))
    finally:
        for holder in () if is_in_child() else leftovers(known):
            warn_and_go_on(
                f"{holder} holds fake tensors of a prediction, which have no values. Empty it "
                "before training. On Linux a prediction runs in a process of its own "
                "(isolate=True), and leaves nothing behind."
            )
