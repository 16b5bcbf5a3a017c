"""Programs whose steps reach outside of their module leave the same with memcallback as without.

Each runs as a process of its own, once without and once with memcallback in its default
configuration. Compared are weights, optimizer state, metrics, generators of random numbers, global
variables and caches, how often steps and samples ran, files, descriptors, processes, shared memory,
what was printed, and how the process ended.
"""

from functools import cache

import pytest
from runner import PROGRAMS, Runners

#: Programs of which a trace never ends. Their predictions get a short limit; all others one that
#: they keep on a machine that other tests fill.
ENDLESS = {
    "hangs_at_a_lock",
    "hangs_in_c",
    "hangs_in_python",
    "ignores_signals",
    "loop_on_loss",
    "loop_on_random",
    "threads",
}
SHORT_S, LONG_S = 3, 600
#: Programs that a trace cannot follow -> what the warning says of them.
REFUSED = {
    "data_pointer": "data_ptr()",
    "exits_by_os": "ended before it had a result",
    "exits_on_a_value": "SystemExit: 3",
    "held_loader": "can only test a child process",
    "interrupts_on_a_value": "KeyboardInterrupt",
    "kills_what_it_started": "SIGKILL",
    "multiprocessing_queue": "EOFError",
    "numpy_save": "programs/numpy_save.py:10 in loss opens 'outputs.npy' for writing",
    "saves_best": "programs/saves_best.py:20 in loss",
    "saves_every_step": "programs/saves_every_step.py:",
    "settings": "programs/settings.py:",
    "signals": "programs/signals.py:34 in loss sends a signal",
    "socket_messages": "programs/socket_messages.py:",
    "sqlite": "programs/sqlite.py:",
    "starts_process": "programs/starts_process.py:12 in loss starts the process 'true'",
    "takes_all_memory": "MemoryError",
}
#: Programs whose training gets a signal while a trace hangs -> how they end.
ENDED_BY_SIGNAL = {"gets_sigint": 1, "gets_sigkill": -9, "gets_sigterm": 0}
NUM_STEPS, NEVER_S = 12, 10**6


@pytest.fixture(scope="module")
def runners(tmp_path_factory):
    runners = Runners(tmp_path_factory.mktemp("untouched") / "program")
    yield runners
    runners.close()


@cache
def check(runners, program, loop, device):
    """Compare a program, check that it trained, and return what it left with memcallback."""
    patience_s = SHORT_S if program in ENDLESS else LONG_S
    found, alone, watched = runners.compare(program, loop, device, patience_s=patience_s)
    assert found == []
    assert (alone["it ended"], alone["exit status"]) == (True, 0), alone["stderr"]
    told = "\n".join(watched["warned"] + watched["refused"])
    if program in REFUSED:
        assert REFUSED[program] in told
    elif program not in ENDLESS:
        assert set(watched["predicted"]) == {"traced step"}, told
    return alone, watched


#: Programs of each kind that run on a CUDA device too, where one takes longer.
ON_CUDA = {"lru_cache_mask", "multiprocessing_value", "numpy_generator", "running_mean"}


def on_each_device(programs):
    """A case for each program on a CPU, and for some on a CUDA device."""
    return pytest.mark.parametrize(
        ("program", "device"),
        [
            *((program, "cpu") for program in programs),
            *(
                pytest.param(program, "cuda", marks=pytest.mark.cuda)
                for program in programs
                if program in ON_CUDA
            ),
        ],
    )


@on_each_device(sorted({*PROGRAMS} - {*ENDED_BY_SIGNAL}))
def test_a_fit_is_the_same_with_the_callback(runners, program, device):
    alone, _ = check(runners, program, "fit", device)
    assert alone["process"]["ran"]["steps"] == NUM_STEPS


@on_each_device(
    ["losses_of_an_epoch", "lru_cache_mask", "multiprocessing_value", "numpy_generator"]
)
def test_so_is_a_second_fit_after_the_device_has_trained(runners, program, device):
    check(runners, program, "fit_twice", device)


@on_each_device(
    [
        "class_attribute_cache",
        "closes_descriptor",
        "copies_return_self",
        "data_pointer",
        "exits_on_a_value",
        "flop_counter",
        "held_loader",
        "interrupts_on_a_value",
        "large_attributes",
        "loop_on_random",
        "lru_cache_mask",
        "memory_map",
        "multiprocessing_value",
        "numpy_generator",
        "numpy_save",
        "own_modes",
        "queue_of_batches",
        "removes_folder",
        "running_mean",
        "saves_best",
        "shared_tensor",
    ]
)
def test_so_is_a_plain_loop_with_a_prediction_before_and_after_it(runners, program, device):
    check(runners, program, "predict", device)


@on_each_device(
    ["exits_on_a_value", "flop_counter", "loop_on_random", "lru_cache_mask", "saves_best"]
)
def test_so_is_a_plain_loop_with_a_memory_log(runners, program, device):
    check(runners, program, "log", device)


@on_each_device(["exits_on_a_value", "loop_on_random", "lru_cache_mask", "numpy_generator"])
def test_so_is_a_trainer_of_transformers(runners, program, device):
    pytest.importorskip("transformers")
    check(runners, program, "huggingface", device)


@pytest.mark.parametrize("program", ENDED_BY_SIGNAL)
def test_a_signal_ends_training_and_trace_at_once(runners, program):
    # Without a limit: a callback that waited for the trace would not end.
    found, alone, _ = runners.compare(program, "fit", "cpu", patience_s=NEVER_S)
    assert found == []
    assert alone["exit status"] == ENDED_BY_SIGNAL[program]
    assert alone["process"]["ran"]["steps"] < NUM_STEPS if "process" in alone else True


def test_large_attributes_are_not_copied(runners):
    # The copy of an array of 200 MiB would be seen.
    alone, watched = check(runners, "large_attributes", "fit", "cpu")
    assert watched["peak_kib"] - alone["peak_kib"] < 150 * 1024
