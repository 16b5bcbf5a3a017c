"""A convolution whose workspace does not fit on a device, real or virtual: the next plan of cuDNN
is taken, and so many samples more fit, as predicted.
"""

from dataclasses import replace

import own_process
import pytest
import torch
from torch import nn

import memcallback as mc
from memcallback.core.units import MiB
from memcallback.devices.local import resolve

pytestmark = pytest.mark.cuda
LIMIT_BYTES = 2048 * MiB


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(inplace=True),
    )


def loss_of(model, batch):
    return model(batch).mean()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def steps(num_samples):
    """Whether four steps run on a small device, and how often its cache was released."""
    torch.cuda.set_per_process_memory_fraction(
        LIMIT_BYTES / torch.cuda.get_device_properties(0).total_memory
    )
    model = convolutions().cuda()
    optimize = optimizer(model.parameters())
    try:
        for _ in range(4):
            batch = torch.zeros(num_samples, 3, 128, 128, device="cuda")
            optimize.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = loss_of(model, batch)
            loss.backward()
            optimize.step()
            del batch, loss
    except torch.OutOfMemoryError:
        return False, None
    return True, torch.cuda.memory_stats()["num_alloc_retries"]


def run(num_samples):
    """The same in a new process: after a retry, the addresses that the driver gives decide which
    free block is taken, and where memory was freed before it gives other addresses.
    """
    return own_process.result_of(steps, num_samples)


def test_a_workspace_that_does_not_fit_costs_no_samples():
    step = mc.TrainingStep(
        convolutions(),
        torch.zeros(8, 3, 128, 128),
        loss=loss_of,
        optimizer=optimizer,
        precision="16-mixed",
    )
    card = replace(resolve("cuda"), capacity_bytes=LIMIT_BYTES, context_bytes=0)
    prediction = mc.predict(step, device=card)
    limit = prediction.limit
    assert limit > prediction.limit_without_retry
    assert run(prediction.limit_without_retry) == (True, 0)
    fits, num_retries = run(limit)
    assert fits
    assert num_retries > 0
    assert not run(limit + 1)[0]
