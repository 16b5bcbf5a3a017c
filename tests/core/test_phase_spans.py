"""Signals of a loop become spans of phases between readings; neighbours share one."""

import pytest

from memcallback.core.phase_spans import (
    PhaseSpans,
    begin_backward,
    begin_update,
    end_backward,
    end_forward,
    end_manual_step,
    end_update,
    phase_of,
)
from memcallback.core.types import Phase

FORWARD, BACKWARD, UPDATE = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP


@pytest.fixture
def spans():
    readings = []
    made = PhaseSpans(lambda: readings.append(1))
    made.readings = readings
    return made


def automatic(spans):
    spans.open_phase(FORWARD)
    begin_backward(spans)
    end_backward(spans, is_manual=False)
    begin_update(spans, is_manual=False)
    end_update(spans, is_manual=False)
    spans.end_step()


def test_a_step_has_five_readings_since_backward_pass_and_update_share_theirs(spans):
    automatic(spans)
    assert spans.windows == [((FORWARD,), 0, 1), ((BACKWARD,), 2, 3), ((UPDATE,), 3, 4)]
    assert len(spans.readings) == 5


def test_a_phase_that_begins_in_another_ends_that_one_at_the_same_reading(spans):
    spans.open_phase(FORWARD)
    spans.open_phase(BACKWARD)
    spans.close_phase()
    assert spans.windows == [((FORWARD,), 0, 1), ((BACKWARD,), 1, 2)]
    assert len(spans.readings) == 3


def test_a_pause_between_forward_and_backward_has_two_boundaries(spans):
    spans.open_phase(FORWARD)
    end_forward(spans)
    assert spans.current_phase is None
    begin_backward(spans)
    assert spans.current_phase is BACKWARD
    end_backward(spans, is_manual=False)
    assert spans.windows == [((FORWARD,), 0, 1), ((BACKWARD,), 2, 3)]
    assert len(spans.readings) == 4


def test_an_update_after_a_forward_pass_alone_takes_a_boundary_of_its_own(spans):
    spans.open_phase(FORWARD)
    spans.close_phase()
    spans.open_phase(UPDATE)
    spans.close_phase()
    assert spans.windows == [((FORWARD,), 0, 1), ((UPDATE,), 2, 3)]


def test_a_second_update_takes_a_boundary_of_its_own(spans):
    automatic(spans)
    spans.open_phase(UPDATE)
    spans.end_step()
    assert spans.windows[-1] == ((UPDATE,), 5, 6)
    assert len(spans.readings) == 7


def test_a_phase_that_is_closed_twice_ends_once(spans):
    spans.open_phase(FORWARD)
    spans.close_phase()
    spans.close_phase()
    spans.end_step()
    assert spans.windows == [((FORWARD,), 0, 1)]
    assert len(spans.readings) == 2


def test_an_open_phase_ends_with_the_step(spans):
    spans.open_phase(FORWARD)
    spans.end_step()
    assert spans.windows == [((FORWARD,), 0, 1)]


def manual(spans, *, num_passes=1):
    spans.open_phase(FORWARD)
    for _ in range(num_passes):
        begin_backward(spans)
        end_backward(spans, is_manual=True)
    begin_update(spans, is_manual=True)
    end_update(spans, is_manual=True)


def test_a_provisional_forward_pass_before_an_update_did_not_happen(spans):
    manual(spans)
    assert spans.current_phase is None
    spans.end_step()
    assert spans.windows == [((FORWARD,), 0, 1), ((BACKWARD,), 2, 3), ((UPDATE,), 3, 4)]


def test_a_provisional_forward_pass_before_another_backward_pass_is_one(spans):
    manual(spans, num_passes=2)
    spans.end_step()
    assert [covers for covers, _, _ in spans.windows] == [
        (FORWARD,),
        (BACKWARD,),
        (FORWARD,),
        (BACKWARD,),
        (UPDATE,),
    ]
    assert [(first, last) for _, first, last in spans.windows] == [
        (0, 1),
        (2, 3),
        (3, 4),
        (4, 5),
        (5, 6),
    ]


