"""How far a prediction is, on a terminal and elsewhere, by a clock that a test sets."""

import io
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import memcallback as mc
from memcallback.prediction.progress import ProgressLine, part_of


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def step():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    return mc.TrainingStep(model, torch.ones(4096, 256), optimizer=torch.optim.SGD)


@pytest.fixture
def clock():
    return Clock()


def shown(stream):
    """The lines as a terminal would have shown them one after the other."""
    return [line.rstrip() for line in stream.getvalue().split("\r") if line.strip()]


def test_on_a_terminal_one_line_is_written_anew_with_an_estimate(clock):
    stream = Terminal()
    with ProgressLine(stream=stream, clock=clock) as line:
        line.say("loading PyTorch")
        clock.now = 3.0
        line(0, 3)
        clock.now = 8.0
        line(1, 3)
        clock.now = 9.0
        line.tick()
        clock.now = 10.0
        line(2, 3)
    assert shown(stream) == [
        "memcallback: loading PyTorch",
        "memcallback: 0 of 3 traces, 3 s",
        "memcallback: 1 of 3 traces, 8 s, about 16 s left",
        "memcallback: 1 of 3 traces, 9 s, about 18 s left",
        "memcallback: 2 of 3 traces, 10 s, about 5 s left",
    ]
    assert "\n" not in stream.getvalue()
    # The line is gone at the end.
    *_, last, _ = stream.getvalue().split("\r")
    assert last.isspace()


def test_in_a_notebook_one_line_is_written_anew_and_not_where_ipykernel_is_only_imported(
    clock, monkeypatch
):
    # A notebook's stderr is no terminal.
    notebook = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    for stream in (notebook, log):
        with ProgressLine(stream=stream, clock=clock) as line:
            line.say("loading PyTorch")
    assert shown(notebook) == ["memcallback: loading PyTorch"]
    assert log.getvalue() == ""


def test_elsewhere_there_is_a_line_every_10_seconds_and_none_before(clock):
    stream = io.StringIO()
    with ProgressLine("predictions", stream=stream, clock=clock) as line:
        line.say("loading PyTorch")
        for clock.now in range(0, 25, 2):
            line(int(clock.now) // 2, 20)
    assert stream.getvalue() == (
        "memcallback: 5 of 20 predictions, 10 s, about 30 s left\n"
        "memcallback: 10 of 20 predictions, 20 s, about 20 s left\n"
    )


class Tee:
    """What many programs put in the place of stderr, to have it in a file too."""

    def __init__(self, *streams):
        self.streams = streams

    def write(self, text):
        for stream in self.streams:
            stream.write(text)

    def flush(self):
        for stream in self.streams:
            stream.flush()


def test_a_stream_with_write_and_flush_alone_is_written_line_by_line(clock, monkeypatch):
    stream = io.StringIO()
    with ProgressLine(stream=Tee(stream), clock=clock) as line:
        line.say("tracing")
        clock.now = 10.0
        line(1, 2)
    assert stream.getvalue() == "memcallback: 1 of 2 traces, 10 s, about 10 s left\n"
    monkeypatch.setattr("sys.stderr", Tee(stream))
    assert mc.predict(step(), device="24GiB", isolate=False).fits


class Gone(Terminal):
    def write(self, text):
        raise BrokenPipeError


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_stream_that_takes_nothing_does_not_end_a_prediction(clock, is_closed):
    stream = Gone()
    if is_closed:
        stream.close()
    with ProgressLine(stream=stream, clock=clock) as line:
        line.say("tracing")
        clock.now = 10.0
        line(1, 2)
        clock.now = 20.0
        line(2, 2)


def test_parts_of_a_work_count_as_one():
    told = []
    for number in range(2):
        report = part_of(lambda *numbers: told.append(numbers), number, 2)
        report(0, 3)
        report(2, 3)
    assert told == [(0, 6), (2, 6), (3, 6), (5, 6)]


@pytest.mark.parametrize("function", [mc.predict, mc.suggest_batch_size, mc.what_if])
def test_it_is_shown_by_itself_and_only_on_stderr(function, monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    options = {"max_batch_size": 64} if function is mc.suggest_batch_size else {}
    function(step(), device="NVIDIA L4", **options)
    assert shown(terminal)[0] == "memcallback: tracing"
    assert "memcallback: 0 of " in shown(terminal)[1]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("function", [mc.suggest_batch_size, mc.what_if])
def test_all_of_the_work_is_counted(function):
    told = []
    options = {"max_batch_size": 64} if function is mc.suggest_batch_size else {}
    function(step(), device="24GiB", progress=lambda *numbers: told.append(numbers), **options)
    done = [done for done, _ in told]
    assert done == sorted(done)
    assert all(done < num_all for done, num_all in told)
    last, num_all = told[-1]
    assert last == num_all - 1


def test_with_a_progress_of_ones_own_nothing_is_shown(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    mc.predict(step(), device="NVIDIA L4", progress=lambda *_: None)
    assert terminal.getvalue() == ""
