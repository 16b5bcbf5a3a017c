import re
from dataclasses import replace

import pytest
from hand_made import batch_trace, traced_step
from hypothesis import given
from hypothesis import strategies as st

from memcallback.core.allocation_trace import (
    Alloc,
    AllocationTrace,
    Free,
    PhaseEnd,
    PhaseStart,
    StepEnd,
    StepStart,
)
from memcallback.core.kernel import (
    FIRST_TEMPORARY,
    AllocOutput,
    AllocTemp,
    FreeTemp,
    KernelCall,
    KernelRule,
    OpenBlasHandles,
    completed,
)
from memcallback.core.types import Category, Phase
from memcallback.prediction.batch_trace import BatchDependentPath, BatchTrace, UnknownBatchSize
from memcallback.trace.traced_step import TracedStep


def step(batch_size, *sizes, operators=None):
    """A step with one allocation for each size, in the backward pass of module net.0."""
    allocs = [
        Alloc(
            number,
            size,
            0,
            Category.WORKSPACE,
            operators[number] if operators else "aten::mm",
            "net.0",
        )
        for number, size in enumerate(sizes)
    ]
    frees = [Free(number) for number in range(len(sizes))]
    events = (
        StepStart(),
        PhaseStart(Phase.BACKWARD),
        *allocs,
        *frees,
        PhaseEnd(Phase.BACKWARD),
        StepEnd(),
    )
    return TracedStep(AllocationTrace(events), batch_size)


@given(
    lines=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=20),
    first=st.integers(1, 50),
    more=st.integers(1, 50),
    other=st.integers(1, 1000),
)
def test_two_traces_tell_every_size_at_any_batch_size(lines, first, more, other):
    def at(batch_size):
        return step(batch_size, *(fixed + batch_size * slope for fixed, slope in lines))

    fitted = BatchTrace.fit(at(first + more), at(first))
    assert fitted.at(other) == at(other).trace


def test_a_traced_step_comes_out_as_a_third_trace_has_it():
    assert batch_trace().at(32) == traced_step(32).trace
    assert batch_trace().at(2) == traced_step(2).trace


asked = []


def in_tiles(tile_bytes, num_values):
    """An operator that works in tiles, which it takes before its output; of few values it makes the
    output alone.
    """
    asked.append(num_values)
    if num_values < 20:
        return ()
    return (
        AllocTemp(-(-num_values // tile_bytes) * tile_bytes),
        AllocOutput(0),
        AllocTemp(8),
        FreeTemp(1),
    )


def tiled(batch_size, tile_bytes=1000, num_calls=1, num_values=None):
    """Calls of such an operator, as a tracer writes them down: the first one opens a handle."""
    rule = KernelRule(
        in_tiles, (tile_bytes,), (batch_size * 7 + 3 if num_values is None else num_values,)
    )
    events, calls, temporaries = [StepStart(), PhaseStart(Phase.BACKWARD)], [], FIRST_TEMPORARY
    for number in range(num_calls):
        start, taken = len(events), []
        handles = (1,) if number == 0 else ()
        for item in completed(rule.function(*rule.constants, *rule.numbers), 1):
            if isinstance(item, AllocTemp):
                taken.append(temporaries)
                events.append(
                    Alloc(temporaries, item.size_bytes, 0, item.category, "aten::sort", "net")
                )
                temporaries += 1
            elif isinstance(item, AllocOutput):
                events.append(
                    Alloc(2 * number, 8 * batch_size, 0, Category.ACTIVATION, "aten::sort", "net")
                )
            elif isinstance(item, OpenBlasHandles):
                events.extend(
                    Alloc(handle, 4096, 0, Category.WORKSPACE, "aten::sort", "net")
                    for handle in handles
                )
            else:
                events.append(Free(taken[item.index]))
        calls.append(
            KernelCall(start, len(events), rule, (2 * number,), handles, "aten::sort", "net")
        )
    events += [PhaseEnd(Phase.BACKWARD), StepEnd()]
    return TracedStep(AllocationTrace(tuple(events)), batch_size, tuple(calls))


@given(
    first=st.integers(1, 50),
    more=st.integers(1, 50),
    other=st.integers(1, 1000),
    num_calls=st.integers(1, 3),
)
def test_an_operator_is_asked_at_each_batch_size_what_it_takes_and_when(
    first, more, other, num_calls
):
    fitted = BatchTrace.fit(
        *(tiled(batch_size, num_calls=num_calls) for batch_size in (first, first + more, other))
    )
    assert fitted.at(other) == tiled(other, num_calls=num_calls).trace
    assert fitted.at(1) == tiled(1, num_calls=num_calls).trace
    assert fitted.grows


def test_an_operator_is_asked_once_for_the_same_numbers():
    fitted = BatchTrace.fit(*(tiled(batch_size, num_calls=3) for batch_size in (2, 3)))
    asked.clear()
    for _ in range(3):
        fitted.at(7)
    assert asked == [52]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            step(3, 100, 200, operators=["aten::mm", "aten::bmm"]),
            "at batch size 2 it has aten::mm in module 'net.0' (backward) with 200 bytes, and at "
            "the same place at batch size 3 aten::bmm in module 'net.0' (backward)",
        ),
        (
            step(3, 100),
            "at batch size 2 it has aten::mm in module 'net.0' (backward) with 200 bytes, and at "
            "the same place at batch size 3 the freeing of aten::mm in",
        ),
        (
            tiled(3),
            "at batch size 2 it has aten::mm in module 'net.0' (backward) with 100 bytes, and at "
            "the same place at batch size 3 a call of aten::sort in module",
        ),
    ],
    ids=["another operator", "an allocation less", "an operator with a rule only there"],
)
def test_where_the_program_takes_another_path_the_first_event_is_named(second, message):
    with pytest.raises(BatchDependentPath, match=re.escape(message)):
        BatchTrace.fit(step(2, 100, 200), second)


