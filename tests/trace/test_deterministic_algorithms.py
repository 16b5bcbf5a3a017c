"""Deterministic algorithms: some functions run other operators on a device."""

import pytest
import torch
from device_loop import empty_device, figures, record_on_device
from torch import nn
from torch.nn import functional as F

import memcallback as mc

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")


def upsampled(**options):
    return lambda y: F.interpolate(y, scale_factor=4, mode="bilinear", **options)


def upsampled_volume(y):
    return F.interpolate(y.view(4, 8, 16, 32, 32), size=(32, 64, 64), mode="trilinear")


def padded(y):
    return nn.ReplicationPad2d(8)(y)


CHANGES = {
    "bilinear": upsampled(),
    "bilinear-corners": upsampled(align_corners=True),
    "bilinear-whole-scale": upsampled(recompute_scale_factor=True),
    "bilinear-antialias": upsampled(antialias=True),
    "channels-last": lambda y: upsampled()(y.to(memory_format=torch.channels_last)),
    "trilinear": upsampled_volume,
    "nearest": lambda y: F.interpolate(y, scale_factor=2),
    "replicate": padded,
    "reflect": lambda y: F.pad(y, (8, 8, 8, 8), mode="reflect"),
    "max-pool": lambda y: F.max_pool3d(y.view(4, 8, 16, 32, 32), 2, return_indices=True)[0],
}


def layers():
    return nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU())


def loss_with(change):
    return lambda model, batch: change(model(batch).view(-1, 8, 128, 128)).square().mean()


def predicted(change, device, **options):
    step = mc.TrainingStep(
        layers(),
        torch.zeros(1024, 512),
        loss=loss_with(change),
        optimizer=torch.optim.AdamW,
        **options,
    )
    return mc.predict(step, device=device).step


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


# On a virtual H200 with PyTorch 2.11, 2026-11-28.
@pytest.mark.parametrize(
    ("change", "peak_bytes"), [(upsampled(), 318_801_920), (padded, 95_240_192)]
)
def test_a_decomposition_counts_where_algorithms_are_deterministic(
    deterministic, change, peak_bytes
):
    assert predicted(change, "H200").peak_allocated_bytes == peak_bytes


@pytest.mark.cuda
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_a_step_takes_what_is_predicted_with_deterministic_algorithms(
    deterministic, name, precision
):
    change = CHANGES[name]
    empty_device()
    (*_, measured) = record_on_device(
        layers(),
        torch.zeros(1024, 512),
        loss_with(change),
        torch.optim.AdamW,
        autocast_dtype=precision,
    )
    empty_device()
    options = {} if precision is None else {"precision": "bf16-mixed"}
    assert figures(predicted(change, "cuda", **options)) == figures(measured)
