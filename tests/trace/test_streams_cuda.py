"""Steps of several CUDA streams on a device, real or virtual: what is predicted of them is
measured.
"""

import json

import own_process
import pytest
import torch
from device_loop import figures, record_on_device
from torch import nn

import memcallback as mc

pytestmark = pytest.mark.cuda


def network():
    return nn.ModuleDict(
        {"first": nn.Linear(512, 512), "aside": nn.Linear(512, 512), "last": nn.Linear(512, 256)}
    )


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


def train(_, name, file):
    """In a process of its own, whose allocator has seen nothing else: what is predicted, and what
    is measured.
    """
    loss, side = LOSSES[name], None

    def in_streams(model, batch):
        nonlocal side
        side = side or torch.cuda.Stream()
        return loss(model, batch, side)

    model = network()
    predicted = mc.predict(
        mc.TrainingStep(model, torch.zeros(4096, 512), loss=in_streams, optimizer=torch.optim.AdamW)
    )
    side = None
    steps = record_on_device(model, torch.zeros(4096, 512), in_streams, torch.optim.AdamW, 4)
    with open(file, "w") as opened:
        json.dump([figures(predicted.step), figures(steps[-1])], opened)


LOSSES = {loss.__name__: loss for loss in (in_one_stream, all_aside, a_branch_aside)}


@pytest.mark.parametrize("name", LOSSES)
def test_what_streams_take_is_predicted_to_the_byte(tmp_path, name):
    own_process.start(train, (name, str(tmp_path / "figures.json")))
    predicted, measured = json.loads((tmp_path / "figures.json").read_text())
    assert predicted == measured
