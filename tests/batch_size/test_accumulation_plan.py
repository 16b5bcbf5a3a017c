"""accumulate_for(): the accumulated step fits, with the gradients of the batches before."""

import pickle

import pytest
import torch
from torch import nn

import memcallback as mc

CARD = "Tesla T4"


def step(**options):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(6)))
        batch = torch.zeros(64, 8192)
    return mc.TrainingStep(model, batch, optimizer=torch.optim.SGD, **options)


@pytest.fixture(scope="module")
def advice():
    return mc.suggest_batch_size(step(), device=CARD)


def test_a_plan_leaves_room_for_the_gradients_of_the_batches_before(advice):
    effective = 4 * advice.batch_size
    whole = mc.predict(step(accumulate=4), device=CARD, batch_size=advice.batch_size)
    assert whole.run_peak_reserved_bytes > advice.budget_bytes
    plan = advice.accumulate_for(effective)
    assert plan.effective_batch_size == effective
    assert 1 < plan.batch_size < advice.batch_size
    planned = mc.predict(step(accumulate=plan.accumulate), device=CARD, batch_size=plan.batch_size)
    assert planned.run_peak_reserved_bytes <= advice.budget_bytes


def test_what_fits_into_one_batch_accumulates_nothing(advice):
    plan = advice.accumulate_for(advice.batch_size)
    assert (plan.batch_size, plan.accumulate) == (advice.batch_size, 1)
    # Nothing is predicted for it, so a copy that has no step knows it, too.
    assert pickle.loads(pickle.dumps(advice)).accumulate_for(advice.batch_size) == plan


def test_an_advice_without_its_step_says_how_a_plan_is_had(advice):
    copy = pickle.loads(pickle.dumps(advice))
    with pytest.raises(ValueError, match=r"pickled without its step.*Ask suggest_batch_size again"):
        copy.accumulate_for(4 * advice.batch_size)


def test_a_step_that_accumulates_is_planned_with_its_own_advice():
    accumulating = mc.suggest_batch_size(step(accumulate=2), device=CARD)
    copy = pickle.loads(pickle.dumps(accumulating))
    plan = copy.accumulate_for(4 * accumulating.batch_size)
    assert (plan.batch_size, plan.accumulate) == (accumulating.batch_size, 4)
