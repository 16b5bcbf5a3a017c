"""An operator that takes one tensor twice: autograd adds its two gradients, in place if it can."""

import pytest
import torch
from device_loop import empty_device, figures, record_on_device
from torch import nn
from torch.nn import functional as F

import memcallback as mc

pytestmark = pytest.mark.cuda


class Twice(nn.Module):
    def __init__(self, operator):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4, 512, 512))
        self.operator = operator

    def forward(self, x):
        return self.operator(self.weight).sum() * x.sum()


def with_noise(y):
    y.register_hook(lambda gradient: gradient * 0.5 + torch.ones_like(gradient))
    return y


OPERATORS = {
    "add": lambda w: w + w,
    "addmm": lambda w: torch.addmm(w.view(2048, 2048), w.view(2048, 2048), w.view(2048, 2048)),
    "atan2": lambda w: torch.atan2(w, w),  # its formula adds tensors of its own
    "baddbmm": lambda w: torch.baddbmm(*[w.view(-1, 512, 512)] * 3),
    "bmm": lambda w: torch.bmm(w.view(-1, 512, 512), w.view(-1, 512, 512)),
    "div": lambda w: w / w,
    "dot": lambda w: torch.dot(w.flatten(), w.flatten()),
    "hypot": lambda w: torch.hypot(w, w),
    "maximum": lambda w: torch.maximum(w, w),
    "minimum": lambda w: torch.minimum(w, w),
    "mm": lambda w: torch.mm(w.view(2048, 2048), w.view(2048, 2048)),
    "mul": lambda w: w * w,
    "outer": lambda w: torch.outer(w[0, 0].flatten()[:2048], w[0, 0].flatten()[:2048]),
    "pow": lambda w: w**w,
    "attention": lambda w: F.scaled_dot_product_attention(w, w, w),
    "flash_attention": lambda w: F.scaled_dot_product_attention(*[w.view(4, 4, -1, 64).half()] * 3),
    "mul with a hook that adds": lambda w: with_noise(w * 2) * 2,
    "sub": lambda w: torch.sub(w, w, alpha=2),
    "where": lambda w: torch.where(w > 0, w, w),
    "xlogy": lambda w: torch.xlogy(w, w),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_of_one_tensor_are_added_as_autograd_adds_them(name):
    empty_device()
    batch, model = torch.ones(8), Twice(OPERATORS[name])
    step = mc.TrainingStep(model, batch, loss=lambda m, x: m(x), optimizer=torch.optim.SGD)
    predicted = mc.predict(step, device="cuda").step
    (*_, measured) = record_on_device(model, batch, lambda m, x: m(x), torch.optim.SGD)
    assert figures(predicted) == figures(measured)
