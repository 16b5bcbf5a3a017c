"""Operators whose fake kernels refuse what a device takes."""

import pytest
import torch
from torch import nn

import memcallback as mc

CARD = "NVIDIA H200"
needs_grouped_mm = pytest.mark.skipif(
    not hasattr(torch, "_grouped_mm"), reason="needs a PyTorch with grouped matrix products"
)


class Experts(nn.Module):
    def __init__(self, width=64, outputs=64, num_experts=4, dtype=torch.float32):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(num_experts, outputs, width, dtype=dtype))

    def forward(self, x):
        experts = torch.zeros(len(x), dtype=torch.int32, device=x.device)
        counts = torch.histc(
            experts if x.is_cuda else experts.float(),
            bins=len(self.weights),
            min=0,
            max=len(self.weights) - 1,
        )
        return torch._grouped_mm(x, self.weights.mT, offs=counts.cumsum(0, dtype=torch.int32))


@needs_grouped_mm
@pytest.mark.parametrize("device", [CARD, "cpu"])
@pytest.mark.parametrize(
    ("dtype", "outputs"),
    [(torch.float32, 64), (torch.float32, 62), (torch.float16, 62), (torch.bfloat16, 62)],
)
def test_grouped_products_of_any_type_are_predicted_with_the_layout_that_they_have(
    device, dtype, outputs
):
    model, batch = Experts(outputs=outputs, dtype=dtype), torch.zeros(32, 64, dtype=dtype)
    strides = model(batch).stride()

    def loss(model, batch):
        output = model(batch)
        assert (output.dtype, output.stride()) == (dtype, strides)
        return output.sum()

    assert (
        mc.predict(mc.TrainingStep(model, batch, loss=loss), device=device).peak_allocated_bytes > 0
    )


def test_an_integer_histogram_is_predicted_on_a_card():
    def loss(model, batch):
        kept.append(torch.histc(batch.int(), bins=1 << 20, min=0, max=9))
        return model(batch).sum()

    kept = []
    step = mc.TrainingStep(nn.Linear(8, 8), torch.zeros(4, 8), loss=loss)
    without = mc.TrainingStep(
        nn.Linear(8, 8), torch.zeros(4, 8), loss=lambda model, batch: model(batch).sum()
    )
    ends = [
        mc.predict(one, device=CARD).step.phases[mc.Phase.FORWARD].end.allocated_bytes
        for one in (step, without)
    ]
    assert ends[0] - ends[1] >= 4 << 20


@pytest.mark.parametrize("device", [CARD, "cpu"])
@pytest.mark.parametrize(
    ("transform", "dims", "strides"),
    [
        ("fft2", (1, 0), (6, 1, 24)),
        ("fft2", (2, 1), (60, 10, 1)),
        ("rfft2", (2, 1), (40, 1, 4)),
        ("rfft2", (0, 1), (1, 4, 16)),
        ("rfftn", (0, 1, 2), (6, 1, 24)),
    ],
)
def test_a_fourier_transform_of_dimensions_in_any_order_has_the_strides_of_the_device(
    transform, dims, strides, device
):
    def loss(model, batch):
        made = getattr(torch.fft, transform)(model(batch), dim=dims)
        if device == CARD and len(batch) == 4:  # a prediction traces other batch sizes too
            assert made.stride() == strides  # as PyTorch 2.11 returns on a virtual card
        return made.abs().sum()

    step = mc.TrainingStep(nn.Linear(10, 10), torch.zeros(4, 6, 10), loss=loss)
    assert mc.predict(step, device=device).peak_allocated_bytes > 0
