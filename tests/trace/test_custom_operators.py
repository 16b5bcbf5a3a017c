"""Operators that are not PyTorch's: only their results are counted, and a caveat says so."""

import pytest
import torch
from torch import nn

import memcallback as mc


@pytest.fixture(scope="module")
def squared():
    """An operator whose kernel needs more than its result."""

    @torch.library.custom_op("tests_of_memcallback::squared", mutates_args=())
    def squared(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x, x, x]).square()[: len(x)].clone()

    @squared.register_fake
    def _(x):
        return torch.empty_like(x)

    squared.register_autograd(
        lambda ctx, grad: 2 * grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return squared


def caveats(loss, device):
    step = mc.TrainingStep(nn.Linear(16, 16), torch.zeros(4, 16), loss=loss)
    told = mc.predict(step, device=device, isolate=False).caveats
    return [caveat for caveat in told if "is no operator of PyTorch" in caveat]


def test_an_operator_of_a_library_may_need_more(squared):
    def loss(model, batch):
        return squared(squared(model(batch))).mean()

    (told,) = caveats(loss, "NVIDIA H200")
    assert told.startswith("tests_of_memcallback::squared is no operator of PyTorch")
    assert told.endswith("so the step may need more.")


def test_pytorchs_own_operators_say_nothing(squared):
    def loss(model, batch):
        return model(batch).square().mean()

    assert not caveats(loss, "NVIDIA H200")


def test_an_operator_on_the_host_says_nothing(squared):
    def loss(model, batch):
        squared(torch.ones(4))
        return model(batch).mean()

    assert not caveats(loss, "NVIDIA H200")
