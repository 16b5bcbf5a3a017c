"""Matrix products into another dtype, which PyTorch has for CUDA alone."""

import pytest
import torch
from device_loop import empty_device, record_on_device
from torch import nn

import memcallback as mc

pytestmark = pytest.mark.cuda


def of_matrices(inputs, weight):
    outputs = torch.zeros(len(inputs), len(weight), device=inputs.device)
    torch.addmm(outputs, inputs, weight.T, out_dtype=torch.float32, out=outputs)
    return torch.addmm(outputs, inputs, weight.T, out_dtype=torch.float32)


def of_batches(inputs, weight):
    inputs, weight = inputs.unflatten(0, (4, -1)), weight.T.expand(4, -1, -1)
    outputs = torch.zeros(*inputs.shape[:-1], weight.shape[-1], device=inputs.device)
    torch.baddbmm(outputs, inputs, weight, out_dtype=torch.float32, out=outputs)
    return torch.baddbmm(outputs, inputs, weight, out_dtype=torch.float32).flatten(0, 1)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, weight, how):
        ctx.save_for_backward(weight)
        return how(inputs.bfloat16(), weight.bfloat16())

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.saved_tensors[0], None, None


@pytest.mark.parametrize("how", [of_matrices, of_batches])
def test_a_product_into_another_dtype_is_predicted(how):
    def loss_of(model, batch):
        return Product.apply(model(batch), model.weight.detach(), how).square().mean()

    empty_device()
    batch = torch.ones(512, 256)
    model = nn.Linear(256, 256, bias=False)
    step = mc.TrainingStep(model, batch, loss=loss_of, optimizer=torch.optim.SGD)
    predicted = mc.predict(step, device="cuda").step
    measured = record_on_device(model, batch, loss_of, torch.optim.SGD)[-1]
    assert [(window.label, window.peak_allocated_bytes) for window in predicted.windows] == [
        (window.label, window.peak_allocated_bytes) for window in measured.windows
    ]
