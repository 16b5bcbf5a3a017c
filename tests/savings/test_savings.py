"""`dry_run`: what a saving would save, against what it does save on this CPU;
tests/savings/test_savings_cuda.py does the same on a GPU.
"""

import pytest
import savings_run
import torch
from torch import nn

import memcallback as mc
from memcallback.core.allocation_trace import Alloc, StepStart
from memcallback.core.types import Category


@pytest.fixture(scope="module")
def before():
    return savings_run.measured("cpu")


@pytest.mark.parametrize("savings", savings_run.SAVINGS, ids=str)
def test_what_is_predicted_is_saved(before, savings):
    after = savings_run.measured("cpu", **savings)
    dry = mc.dry_run(savings_run.training_step("cpu"), device="cpu", **savings)
    saved = before.peak_allocated_bytes - after.peak_allocated_bytes
    assert saved > 2**20
    # A loss and its scale are 4 bytes each, and are let go at slightly other places than in the
    # user's loop.
    assert abs(dry.saved_bytes - saved) <= 32
    assert dry.after.batch_size == after.batch_size
    for predicted, measured in zip(dry.after.step.windows, after.windows, strict=True):
        assert abs(predicted.end.allocated_bytes - measured.end.allocated_bytes) <= 32


def test_a_dry_run_leaves_the_step_and_its_model_as_they_were():
    step = savings_run.training_step("cpu")
    options = dict(vars(step))
    modules = {name: dict(vars(module)) for name, module in step.model.named_modules()}
    mc.dry_run(step, accumulate=4, amp="bf16-mixed", checkpoint=True, device="cpu")
    assert vars(step) == options
    assert {name: dict(vars(module)) for name, module in step.model.named_modules()} == modules


def test_the_text_has_the_peaks_without_and_with_and_what_was_tried():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    step = mc.TrainingStep(model, torch.ones(1024, 64), optimizer=torch.optim.SGD)
    dry = mc.dry_run(step, accumulate=4, amp="bf16-mixed", checkpoint=True, device="24GiB")
    text = dry.to_text()
    assert "with accumulate=4, amp='bf16-mixed', checkpoint of (root module)" in text
    before, after = dry.before.peak_allocated_bytes, dry.after.peak_allocated_bytes
    row = next(line for line in text.splitlines() if line.startswith(" allocated"))
    share = f"{100 * (before - after) / before:.1f}"
    expected = [*(mc.format_bytes(size) for size in (before, after, before - after)), f"{share} %"]
    assert row.split() == ["allocated", *" ".join(expected).split()]
    assert " reserved" in text
    assert " reserved" not in mc.dry_run(step, accumulate=4, device="cpu").to_text()


def test_accumulation_splits_the_batch_of_an_update():
    dry = mc.dry_run(savings_run.training_step("cpu"), accumulate=3, device="cpu")
    assert (dry.before.batch_size, dry.after.batch_size) == (256, 86)
    assert len(dry.after.steps) > len(dry.before.steps)


def test_the_step_of_a_lightning_module_is_tried_too():
    import training

    step = mc.TrainingStep.from_lightning(
        training.Automatic(), (torch.randn(512, 64), torch.randint(0, 10, (512,)))
    )
    assert mc.dry_run(step, accumulate=4, device="cpu").saved_bytes > 2**20
    assert mc.dry_run(step, checkpoint="network", device="cpu").saved_bytes != 0
    assert mc.dry_run(step, amp="bf16-mixed", device="cpu").saved_bytes > 2**18


@pytest.mark.parametrize(
    ("savings", "text"),
    [
        ({}, r"there is no saving to try\. Give accumulate=\.\.\., amp=\.\.\. or checkpoint="),
        ({"accumulate": 0}, r"accumulate must be a whole number of at least 1, got 0\."),
        (
            {"accumulate": 9},
            r"accumulate=9 for a batch of 8: a micro-batch has at least one sample\. Give at most 8\.",
        ),
        ({"amp": "fp16"}, r"amp must be one of 16-mixed, bf16-mixed, got 'fp16'\. Leave it out"),
        ({"checkpoint": "body"}, r"Sequential has no module named 'body'"),
        (
            {"checkpoint": 3},
            r"checkpoint must be True, the name of a module, several, or numbers of segments by name, got 3\.",
        ),
    ],
)
def test_a_saving_that_cannot_be_tried_is_refused(savings, text):
    step = mc.TrainingStep(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(8, 8), optimizer=torch.optim.SGD
    )
    with pytest.raises(ValueError, match=text):
        mc.dry_run(step, device="cpu", **savings)


def test_mixed_precision_is_for_a_step_in_float32():
    step = mc.TrainingStep(nn.Linear(8, 8), torch.ones(8, 8), precision="bf16-mixed")
    with pytest.raises(
        ValueError,
        match=r"amp='16-mixed' is for a step of precision 32-true, and this one is bf16-mixed\. Leave it out",
    ):
        mc.dry_run(step, amp="16-mixed", device="cpu")


def test_a_step_of_several_updates_has_no_accumulation():
    model = nn.Linear(8, 8)
    optimizers = [torch.optim.SGD(model.parameters()) for _ in range(2)]
    loss = lambda model, batch: model(batch).sum()  # noqa: E731
    step = mc.TrainingStep(model, torch.ones(8, 8), loss=[loss, loss], optimizer=optimizers)
    with pytest.raises(ValueError, match="accumulate=2 with 2 losses is not known"):
        mc.dry_run(step, accumulate=2, device="cpu")


def test_gradients_are_cleared_before_the_first_batch_of_an_update_comes():
    after = mc.dry_run(savings_run.training_step("cpu"), accumulate=2, device="24GiB").after
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
