"""Signals that arrive in a search act when it has ended."""

import signal
import threading

import pytest

from memcallback.integrations.lightning.fit.signals import deferred_signals, ended_by_sigterm


@pytest.fixture
def received():
    """The signals that the program's own handlers got."""
    numbers = []
    before = {
        number: signal.signal(number, lambda number, frame: numbers.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def test_deferred_signals_act_at_the_end_in_their_order(received):
    with deferred_signals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert received == []
    assert received == [signal.SIGTERM, signal.SIGINT]


def test_a_sigterm_ends_a_search_and_then_reaches_the_programs_own_handler(received):
    steps = []

    def step():
        try:
            signal.raise_signal(signal.SIGTERM)
        except Exception:
            steps.append("caught")
        finally:
            steps.append(received[:])

    with pytest.raises(RuntimeError, match="own handler let the program go on"), ended_by_sigterm():
        step()
    assert steps == [[]]
    assert received == [signal.SIGTERM]


def test_a_search_within_a_search_ends_both_and_the_handler_runs_once(received):
    with (
        pytest.raises(RuntimeError, match="own handler let the program go on"),
        ended_by_sigterm(),
        ended_by_sigterm(),
    ):
        signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM]


def test_a_sigterm_that_the_program_ignores_ends_nothing(received):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with ended_by_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_another_thread_sets_no_handlers(received):
    before = signal.getsignal(signal.SIGTERM)
    handlers = []

    def search():
        with ended_by_sigterm(), deferred_signals():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=search)
    thread.start()
    thread.join()
    assert handlers == [before]
