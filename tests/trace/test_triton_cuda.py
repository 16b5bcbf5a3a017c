"""Triton kernels are not launched where a step is traced, and steps with them are predicted."""

import pytest
import torch
from device_loop import empty_device, figures, record_on_device
from torch import nn

import memcallback as mc

pytestmark = pytest.mark.cuda
if not torch.cuda.is_available():
    # Triton of PyTorch 2.6 asks for a driver where a kernel is only made.
    pytest.skip("needs a CUDA device", allow_module_level=True)
triton = pytest.importorskip("triton")
from triton_kernels import Scale, launch, launch_tuned, scale_kernel  # noqa: E402 -- needs Triton


@torch.library.triton_op("memcallback_tests::scaled", mutates_args=())
def scaled_op(inputs: torch.Tensor, factor: float) -> torch.Tensor:
    outputs, num = torch.empty_like(inputs), inputs.numel()
    torch.library.wrap_triton(scale_kernel)[(triton.cdiv(num, 256),)](
        inputs, outputs, factor, num, BLOCK=256
    )
    return outputs


class Network(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))
        self.how = how

    def forward(self, inputs):
        for layer in self.layers:
            inputs = Scale.apply(layer(inputs), 0.5, self.how)
        return inputs


def num_compiled():
    """How many variants of the kernel have been compiled for a launch."""
    return sum(len(caches[0]) for caches in scale_kernel.device_caches.values())


def loss_of(model, batch):
    return model(batch).square().mean()


@pytest.mark.parametrize("how", [launch, launch_tuned, scaled_op])
def test_a_step_with_triton_kernels_is_predicted(how):
    model = Network(how)
    step = mc.TrainingStep(model, torch.ones(256, 512), loss=loss_of, optimizer=torch.optim.AdamW)
    num_before = num_compiled()
    predicted = mc.predict(step, device="cuda")
    assert num_compiled() == num_before
    assert predicted.at(512).peak_allocated_bytes > predicted.peak_allocated_bytes
    empty_device()
    steps = record_on_device(model, step.batch, loss_of, torch.optim.AdamW)
    assert figures(predicted.step) == figures(steps[-1])


def test_a_launch_on_a_models_own_tensors_changes_nothing():
    model = Network(launch).cuda()
    before = [parameter.clone() for parameter in model.parameters()]
    step = mc.TrainingStep(model, torch.ones(4, 512, device="cuda"), loss=loss_of)
    num_before = num_compiled()
    mc.predict(step, device="cuda", isolate=False)
    assert all(map(torch.equal, model.parameters(), before))
    assert num_compiled() == num_before
