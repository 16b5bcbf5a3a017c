"""On a CUDA device, real or virtual: what a row of a plan says is what training takes once its line is in the program."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memcallback as mc

pytestmark = pytest.mark.cuda

BATCH_SIZE = 64


def network():
    layers = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def batch():
    return torch.randn(BATCH_SIZE, 3, 64, 64), torch.zeros(BATCH_SIZE, dtype=torch.int64)


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def plan():
    return mc.what_if(mc.TrainingStep(network(), batch(), loss=loss_of, optimizer=torch.optim.Adam), device="cuda")


def measured(line, dtype):
    """The steady step of a training that begins with a line."""
    gc.collect()
    # As in a new process: workspaces of cuBLAS that stay would split segments elsewhere.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    model = network()
    exec(line, {"torch": torch, "model": model})
    model.cuda()
    optimizer = torch.optim.Adam(one for one in model.parameters() if one.requires_grad)
    recorder = mc.MemoryRecorder(model, optimizer)
    for _ in range(6):
        images, classes = batch()
        on_device = images.to(dtype).cuda(), classes.cuda()
        optimizer.zero_grad()
        with recorder.step(on_device):
            with recorder.phase(mc.Phase.FORWARD):
                loss = loss_of(model, on_device)
            with recorder.phase(mc.Phase.BACKWARD):
                loss.backward()
            with recorder.phase(mc.Phase.OPTIMIZER_STEP):
                optimizer.step()
        del loss, on_device
    recorder.close()
    return recorder.steps[-1]


@pytest.mark.parametrize(("saving", "dtype"), [("freeze all but the last layer", torch.float32), ("bf16-true", torch.bfloat16)])
def test_a_row_is_what_training_takes_with_its_line(plan, saving, dtype):
    row = next(row for row in plan.rows if row.saving == saving)
    step = measured(row.line, dtype)
    assert row.peak_allocated_bytes < plan.current.peak_allocated_bytes
    assert step.peak_allocated_bytes == pytest.approx(row.peak_allocated_bytes, rel=0.01)
    assert step.peak_reserved_bytes == pytest.approx(row.peak_reserved_bytes, rel=0.01)
