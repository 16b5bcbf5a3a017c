"""Errors of ours: told once, as warnings, and what is meant for the user goes on."""

import linecache
import signal
import warnings

import pytest

from memcallback.core.errors import (
    MemoryWarning,
    MissingPartError,
    PredictionError,
    fail_safe,
    faults_as_warnings,
    reason_of,
    warn,
    warn_and_go_on,
)


class Recorder:
    """Records until a hook fails."""

    def __init__(self, *, fails_to_close=False):
        self._is_broken = False
        self.num_calls = self.num_released = 0
        self.fails_to_close = fails_to_close

    def _release(self):
        self.num_released += 1
        if self.fails_to_close:
            raise OSError("the disk is full")

    @fail_safe
    def on_step(self, number, *, error=None):
        """What a step does."""
        self.num_calls += 1
        if error is not None:
            raise error
        return number + 1


def test_a_guarded_method_returns_what_it_returns_and_keeps_its_name():
    recorder = Recorder()
    assert recorder.on_step(3) == 4
    assert Recorder.on_step.__name__ == "on_step"
    assert not recorder._is_broken


@pytest.mark.parametrize("fails_to_close", [False, True])
def test_the_first_error_is_told_and_ends_the_recording(fails_to_close):
    recorder = Recorder(fails_to_close=fails_to_close)
    with pytest.warns(MemoryWarning) as told:
        assert recorder.on_step(1, error=ValueError("no such thing.")) is None
    assert [str(one.message) for one in told] == [
        "Recorder has stopped recording: ValueError in on_step: no such thing. Training goes on "
        "without it."
    ]
    assert recorder.num_released == 1
    assert recorder.on_step(2) is None
    assert recorder.num_calls == 1


def test_where_warnings_are_errors_a_failed_hook_is_silent():
    recorder = Recorder()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recorder.on_step(1, error=SystemExit(3)) is None
        warn_and_go_on("said to nobody")
        with pytest.raises(MemoryWarning, match="said to the caller"):
            warn("said to the caller")
    assert recorder._is_broken


def test_a_time_limit_is_meant_for_the_training():
    recorder = Recorder()

    def stop(number, frame):
        raise TimeoutError("22 hours")

    def wait(self):
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        Recorder.waits = fail_safe(wait)
        with pytest.raises(TimeoutError):
            recorder.waits()
        with pytest.raises(TimeoutError), faults_as_warnings("The report is lost."):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
        del Recorder.waits
    assert not recorder._is_broken
    assert recorder.num_released == 0


def test_a_fault_is_a_warning_that_says_what_is_lost_and_why():
    with (
        pytest.warns(MemoryWarning, match=r"^The report is lost\. OSError: no space\.$"),
        faults_as_warnings("The report is lost."),
    ):
        raise OSError(" no space. ")


def test_an_error_of_a_kind_that_is_meant_for_the_user_goes_on():
    with pytest.raises(KeyError), faults_as_warnings("The report is lost.", LookupError):
        raise KeyError("name")


def test_our_own_errors_are_sentences_without_their_class():
    assert reason_of(PredictionError("A reason")) == "A reason."
    assert reason_of(MissingPartError("A part. ")) == "A part."
    assert reason_of(ValueError("a reason")) == "ValueError: a reason."


@pytest.mark.parametrize("say", [warn, warn_and_go_on])
def test_a_warning_names_the_line_of_the_one_who_called_and_shows_controls(say):
    def ours():
        say("name \x1b[2J")

    with pytest.warns(MemoryWarning) as told:
        ours()
    (line,) = told
    assert str(line.message) == r"name \x1b[2J"
    assert line.filename == __file__
    assert linecache.getline(__file__, line.lineno).strip() == "ours()"


def test_an_errors_message_shows_controls_as_escapes():
    assert str(PredictionError("name \x1b[2J")) == r"name \x1b[2J"


def test_a_warning_that_cannot_be_shown_does_not_stop_the_training(monkeypatch):
    def show(*args, **kwargs):
        raise ValueError("I/O operation on closed file.")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        warn_and_go_on("a text")
        with pytest.raises(ValueError, match="closed file"):
            warn("a text")
