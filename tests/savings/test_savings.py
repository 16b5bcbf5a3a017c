"""The savings predicted for a step, against those measured on this CPU;
tests/savings/test_savings_cuda.py does the same on a GPU.
"""

import pytest
import savings_run
import torch

import memcallback as mc
from memcallback.core.allocation_trace import Alloc, StepStart
from memcallback.core.types import Category


@pytest.fixture(scope="module")
def before():
    return savings_run.measured("cpu")


@pytest.mark.parametrize("savings", savings_run.SAVINGS, ids=str)
def test_what_is_predicted_is_saved(before, savings):
    after = savings_run.measured("cpu", **savings)
    step = savings_run.training_step("cpu")
    without = mc.predict(step, device="cpu")
    predicted = savings_run.predicted(step, "cpu", **savings)
    saved = before.peak_allocated_bytes - after.peak_allocated_bytes
    assert saved > 2**20
    # A loss and its scale are 4 bytes each, and are let go at slightly other places than in the
    # user's loop.
    assert abs(without.peak_allocated_bytes - predicted.peak_allocated_bytes - saved) <= 32
    assert predicted.batch_size == after.batch_size
    for phase, measured in zip(predicted.step.windows, after.windows, strict=True):
        assert abs(phase.end.allocated_bytes - measured.end.allocated_bytes) <= 32


def test_predicting_savings_leaves_the_step_and_its_model_as_they_were():
    step = savings_run.training_step("cpu")
    options = dict(vars(step))
    modules = {name: dict(vars(module)) for name, module in step.model.named_modules()}
    savings_run.predicted(step, "cpu", accumulate=4, amp="bf16-mixed", checkpoint=True)
    assert vars(step) == options
    assert {name: dict(vars(module)) for name, module in step.model.named_modules()} == modules


def test_accumulation_splits_the_batch_of_an_update():
    step = savings_run.training_step("cpu")
    without = mc.predict(step, device="cpu")
    predicted = savings_run.predicted(step, "cpu", accumulate=3)
    assert (without.batch_size, predicted.batch_size) == (256, 86)
    assert len(predicted.steps) > len(without.steps)


def test_the_step_of_a_lightning_module_is_tried_too():
    import training

    step = mc.TrainingStep.from_lightning(
        training.Automatic(), (torch.randn(512, 64), torch.randint(0, 10, (512,)))
    )
    without = mc.predict(step, device="cpu").peak_allocated_bytes

    def saved_bytes(**savings):
        return without - savings_run.predicted(step, "cpu", **savings).peak_allocated_bytes

    assert saved_bytes(accumulate=4) > 2**20
    assert saved_bytes(checkpoint="network") != 0
    assert saved_bytes(amp="bf16-mixed") > 2**18


def test_gradients_are_cleared_before_the_first_batch_of_an_update_comes():
    after = savings_run.predicted(savings_run.training_step("cpu"), "24GiB", accumulate=2)
    events = after.trace.at(after.batch_size).events
    starts = [position for position, event in enumerate(events) if isinstance(event, StepStart)]
    allocs = {event.id: event for event in events if isinstance(event, Alloc)}
    # As `Accumulation.over` does: in the second update, at whose third step of all, before the
    # batch is on the device.
    of_step = events[starts[2] + 1 : starts[3]]
    first = next(position for position, event in enumerate(of_step) if isinstance(event, Alloc))
    assert of_step[first].category is Category.INPUT
    cleared = [allocs[event.id].category for event in of_step[:first]]
    assert set(cleared) == {Category.GRADIENT}
    assert len(cleared) == sum(
        parameter.requires_grad for parameter in savings_run.training_step("cpu").model.parameters()
    )
