"""Matrix products into another dtype, which PyTorch has for CUDA alone."""

import gc

import pytest
import torch
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

    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    batch = torch.ones(512, 256)
    model = nn.Linear(256, 256, bias=False)
    step = mc.TrainingStep(model, batch, loss=loss_of, optimizer=torch.optim.SGD)
    predicted = mc.predict(step, device="cuda").step
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters())
    recorder = mc.MemoryRecorder(model, optimizer)
    for _ in range(3):
        on_device = batch.cuda()
        with recorder.step(on_device):
            optimizer.zero_grad()
            with recorder.phase(mc.Phase.FORWARD):
                loss = loss_of(model, on_device)
            with recorder.phase(mc.Phase.BACKWARD):
                loss.backward()
            with recorder.phase(mc.Phase.OPTIMIZER_STEP):
                optimizer.step()
        del on_device, loss
    measured = recorder.steps[-1]
    assert [(window.label, window.peak_allocated_bytes) for window in predicted.windows] == [
        (window.label, window.peak_allocated_bytes) for window in measured.windows
    ]
