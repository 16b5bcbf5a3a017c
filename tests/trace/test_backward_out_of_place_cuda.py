"""Backward passes in which autograd does not accumulate in place, and sums of exponentials."""

import pytest
import torch
from device_loop import empty_device, record_on_device
from torch import nn

import memcallback as mc

pytestmark = pytest.mark.cuda


class Spread(torch.autograd.Function):
    """Picks rows; its backward pass adds their gradients to zeros, out of place."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x[index]

    @staticmethod
    def backward(ctx, gradient):
        zeros = gradient.new_zeros(ctx.shape)
        return zeros.index_add(0, ctx.saved_tensors[0], gradient), None


def buckets(reduce, include_self):
    def loss_of(model, batch):
        values = model(batch)
        index = (torch.arange(len(values), device=values.device) % 7)[:, None].expand_as(values)
        start = values.new_zeros(7, values.shape[1])
        return start.scatter_reduce(0, index, values, reduce, include_self=include_self).sum()

    return loss_of


def picked(model, batch):
    index = torch.arange(len(batch), device=batch.device)
    return Spread.apply(model(batch), index).square().mean()


def exponentials(model, batch):
    return model(batch).logsumexp(-1).mean() + model(batch).logsumexp((0, 1))


@pytest.mark.parametrize(
    "loss_of",
    [
        pytest.param(buckets("amax", include_self=False), id="scatter_reduce_amax"),
        pytest.param(buckets("amin", include_self=True), id="scatter_reduce_amin"),
        pytest.param(buckets("mean", include_self=False), id="scatter_reduce_mean"),
        pytest.param(buckets("prod", include_self=True), id="scatter_reduce_prod"),
        picked,
        exponentials,
    ],
)
def test_the_peaks_of_a_step_are_predicted(loss_of):
    predicted, measured = both(loss_of)
    assert predicted == measured


def both(loss_of):
    """The peaks of each phase, predicted and measured."""
    empty_device()
    batch = torch.ones(2000, 256)
    model = nn.Linear(256, 2048, bias=False)
    step = mc.TrainingStep(model, batch, loss=loss_of, optimizer=torch.optim.SGD)
    predicted = mc.predict(step, device="cuda").step
    measured = record_on_device(model, batch, loss_of, torch.optim.SGD)[-1]
    return [
        [(window.label, window.peak_allocated_bytes) for window in step.windows]
        for step in (predicted, measured)
    ]
