"""A trace as a function of the batch size.

The size of every tensor in a step's trace is a straight line over the batch size, a + b * batch
size, as long as the program takes the same path at every size. Where samples are compared with each
other it is a parabola, as for the similarities of a contrastive loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from memcallback.core.allocation_trace import AllocationTrace
from memcallback.core.kernel import AllocationSource, Kernel, KernelCall
from memcallback.core.validation import whole_number
from memcallback.trace.growth import traced_id
from memcallback.trace.items import event_text, is_same, item_of, item_text
from memcallback.trace.traced_step import SAMPLES, TracedStep

#: Begins the caveat that says why other batch sizes are unknown.
ONLY = "Only batch size"
#: A batch size so many times the largest traced is far from it.
_FAR = 64


class BatchDependentPath(ValueError):
    """The program takes another path at another batch size: two traces do not predict a third."""


class UnknownBatchSize(ValueError):
    """The trace knows only its own batch size, and another one was asked for."""


@dataclass(frozen=True, eq=False)
class BatchTrace:
    """A step's allocations as a function of the batch size.

    Attributes:
        traced: The step as it was traced at the smaller of the batch sizes.
        slopes: How much each of its `numbers` grows with the next sample; None if only the traced
            batch size is known.
        caveats: What was assumed, one sentence each.
        base: The `numbers` of the same step at another sequence length; None for its own.
        largest_traced: The largest batch size whose trace agrees; None for that of `traced`.
        shape_slopes: How much the dimensions of tensors grow per sample, by the id of their
            allocation, where any grows.
        exceptions: Batch sizes at which the step runs in another way, as often with one sample ->
            traces that know that size alone.
        curvatures: How much each slope grows with each sample; None if they are straight lines.
    """

    traced: TracedStep
    slopes: tuple[int, ...] | None = field(default=None, repr=False)
    caveats: tuple[str, ...] = ()
    base: tuple[int, ...] | None = field(default=None, repr=False)
    largest_traced: int | None = None
    shape_slopes: Mapping[int, tuple[float, ...]] = field(default_factory=dict, repr=False)
    exceptions: Mapping[int, BatchTrace] = field(default_factory=dict, repr=False)
    curvatures: tuple[int, ...] | None = field(default=None, repr=False)
    #: Cached results of kernel rules: batch sizes repeat, and many operators have the same inputs.
    _answers: dict[tuple[int, ...], Kernel] = field(default_factory=dict, repr=False)

    @classmethod
    def single(cls, traced: TracedStep) -> BatchTrace:
        """A trace at one batch size, which knows only that."""
        return cls(traced, caveats=traced.caveats)

    @classmethod
    def fit_curve(
        cls,
        first: TracedStep,
        second: TracedStep,
        third: TracedStep,
        check: TracedStep | None = None,
    ) -> BatchTrace:
        """Fit parabolas through the sizes at three batch sizes in a row, checked by a fourth."""
        line = cls.fit(first, second)
        if not is_same_path(second, third):
            raise _path_depends(second, third, len(third.items))
        curvatures = tuple(
            last - middle - slope
            for last, middle, slope in zip(
                third.numbers, second.numbers, line.slopes or (), strict=True
            )
        )
        of_check = check.caveats if check else ()
        caveats = tuple(dict.fromkeys((*line.caveats, *third.caveats, *of_check)))
        curved = replace(line, curvatures=curvatures, caveats=caveats)
        return curved if check is None else curved.verified(check)

    @classmethod
    def fit(
        cls, first: TracedStep, second: TracedStep, check: TracedStep | None = None
    ) -> BatchTrace:
        """Fit a straight line through the sizes at two batch sizes, checked by a third trace."""
        first, second = sorted((first, second), key=lambda step: step.batch_size)
        num_samples = second.batch_size - first.batch_size
        if num_samples == 0:
            raise ValueError(
                f"both traces are at batch size {first.batch_size}; a line needs two batch sizes: "
                "trace another one"
            )
        for number, (ours, theirs) in enumerate(zip(first.items, second.items, strict=False)):
            if not is_same(ours, theirs):
                raise _path_depends(first, second, number)
        if len(first.items) != len(second.items):
            raise _path_depends(first, second, min(len(first.items), len(second.items)))
        steps = [
            divmod(more - number, num_samples)
            for number, more in zip(first.numbers, second.numbers, strict=True)
        ]
        uneven = next((position for position, (_, rest) in enumerate(steps) if rest), None)
        if uneven is not None:
            raise _path_depends(first, second, item_of(first, uneven))
        caveats = dict.fromkeys(first.caveats + second.caveats + (check.caveats if check else ()))
        fitted = cls(
            first,
            tuple(slope for slope, _ in steps),
            tuple(caveats),
            largest_traced=second.batch_size,
            shape_slopes=_shape_slopes(first, second),
        )
        return fitted if check is None else fitted.verified(check)

    def verified(self, check: TracedStep) -> BatchTrace:
        """The same trace, checked against a trace at one more batch size."""
        self._reproduce(check)
        return replace(
            self, largest_traced=max(check.batch_size, self.largest_traced or self.batch_size)
        )

    def of(self, batch_size: int) -> BatchTrace:
        """The trace that knows a batch size: this one, or that of an exception."""
        return self.exceptions.get(batch_size, self)

    def is_among_traced(self, batch_size: int) -> bool:
        """Whether a batch size is within the range of those that were traced."""
        return batch_size in self.exceptions or self.batch_size <= batch_size <= (
            self.largest_traced or self.batch_size
        )

    def is_far(self, batch_size: int) -> bool:
        """Whether a batch size is so far beyond the largest traced one that the path may change."""
        return batch_size > _FAR * (self.largest_traced or self.batch_size)

    @property
    def batch_size(self) -> int:
        """The batch size that was traced."""
        return self.traced.batch_size

    @property
    def numbers(self) -> Sequence[int]:
        """All numbers that may depend on the batch size, at `batch_size`."""
        return self.traced.numbers if self.base is None else self.base

    @property
    def is_any_batch_size_known(self) -> bool:
        """Whether other batch sizes than the traced one are known."""
        return self.slopes is not None

    @cached_property
    def largest_known(self) -> int | None:
        """The largest batch size at which no size is negative; None if none shrinks."""
        slopes = self.slopes or ()
        curvatures = self.curvatures or (0,) * len(slopes)
        ends = (
            _last_above_zero(number, slope, curvature)
            for number, slope, curvature in zip(self.numbers, slopes, curvatures, strict=False)
            if number >= 0 and (slope < 0 or curvature < 0)
        )
        least = min((end for end in ends if end is not None), default=None)
        return None if least is None else self.batch_size + least

    @cached_property
    def smallest_known(self) -> int:
        """The smallest batch size of the line at which no size is negative."""
        slopes = self.slopes or ()
        curvatures = self.curvatures or (0,) * len(slopes)
        fewest = self.batch_size - 1
        for position, (slope, curvature) in enumerate(zip(slopes, curvatures, strict=True)):
            number = self.numbers[position]
            if number < 0 or (slope <= curvature and curvature >= 0):
                continue
            end = _last_above_zero(number, curvature - slope, curvature)
            if end is not None and end < fewest and not self._is_padded(position):
                fewest = end
        return self.batch_size - fewest

    def is_in_range(self, batch_size: int) -> bool:
        """Whether no size is negative at a batch size."""
        if batch_size in self.exceptions:
            return True
        last = self.largest_known
        return self.smallest_known <= batch_size and (last is None or batch_size <= last)

    def largest_within(self, capacity_bytes: int) -> int | None:
        """The largest batch size at which each single allocation fits; None if each always does."""
        slopes = self.slopes or ()
        curvatures = self.curvatures or (0,) * len(slopes)
        ends = (
            _last_above_zero(
                capacity_bytes - self.numbers[position], -slopes[position], -curvatures[position]
            )
            for position in self.traced.positions_of_sizes
            if self.numbers[position] <= capacity_bytes
            and (slopes[position] > 0 or curvatures[position] > 0)
        )
        least = min((end for end in ends if end is not None), default=None)
        return None if least is None else self.batch_size + least

    @property
    def grows(self) -> bool:
        """Whether a larger batch needs more of anything."""
        return any(rise > 0 for rise in (*(self.slopes or ()), *(self.curvatures or ())))

    def thinned(self, most_items: int = 0) -> BatchTrace:
        """The same with some of the tokens of a generation, for a search in less time."""
        traced = self.traced.thinned(most_items)
        if traced.num_written == self.traced.num_written:
            return self
        exceptions = {size: trace.thinned(most_items) for size, trace in self.exceptions.items()}
        return replace(self, traced=traced, exceptions=exceptions)

    def at(self, batch_size: int) -> AllocationTrace:
        """The trace at a batch size."""
        batch_size = whole_number("batch_size", batch_size, SAMPLES)
        if batch_size in self.exceptions:
            return self.exceptions[batch_size].at(batch_size)
        more = batch_size - self.batch_size
        if not more and self.base is None:
            return self.traced.whole
        if more and self.slopes is None:
            raise UnknownBatchSize(
                f"the step was traced at batch size {self.batch_size} only, so batch size "
                f"{batch_size} is unknown: memcallback.predict(step, batch_size={batch_size}) "
                "traces the step at that size"
            )
        numbers = self._numbers_at(more)
        for position in [
            position
            for position, number in enumerate(self.traced.numbers)
            if number >= 0 > numbers[position]
        ]:
            if self._is_padded(position):
                numbers[position] = 0
                continue
            place = item_text(self.traced, item_of(self.traced, position))
            raise UnknownBatchSize(
                f"the straight line through the traced batch sizes gives a negative size "
                f"({numbers[position]}) for {place} at batch size {batch_size}. Trace the step at "
                "a batch size nearer to it."
            )
        return self.traced.with_numbers(numbers, self._answers)

    def _is_padded(self, position: int) -> bool:
        """Whether a number is of a padded shape at another sequence length.

        The operator's rule ignores it.
        """
        item = self.traced.items[item_of(self.traced, position)]
        return self.base is not None and isinstance(item, KernelCall)

    def growth_bytes(self, batch_size: int) -> int | None:
        """What each repetition (a token, a batch) adds to memory; None without repetitions."""
        known = self.of(batch_size)
        if not known.traced.growths:
            return None
        return known.traced.growth_bytes(known._numbers_at(batch_size - known.batch_size))

    def _numbers_at(self, more: int) -> list[int]:
        """All numbers for so many samples more."""
        slopes = self.slopes or (0,) * len(self.numbers)
        numbers = [
            number + more * slope for number, slope in zip(self.numbers, slopes, strict=True)
        ]
        if self.curvatures is not None:
            pairs = more * (more - 1) // 2
            numbers = [
                number + pairs * curvature
                for number, curvature in zip(numbers, self.curvatures, strict=True)
            ]
        return numbers

    def origin(self, number: int, batch_size: int) -> AllocationSource | None:
        """The tensor that an allocation is for; None if unknown."""
        if batch_size in self.exceptions:
            return self.exceptions[batch_size].origin(number, batch_size)
        number = traced_id(number)
        origin, slopes = self.traced.origins.get(number), self.shape_slopes.get(number)
        if origin is None or slopes is None:
            return origin
        more = batch_size - self.batch_size
        return replace(
            origin,
            shape=tuple(
                round(size + more * slope) for size, slope in zip(origin.shape, slopes, strict=True)
            ),
        )

    def _reproduce(self, check: TracedStep) -> None:
        try:
            ours, theirs = self.at(check.batch_size).events, check.whole.events
        except UnknownBatchSize as error:
            raise BatchDependentPath(str(error)) from error
        for position, (our_event, their_event) in enumerate(zip(ours, theirs, strict=False)):
            if our_event != their_event:
                raise self._check_fails(
                    check.batch_size, event_text(ours, position), event_text(theirs, position)
                )
        if len(ours) != len(theirs):
            end = min(len(ours), len(theirs))
            raise self._check_fails(
                check.batch_size, event_text(ours, end), event_text(theirs, end)
            )

    def _check_fails(self, batch_size: int, ours: str, theirs: str) -> BatchDependentPath:
        others = "two" if self.curvatures is None else "three"
        return BatchDependentPath(
            f"the step does something else at another batch size: at batch size {batch_size} it "
            f"has {theirs}; from {others} other batch sizes, {ours} was expected. Predict each "
            "batch size from a trace of its own."
        )


def is_same_path(first: TracedStep, second: TracedStep) -> bool:
    """Whether two traces agree in all but numbers."""
    return len(first.items) == len(second.items) and all(map(is_same, first.items, second.items))


def _last_above_zero(number: int, slope: int, curvature: int) -> int | None:
    """After how many samples more a size that shrinks is still at least 0; None if for ever."""

    def at(more: int) -> int:
        return number + more * slope + more * (more - 1) // 2 * curvature

    if curvature == 0:
        return number // -slope
    if curvature > 0:
        bad = -slope // curvature + 1  # about where it is smallest
        if at(bad) >= 0:
            return None
    else:
        bad = 1
        while at(bad) >= 0:
            bad *= 2
    good = 0
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if at(middle) >= 0 else (good, middle)
    return good


def _shape_slopes(first: TracedStep, second: TracedStep) -> dict[int, tuple[float, ...]]:
    """How dimensions grow per sample; a tensor with another number of dimensions stays as it is."""
    num_samples = second.batch_size - first.batch_size
    all_slopes = {}
    for number, origin in first.origins.items():
        other = second.origins.get(number)
        if (
            other is not None
            and origin.shape != other.shape
            and len(origin.shape) == len(other.shape)
        ):
            all_slopes[number] = tuple(
                (more - size) / num_samples
                for size, more in zip(origin.shape, other.shape, strict=True)
            )
    return all_slopes


def _path_depends(first: TracedStep, second: TracedStep, index: int) -> BatchDependentPath:
    return BatchDependentPath(
        f"the step does something else at another batch size: at batch size {first.batch_size} it "
        f"has {item_text(first, index)}, and at the same place at batch size {second.batch_size} "
        f"{item_text(second, index)}. Predict each batch size from a trace of its own."
    )
