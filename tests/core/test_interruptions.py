"""An end that a signal brings is meant for the training; one that our own call raised is not."""

import functools
import os
import signal
import sys

import pytest

from memcallback.core.interruptions import ENDS, PassOver, raise_if_meant, remember_handlers
from memcallback.step.batch import infer_batch_size


@pytest.fixture
def handled():
    """Sets the handler of a signal for the length of a test."""
    before = {}

    def handle(number, handler):
        before.setdefault(number, signal.signal(number, handler))

    yield handle
    for number, handler in before.items():
        signal.signal(number, handler)


def raised_by(call):
    """What a call raises, and whether it goes on through our guard."""
    try:
        call()
    except ENDS as error:
        first = error
    try:
        raise_if_meant(first)
    except ENDS as error:
        return first, error is first
    return first, False


def interrupt(number):
    """Send a signal to this process, whose handler runs before the loop ends."""
    os.kill(os.getpid(), number)
    while True:
        pass


def explicitly():
    raise KeyboardInterrupt


def again():
    try:
        interrupt(signal.SIGINT)
    except KeyboardInterrupt:
        raise


def test_ctrl_c_goes_on(handled):
    handled(signal.SIGINT, signal.default_int_handler)
    assert raised_by(lambda: interrupt(signal.SIGINT))[1]


def test_ctrl_c_that_was_caught_and_raised_again_goes_on(handled):
    handled(signal.SIGINT, signal.default_int_handler)
    assert raised_by(again)[1]


def test_ctrl_c_inside_a_call_without_frames_goes_on(handled):
    handled(signal.SIGINT, signal.default_int_handler)
    assert raised_by(lambda: signal.raise_signal(signal.SIGINT))[1]


def test_a_keyboard_interrupt_that_code_raised_is_contained():
    assert not raised_by(explicitly)[1]


@pytest.mark.parametrize("leave", [sys.exit, exit, lambda: explicitly.no_such_name])
def test_an_exit_or_an_error_is_contained(leave):
    assert not raised_by(leave)[1]


class Handler:
    def __init__(self, error):
        self.error = error

    def __call__(self, number, frame):
        self.by_method(number, frame)

    def by_method(self, number, frame):
        raise self.error


@pytest.mark.parametrize("error", [SystemExit(3), TimeoutError("22 hours"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    "form",
    [
        lambda error: Handler(error),
        lambda error: Handler(error).by_method,
        lambda error: functools.partial(Handler.by_method, Handler(error)),
    ],
)
def test_whatever_a_signal_handler_raises_goes_on(error, form, handled):
    handled(signal.SIGTERM, form(error))
    assert raised_by(lambda: interrupt(signal.SIGTERM)) == (error, True)


def test_an_error_without_frames_is_taken_for_ctrl_c_only_if_it_is_one():
    with pytest.raises(KeyboardInterrupt):
        raise_if_meant(KeyboardInterrupt())
    raise_if_meant(SystemExit(3))
    raise_if_meant(ValueError("no such thing"))


@pytest.mark.parametrize("error", [SystemExit(3), TimeoutError("22 hours")])
def test_what_a_handler_raises_that_has_taken_itself_away_goes_on(error, handled):
    def handler(number, frame):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one kills
        raise error

    handled(signal.SIGTERM, handler)
    remember_handlers()  # a recorder does when it is made
    assert raised_by(lambda: interrupt(signal.SIGTERM)) == (error, True)


class TimeLimit(Exception):
    pass


def test_an_error_is_passed_over_and_a_time_limit_is_not(handled):
    def limit(*_):
        raise TimeLimit

    handled(signal.SIGUSR1, limit)
    with PassOver():
        raise ValueError
    with pytest.raises(TimeLimit), PassOver():
        interrupt(signal.SIGUSR1)
    with pytest.raises(KeyboardInterrupt), PassOver():
        raise KeyboardInterrupt


def test_a_time_limit_that_comes_while_a_batch_is_read_goes_on(handled):
    class Batch:
        @property
        def batch_size(self):
            interrupt(signal.SIGUSR1)

    def limit(*_):
        raise TimeLimit

    handled(signal.SIGUSR1, limit)
    with pytest.raises(TimeLimit):
        infer_batch_size(Batch())
