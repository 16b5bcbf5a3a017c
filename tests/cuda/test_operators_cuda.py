"""Operators along other dimensions, with other strides and layouts, forward and backward: sorts,
indexing, images, rolls, Fourier transforms.
"""

from functools import partial

import pytest
import torch
from device_loop import empty_device, record_on_device
from torch import nn
from torch.nn import functional as F

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


def numbers(x, size, most):
    return torch.arange(size, device=x.device) % most


def three(x):
    return numbers(x, 64, 64)[:, None, None], numbers(x, 50, 128)[:, None], numbers(x, 40, 64)


def put(x, value):
    """`x` with a value at indices of all three dimensions."""
    y, indices = x.clone(), three(x)
    y[indices] = x[indices].detach() if value is None else value
    return y


INDEXINGS = {
    "indices of three dimensions": lambda x: x[three(x)],
    "whole numbers of 32 bits": lambda x: x[numbers(x, 640, 64).int(), numbers(x, 640, 128)],
    "row and column": lambda x: x[numbers(x, 64, 64)[:, None], numbers(x, 100, 128)],
    "row and column apart": lambda x: x[numbers(x, 64, 64)[:, None], :, numbers(x, 64, 64)],
    "in two strides": lambda x: x[numbers(x, 1280, 64)[::2], numbers(x, 640, 128)],
    "a number put": lambda x: put(x, 0.0),
    "values put": lambda x: put(x, None),
    "values added": lambda x: x.clone().index_put(three(x), x[three(x)].detach(), accumulate=True),
    "transposed": lambda x: x[
        numbers(x, 6400, 64).view(64, 100).t(), numbers(x, 6400, 128).view(100, 64)
    ],
}


def images(x):
    return x.reshape(32, 64, 16, 16)


def last(x):
    return images(x).contiguous(memory_format=torch.channels_last)


def volumes_last(x):
    return x.reshape(8, 64, 16, 8, 8).contiguous(memory_format=torch.channels_last_3d)


IMAGES = {
    "max_pool2d": lambda x: F.max_pool2d(images(x).transpose(2, 3), 2),
    "avg_pool2d": lambda x: F.avg_pool2d(last(x), 2),
    "avg_pool2d of a part": lambda x: F.avg_pool2d(last(x)[:, :, 2:14, 2:14], 2).relu(),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(images(x), 4),
    "adaptive_avg_pool2d of channels last": lambda x: F.adaptive_avg_pool2d(last(x), 4),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(images(x), 4),
    "adaptive_max_pool2d of channels last": lambda x: F.adaptive_max_pool2d(last(x), 4),
    "max_unpool2d": lambda x: F.max_unpool2d(*F.max_pool2d(last(x), 2, return_indices=True), 2),
    "max_pool3d": lambda x: F.max_pool3d(volumes_last(x), 2).relu(),
    "avg_pool3d": lambda x: F.avg_pool3d(volumes_last(x), 2).relu(),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(volumes_last(x), 2).relu(),
    "adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(volumes_last(x), 2).relu(),
    "interpolate of volumes": lambda x: F.interpolate(volumes_last(x), scale_factor=2).relu(),
    "interpolate, antialias": lambda x: F.interpolate(
        last(x), scale_factor=0.5, mode="bilinear", antialias=True
    ).relu(),
    "unfold": lambda x: F.unfold(last(x), 3),
    "affine_grid": lambda x: F.affine_grid(
        x.reshape(-1)[:384].view(64, 2, 3), (64, 1, 32, 32), align_corners=False
    ),
}
ROLLS = {
    "roll(0)": lambda x: x.roll(1, 0),
    "roll(0, 1, 2)": lambda x: x.roll((1, 2, 3), (0, 1, 2)).relu(),
    "roll(0, 1, 2) of a transposed": lambda x: x.transpose(0, 1).roll((1, 2, 3), (0, 1, 2)),
}

TRANSFORMS = {
    "rfft(-1)": lambda x: torch.fft.rfft(x, dim=-1),
    "rfft(1)": lambda x: torch.fft.rfft(x, dim=1),
    "rfft(1, n)": lambda x: torch.fft.rfft(x, n=256, dim=1),
    "rfft2(0, 1)": lambda x: torch.fft.rfft2(x, dim=(0, 1)),
    "fft(1)": lambda x: torch.fft.fft(x + 0j, dim=1),
    "fft(0)": lambda x: torch.fft.fft(x + 0j, dim=0),
    "ifft of a transposed": lambda x: torch.fft.ifft(x.transpose(1, 2) + 0j),
    "fft2(2, 1)": lambda x: torch.fft.fft2(x + 0j, dim=(2, 1)),
    "fft2(1, 0)": lambda x: torch.fft.fft2(x, dim=(1, 0)),
    "rfft2(2, 1)": lambda x: torch.fft.rfft2(x, dim=(2, 1)),
    "rfft2(1, 0)": lambda x: torch.fft.rfft2(x, dim=(1, 0)),
    "irfft(1)": lambda x: torch.fft.irfft(x + 0j, dim=1),
    "irfft2(0, 1)": lambda x: torch.fft.irfft2(x + 0j, dim=(0, 1)),
}
OPERATORS = {
    **SORTS,
    **INDEXINGS,
    **IMAGES,
    **ROLLS,
    **TRANSFORMS,
    "pdist": lambda x: torch.pdist(F.normalize(x.flatten(1)[:, :512])),
}


def loss_of(function, model, batch):
    made = function(model(batch))
    return (made.abs() if made.is_complex() else made).sum()


@pytest.mark.parametrize("function", [pytest.param(f, id=n) for n, f in OPERATORS.items()])
def test_it_takes_as_much_as_on_the_device(function):
    empty_device()
    model, batch, loss = nn.Linear(64, 64), torch.zeros(64, 128, 64), partial(loss_of, function)
    step = mc.TrainingStep(model, batch, loss=loss, optimizer=torch.optim.SGD)
    predicted = mc.predict(step, device="cuda").step
    measured = record_on_device(model, batch, loss, torch.optim.SGD)[-1]
    assert [(window.label, window.peak_allocated_bytes) for window in predicted.windows] == [
        (window.label, window.peak_allocated_bytes) for window in measured.windows
    ]
