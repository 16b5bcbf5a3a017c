"""Real trainings, healthy and sick: the healthy ones get no warning, the sick ones theirs, once,
with what is wrong in words.
"""

import gc
import multiprocessing
import re
import warnings
from concurrent.futures import ProcessPoolExecutor

import health_programs as programs
import pytest
import torch
import training
from needs import needs_saved
from warnings_table import warnings_of, warnings_of_named

from memcallback import MemoryRecorder, MemoryWarning, Phase
from memcallback.core.units import GiB
from memcallback.devices import memory
from memcallback.diagnose.health import monitor as health_monitor
from memcallback.diagnose.health.monitor import HealthMonitor

ANY_DEVICE = ["cpu", pytest.param("gpu", marks=pytest.mark.cuda)]


@pytest.fixture(scope="module")
def own_process():
    """A process that trains and nothing else: a look at what is alive walks through all that a
    process holds, here that of all tests.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *args, **settings: pool.submit(function, *args, **settings).result()


@pytest.mark.parametrize("accelerator", ANY_DEVICE)
@pytest.mark.parametrize("name", programs.HEALTHY)
def test_a_healthy_training_gets_no_warning(own_process, name, accelerator):
    assert own_process(warnings_of_named, "HEALTHY", name, accelerator) == []


@pytest.mark.parametrize("accelerator", ANY_DEVICE)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=needs_saved if "graph" in name else ()) for name in programs.SICK],
)
def test_a_training_that_keeps_graphs_is_told_once_what_grows_and_who_holds_it(
    own_process, name, accelerator
):
    told = own_process(warnings_of_named, "SICK", name, accelerator)
    assert len(told) == 1
    assert [
        word
        for word in ("grows from step to step", *programs.SICK[name].names)
        if word not in told[0]
    ] == [], told[0]


@pytest.fixture
def small_device():
    """A CUDA device of which the program may have 1 GiB."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        GiB / torch.cuda.get_device_properties(0).total_memory
    )
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.mark.cuda
@pytest.mark.parametrize("name", programs.SICK_ON_A_SMALL_DEVICE)
def test_what_is_wrong_on_a_small_device_is_told_once(small_device, name):
    program = programs.SICK_ON_A_SMALL_DEVICE[name]
    told = warnings_of(program, "gpu")
    right = [text for text in told if all(word in text for word in program.names)]
    assert len(right) == 1, told
    # A leak ends on a full device, which is told of too.
    consequences = ("tried again", "are left on") if program.ends_out_of_memory else ()
    assert [
        text
        for text in told
        if text not in right and not any(word in text for word in consequences)
    ] == []


@pytest.mark.cuda
def test_another_process_that_takes_memory_is_told_once(monkeypatch):
    sizes = iter([0, 0, *[20 * GiB] * 100])
    monkeypatch.setattr(memory, "_by_process", lambda *_: (GiB, next(sizes)))
    told = warnings_of(programs.HEALTHY["perceptron"], "gpu")
    assert len(told) == 1
    assert "Other processes have taken 20.00 GiB" in told[0]


def test_without_warnings_nothing_is_told(own_process):
    assert (
        own_process(warnings_of_named, "SICK", "losses on the module", "cpu", warnings=False) == []
    )


def test_on_a_cpu_they_have_to_be_asked_for(own_process):
    assert (
        own_process(warnings_of_named, "SICK", "losses on the module", "cpu", warnings=None) == []
    )


def train(device, num_steps):
    """A plain loop with the classic mistake; the losses are not used."""
    model = training.network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = MemoryRecorder(model, optimizer, device=device, sample_every_n_steps=10)
    watch = HealthMonitor([model], [optimizer], torch.device(device), headroom=0.05)
    losses = []
    for _ in range(num_steps):
        batch = torch.ones(8, training.NUM_FEATURES, device=device)
        num_recorded = recorder.steps[-1].index if recorder.steps else None
        with recorder.step(batch):
            with recorder.phase(Phase.FORWARD):
                loss = model(batch).square().mean()
            with recorder.phase(Phase.BACKWARD):
                loss.backward()
            with recorder.phase(Phase.OPTIMIZER_STEP):
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss)
        if recorder.steps[-1].index != num_recorded:
            watch.on_step(recorder.steps[-1], batch)


def warnings_of_loop(device, num_steps):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(device, num_steps)
    return [str(one.message) for one in caught if issubclass(one.category, MemoryWarning)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_in_a_plain_loop_the_variable_and_its_function_are_named(own_process, device):
    (told,) = own_process(warnings_of_loop, device, 260)
    assert re.search(
        r"local variable 'losses' in train\(\) of test_health_of_trainings.py",
        told,
    )


def test_a_plain_loop_is_given_two_hundred_steps(own_process):
    assert own_process(warnings_of_loop, "cpu", 150) == []


@pytest.mark.cuda
def test_nothing_is_looked_at_while_the_counters_do_not_rise(monkeypatch):
    gc.collect()
    monkeypatch.setattr(
        health_monitor, "live_by_owner", lambda *_: pytest.fail("a look at what is alive")
    )
    assert warnings_of(programs.HEALTHY["perceptron"], "gpu") == []
