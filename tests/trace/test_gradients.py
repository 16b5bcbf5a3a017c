"""Gradients that PyTorch computes by other operators for fakes than for tensors on a device."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from device_loop import empty_device, record_on_device
from torch import nn

import memcallback as mc
from memcallback.devices.catalogue import find_device

CARD = replace(find_device("NVIDIA H200"), torch_version=(2, 11))


def written_to_a_view(write):
    """Numbers written to a part of a copy."""

    def function(x):
        copy = x.clone()
        write(copy[:, :64], torch.arange(640, device=x.device) % 64)
        return copy

    return function


#: An operator -> the peak of the backward pass on a virtual H200 with PyTorch 2.11, which the test
#: marked `cuda` measures again.
PEAK_BYTES = {
    "prod": 77_137_408,
    "prod of all": 76_564_480,
    "cumprod": 83_379_712,
    "renorm": 80_759_808,
    "max": 77_615_104,
    "median": 77_615_104,
    "take": 74_507_264,
    "put in a view": 74_472_448,
    "scatter in a view": 74_471_936,
}
OPERATORS = {
    "prod": lambda x: x.prod(1),
    "prod of all": lambda x: x.prod(),
    "cumprod": lambda x: x.cumprod(1),
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "max": lambda x: x.max(),
    "median": lambda x: x.median(),
    "take": lambda x: x.take(torch.arange(5000, device=x.device)),
    "put in a view": written_to_a_view(
        lambda part, places: part.index_put_((places,), part.new_zeros(()))
    ),
    "scatter in a view": written_to_a_view(
        lambda part, places: part.scatter_(1, places.view(1, 10, 64), 0.0)
    ),
}


def loss_of(name, model, batch):
    return OPERATORS[name](model(batch)).sum()


def step(name):
    return mc.TrainingStep(
        nn.Linear(64, 64),
        torch.zeros(64, 128, 64),
        loss=partial(loss_of, name),
        optimizer=torch.optim.SGD,
    )


def peak_bytes(recorded):
    return recorded.phases[mc.Phase.BACKWARD].peak_allocated_bytes


@pytest.mark.parametrize("name", OPERATORS)
def test_a_gradient_takes_as_much_as_was_measured(name):
    assert peak_bytes(mc.predict(step(name), device=CARD).step) == PEAK_BYTES[name]


@pytest.mark.cuda
@pytest.mark.parametrize("name", OPERATORS)
def test_a_gradient_takes_as_much_as_on_the_device(name):
    empty_device()
    given = step(name)
    predicted = peak_bytes(mc.predict(given, device="cuda").step)
    loss = partial(loss_of, name)
    measured = record_on_device(given.model, torch.zeros(64, 128, 64), loss, torch.optim.SGD)
    assert predicted == peak_bytes(measured[-1])


def test_a_product_of_numbers_is_predicted_without_zeros_and_that_is_said():
    def has_said(name):
        caveats = mc.predict(step(name), device=CARD).caveats
        return any("numbers of which none is 0" in caveat for caveat in caveats)

    assert [has_said(name) for name in ("prod", "cumprod", "max")] == [True, True, False]


def test_a_gradient_of_a_gradient_of_a_product_is_traced():
    def loss(model, batch):
        x = model(batch)
        (slope,) = torch.autograd.grad(x.prod(1).sum(), x, create_graph=True)
        return slope.square().sum()

    batch = torch.zeros(4, 8, 8)
    given = mc.TrainingStep(nn.Linear(8, 8), batch, loss=loss, optimizer=torch.optim.SGD)
    assert mc.predict(given, device=CARD).peak_allocated_bytes > 0
