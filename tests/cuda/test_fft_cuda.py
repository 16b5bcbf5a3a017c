"""Fourier transforms along any dimensions, forward and backward, and the backward pass of pdist."""

from functools import partial

import pytest
import torch
from device_loop import empty_device, record_on_device
from torch import nn
from torch.nn import functional as F

import memcallback as mc

pytestmark = pytest.mark.cuda


def loss_of(function, model, batch):
    made = function(model(batch))
    return (made.abs() if made.is_complex() else made).sum()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.fft.rfft(x, dim=-1),
        lambda x: torch.fft.rfft(x, dim=1),
        lambda x: torch.fft.rfft(x, n=256, dim=1),
        lambda x: torch.fft.rfft2(x, dim=(0, 1)),
        lambda x: torch.fft.fft(x + 0j, dim=1),
        lambda x: torch.fft.fft(x + 0j, dim=0),
        lambda x: torch.fft.ifft(x.transpose(1, 2) + 0j),
        lambda x: torch.fft.fft2(x + 0j, dim=(2, 1)),
        lambda x: torch.fft.fft2(x, dim=(1, 0)),
        lambda x: torch.fft.rfft2(x, dim=(2, 1)),
        lambda x: torch.fft.rfft2(x, dim=(1, 0)),
        lambda x: torch.fft.irfft(x + 0j, dim=1),
        lambda x: torch.fft.irfft2(x + 0j, dim=(0, 1)),
        lambda x: torch.pdist(F.normalize(x.flatten(1)[:, :512])),
    ],
    ids=[
        *("rfft(-1)", "rfft(1)", "rfft(1, n)", "rfft2(0, 1)", "fft(1)", "fft(0)"),
        *("ifft of a transposed", "fft2(2, 1)", "fft2(1, 0)", "rfft2(2, 1)", "rfft2(1, 0)"),
        *("irfft(1)", "irfft2(0, 1)", "pdist"),
    ],
)
def test_it_takes_as_much_as_on_the_device(function):
    empty_device()
    model, batch, loss = nn.Linear(64, 64), torch.zeros(64, 128, 64), partial(loss_of, function)
    step = mc.TrainingStep(model, batch, loss=loss, optimizer=torch.optim.SGD)
    predicted = mc.predict(step, device="cuda").step
    measured = record_on_device(model, batch, loss, torch.optim.SGD)[-1]
    assert [(window.label, window.peak_allocated_bytes) for window in predicted.windows] == [
        (window.label, window.peak_allocated_bytes) for window in measured.windows
    ]
