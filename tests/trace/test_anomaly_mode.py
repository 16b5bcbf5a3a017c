"""Steps in anomaly mode, where autograd looks for NaN in each gradient."""

import pytest
import torch
from device_loop import empty_device, figures, record_on_device
from torch import nn

import memcallback as mc

pytestmark = pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")


def loss_of(model, batch):
    return model(batch).square().mean()


def layers():
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))


def predicted(device):
    step = mc.TrainingStep(
        layers(), torch.zeros(2048, 512), loss=loss_of, optimizer=torch.optim.AdamW
    )
    return mc.predict(step, device=device).step


@pytest.mark.parametrize("device", ["H200", "cpu"])
def test_a_step_is_predicted_with_the_search_for_nan(device):
    plain = predicted(device)
    with torch.autograd.detect_anomaly():
        searching = predicted(device)
    assert searching.peak_allocated_bytes >= plain.peak_allocated_bytes


@pytest.mark.cuda
def test_the_search_for_nan_takes_what_is_predicted():
    empty_device()
    with torch.autograd.detect_anomaly():
        (*_, measured) = record_on_device(
            layers(), torch.zeros(2048, 512), loss_of, torch.optim.AdamW
        )
        empty_device()
        assert figures(predicted("cuda")) == figures(measured)
