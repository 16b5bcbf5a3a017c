"""Compiled functions inside a step: they run as they are, and the prediction says so."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import memcallback as mc

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
CAVEAT = (
    "Compiled code ran as it would without compilation: {}. Compiled, it mostly needs less. Of 161 "
    "measured steps one reserved 86 % more than this (its convolutions took other algorithms on an "
    "H100). The others reserved at most 7 % more, or 17 % with CUDA graphs."
)


def caveats(loss, optimizer=torch.optim.AdamW, device="NVIDIA L4"):
    step = mc.TrainingStep(nn.Linear(64, 64), torch.zeros(8, 64), loss=loss, optimizer=optimizer)
    found = mc.predict(step, device=device).caveats
    return [caveat for caveat in found if "ompiled" in caveat]


def activation(x):
    return (2 * x).relu()


def sine(x):
    return x.sin()


class CompiledUpdate(torch.optim.SGD):
    """Compiles its update in the step, as torchao's optimizers do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                torch.compile(descend, fullgraph=True)(parameter, parameter.grad)


def descend(parameter, gradient):
    parameter.sub_(0.1 * gradient)


@pytest.mark.parametrize("device", ["NVIDIA L4", "cpu"])
def test_what_was_compiled_before_is_said(device):
    compiled = torch.compile(activation)
    said = caveats(lambda model, batch: compiled(model(batch)).sum(), device=device)
    assert said == [CAVEAT.format("activation")]


def test_what_the_step_compiles_is_said():
    said = caveats(lambda model, batch: torch.compile(sine)(model(batch)).sum())
    assert said == [CAVEAT.format("sine")]
    said = caveats(lambda model, batch: torch.compile(dynamic=False)(sine)(model(batch)).sum())
    assert said == [CAVEAT.format("sine")]
    said = caveats(lambda model, batch: model(batch).sum(), CompiledUpdate)
    assert said == [CAVEAT.format("descend")]


def test_of_a_step_without_compiled_code_nothing_is_said():
    assert caveats(lambda model, batch: sine(model(batch)).sum()) == []


def test_compiled_flex_attention_is_predicted_compiled():
    compiled = torch.compile(flex_attention)

    def loss(model, batch):
        return compiled(*[model(batch)[None, None]] * 3).sum()

    assert caveats(loss) == []
