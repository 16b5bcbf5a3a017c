"""Steps in which samples are compared with each other: sizes are squares of the batch size."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memcallback as mc


def contrastive(num_samples):
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))

    def loss(model, batch):
        queries, keys = model(batch[0]), model(batch[1])
        return F.cross_entropy(queries @ keys.T, torch.arange(len(queries), device=queries.device))

    batch = torch.randn(num_samples, 64), torch.randn(num_samples, 64)
    return mc.TrainingStep(model, batch, loss=loss, optimizer=torch.optim.AdamW)


@pytest.mark.parametrize("device", ["NVIDIA L4", "cpu"])
def test_every_batch_size_is_predicted_from_one(device):
    prediction = mc.predict(contrastive(8), device=device)
    assert not any("Only batch size" in caveat for caveat in prediction.caveats)
    for size in (2, 20, 300, 5000):
        own = mc.predict(contrastive(size), device=device)
        there = prediction.at(size)
        assert there.peak_allocated_bytes == own.peak_allocated_bytes
        assert there.peak_reserved_bytes == own.peak_reserved_bytes
        assert there.phases == own.phases
    assert prediction.at(5000).peak_allocated_bytes > 5000 * 5000 * 4


def test_the_largest_batch_of_squares_is_found():
    advice = mc.suggest_batch_size(contrastive(8), device="NVIDIA L4", multiple_of=1)
    assert advice.fits(advice.largest)
    assert not advice.fits(advice.largest + 1)
    assert 4 * advice.largest**2 < advice.capacity_bytes < 40 * advice.largest**2
