"""A user's own profile comes out as without us, whenever it begins and ends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from profiled_programs import NUM_STEPS, PROGRAMS

SCRIPT = Path(__file__).parents[1] / "profiled_programs.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each program did, by its name and whether its steps were recorded."""
    file = tmp_path_factory.mktemp("profiled") / "runs"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(file)], capture_output=True, text=True, check=False
    )
    assert file.exists(), done.stderr[-2000:]
    lines = map(json.loads, file.read_text().splitlines())
    return {(name, is_recorded): said for name, is_recorded, said in lines}


def both(runs, name):
    """The run without us and the one with."""
    assert (name, True) in runs, "the process died"
    alone, recorded = runs[name, False], runs[name, True]
    assert "failed" not in alone, alone["failed"]
    assert "failed" not in recorded, recorded["failed"]
    return alone, recorded


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_profile_has_the_same_events_as_without_us(runs, name):
    alone, recorded = both(runs, name)
    assert alone["profiled"]
    assert recorded["profiled"] == alone["profiled"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_profiled_training_is_the_same_and_left_as_it_was(runs, name):
    alone, recorded = both(runs, name)
    assert recorded["trained"] == alone["trained"]
    assert recorded["patches"] == []
    assert not recorded["is_profiler_on"]


def test_steps_beside_a_profile_are_counted(runs):
    counted = {name: runs[name, True]["counted"] for name in PROGRAMS if (name, True) in runs}
    only = lambda *without: [number not in without for number in range(NUM_STEPS)]  # noqa: E731
    assert counted["inside one phase"] == only(3)
    assert counted["begun inside a step, ended in the next"] == only(3, 4)
    assert counted["in another thread, begun inside a step"] == only(3, 4)
    assert counted["in another thread, begun before"] == only(3, 4)
    assert counted["prepared where a finished one was"] == only(3, 4)
    assert counted["an execution trace"] == only()
    # Prepared before steps 1 and 4 and running in 2 and 5: waiting takes nothing.
    assert counted["scheduled, stepped between steps"] == only(1, 2, 4, 5)


def test_a_profile_begun_inside_a_step_is_not_warned_of(runs):
    assert runs["inside one phase", True]["warnings"] == []
