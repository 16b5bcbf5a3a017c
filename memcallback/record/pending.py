"""PendingPrediction: a training's prediction, made in a child process while the training runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from memcallback.core.errors import reason_of
from memcallback.core.interruptions import ENDS, PassOver, raise_if_meant
from memcallback.isolation.isolated import TICK_S, TIMEOUT_S, Isolated, can_isolate
from memcallback.prediction.apart import predict_apart
from memcallback.prediction.predict_here import load_tracer
from memcallback.prediction.predict_or_warn import warn_unpredicted

#: How long somebody who needs it waits for a prediction beside which the training has run: longer
#: than nearly every prediction takes, and short against a training.
PATIENCE_S = 30.0
#: `work(say)` returns a prediction and whatever else was computed with it.
Work = Callable[[Callable[[str], None]], tuple[Any, Any]]


class PendingPrediction:
    """Runs `work` beside the training.

    Of `unread`, storages by address and bytes, the work finds zeros (see `Isolated`).

    Attributes:
        is_done: Whether it has ended.
        prediction: The prediction; None before its end, or if there is none.
        more: What else the work returned.
    """

    def __init__(
        self,
        work: Work,
        *,
        say: Callable[[str], None],
        without: str | None,
        isolate: bool = True,
        timeout_s: float = TIMEOUT_S,
        is_background: bool = True,
        unread: Mapping[int, int] | None = None,
    ) -> None:
        self._print, self._without = say, without
        self.is_done = False
        self.prediction: Any = None
        self.more: Any = None
        self._next_s = TICK_S
        self._running: Isolated[tuple[Any, Any]] | None = None
        try:
            if isolate and can_isolate():
                self._running = Isolated(
                    work,
                    timeout_s=timeout_s,
                    prepare=load_tracer,
                    is_background=is_background,
                    unread=unread,
                )
            else:
                self._take(predict_apart(lambda _: work(say), isolate=False))
        except ENDS as error:  # user code on fakes fails in any way, and training goes on
            raise_if_meant(error)
            self._fail(error)

    def wait(self, seconds: float | None) -> bool:
        """Wait for the end, None for as long as it takes; return whether it has come."""
        running = self._running
        while running is not None and not self.is_done:
            before_s = running.elapsed_s
            try:
                if running.wait(min(TICK_S, math.inf if seconds is None else seconds), self._say):
                    self._take(running.result())
            except Exception as error:  # as above; but a time limit may end the waiting
                raise_if_meant(error)
                self._fail(error)
            if not self.is_done and running.elapsed_s > self._next_s:
                self._next_s = 2 * running.elapsed_s
                self._say(f"The step is being predicted ({running.elapsed_s:.0f} s so far).")
            if seconds is not None:
                seconds -= running.elapsed_s - before_s
                if seconds <= 0:
                    break
        return self.is_done

    def _say(self, text: str) -> None:
        with PassOver():  # a screen that is gone takes no prediction with it
            self._print(text)

    def close(self) -> None:
        """Give it up if it has not ended."""
        if self._running is not None:
            self._running.close()
        self.is_done = True

    def _take(self, result: tuple[Any, Any]) -> None:
        self.prediction, self.more = result
        self.is_done = True

    def _fail(self, error: BaseException) -> None:
        self.is_done = True
        warn_unpredicted(reason_of(error), self._without)
