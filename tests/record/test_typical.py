"""Which step of a training is a typical one."""

from copy import copy
from dataclasses import replace

import pytest
from hand_made import prediction as traced

from memcallback.core.types import Kind, Phase
from memcallback.core.units import MiB
from memcallback.record.typical import TypicalStep


def step(peak_mib, index=0, *, is_sampled=True, batch_size=16, phases=tuple(Phase)):
    made = traced(16, device="cpu", with_limits=False).step
    windows = tuple(
        replace(
            window,
            peak_allocated_bytes=peak_mib * MiB,
            start=window.start if is_sampled else replace(window.start, by_category=None),
            end=window.end if is_sampled else replace(window.end, by_category=None),
        )
        for window in made.windows
        if window.phase in phases
    )
    return replace(made, kind=Kind.MEASURED, windows=windows, index=index, batch_size=batch_size)


def typical(*steps):
    found = TypicalStep()
    for each in steps:
        found.add(each)
    return found.step


def test_without_a_step_there_is_none():
    assert typical() is None
    assert typical(step(100, is_sampled=False)) is None


def test_the_last_of_the_kind_of_which_there_were_most_is_typical():
    assert typical(step(300, 0), step(100, 1), step(100, 2), step(200, 3)).index == 2


def test_of_kinds_with_as_many_steps_the_larger_one_is():
    assert typical(step(100, 0), step(300, 1), step(200, 2)).index == 1


def test_steps_within_a_percent_and_a_mebibyte_are_alike():
    assert typical(step(1000, 0), step(1005, 1), step(2000, 2)).index == 1
    assert typical(step(1000, 0), step(1050, 1), step(2000, 2)).index == 2


def test_steps_that_are_not_sampled_count_and_are_not_chosen():
    unsampled = [step(100, number, is_sampled=False) for number in (2, 3)]
    assert typical(step(300, 0), step(300, 1), step(100, 1), *unsampled).index == 1


@pytest.mark.parametrize("changes", [{"batch_size": 8}, {"phases": (Phase.FORWARD,)}])
def test_other_batch_sizes_and_other_phases_are_other_kinds(changes):
    others = [step(100, number, **changes) for number in (1, 2)]
    expected = 0 if "phases" in changes else 2
    assert typical(step(100, 0), *others).index == expected


def test_many_kinds_are_forgotten_but_for_the_most_frequent():
    steps = [step(100, 0), step(100, 1), *(step(int(200 * 1.05**n), n + 2) for n in range(100))]
    assert typical(*steps).index == 1


def test_a_copy_goes_its_own_way():
    first = TypicalStep()
    first.add(step(100, 0))
    second = copy(first)
    second.add(step(100, 1))
    assert (first.step.index, second.step.index) == (0, 1)
