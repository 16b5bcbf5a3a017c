"""suggest_batch_size(validation=...): the size fits in the training and in its validation."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import nn

import memcallback as mc
from memcallback.batch_size.bounds import BatchSizeBounds
from memcallback.batch_size.estimate import Estimate
from memcallback.batch_size.one_rank import in_both
from memcallback.batch_size.peaks import TracedPeak
from memcallback.core.units import MiB
from memcallback.devices.catalogue import find_device

CARD = "Tesla T4"
MANY = 1000


class Classifier(nn.Module):
    """Its evaluation takes far more memory for each sample of a large batch."""

    def __init__(self, error=None):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
        self.error = error

    def forward(self, x):
        outputs = self.layers(x)
        if self.training or len(x) <= MANY:
            return outputs
        if self.error is not None:
            raise self.error
        return outputs.repeat(1, 64).exp()


def suggested(model):
    step = mc.TrainingStep(model, torch.zeros(8, 512), optimizer=torch.optim.SGD)
    validation = mc.InferenceStep(model, torch.zeros(8, 512), after=step)
    return validation, mc.suggest_batch_size(step, device=CARD, validation=validation)


def test_a_validation_that_runs_differently_in_large_batches_is_predicted_there():
    validation, advice = suggested(Classifier())
    assert advice.batch_size > MANY
    there = mc.predict(validation, device=CARD, batch_size=advice.batch_size)
    assert there.peak_reserved_bytes <= advice.budget_bytes
    assert any("Validation limits the batch size" in caveat for caveat in advice.caveats)
    assert not any("a check of" in part for part in advice.leaves_out)


def test_a_validation_that_cannot_be_traced_at_the_suggested_size_is_named():
    _, advice = suggested(Classifier(error=ValueError("too many")))
    assert (
        f"a check of batch size {advice.batch_size:,} in validation, which cannot be traced "
        "(the largest traced is 19)"
    ) in advice.leaves_out


class Replays:
    """Replays that fit without a retry at some sizes alone."""

    def __init__(self, fitting):
        self.fitting = fitting
        self.device = find_device(CARD)
        self.trace = SimpleNamespace(is_in_range=lambda batch_size: True)

    def peak_bytes(self, batch_size):
        return batch_size * MiB

    def fits_without_retry(self, batch_size):
        return batch_size in self.fitting


def test_the_smaller_of_two_sizes_is_tried_in_the_other_run():
    def estimate(fitting):
        return Estimate(
            peaks=TracedPeak(replays=Replays(fitting), batch_size=10),
            largest=max(fitting),
            counts="reserved",
            bounds=BatchSizeBounds(multiple_of=1),
            capacity_bytes=100 * MiB,
            outside_bytes=0,
            headroom=0.0,
            is_measured=False,
            basis="predicted by hand",
            leaves_out=(),
        )

    with_a_gap, whole = estimate([*range(31), 60]), estimate(range(46))
    assert in_both(with_a_gap, whole).best_batch_size() == 30
    assert in_both(whole, with_a_gap).best_batch_size() == 30
    assert in_both(whole, replace(whole, largest=40)).best_batch_size() == 40
