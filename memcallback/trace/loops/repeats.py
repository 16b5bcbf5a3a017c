"""Repeats the middle batches of an update in the trace, instead of running each of them."""

from __future__ import annotations

from memcallback.trace.loops.passes import Training
from memcallback.trace.loops.python_state import python_state
from memcallback.trace.marks import Place

#: Middle batches that are run and compared; if no two of them are the same, all are run.
_NUM_COMPARED = 3


class Repeats:
    """Compares the middle batches of one update, which neither clear gradients nor update.

    A batch is repeated if it was recorded as the one before it, and left all state in Python as
    that one had: then the next batch would do the same. Only with collectives each batch is run,
    since its messages belong to other ranks too.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._places: list[Place] = []
        self._state: list[object] | None = None
        self._num_reads = 0

    def begin(self, num_left: int) -> None:
        """The first batch is over, and so many follow, the last one with the update."""
        # With fewer nothing is left to repeat once two are the same.
        self._num_reads = self._training.marks.num_reads
        if num_left > 3 and self._training.step.ranks is None:
            self._places.append(self._training.marks.here())

    def after_middle_batch(self, num_left: int) -> int:
        """How many of the middle batches that are left were repeated: all or none."""
        marks, places = self._training.marks, self._places
        if not places or len(places) > _NUM_COMPARED:
            return 0
        before, self._state = self._state, self._python_state()
        if (
            before is not None
            and before == self._state
            and marks.repeat(places[-2], places[-1], num_left)
        ):
            places.clear()
            return num_left
        places.append(marks.here())
        return 0

    def _python_state(self) -> list[object] | None:
        training = self._training
        return python_state(
            [training.model, training.optimizers, training.losses, training.step.lightning],
            has_values=training.marks.num_reads > self._num_reads,
        )
