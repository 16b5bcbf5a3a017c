"""Real trainings, healthy and sick: the healthy ones get no warning, the sick ones theirs, once, with what is wrong in words."""

import gc
import warnings
from contextlib import nullcontext

import health_programs as programs
import pytest
import torch
import training

from memcallback import MemoryCallback, MemoryRecorder, MemoryWarning, Phase, health_watch, nvml
from memcallback.health_watch import HealthWatch
from memcallback.saved_tensors import READS_SAVED
from memcallback.units import GiB

NUM_EPOCHS = 4
ANY_DEVICE = ["cpu", pytest.param("gpu", marks=pytest.mark.cuda)]


def warnings_of(tmp_path, program, accelerator, callback=None, **options):
    """What a training warns of, in order."""
    options = (
        {"max_epochs": NUM_EPOCHS, "accelerator": accelerator, "num_sanity_val_steps": 0, "log_every_n_steps": 10}
        | program.options
        | options
    )
    others = options.pop("callbacks", [])
    callback = callback or MemoryCallback(predict=False, warnings=True)
    gc.collect()  # the garbage of other tests is not to go meanwhile
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # What the warning has foretold.
        with pytest.raises(torch.OutOfMemoryError) if program.ends_out_of_memory else nullcontext():
            training.trainer(tmp_path, [callback, *others], **options).fit(program.module(), program.data())
    assert not callback._is_broken
    return [str(one.message) for one in caught if issubclass(one.category, MemoryWarning)]


@pytest.mark.parametrize("accelerator", ANY_DEVICE)
@pytest.mark.parametrize("name", programs.HEALTHY)
def test_a_healthy_training_gets_no_warning(tmp_path, name, accelerator):
    assert warnings_of(tmp_path, programs.HEALTHY[name], accelerator) == []


@pytest.mark.parametrize("accelerator", ANY_DEVICE)
@pytest.mark.parametrize("name", programs.SICK)
def test_a_training_that_keeps_graphs_is_told_once_what_grows_and_who_holds_it(tmp_path, name, accelerator):
    program = programs.SICK[name]
    programs.GLOBAL_LOSSES.clear()
    if name.startswith("a graph") and not READS_SAVED:
        pytest.skip("PyTorch before 2.11 tells nothing of saved tensors")
    told = warnings_of(tmp_path, program, accelerator)
    assert len(told) == 1
    assert [word for word in ("grows from step to step", *program.names) if word not in told[0]] == [], told[0]


@pytest.fixture
def small_device():
    """A CUDA device of which the program may have 1 GiB."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(GiB / torch.cuda.get_device_properties(0).total_memory)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.mark.cuda
@pytest.mark.parametrize("name", programs.SICK_ON_A_SMALL_DEVICE)
def test_what_is_wrong_on_a_small_device_is_told_once(tmp_path, small_device, name):
    program = programs.SICK_ON_A_SMALL_DEVICE[name]
    told = warnings_of(tmp_path, program, "gpu")
    right = [text for text in told if all(word in text for word in program.names)]
    assert len(right) == 1, told
    # A leak ends on a full device, which is told of too.
    consequences = ("tried again", "are left on") if program.ends_out_of_memory else ()
    assert [text for text in told if text not in right and not any(word in text for word in consequences)] == []


@pytest.mark.cuda
def test_another_process_that_takes_memory_is_told_once(tmp_path, monkeypatch):
    sizes = iter([0, 0, *[20 * GiB] * 100])
    monkeypatch.setattr(nvml, "_by_process", lambda *_: (GiB, next(sizes)))
    told = warnings_of(tmp_path, programs.HEALTHY["perceptron"], "gpu")
    assert len(told) == 1
    assert "Other processes have taken 20.00 GiB" in told[0]


def test_without_warnings_nothing_is_told(tmp_path):
    program = programs.SICK["losses on the module"]
    assert warnings_of(tmp_path, program, "cpu", MemoryCallback(predict=False, warnings=False)) == []


def train(device, num_steps):
    """A plain loop with the classic mistake; the losses are not used."""
    model = training.network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = MemoryRecorder(model, optimizer, device=device, sample_every_n_steps=10)
    watch = HealthWatch([model], [optimizer], torch.device(device), headroom=0.05)
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_in_a_plain_loop_the_variable_and_its_function_are_named(device):
    gc.collect()
    with pytest.warns(MemoryWarning, match=r"local variable 'losses' in train\(\) of test_warnings.py.*losses\.append\(loss\)"):
        train(device, 260)


def test_a_plain_loop_is_given_two_hundred_steps(recwarn):
    gc.collect()
    train("cpu", 150)
    assert [one for one in recwarn if issubclass(one.category, MemoryWarning)] == []


@pytest.mark.cuda
def test_nothing_is_looked_at_while_the_counters_do_not_rise(tmp_path, monkeypatch):
    gc.collect()
    monkeypatch.setattr(health_watch, "holding", lambda *_: pytest.fail("a look at what is alive"))
    assert warnings_of(tmp_path, programs.HEALTHY["perceptron"], "gpu") == []
