"""Steps of several CUDA streams on a device, real or virtual: what is predicted of them is measured."""

import gc

import pytest
import torch
from torch import nn

import memcallback as mc

pytestmark = pytest.mark.cuda


def network():
    return nn.ModuleDict({"first": nn.Linear(512, 512), "aside": nn.Linear(512, 512), "last": nn.Linear(512, 256)})


def in_one_stream(model, batch, side):
    x = model["first"](batch).relu()
    return (model["last"](x) + model["last"](model["aside"](x))).square().mean()


def all_aside(model, batch, side):
    with torch.cuda.stream(side):
        return in_one_stream(model, batch, side)


def a_branch_aside(model, batch, side):
    x = model["first"](batch).relu()
    with torch.cuda.stream(side):
        branch = model["last"](model["aside"](x))
    return (model["last"](x) + branch).square().mean()


def figures(step):
    return [
        (window.label, window.start.allocated_bytes, window.peak_allocated_bytes, window.end.allocated_bytes, window.peak_reserved_bytes)
        for window in step.windows
    ]


@pytest.mark.parametrize("loss", [in_one_stream, all_aside, a_branch_aside])
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
def test_what_streams_take_is_predicted_to_the_byte(loss):
    torch.cuda.synchronize()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    side = None

    def in_streams(model, batch):
        nonlocal side
        side = side or torch.cuda.Stream()
        return loss(model, batch, side)

    model = network()
    predicted = mc.predict(mc.TrainingStep(model, torch.zeros(4096, 512), loss=in_streams, optimizer=torch.optim.AdamW))
    side = None
    optimizer = torch.optim.AdamW(model.cuda().parameters())
    recorder = mc.MemoryRecorder(model, optimizer)
    for _ in range(4):
        batch = torch.zeros(4096, 512, device="cuda")
        with recorder.step(batch):
            optimizer.zero_grad()
            with recorder.phase(mc.Phase.FORWARD):
                value = in_streams(model, batch)
            with recorder.phase(mc.Phase.BACKWARD):
                value.backward()
            with recorder.phase(mc.Phase.OPTIMIZER_STEP):
                optimizer.step()
        del batch, value
        torch.cuda.synchronize()
    assert figures(predicted.step) == figures(recorder.steps[-1])
