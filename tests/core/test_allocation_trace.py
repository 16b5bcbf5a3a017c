"""A step as data: what a trace accepts, and that JSON gives back what was written."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_json import from_json, to_json

from memcallback.core.allocation_trace import (
    Alloc,
    AllocationTrace,
    Free,
    PhaseEnd,
    PhaseStart,
    StepEnd,
    StepStart,
    last_step_start,
    not_freed,
    phase_events,
)
from memcallback.core.types import Category, Phase

SMALL_STEP = (
    Alloc(1, 4096, category=Category.PARAMETER),
    StepStart(),
    PhaseStart(Phase.FORWARD),
    Alloc(2, 1234, 7, Category.ACTIVATION, "aten::relu", "encoder.0"),
    PhaseEnd(Phase.FORWARD),
    Free(2),
    StepEnd(),
)


@st.composite
def traces(draw):
    """Any valid trace: sizes and names at random, frees of what is alive, phases one after the
    other.
    """
    events, alive, phase, in_step = [], [], None, False
    for number in range(draw(st.integers(0, 30))):
        kind = draw(st.sampled_from(("alloc", "alloc", "free", "phase", "step")))
        if kind == "alloc":
            names = st.sampled_from(("", "aten::mm", "encoder.layers.0", 'quoted " name', "日本"))
            category = draw(st.none() | st.sampled_from(Category))
            events.append(
                Alloc(
                    number,
                    draw(st.integers(0, 2**45)),
                    draw(st.integers(0, 3)),
                    category,
                    draw(names),
                    draw(names),
                )
            )
            alive.append(number)
        elif kind == "free" and alive:
            events.append(Free(alive.pop(draw(st.integers(0, len(alive) - 1)))))
        elif kind == "phase":
            covers = draw(st.sampled_from([(), (Phase.FORWARD, Phase.BACKWARD)]))
            events.append(
                PhaseEnd(phase)
                if phase
                else PhaseStart(phase := draw(st.sampled_from(Phase)), covers)
            )
            phase = None if isinstance(events[-1], PhaseEnd) else phase
        elif kind == "step" and phase is None:
            events.append(StepEnd() if in_step else StepStart())
            in_step = not in_step
    return AllocationTrace(
        (*events, *([PhaseEnd(phase)] if phase else []), *([StepEnd()] if in_step else []))
    )


@given(traces())
def test_json_gives_back_the_trace_that_was_written(trace):
    assert from_json(to_json(trace)) == trace


def test_names_are_written_once():
    events = tuple(
        Alloc(i, 512, operator="aten::convolution", module="layer1.0.conv1") for i in range(1000)
    )
    text = to_json(AllocationTrace(events))
    assert text.count("aten::convolution") == 1
    assert len(gzip.compress(text.encode())) < 4096


def test_json_says_what_it_is():
    document = json.loads(to_json(AllocationTrace(SMALL_STEP)))
    assert (document["format"], document["version"]) == ("memcallback.AllocationTrace", 2)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (
            (Free(3),),
            "event 0 frees id 3, which was never allocated; each Alloc is freed at most once, by a "
            "later Free: leave this Free out",
        ),
        (
            (Alloc(3, 512), Free(3), Free(3)),
            "event 2 frees id 3, which is freed already; each Alloc is freed at most once, by a "
            "later Free: leave this Free out",
        ),
        (
            (Alloc(3, 512), Alloc(3, 512)),
            "event 1 allocates id 3 a second time; an id belongs to one allocation: give each "
            "allocation its own",
        ),
        (
            (Alloc(3, 512), Free(3), Alloc(3, 512)),
            "event 2 allocates id 3 a second time; an id belongs to one allocation: give each "
            "allocation its own",
        ),
        (
            (PhaseStart(Phase.FORWARD),),
            "phase 'forward' has a start and no end; every phase has both: append "
            "PhaseEnd(Phase.FORWARD)",
        ),
        (
            (PhaseEnd(Phase.FORWARD),),
            "event 0 ends phase 'forward', but the current phase is None: put a PhaseStart for "
            "'forward' before it",
        ),
        (
            (PhaseStart(Phase.FORWARD), PhaseStart(Phase.BACKWARD)),
            "event 1 starts phase 'backward' inside 'forward'; phases do not overlap: end the "
            "other first",
        ),
        (
            (StepStart(), StepStart()),
            "event 1 is a StepStart inside a step; steps contain whole phases and do not overlap: "
            "put a step's marks between phases",
        ),
        (
            (StepEnd(),),
            "event 0 is a StepEnd without an open step; steps contain whole phases "
            "and do not overlap: put a step's marks between phases",
        ),
        (
            (StepStart(), PhaseStart(Phase.FORWARD), StepEnd()),
            "event 2 is a StepEnd inside phase 'forward'; steps contain whole phases and do not "
            "overlap: put a step's marks between phases",
        ),
        ((StepStart(),), "a step has a start and no end; every step has both: append StepEnd()"),
    ],
)
def test_events_that_contradict_each_other_are_refused(events, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the whole text is compared
        AllocationTrace(events)
    assert str(caught.value) == message


def test_a_negative_size_is_refused():
    with pytest.raises(
        ValueError, match="allocation 3 has size_bytes=-1; a size is 0 or more bytes"
    ):
        Alloc(3, -1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "this JSON is no trace"),
        ("{}", "this JSON is no trace"),
        (
            '{"format":"memcallback.AllocationTrace","version":99}',
            "version 99; this memcallback reads version 2",
        ),
        ('{"format":"memcallback.AllocationTrace","version":2}', "the trace is damaged"),
        (
            '{"format":"memcallback.AllocationTrace","version":2,"names":[],"events":[["x"]]}',
            "an event 'x'; known are a, f, start, end, step and step end",
        ),
        (
            '{"format":"memcallback.AllocationTrace","version":2,"names":[],"events":[["a",1,2,0,null,0,0]]}',
            "the trace is damaged",
        ),
        (
            '{"format":"memcallback.AllocationTrace","version":2,"names":[],"events":[["f",1]]}',
            "was never allocated",
        ),
        ("{", "the text is no JSON .*; give a text that to_json wrote"),
    ],
)
def test_a_text_that_is_no_trace_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        from_json(text)


def test_the_events_of_a_phase_are_those_between_its_marks():
    twice = (*SMALL_STEP[1:], StepStart(), *(e for e in SMALL_STEP[2:5]), StepEnd())
    assert list(phase_events(twice, Phase.FORWARD)) == [(SMALL_STEP[3],), (SMALL_STEP[3],)]
    assert list(phase_events(twice, Phase.BACKWARD)) == []
    assert twice[last_step_start(twice) :] == (StepStart(), *SMALL_STEP[2:5], StepEnd())
    assert last_step_start(SMALL_STEP[:1]) == 0


def test_what_is_not_freed_is_live():
    assert not_freed(SMALL_STEP) == [SMALL_STEP[0]]
    assert not_freed(SMALL_STEP[:5]) == [SMALL_STEP[0], SMALL_STEP[3]]
    assert not_freed((Free(9),)) == []
