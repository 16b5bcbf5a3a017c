"""Views that are written to in place: autograd copies their gradients, on a device and on a CPU."""

import pytest
import torch
from needs import needs_recorded_version
from torch import nn

import memcallback as mc
from memcallback import Phase
from memcallback.core.allocation_trace import Alloc, Free, phase_events

BATCH = torch.zeros(4096, 256)
#: Of a gradient of the features.
NUM_BYTES = 4096 * 256 * 4
#: What `CopySlices` takes: the gradient of the whole, the view's part of it, and its product.
SLICES = ["aten::new_empty_strided", "aten::clone", "aten::mul"]


class Scaled(nn.Module):
    """Adds features to others that `scale` multiplies."""

    def __init__(self, scale):
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(256, 256), nn.Linear(256, 256), scale

    def forward(self, x):
        return self.first(x) + self.scale(self.second(x)).view_as(x)


def large_gradients(scale, device):
    """The operators that allocate something of the size of the features in a backward pass."""
    step = mc.TrainingStep(
        Scaled(scale), BATCH, loss=lambda model, batch: (model(batch) * batch).sum()
    )
    events = mc.predict(step, device=device).trace.at(len(BATCH)).events
    *_, backward = phase_events(events, Phase.BACKWARD)
    allocations = [event for event in backward if isinstance(event, Alloc)]
    return [one.operator for one in allocations if one.size_bytes == NUM_BYTES]


@pytest.mark.parametrize("device", ["24GiB", "cpu"])
@pytest.mark.parametrize(
    ("scale", "num_writes"),
    [
        (lambda y: y.view(-1, 64).mul_(2), 1),
        (lambda y: y.view(-1, 64).unsqueeze(0).mul_(2), 1),
        (lambda y: y.unsqueeze(0).view(-1, 64).mul_(1).mul_(2), 2),
    ],
    ids=["view", "view-of-a-view", "twice"],
)
def test_a_view_that_is_written_to_copies_its_gradient_once(scale, num_writes, device):
    assert large_gradients(scale, device) == [
        "aten::mul",  # the gradient of the output
        "aten::new_zeros",  # its copy, of `AsStridedBackward0`
        *(num_writes * SLICES),
    ]


def test_a_second_backward_pass_copies_it_again():
    def twice(model, batch):
        loss = (model(batch) * batch).sum()
        torch.autograd.grad(loss, model.second.weight, retain_graph=True)
        return loss

    step = mc.TrainingStep(Scaled(lambda y: y.view(-1, 64).mul_(2)), BATCH, loss=twice)
    events = mc.predict(step, device="24GiB").trace.at(len(BATCH)).events
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        *_, last = phase_events(events, phase)
        copies = [event for event in last if getattr(event, "operator", "") == "aten::new_zeros"]
        assert [event.size_bytes for event in copies] == [NUM_BYTES]


@pytest.mark.parametrize(
    ("scale", "gradients"),
    [
        (lambda y: y.view(-1, 64) * 2, ["aten::mul"]),
        (lambda y: y.mul_(2).view(-1, 64), ["aten::mul"]),
        (lambda y: y.view(-1, 64) + y.detach().view(-1, 64).mul_(0), []),
    ],
    ids=["out-of-place", "no-view", "no-gradient"],
)
def test_other_operators_copy_no_gradient(scale, gradients):
    assert large_gradients(scale, "24GiB") == ["aten::mul", *gradients]


@needs_recorded_version
@pytest.mark.parametrize(
    "scale",
    [lambda y: y.view(-1, 64).mul_(2), lambda y: y.view(-1, 64).unsqueeze(0).mul_(2)],
    ids=["view", "view-of-a-view"],
)
def test_the_gradient_goes_once_it_is_copied_unless_another_node_waits_for_it(scale):
    def live(is_needed):
        """How many gradients are live as `CopySlices` begins."""

        def loss(model, batch):
            features, scaled = model.first(batch), scale(model.second(batch)).view_as(batch)
            return ((features + scaled if is_needed else scaled) * batch).sum()

        step = mc.TrainingStep(Scaled(scale), BATCH, loss=loss)
        events = mc.predict(step, device="24GiB").trace.at(len(BATCH)).events
        *_, backward = phase_events(events, Phase.BACKWARD)
        found = set()
        for event in backward:
            if isinstance(event, Free):
                found.discard(event.id)
            elif isinstance(event, Alloc) and event.size_bytes == NUM_BYTES:
                if event.operator == SLICES[0]:
                    return len(found)
                found.add(event.id)

    assert (live(is_needed=False), live(is_needed=True)) == (1, 2)
