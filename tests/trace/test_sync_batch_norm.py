"""SyncBatchNorm, whose operators PyTorch has only for CUDA. On devices:
test_ranks_predicted_cuda.py.
"""

import pytest
import torch
from needs import needs_ranks
from torch import nn

import memcallback as mc

pytestmark = needs_ranks
CHANNELS, MIB = 64, 1 << 20
SHAPES = {
    "vectors": (8192, CHANNELS),
    "rows": (64, CHANNELS, 128),
    "images": (32, CHANNELS, 32, 32),
    "volumes": (8, CHANNELS, 16, 16, 16),
}


class Network(nn.Module):
    """A norm whose input needs a gradient."""

    def __init__(self, norm):
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.ones(1)), norm

    def forward(self, batch):
        return self.norm(batch * self.scale)


def predicted(norm, shape, *, precision="32-true", layout=torch.contiguous_format):
    """What a job of eight ranks holds after the forward pass, and its caveats."""
    step = mc.TrainingStep(
        Network(norm),
        torch.zeros(shape).to(memory_format=layout),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.SGD,
        precision=precision,
        ranks=mc.Ranks(8),
    )
    found = mc.predict(step, device="NVIDIA A100-SXM4-80GB")
    return found.phases, found.caveats


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", SHAPES)
def test_it_takes_what_a_norm_of_one_rank_takes_and_the_statistics_of_all(kind, precision):
    shape = SHAPES[kind]
    alone = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    phases, caveats = predicted(nn.SyncBatchNorm(CHANNELS), shape, precision=precision)
    own, _ = predicted(alone[len(shape)](CHANNELS), shape, precision=precision)
    assert not [caveat for caveat in caveats if "depends on values" in caveat]
    for phase in (mc.Phase.FORWARD, mc.Phase.BACKWARD):
        # Eight rows of 2 x 64 + 1 numbers and some vectors of 64, in blocks of 512 bytes; the
        # norm of one rank takes what cuDNN reserves.
        more = phases[phase].peak_allocated_bytes - own[phase].peak_allocated_bytes
        assert abs(more) < MIB
        assert phases[phase].peak_allocated_bytes > 4 * MIB


def test_its_result_keeps_the_layout_of_channels():
    layouts = []

    class Norm(nn.SyncBatchNorm):
        def forward(self, batch):
            result = super().forward(batch)
            layouts.append(result.is_contiguous(memory_format=torch.channels_last))
            return result

    for layout in (torch.channels_last, torch.contiguous_format):
        layouts.clear()
        predicted(Norm(CHANNELS), SHAPES["images"], layout=layout)
        assert set(layouts) == {layout is torch.channels_last}


def test_without_weights_it_has_no_gradients_of_its_own():
    peaks = [
        predicted(nn.SyncBatchNorm(CHANNELS, affine=affine), SHAPES["vectors"])[0][
            mc.Phase.BACKWARD
        ].peak_allocated_bytes
        for affine in (True, False)
    ]
    # At least those of weight and bias; at most these as well, and buckets.
    assert 2 * 512 <= peaks[0] - peaks[1] <= 8 * 512
