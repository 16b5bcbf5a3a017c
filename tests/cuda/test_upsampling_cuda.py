"""The backward passes of upsampling, whose gradient is a slice of channels as in a U-Net."""

from functools import partial

import pytest
import torch
from device_loop import empty_device, record_on_device
from torch import nn

import memcallback as mc

pytestmark = pytest.mark.cuda
_aten = torch.ops.aten


def loss_of(operator, options, size, model, batch):
    """Nothing else in it needs as much memory as the operator."""
    images, features = batch
    made = operator(images[:, :8], [64, 64], [8, 8, size, size], *options)
    return model(features).sum() + 0 * made.sum()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize(
    ("operator", "options"),
    [(_aten.upsample_nearest2d_backward, ()), (_aten.upsample_bilinear2d_backward, (False,))],
)
def test_a_slice_of_channels_is_copied_as_on_the_device(operator, options, size, memory_format):
    empty_device()
    images = torch.zeros(8, 16, 64, 64).to(memory_format=memory_format)
    batch, model = (images, torch.zeros(8, 4)), nn.Linear(4, 4)
    loss = partial(loss_of, operator, options, size)
    step = mc.TrainingStep(model, batch, loss=loss, optimizer=torch.optim.SGD)
    predicted = mc.predict(step, device="cuda").step
    measured = record_on_device(model, batch, loss, torch.optim.SGD)[-1]
    assert [(window.label, window.peak_allocated_bytes) for window in predicted.windows] == [
        (window.label, window.peak_allocated_bytes) for window in measured.windows
    ]
