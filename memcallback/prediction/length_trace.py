"""A trace as a function of the sequence length.

Shapes are polynomials of the sequence length: a row of tokens is linear in it, a matrix of
attention quadratic. So every size, what it grows with each sample, and every number of an
operator's own rule is a parabola through its values at three lengths, in whole numbers, as long as
the program takes the same path at every length. A fourth length shows whether it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import zip_longest
from math import gcd, lcm, prod

from memcallback.core.kernel import KernelCall
from memcallback.core.validation import whole_number
from memcallback.prediction.batch_trace import BatchTrace
from memcallback.trace.items import event_text, is_same, item_of, item_text
from memcallback.trace.traced_step import TracedStep

#: Lengths stay as they are modulo this where they can: CUDA's attention kernels pad to it.
_ALIGNMENT = 8
_ANOTHER = "the step does something else at another sequence length: "
_EACH = "Predict each sequence length from traces of its own."


class LengthDependentPath(ValueError):
    """The program takes another path at another sequence length, so traces predict no other."""


class UnknownSequenceLength(ValueError):
    """The trace does not know the sequence length that was asked for."""


def lengths_to_trace(sequence_length: int) -> tuple[int, int, int, int]:
    """The lengths to trace: three for `SequenceLengthTrace.fit` and one for its check.

    None is longer than the step's own, since models have a longest length. From 32 on they are
    alike modulo 8, and powers of two from 64 on get eighths: 8/8, 6/8, 4/8, 3/8. That far apart
    they distinguish a size rounded up to a power of two from a polynomial, unless its rounding
    steps are as long as the sequence: then it looks constant.
    """
    if sequence_length >= 8 * _ALIGNMENT:
        parts = sequence_length // _ALIGNMENT
        less, step = (parts // 4, parts // 2, 5 * parts // 8), _ALIGNMENT
    else:
        less, step = (
            (1, 2, 3),
            _ALIGNMENT if sequence_length >= 4 * _ALIGNMENT else sequence_length // 4,
        )
    return (sequence_length, *(sequence_length - step * parts for parts in less))  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class SequenceLengthTrace:
    """A step's allocations as a function of the sequence length and the batch size.

    Attributes:
        traces: Sequence length -> the step's trace there: one if only that length is known, else
            three that agree in all but numbers.
        step: Known lengths differ by multiples of this; 0 if only one is known.
    """

    traces: Mapping[int, BatchTrace]
    step: int = 0
    _known: dict[int, BatchTrace] = field(default_factory=dict, repr=False)

    @classmethod
    def single(cls, trace: BatchTrace, sequence_length: int) -> SequenceLengthTrace:
        """A trace at one sequence length, which knows only that."""
        return cls({sequence_length: trace})

    @classmethod
    def fit(
        cls,
        traces: Mapping[int, BatchTrace],
        check: tuple[int, Sequence[TracedStep]] | None = None,
    ) -> SequenceLengthTrace:
        """Fit a parabola through the numbers at three sequence lengths; a fourth checks it.

        It checks each batch size that was traced there.
        """
        if len(traces) != 3:
            raise ValueError(
                f"a parabola needs traces at three sequence lengths, got {len(traces)}: "
                f"{sorted(traces)}"
            )
        if len({(trace.batch_size, trace.slopes is None) for trace in traces.values()}) > 1:
            sizes = {length: trace.batch_size for length, trace in traces.items()}
            raise ValueError(
                f"traces at several sequence lengths must know the same batch sizes, got {sizes}"
            )
        longest = max(traces)
        lengths = (*traces, *((check[0],) if check else ()))
        fitted = cls(dict(traces), gcd(*(longest - length for length in lengths)))
        for same in (fitted, *fitted._exceptions.values()):
            for length, trace in same.traces.items():
                same._align(length, trace)
        for traced in check[1] if check else ():
            same = fitted._exceptions.get(traced.batch_size, fitted)
            same._reproduce(lengths[-1], traced)
        return fitted

    @property
    def sequence_length(self) -> int:
        """The longest that was traced: the step's own."""
        return max(self.traces)

    def at(self, sequence_length: int) -> BatchTrace:
        """The step's allocations at a sequence length, for any batch size that the traces know."""
        sequence_length = whole_number(
            "sequence_length", sequence_length, "Give how long the batch's sequences are."
        )
        if sequence_length == self.sequence_length:
            return self._longest
        if sequence_length not in self._known:
            self._known[sequence_length] = self._between(sequence_length)
        return self._known[sequence_length]

    @cached_property
    def _longest(self) -> BatchTrace:
        return self.traces[self.sequence_length]

    @cached_property
    def _exceptions(self) -> dict[int, SequenceLengthTrace]:
        """The same for each batch size at which the step runs in another way."""
        return {
            size: SequenceLengthTrace(
                {length: trace.exceptions[size] for length, trace in self.traces.items()}, self.step
            )
            for size in self._longest.exceptions
        }

    def _between(self, sequence_length: int) -> BatchTrace:
        own, longest = self.sequence_length, self._longest
        if not self.step:
            raise UnknownSequenceLength(
                f"the step was traced at sequence length {own} only, so length {sequence_length} "
                "is unknown: memcallback.predict(step, sequence_length=...) traces the step there"
            )
        if (sequence_length - own) % self.step:
            raise UnknownSequenceLength(
                f"sequence length {sequence_length} is not known: known are {own} and lengths that "
                f"differ from it by a multiple of {self.step}, such as {own + self.step}. Take one "
                "of these, or trace the step at that length."
            )
        parabola = _Parabola(tuple(self.traces), sequence_length)
        traces, loose = tuple(self.traces.values()), longest.traced.loose
        try:
            numbers = parabola.through([trace.numbers for trace in traces], loose)
            slopes = (
                None
                if longest.slopes is None
                else tuple(parabola.through([trace.slopes or () for trace in traces], loose))
            )
            curvatures = (
                None
                if longest.curvatures is None
                else tuple(parabola.through([trace.curvatures or () for trace in traces], loose))
            )
        except _NotWholeError as error:
            place = item_text(longest.traced, item_of(longest.traced, error.position))
            raise UnknownSequenceLength(
                f"at sequence length {sequence_length} a size of {place} would not be a whole "
                "number. Trace the step at that length."
            ) from None
        below = [
            position
            for position, number in enumerate(longest.numbers)
            if number >= 0 > numbers[position]
        ]
        for position in below:
            index = item_of(longest.traced, position)
            if isinstance(longest.traced.items[index], KernelCall):
                # A padded shape is on no parabola; the operator's rule computes it anew.
                continue
            place = item_text(longest.traced, index)
            raise UnknownSequenceLength(
                f"the curve through the traced lengths gives a negative size ({numbers[position]}) "
                f"for {place} at sequence length {sequence_length}. Trace the step at that length."
            )
        return replace(
            longest,
            base=tuple(numbers),
            slopes=slopes,
            curvatures=curvatures,
            exceptions={size: own.at(sequence_length) for size, own in self._exceptions.items()},
            caveats=(*longest.caveats, *self._caveats(sequence_length)),
        )

    def _caveats(self, sequence_length: int) -> Iterator[str]:
        if sequence_length > self.sequence_length:
            yield (
                f"The longest sequence that was traced has length {self.sequence_length}. Whether "
                f"the model accepts length {sequence_length} and runs the same way was not checked."
            )

    def _align(self, length: int, trace: BatchTrace) -> None:
        """Raise unless a trace is that at the longest length in all but numbers."""
        ours, theirs = self._longest.traced, trace.traced
        for index, (our_item, their_item) in enumerate(zip_longest(ours.items, theirs.items)):
            if our_item is None or their_item is None or not is_same(our_item, their_item):
                raise self._path_depends(length, item_text(ours, index), item_text(theirs, index))

    def _reproduce(self, length: int, check: TracedStep) -> None:
        try:
            ours = self._between(length).at(check.batch_size).events
        except UnknownSequenceLength as error:
            raise LengthDependentPath(
                f"sizes do not follow a parabola over the sequence length: {error}"
            ) from None
        theirs = check.whole.events
        for position, (ours_here, theirs_here) in enumerate(zip_longest(ours, theirs)):
            if ours_here != theirs_here:
                raise LengthDependentPath(
                    f"{_ANOTHER}at sequence length {length} it has {event_text(theirs, position)}; "
                    f"from other lengths, {event_text(ours, position)} was expected. {_EACH}"
                )

    def _path_depends(self, length: int, ours: str, theirs: str) -> LengthDependentPath:
        return LengthDependentPath(
            f"{_ANOTHER}at sequence length {self.sequence_length} it has {ours}, and at sequence "
            f"length {length} {theirs}. {_EACH}"
        )


class _NotWholeError(ArithmeticError):
    """A parabola does not go through a whole number.

    Attributes:
        position: Which one of several.
    """

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class _Parabola:
    """Extrapolates a parabola through three points by Lagrange's formula, in whole numbers."""

    def __init__(self, places: Sequence[int], wanted: int) -> None:
        weights = [
            prod(Fraction(wanted - other, place - other) for other in places if other != place)
            for place in places
        ]
        self._denominator = lcm(*(weight.denominator for weight in weights))
        self._numerators = [int(weight * self._denominator) for weight in weights]

    def through(self, values: Sequence[Sequence[int]], loose: frozenset[int]) -> list[int]:
        """The values there, for the values at each of the three places."""
        first, second, third = self._numerators
        totals = [first * a + second * b + third * c for a, b, c in zip(*values, strict=True)]
        if self._denominator == 1:
            return totals
        for position, total in enumerate(totals):
            if total % self._denominator and position not in loose:
                raise _NotWholeError(position)
        return [total // self._denominator for total in totals]
