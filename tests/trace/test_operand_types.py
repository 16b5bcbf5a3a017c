"""A step whose operands have different dtypes ends in an error, as its training does."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memcallback as mc

BF16 = torch.bfloat16


def ones(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype, requires_grad=dtype.is_floating_point)


#: What is refused: the call of some tensors, and those tensors.
REFUSED = {
    "mm": (torch.mm, ones(4, 4), ones(4, 4, dtype=BF16)),
    "linear": (F.linear, ones(4, 4), ones(4, 4, dtype=BF16), ones(4, dtype=BF16)),
    "linear of integers": (F.linear, ones(4, 4, dtype=torch.int64), ones(4, 4), ones(4)),
    "linear of many dimensions": (F.linear, ones(2, 3, 4), ones(4, 4, dtype=BF16)),
    "bias": (F.linear, ones(4, 4), ones(4, 4), ones(4, dtype=BF16)),
    "bmm": (torch.bmm, ones(2, 4, 4), ones(2, 4, 4, dtype=BF16)),
    "baddbmm": (torch.baddbmm, ones(2, 4, 4), ones(2, 4, 4), ones(2, 4, 4, dtype=BF16)),
    "dot": (torch.dot, ones(4), ones(4, dtype=BF16)),
    "addmv": (torch.addmv, ones(4), ones(4, 4), ones(4, dtype=BF16)),
    "addbmm": (torch.addbmm, ones(4, 4), ones(2, 4, 4), ones(2, 4, 4, dtype=BF16)),
    "mv": (torch.mv, ones(4, 4), ones(4, dtype=BF16)),
    "convolution": (F.conv2d, ones(1, 3, 8, 8), ones(4, 3, 3, 3, dtype=BF16)),
    "attention": (
        F.scaled_dot_product_attention,
        *(ones(2, 4, 16, 64, dtype=dtype) for dtype in (BF16, BF16, torch.float32)),
    ),
    "classes": (F.cross_entropy, ones(4, 10), ones(4, dtype=torch.int32)),
    "classes of pixels": (F.cross_entropy, ones(4, 3, 8, 8), ones(4, 8, 8, dtype=torch.int32)),
    "index_add": (
        lambda x, index, source: x.index_add(0, index, source),
        ones(4),
        torch.zeros(4, dtype=torch.int64),
        ones(4, dtype=BF16),
    ),
}


class Calls(nn.Module):
    """Calls an operator with tensors of its own."""

    def __init__(self, operator, *tensors):
        super().__init__()
        self.operator, self.names = operator, []
        for number, tensor in enumerate(tensors):
            name = f"tensor{number}"
            self.names.append(name)
            if tensor.requires_grad:
                setattr(self, name, nn.Parameter(tensor.detach().clone()))
            else:
                self.register_buffer(name, tensor.clone())

    def forward(self, x):
        return self.operator(*(getattr(self, name) for name in self.names)).float().sum() * x.sum()


@pytest.mark.parametrize("device", ["L4", "cpu"])
@pytest.mark.parametrize("name", REFUSED)
def test_operands_of_different_dtypes_are_refused(name, device):
    step = mc.TrainingStep(Calls(*REFUSED[name]), torch.ones(2), optimizer=torch.optim.SGD)
    said = "dtype|scalar type|classes of torch.int64"
    with pytest.raises(mc.PredictionError, match=f"RuntimeError: .*({said})"):
        mc.predict(step, device=device)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)], ids=["cpu", "cuda"]
)
@pytest.mark.parametrize("name", REFUSED)
def test_pytorch_refuses_them_too(name, device):
    model = Calls(*REFUSED[name]).to(device)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, device=device))


@pytest.mark.parametrize("device", ["L4", "cpu"])
@pytest.mark.parametrize(
    "call",
    [
        (F.cross_entropy, ones(4, 10), ones(4, dtype=torch.int64)),
        (F.linear, ones(4, 4, dtype=BF16), ones(4, 4, dtype=BF16)),
        (torch.add, ones(4), ones(4, dtype=BF16)),
    ],
    ids=["classes", "equal", "promoted"],
)
def test_what_pytorch_takes_is_predicted(call, device):
    model = Calls(*call)
    model(torch.ones(2))
    step = mc.TrainingStep(model, torch.ones(2), optimizer=torch.optim.SGD)
    assert mc.predict(step, device=device).peak_allocated_bytes > 0


def test_the_error_gives_the_dtypes_and_the_line():
    def loss(model, batch):
        return model(batch).sum()

    step = mc.TrainingStep(nn.Linear(64, 8).to(BF16), torch.zeros(4, 64), loss=loss)
    with pytest.raises(
        mc.PredictionError,
        match=re.escape(
            "aten::addmm needs operands of the same dtype, got torch.bfloat16, torch.float32, "
            "torch.bfloat16"
        ),
    ) as caught:
        mc.predict(step, device="L4")
    assert "test_operand_types.py" in str(caught.value)
