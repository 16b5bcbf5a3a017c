"""Growth: a part of a trace that repeats with other sizes, such as the tokens of a generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

#: Repetitions from this on behave alike: the first fills caches, the second appends to them first,
#: and the third frees what the second left.
NUM_BEFORE = 3
#: How often each repetition of a period is traced: two give the line, one checks it.
NUM_COMPARED = 3
#: Where every repetition runs the same kernels, so many more are compared: sizes that are padded to
#: multiples of 8 look constant nearby.
NUM_MORE = 8
#: Ids of allocations that were not traced are those of an earlier one, plus multiples of this.
_LATER = 1 << 44


def num_to_trace(num_all: int, period: int) -> int:
    """How many repetitions to trace, so that the rest are whole periods."""
    least = NUM_BEFORE + NUM_COMPARED * period + (NUM_MORE if period == 1 else 0)
    return num_all if num_all <= least else least + (num_all - least) % period


def traced_id(number: int) -> int:
    """The id of the traced allocation that one of a later repetition is like."""
    return number % _LATER


@dataclass(frozen=True)
class Growth:
    """A part of a trace that repeats.

    Attributes:
        starts: The indices of the items at which each traced repetition starts, and the index after
            the last.
        num_all: How many repetitions there are.
        period: After how many repetitions the same kernels run again.
        ids: The ids of the allocations of each traced repetition, in order.
        freed: The ids that are freed before the last repetition ends.
        ahead: Which of the later periods are written, by how many periods they come after the last
            traced one: all, or some for an estimate. The last is among them.
    """

    starts: tuple[int, ...]
    num_all: int
    period: int
    ids: tuple[tuple[int, ...], ...]
    freed: frozenset[int]
    ahead: tuple[int, ...]

    @classmethod
    def of(
        cls,
        starts: tuple[int, ...],
        num_all: int,
        period: int,
        ids: tuple[tuple[int, ...], ...],
        freed: frozenset[int],
    ) -> Growth:
        """The growth with all later periods."""
        num_periods = (num_all - len(starts) + 1) // period
        return cls(starts, num_all, period, ids, freed, tuple(range(1, num_periods + 1)))

    def thinned(self, most: int) -> Growth:
        """The same with so many later periods at most, the last ones among them."""
        num = len(self.ahead)
        if num <= most:
            return self
        last = min(NUM_COMPARED, most)
        stride = -(-(num - last) // max(1, most - last))
        return replace(self, ahead=(*self.ahead[: num - last : stride], *self.ahead[num - last :]))

    @property
    def num_written(self) -> int:
        """How many repetitions are written."""
        return self.num_traced + self.period * len(self.ahead)

    @property
    def num_items(self) -> int:
        """How many items of the trace one period has."""
        return self.starts[-1] - self.starts[-1 - self.period]

    @cached_property
    def num_traced(self) -> int:
        """How many repetitions were traced."""
        return len(self.starts) - 1

    def source(self, block: int) -> int:
        """The traced repetition that one is like."""
        if block < self.num_traced:
            return block
        first = self.num_traced - self.period
        return first + (block - first) % self.period

    def id_at(self, block: int, place: int) -> int:
        """The id of an allocation of any repetition."""
        if block < self.num_traced:
            return self.ids[block][place]
        source = self.source(block)
        return self.ids[source][place] + (block - source) * _LATER

    def moved(self, number: int, lag: int) -> int:
        """The id of the same allocation, so many repetitions later; others keep theirs."""
        place = self._places.get(number)
        return number if place is None else self.id_at(place[0] + lag, place[1])

    def at_the_end(self, number: int) -> tuple[int, ...]:
        """What is freed after the last repetition where the trace frees an allocation.

        That of the last repetition, or of each, if each keeps its own.
        """
        if number not in self._places:
            return (number,)
        block, place = self._places[number]
        if not self._is_kept(block, place):
            return (self.moved(number, self.num_written - self.num_traced),)
        later = range(block + self.period, self.num_written, self.period)
        is_last = block >= self.num_traced - self.period
        return (number, *(self.id_at(each, place) for each in later if is_last))

    def has(self, number: int) -> bool:
        """Whether an allocation is of a traced repetition."""
        return number in self._places

    def _is_kept(self, block: int, place: int) -> bool:
        """Whether an allocation's like in the earliest repetition of its kind is never freed."""
        if block >= NUM_BEFORE:
            block = NUM_BEFORE + (block - NUM_BEFORE) % self.period
        return self.ids[block][place] not in self.freed

    @cached_property
    def _places(self) -> Mapping[int, tuple[int, int]]:
        """Id -> its repetition, and its place there."""
        return {
            number: (block, place)
            for block, numbers in enumerate(self.ids)
            for place, number in enumerate(numbers)
        }
