"""Optimizers that own another one, as Lookahead does, and have a state of their own."""

from contextlib import closing

import pytest
import torch
from torch import nn

import memcallback as mc
from memcallback.core.types import Category
from memcallback.record.found_loop import FoundLoop

WEIGHT_BYTES = 64 * 64 * 4


class Lookahead(torch.optim.Optimizer):
    """Keeps slow weights, which follow those of another optimizer."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "slow" not in state:
                    state["slow"] = parameter.detach().clone()
                parameter.data.copy_(state["slow"].lerp_(parameter.detach(), 0.5))
        return loss


def lookahead(parameters):
    return Lookahead(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))


def trained(model, optimizer, num_steps=3):
    for _ in range(num_steps):
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.fixture
def model():
    return nn.Linear(64, 64, bias=False)


@pytest.mark.parametrize("is_warm", [False, True])
def test_the_state_of_both_is_predicted(is_warm, model):
    optimizer = lookahead(model.parameters())
    if is_warm:
        trained(model, optimizer)
    given, made = (
        mc.predict(mc.TrainingStep(model, torch.ones(8, 64), optimizer=one), device="24GiB")
        for one in (optimizer, lookahead)
    )
    for prediction in (given, made):
        update = prediction.step.phases[mc.Phase.OPTIMIZER_STEP]
        assert update.end.by_category[Category.OPTIMIZER_STATE] == 2 * WEIGHT_BYTES
    assert given.peak_allocated_bytes == made.peak_allocated_bytes


def test_the_state_of_both_is_recorded_and_an_update_is_one(model):
    optimizer = lookahead(model.parameters())
    with closing(mc.MemoryRecorder(model, optimizer)) as recorder:
        with recorder.watch():
            trained(model, optimizer)
        assert [step.num_optimizer_updates for step in recorder.steps] == [1, 1, 1]
        update = recorder.steps[-1].phases[mc.Phase.OPTIMIZER_STEP]
        assert update.end.by_category[Category.OPTIMIZER_STATE] == 2 * WEIGHT_BYTES


def test_a_loop_with_one_that_owns_another_is_found_with_its_name(capsys, model):
    with closing(FoundLoop()) as found:
        trained(model, lookahead(model.parameters()))
        found.close()
    assert "memcallback │ Linear · batch 8 · Lookahead" in capsys.readouterr().err
