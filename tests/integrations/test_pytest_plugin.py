import re
import subprocess
import sys

import pytest

CONFTEST = "from memcallback.integrations.pytest_plugin import memory_budget as memory_budget\n"
TESTS = """
import sys
from importlib import import_module

def test_nothing_heavy_is_imported_before_its_first_use():
    assert "memcallback" in sys.modules
    assert not {"torch", "lightning", "numpy"} & {*sys.modules}

def make_step():
    torch, mc = import_module("torch"), import_module("memcallback")
    return mc.TrainingStep(
        torch.nn.Linear(1024, 1024),
        torch.zeros(1024, 1024),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.AdamW,
    )

def test_within(memory_budget):
    prediction = memory_budget(make_step(), "100MiB", device="L4", batch_size=512)
    assert prediction.batch_size == 512
    assert prediction.peak_reserved_bytes < 100 * 2**20

def test_above(memory_budget):
    memory_budget(make_step(), "10MiB", device="L4")

def test_does_not_fit(memory_budget):
    memory_budget(make_step(), "24GiB", device="1GiB", batch_size=500_000)

def test_no_device(memory_budget):
    memory_budget(make_step(), "10MiB")

def test_no_size(memory_budget):
    memory_budget(None, "lots", device="L4")
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """The lines that pytest prints for the tests above, by the name of each test."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_memory.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "test_memory.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    sections, name = {}, ""
    for line in done.stdout.splitlines():
        if line.startswith("_") and line.endswith("_"):
            name = line.strip("_ ")
        elif line.startswith("="):
            name = line.strip("= ")
        sections.setdefault(name, []).append(line)
    return sections


def summary(outcome):
    return {line for line in outcome["short test summary info"] if "::" in line}


def test_a_step_within_its_budget_passes_and_its_prediction_can_be_looked_at(outcome):
    assert "PASSED test_memory.py::test_within" in summary(outcome)


def test_a_step_above_its_budget_fails_with_the_size_and_the_tables(outcome):
    text = "\n".join(outcome["test_above"])
    first = (
        r"The step takes (\d+\.00) MiB on NVIDIA L4, (\d+\.00) MiB above its budget of 10.00 MiB"
    )
    peak, more = map(float, re.search(first, text).groups())
    assert peak - more == 10
    assert "Memory of one training step (batch size 1,024) on NVIDIA L4" in text
    assert "Live at the peak" in text
    assert "Traceback" not in text


def test_a_step_that_does_not_fit_fails_whatever_its_budget(outcome):
    text = "\n".join(outcome["test_does_not_fit"])
    assert "The step does not fit a card of 1024.00 MiB: " in text


def test_a_budget_that_is_no_size_is_an_error_before_anything_is_predicted(outcome):
    text = "\n".join(outcome["test_no_size"])
    assert "ValueError: 'lots' is not a size. Write a number and a unit" in text


def test_an_argument_that_is_missing_is_one_of_the_fixture(outcome):
    text = "\n".join(outcome["test_no_device"])
    assert "TypeError: memory_budget() missing 1 required keyword-only argument: 'device'" in text


def test_tests_that_do_not_use_it_do_not_import_torch(outcome):
    name = "test_nothing_heavy_is_imported_before_its_first_use"
    assert f"PASSED test_memory.py::{name}" in summary(outcome)
    assert len(summary(outcome)) == 6