def test_a_second_provisional_pass_replaces_the_first(spans):
    spans.open_phase(FORWARD)
    begin_backward(spans)
    end_backward(spans, is_manual=True)
    spans.open_phase(FORWARD, is_provisional=True)
    spans.end_step()
    assert spans.windows == [((FORWARD,), 0, 1), ((BACKWARD,), 2, 3)]


def test_after_an_update_another_forward_pass_may_follow_where_the_loop_decides(spans):
    manual(spans)
    begin_backward(spans)
    spans.end_step()
    assert [covers for covers, _, _ in spans.windows[3:]] == [(FORWARD,), (BACKWARD,)]


def test_after_an_update_no_forward_pass_follows_where_lightning_decides(spans):
    automatic(spans)
    begin_backward(spans)
    spans.end_step()
    assert [covers for covers, _, _ in spans.windows[3:]] == [(BACKWARD,)]


def test_the_next_step_begins_at_a_boundary_of_its_own(spans):
    manual(spans)
    spans.end_step()
    spans.open_phase(FORWARD)
    spans.close_phase()
    assert spans.windows[-1][0] == (FORWARD,)
    assert spans.windows[-1][2] - spans.windows[-1][1] == 1


def test_the_signal_of_a_backward_pass_alone_is_a_backward_pass(spans):
    begin_backward(spans)
    end_backward(spans, is_manual=False)
    assert spans.windows == [((BACKWARD,), 0, 1)]


def test_an_end_of_a_forward_pass_during_a_backward_pass_is_of_checkpointing(spans):
    spans.open_phase(BACKWARD)
    end_forward(spans)
    assert spans.windows == []
    assert spans.current_phase is BACKWARD


def test_a_closure_runs_its_forward_pass_in_the_update(spans):
    begin_update(spans, is_manual=False)
    end_forward(spans)
    begin_backward(spans)
    end_backward(spans, is_manual=False)
    assert [covers for covers, _, _ in spans.windows] == [(UPDATE, FORWARD), (BACKWARD,)]


def test_after_a_closure_the_rest_is_the_update(spans):
    begin_update(spans, is_manual=True)
    end_forward(spans)
    begin_backward(spans)
    spans.close_phase()
    end_update(spans, is_manual=True)
    assert spans.windows[-1][0] == (UPDATE,)


def test_an_update_that_nothing_began_is_none_with_automatic_optimization(spans):
    end_update(spans, is_manual=False)
    assert spans.windows == []


def test_a_backward_pass_without_a_mark_is_in_the_window_of_the_forward_pass(spans):
    spans.open_phase(FORWARD)
    begin_update(spans, is_manual=True)
    end_update(spans, is_manual=True)
    assert [covers for covers, _, _ in spans.windows] == [(FORWARD, BACKWARD), (UPDATE,)]


def test_with_automatic_optimization_a_forward_pass_before_the_update_is_only_that(spans):
    spans.open_phase(FORWARD)
    begin_update(spans, is_manual=False)
    end_update(spans, is_manual=False)
    assert spans.windows == [((FORWARD,), 0, 1), ((UPDATE,), 2, 3)]


def test_signals_inside_an_update_are_ignored(spans):
    begin_update(spans, is_manual=False)
    begin_update(spans, is_manual=False)
    end_update(spans, is_manual=False)
    assert spans.windows == [((UPDATE,), 0, 1)]


def test_a_manual_step_without_any_mark_is_one_window_of_both_passes(spans):
    spans.open_phase(FORWARD)
    end_manual_step(spans)
    assert [covers for covers, _, _ in spans.windows] == [(FORWARD, BACKWARD)]


def test_a_manual_step_that_ends_after_its_update_adds_nothing(spans):
    manual(spans)
    end_manual_step(spans)
    spans.end_step()
    assert len(spans.windows) == 3


def test_the_last_of_a_windows_phases_names_it():
    assert phase_of((FORWARD, BACKWARD)) is BACKWARD
    assert phase_of((UPDATE, FORWARD)) is UPDATE
