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


@pytest.mark.parametrize("num_samples", [2, 8])
def test_sums_over_all_pairs_end_the_search_for_a_limit(num_samples):
    def loss(model, batch):
        queries = model(batch)
        return (queries @ queries.T).square().mean()

    step = mc.TrainingStep(nn.Linear(64, 32), torch.randn(num_samples, 64), loss=loss)
    prediction = mc.predict(step, device="NVIDIA L4")
    assert not prediction.at(prediction.limit + 1).fits
    advice = mc.suggest_batch_size(step, device="NVIDIA L4")
    assert advice.limit == prediction.limit
    assert advice.largest <= advice.limit_without_retry <= advice.limit


def test_other_sequence_lengths_are_known_as_well():
    def loss(model, batch):
        queries = model(batch).mean(1)
        return F.cross_entropy(queries @ queries.T, torch.arange(len(queries)).to(queries.device))

    def step(length):
        tokens = torch.zeros(4, length, dtype=torch.long)
        return mc.TrainingStep(nn.Embedding(50, 32), tokens, loss=loss, sequence_length=length)

    prediction = mc.predict(step(64), device="NVIDIA L4")
    for length, size in ((32, 4), (32, 50), (64, 50)):
        there = prediction.at(size, sequence_length=length)
        own = mc.predict(step(length), device="NVIDIA L4", batch_size=size)
        assert there.phases == own.phases