def test_a_phase_that_ends_earlier_at_another_batch_size_is_named_in_words():
    more = Alloc(20_000, 8, 0, Category.ACTIVATION, "aten::mul")
    longer = traced_step(3, num_steps=1, extra=[more])
    message = (
        "at batch size 2 it has the end of phase 'forward', and at the same place at batch size 3 "
        "aten::mul in the root module (forward) with 8 bytes"
    )
    with pytest.raises(BatchDependentPath, match=re.escape(message)):
        BatchTrace.fit(traced_step(2, num_steps=1), longer)


def test_rules_of_different_constants_are_another_path():
    with pytest.raises(BatchDependentPath, match="something else at another batch size"):
        BatchTrace.fit(tiled(2), tiled(3, tile_bytes=10))


def test_a_size_that_is_no_line_through_whole_bytes_is_refused():
    with pytest.raises(
        BatchDependentPath,
        match=r"at batch size 2 it has .* with 100 bytes, and .* at batch size 4 .* 101 bytes",
    ):
        BatchTrace.fit(step(2, 100), step(4, 101))


def test_a_third_trace_must_come_out_to_the_byte():
    with pytest.raises(
        BatchDependentPath,
        match=r"at batch size 4 it has .* with 401 bytes; from two other batch sizes, .* with 400 "
        r"bytes was expected",
    ):
        BatchTrace.fit(step(2, 200), step(3, 300), step(4, 401))


def test_two_traces_at_one_batch_size_tell_no_line():
    with pytest.raises(ValueError, match="both traces are at batch size 2"):
        BatchTrace.fit(step(2, 1), step(2, 1))


def test_a_single_trace_knows_only_its_own_batch_size():
    single = BatchTrace.single(step(2, 100))
    assert single.at(2) == step(2, 100).trace
    assert not single.is_any_batch_size_known
    with pytest.raises(
        UnknownBatchSize,
        match=r"traced at batch size 2 only, so batch size 3 is unknown: memcallback\.predict",
    ):
        single.at(3)


@pytest.mark.parametrize("batch_size", [0, -3])
def test_a_batch_size_below_one_is_refused(batch_size):
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        batch_trace().at(batch_size)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        step(batch_size, 1)


def test_a_size_that_shrinks_below_nothing_is_refused():
    fitted = BatchTrace.fit(step(2, 100), step(3, 50))
    with pytest.raises(
        ValueError,
        match=re.escape(
            "gives a negative size (-50) for aten::mm in module 'net.0' (backward) with 100 bytes "
            "at batch size 5"
        ),
    ):
        fitted.at(5)


def test_caveats_of_all_traces_are_kept_once():
    steps = [replace(step(n, n), caveats=("Same.", f"At {n}.")) for n in (2, 3, 4)]
    assert BatchTrace.fit(*steps).caveats == ("Same.", "At 2.", "At 3.", "At 4.")
    assert BatchTrace.single(steps[0]).caveats == ("Same.", "At 2.")
