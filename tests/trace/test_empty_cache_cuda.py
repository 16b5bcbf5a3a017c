"""A step that empties the allocator's cache: what is predicted of it is measured."""

import json

import own_process
import pytest
import torch
from device_loop import figures, record_on_device
from torch import nn

import memcallback as mc
from memcallback.core.units import MiB

SCRATCH_BYTES = 64 * MiB


def network():
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 256))


def loss(model, batch, empties):
    loss = model(batch).square().mean()
    scratch = torch.empty(SCRATCH_BYTES // 4, device=loss.device)
    del scratch
    if empties:
        torch.cuda.empty_cache()
    return loss


def emptying(model, batch):
    return loss(model, batch, empties=True)


def keeping(model, batch):
    return loss(model, batch, empties=False)


def step(loss):
    return mc.TrainingStep(
        network(), torch.zeros(1024, 512), loss=loss, optimizer=torch.optim.AdamW
    )


def test_what_is_emptied_is_not_reserved_afterwards():
    emptied, kept = (
        mc.predict(step(loss), device="NVIDIA H200").phases for loss in (emptying, keeping)
    )
    forward, backward = mc.Phase.FORWARD, mc.Phase.BACKWARD
    assert emptied[forward].peak_reserved_bytes <= kept[forward].peak_reserved_bytes
    saved_bytes = kept[backward].peak_reserved_bytes - emptied[backward].peak_reserved_bytes
    assert saved_bytes >= SCRATCH_BYTES
    assert emptied[backward].peak_allocated_bytes == kept[backward].peak_allocated_bytes


def train(_, file):
    """In a process of its own, whose allocator has seen nothing else."""
    predicted = mc.predict(step(emptying))
    steps = record_on_device(network(), torch.zeros(1024, 512), emptying, torch.optim.AdamW, 4)
    with open(file, "w") as opened:
        json.dump([figures(predicted.step), figures(steps[-1])], opened)


@pytest.mark.cuda
def test_a_step_that_empties_the_cache_is_predicted_to_the_byte(tmp_path):
    own_process.start(train, (str(tmp_path / "figures.json"),))
    predicted, measured = json.loads((tmp_path / "figures.json").read_text())
    assert predicted == measured
