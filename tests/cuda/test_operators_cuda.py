"""Operators along other dimensions, with other strides and layouts, forward and backward."""

from functools import partial

import pytest
import torch
from device_loop import empty_device, record_on_device
from torch import nn

import memcallback as mc

pytestmark = pytest.mark.cuda

SORTS = {
    "sort(0)": lambda x: x.flatten(0, 1).sort(dim=0)[0],
    "sort(1)": lambda x: x.view(4, 8192, 16).sort(dim=1)[0],
    "sort of a transposed": lambda x: x.flatten(0, 1).t().sort()[0],
    "sort of a part": lambda x: x.view(-1, 32)[:, :7].sort(0)[0],
    "sort of an expanded": lambda x: x.view(2, 1, -1)[..., :8192].expand(-1, 3, -1).sort(-1)[0],
    "argsort(0)": lambda x: x + x.flatten(0, 1).argsort(dim=0).view_as(x),
    "topk(0)": lambda x: x.flatten(0, 1).topk(5000, dim=0)[0],
    "topk of a transposed": lambda x: x.flatten(0, 1).t().topk(5000)[0],
    "quantile(0)": lambda x: x.flatten(0, 1).quantile(0.5, dim=0),
}


def loss_of(function, model, batch):
    return function(model(batch)).sum()


@pytest.mark.parametrize("function", [pytest.param(f, id=n) for n, f in SORTS.items()])
def test_it_takes_as_much_as_on_the_device(function):
    empty_device()
    model, batch, loss = nn.Linear(64, 64), torch.zeros(64, 128, 64), partial(loss_of, function)
    step = mc.TrainingStep(model, batch, loss=loss, optimizer=torch.optim.SGD)
    predicted = mc.predict(step, device="cuda").step
    measured = record_on_device(model, batch, loss, torch.optim.SGD)[-1]
    assert [(window.label, window.peak_allocated_bytes) for window in predicted.windows] == [
        (window.label, window.peak_allocated_bytes) for window in measured.windows
    ]
