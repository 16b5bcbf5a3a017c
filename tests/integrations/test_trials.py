"""Programs that keep state outside of their module train after a search as they do without one."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import trial_programs
from trial_programs import PROGRAMS, REFUSED, SIGNALLED

TESTS = Path(__file__).parents[1]
TRAIN = [name for name in PROGRAMS if name not in SIGNALLED]
#: Of each kind one; the callback does the same as the function.
WITH_CALLBACK = [
    "a_global_that_is_bound_anew",
    "attributes_of_the_class",
    "counters_of_itertools",
    "a_mask_in_an_empty_cache",
    "queues_of_indices",
    "a_moving_average_in_a_global",
    "a_generator_held_by_the_module",
]
ON_A_DEVICE = [
    "a_running_mean_in_a_global",
    "a_mask_in_an_empty_cache",
    "teachers_with_statistics",
    "a_moving_average_in_a_global",
    "a_registry_of_auxiliary_losses",
]


@functools.cache
def left(how, accelerator, *names):
    """What programs leave, by name; each in a process of its own."""
    program = [sys.executable, trial_programs.__file__]
    command = [*program, "--accelerator", accelerator, how, *names]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    environment.pop("MEMCALLBACK_ISOLATE", None)  # as by default
    # Of their own, since they look for what is left there.
    with tempfile.TemporaryDirectory() as environment["TMPDIR"]:
        ended = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=900
        )
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert [line["name"] for line in lines] == [*names], ended.stderr
    return {line.pop("name"): line for line in lines}


def assert_trained_the_same(plain, searched, name):
    refused = searched[name]["refused"]
    assert searched[name] == plain[name] | {"refused": refused}
    assert bool(refused) == (name in REFUSED)
    if refused:
        assert "The step takes items from" in refused
        assert "trial_programs.py:" in refused


@pytest.mark.parametrize("name", TRAIN)
def test_training_after_a_search_is_training_without_one(name):
    assert_trained_the_same(left("plain", "cpu", *TRAIN), left("function", "cpu", *TRAIN), name)


@pytest.mark.parametrize("name", WITH_CALLBACK)
def test_training_with_the_callback_that_searches_is_training_without_it(name):
    plain = left("plain-callback", "cpu", *WITH_CALLBACK)[name]
    searched = left("callback", "cpu", *WITH_CALLBACK)[name]
    # The callback logs its values in a folder of its own.
    for one in (plain, searched):
        del one["files"]
    assert searched == plain


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ON_A_DEVICE)
def test_training_on_a_device_after_a_search_is_training_without_one(name):
    assert_trained_the_same(
        left("plain", "cuda", *ON_A_DEVICE), left("function", "cuda", *ON_A_DEVICE), name
    )


INTERRUPTED = {"ended": "SystemExit 1", "is_as_before": True, "hears": True, "folders": []}


@pytest.mark.parametrize("how", ["function", "callback"])
def test_an_interrupt_or_a_sigterm_ends_a_search_with_everything_put_back(how):
    ended = left(how, "cpu", *SIGNALLED)
    # In a fit Lightning ignores further interrupts, with and without a search.
    interrupted = INTERRUPTED | {"hears": how == "function"}
    assert ended == {
        "interrupted_in_a_step": interrupted,
        "interrupted_in_validation": interrupted,
        "terminated_in_a_step": {"signal": 15},
        "terminated_in_validation": {"signal": 15},
        "terminated_and_handled": INTERRUPTED
        | {"ended": "SystemExit with everything as before: True"},
    }
