"""Backward passes that make nodes for another one: predicted in the order in which a device's own
thread makes autograd run them.
"""

import pytest
import torch
from torch import nn

from memcallback import TrainingStep
from memcallback.devices.catalogue import find_device
from memcallback.trace.request import TraceRequest
from memcallback.trace.tracer import trace


@pytest.mark.parametrize(
    ("num_passes", "num_others", "order"),
    [
        # The thread that trains makes more nodes than the device's: these have the lower numbers.
        (1, 50, ["after", "before", "slope"]),
        # The other way round they have the higher ones.
        (20, 0, ["slope", "after", "before"]),
    ],
)
def test_nodes_of_a_backward_pass_run_before_or_after_all_others(
    capsys, num_passes, num_others, order
):
    def loss(model, batch):
        x = batch.clone().requires_grad_()
        before = model(x).exp()
        output = model(x).exp()
        for _ in range(num_passes):
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        after = model(x).exp()
        for _ in range(num_others):
            after = after.exp()
        for name, tensor in {"before": before, "slope": slope, "after": after}.items():
            tensor.register_hook(lambda gradient, name=name: print(name))
        return before.sum() + slope.sum() + after.sum()

    step = TrainingStep(
        nn.Linear(4, 4),
        torch.ones(8, 4),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
    )
    trace(TraceRequest(step, find_device("NVIDIA H200")))
    # What a step's functions put into lists is taken out again.
    assert capsys.readouterr().out.split()[-3:] == order
