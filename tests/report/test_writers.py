"""Where points and texts go, and what happens when that fails."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from event_files import curves_of, events_of
from torch.utils.tensorboard import SummaryWriter

from memcallback import MemoryWarning
from memcallback.core.document import Document
from memcallback.report.writers import Writers


class Failing:
    """A logger that raises."""

    def log_metrics(self, metrics, step):
        raise ConnectionError("no server")


class Listing:
    def __init__(self):
        self.points = []

    def log_metrics(self, metrics, step):
        self.points.append((metrics, step))


def test_two_processes_that_write_to_one_folder_get_a_run_each(tmp_path):
    program = (
        "import sys\n"
        "from memcallback.report.writers import Writers\n"
        "sys.stdin.readline()\n"
        "for _ in range(5):\n"
        "    print(Writers([], sys.argv[1]).log_dir.rpartition('/')[2])\n"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in "ab"
    ]
    for one in both:
        one.stdin.write("go\n")
        one.stdin.flush()
    names = [name for one in both for name in one.communicate()[0].split()]
    assert sorted(names) == sorted(f"version_{number}" for number in range(10))


def test_a_prediction_is_drawn_where_it_begins_changes_or_is_left_by_what_was_measured(tmp_path):
    tag = "memory_gib/peak_backward"
    sinks = Writers([], str(tmp_path))
    points = [(2.0, 2.0), (2.0, 2.0), (2.01, 2.0), (2.5, 2.0), (2.0, 2.0), (3.0, 3.0), (3.0, 3.0)]
    for step, (measured, predicted) in enumerate(points):
        sinks.log_curves({"": {tag: measured}, "predicted": {tag: predicted}}, step)
    folder = Path(sinks.log_dir)
    sinks.close()
    curves = curves_of(folder)
    assert list(curves[""][tag]) == list(range(7))
    # Of two equal lines one would hide the other.
    assert curves["predicted"][tag] == {0: 2.0, 3: 2.0, 5: 3.0}


def test_a_prediction_without_a_measured_curve_beside_it_is_drawn_once(tmp_path):
    sinks = Writers([], str(tmp_path))
    for step in range(3):
        sinks.log_curves({"predicted": {"memory_gib/reserved": 2.0}}, step)
    folder = Path(sinks.log_dir)
    sinks.close()
    assert curves_of(folder)["predicted"] == {"memory_gib/reserved": {0: 2.0}}


def test_a_logger_that_raises_is_told_once_and_left_out(tmp_path):
    other = Listing()
    sinks = Writers([Failing(), other], None)

    def log():
        sinks.log_curves({"": {"memory/peak": 1.0}}, 1)
        sinks.log_curves({"": {"memory/peak": 2.0}}, 2)

    with pytest.warns(
        MemoryWarning, match=r"Failing: ConnectionError: no server\. Memory is still recorded"
    ) as told:
        log()
    assert len(told) == 1
    assert other.points == [({"memory/peak": 1.0}, 1), ({"memory/peak": 2.0}, 2)]


def test_a_run_that_can_no_longer_be_written_is_told_and_training_goes_on(tmp_path, monkeypatch):
    sinks = Writers([], str(tmp_path))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_text", full)
    monkeypatch.setattr(SummaryWriter, "flush", full)

    def log():
        sinks.log_text("memory/report", Document("text"), 1)
        sinks.log_text("memory/report", Document("text"), 2)
        sinks.close()

    with pytest.warns(MemoryWarning, match="No space left") as told:
        log()
    assert len(told) == 1


def test_a_picture_that_cannot_be_drawn_is_told_and_the_others_are_drawn(tmp_path):
    def broken():
        raise ValueError("nothing to draw")

    writers = Writers([], str(tmp_path))
    with pytest.warns(MemoryWarning, match="draw the picture 'a': ValueError: nothing to draw"):
        writers.log_image("a", 1, broken)
    writers.log_image("b", 1, lambda: np.zeros((4, 4, 3), dtype=np.uint8))
    writers.close()
    assert events_of(tmp_path / "version_0").Tags()["images"] == ["b"]


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    sinks = Writers([], str(blocked))
    with pytest.warns(MemoryWarning, match="Give a folder that can be written: default_root_dir"):
        log_dir = sinks.log_dir
    assert log_dir is None
    sinks.log_curves({"": {"memory/peak": 1.0}}, 1)
    sinks.close()


def test_loggers_without_a_folder_leave_each_training_one_of_its_own(tmp_path):
    class Values:
        def log_metrics(self, metrics, step=None): ...

    for number in range(2):
        writers = Writers([Values()], str(tmp_path))
        assert writers.make_folder() == str(tmp_path / f"version_{number}")
        assert writers.make_folder() == str(tmp_path / f"version_{number}")
        writers.close()
    assert Writers([Values()], None).make_folder() is None
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.warns(MemoryWarning, match="Give a folder that can be written: default_root_dir"):
        assert Writers([Values()], str(blocked)).make_folder() is None


def test_a_run_is_opened_at_its_first_value(tmp_path):
    sinks = Writers([], str(tmp_path))
    assert not list(tmp_path.iterdir())
    sinks.close()
    assert not list(tmp_path.iterdir())
    sinks = Writers([], str(tmp_path))
    sinks.log_curves({"": {"memory/peak": 1.0}}, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["version_0"]
    sinks.close()
