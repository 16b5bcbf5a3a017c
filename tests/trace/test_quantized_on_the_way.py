"""Weights that a library quantizes as they move to the device, as bitsandbytes does with 4 bit."""

import copy

import pytest
import torch
from torch import nn

import memcallback as mc
from memcallback.core.allocation_trace import Alloc
from memcallback.core.units import MiB

WIDTH = 64
WHOLE_BYTES = WIDTH * WIDTH * 4
PACKED_BYTES = WIDTH * WIDTH // 2
BIAS_BYTES = WIDTH * 4


class FourBits(nn.Parameter):
    """A weight that is packed, two values in a byte, when it moves."""

    def __new__(cls, data):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.bnb_quantized = False
        return made

    def __deepcopy__(self, memo):
        copied = type(self)(copy.deepcopy(self.data, memo))
        memo[id(self)] = copied
        return copied

    def _quantize(self, device):
        whole = self.data.to(device)
        self.data = torch.empty(whole.numel() // 2, dtype=torch.uint8, device=device)
        self.bnb_quantized = True
        return self


class Quantized(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.weight = FourBits(self.weight.data)

    def forward(self, x):
        unpacked = torch.empty(WIDTH, WIDTH, dtype=x.dtype, device=x.device)
        return nn.functional.linear(x, unpacked, self.bias)


def test_a_weight_is_quantized_at_its_turn():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), Quantized(), Quantized())
    step = mc.TrainingStep(model, torch.randn(8, WIDTH), loss=lambda m, batch: m(batch).sum())
    events = mc.predict(step, device="NVIDIA A100-SXM4-80GB").trace.at(8).events
    moved = [event.size_bytes for event in events if isinstance(event, Alloc)]
    one = [WHOLE_BYTES, PACKED_BYTES, BIAS_BYTES]
    assert moved[:7] == [WHOLE_BYTES, *one, *one]


#: bitsandbytes' operators as it declares them, for a machine without it.
SCHEMAS = {
    "gemm_4bit": "(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type, "
    "Tensor? bias=None, Tensor? absmax_8bit=None, Tensor? absmax_code=None, "
    "Tensor? absmax_offset=None) -> Tensor",
    "quantize_4bit": "(Tensor A, int blocksize, str quant_type, ScalarType quant_storage) "
    "-> (Tensor, Tensor)",
}


def gemm_4bit(A, B, shapeB, *_):
    return A.new_empty(*A.shape[:-1], shapeB[0])


def quantize_4bit(A, blocksize, *_):
    return A.new_empty(A.numel() // 2, dtype=torch.uint8), A.new_empty(A.numel() // blocksize)


@pytest.fixture
def bitsandbytes():
    library = torch.library.Library("bitsandbytes", "FRAGMENT")
    for name, made in (("gemm_4bit", gemm_4bit), ("quantize_4bit", quantize_4bit)):
        if not hasattr(torch.ops.bitsandbytes, name):
            library.define(name + SCHEMAS[name])
            library.impl(name, made, "Meta")
    yield torch.ops.bitsandbytes
    library._destroy()


def requests_of(model, rows, operator):
    step = mc.TrainingStep(
        model, torch.randn(rows, WIDTH), loss=lambda m, batch: m(batch), optimizer=None
    )
    events = mc.predict(step, device="NVIDIA H200").trace.at(rows).events
    found = [e.size_bytes for e in events if isinstance(e, Alloc) and operator in e.operator]
    return found


class FromPacked(nn.Module):
    """A product with packed weights, whose scales are quantized too."""

    def __init__(self, operators, block):
        super().__init__()
        self.multiply, self.block = operators.gemm_4bit, block
        self.scale = nn.Parameter(torch.ones(1))
        self.packed = torch.zeros(PACKED_BYTES, dtype=torch.uint8)
        self.scales = torch.zeros(WIDTH, dtype=torch.uint8)
        self.scales_of_scales, self.offset = torch.zeros(1), torch.zeros(())
        self.code = torch.zeros(256)

    def forward(self, x):
        names = ("packed", "scales_of_scales", "scales", "code", "offset")
        packed, absmax, *nested = [getattr(self, name).to(x.device) for name in names]
        shape = [WIDTH, WIDTH]
        y = self.multiply(x, packed, shape, absmax, self.block, "nf4", None, *nested)
        return (y * self.scale).sum()


UNPACKED = [WIDTH * 4, WIDTH * 4, WHOLE_BYTES]
WORKSPACE = 32 * MiB


@pytest.mark.parametrize(
    ("rows", "block", "requests"),
    [
        (4, 64, [4 * WIDTH * 4]),
        (5, 64, [*UNPACKED, 5 * WIDTH * 4, WORKSPACE]),
        (4, 128, [*UNPACKED, 4 * WIDTH * 4, WORKSPACE]),
    ],
)
def test_weights_of_4_bit_are_unpacked_where_bitsandbytes_does(bitsandbytes, rows, block, requests):
    found = requests_of(FromPacked(bitsandbytes, block), rows, "gemm_4bit")
    assert found[: len(requests)] == requests
    assert (WORKSPACE in found) == (WORKSPACE in requests)


class Packing(nn.Module):
    def __init__(self, operators):
        super().__init__()
        self.quantize = operators.quantize_4bit
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        packed, scales = self.quantize(x, 64, "nf4", torch.uint8)
        return (scales * self.scale).sum() + packed.sum()


def test_scales_are_allocated_before_what_they_scale(bitsandbytes):
    rows = 64
    found = requests_of(Packing(bitsandbytes), rows, "quantize_4bit")
    assert found[:2] == [rows * 4, rows * WIDTH // 2]


def test_an_operator_of_another_library_with_that_name_is_an_ordinary_one():
    library = torch.library.Library("another", "FRAGMENT")
    library.define("gemm_4bit(Tensor x, Tensor scale) -> Tensor")
    library.impl("gemm_4bit", lambda x, scale: x.new_empty(x.shape), "Meta")

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return (torch.ops.another.gemm_4bit(x, self.scale) * self.scale).sum()

    assert requests_of(Calls(), 8, "gemm_4bit")[0] == 8 * WIDTH * 4
    library._destroy()
