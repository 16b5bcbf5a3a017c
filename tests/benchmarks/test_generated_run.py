"""The long run of generated programs runs none again that passed, and reports failures small."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import generated_run
from generated_run import Run

REPORT = """<testsuites><testsuite><testcase name="test_a">{}</testcase></testsuite></testsuites>"""
FAILED = """<failure message="assert 1 == 2">def check(program):
&gt;       assert 1 == 2
E       assert 1 == 2
E       Falsifying example: counted(
E           program=Program(family='vectors', layers=(Layer(kind='linear'),)),
E       )
</failure>"""


@pytest.fixture
def asked(monkeypatch):
    """What is run, where the second seed fails the first time."""
    runs = []

    def run(check, seed, num_programs):
        runs.append((check, seed))
        failure = "assert 1 == 2" if seed == 2 and runs.count((check, 2)) == 1 else None
        return Run(
            check=check,
            seed=seed,
            num_programs=num_programs,
            num_passed=0 if failure else num_programs,
            seconds=1.0,
            failure=failure,
        )

    monkeypatch.setattr(generated_run, "run", run)
    return runs


def called(monkeypatch, folder, *options):
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "benchmarks/generated_run.py",
            "--checks",
            "observer",
            "--programs",
            "5",
            "--out",
            str(folder),
            *options,
        ],
    )
    return generated_run.main()


def test_what_passed_is_not_run_again_and_what_failed_is(monkeypatch, tmp_path, asked):
    assert called(monkeypatch, tmp_path, "--seeds", "1-2") == 1
    assert "1 failed" in (tmp_path / "generated.md").read_text()
    assert called(monkeypatch, tmp_path, "--seeds", "1-3") == 0
    assert asked == [("observer", 1), ("observer", 2), ("observer", 2), ("observer", 3)]
    written = json.loads((tmp_path / "generated.json").read_text())
    assert [one["seed"] for one in written["runs"]] == [1, 2, 3]
    assert len(written["commands"]) == 2
    page = (tmp_path / "generated.md").read_text()
    assert "15 programs passed, 0 failed." in page
    assert "| 1-3 | 5 | 15 | 0 | 3 |" in page


def test_a_failure_is_the_error_and_the_smallest_program():
    num_passed, failure = generated_run.outcome(REPORT.format(FAILED))
    assert num_passed == 0
    assert failure.startswith("assert 1 == 2\nFalsifying example")
    assert "layers=(Layer(kind='linear'),)" in failure


def test_seeds_are_told_as_ranges():
    assert generated_run.seeds_of("3") == [3]
    assert generated_run.as_ranges([12, 2, 1, 3]) == "1-3, 12"


def test_as_many_programs_are_checked_as_were_asked_for():
    assert generated_run.run("observer", 1, 2).num_passed == 2
