"""With one sample steps often run in another way: attention has other kernels, for one."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import memcallback as mc
from memcallback.core.units import GiB
from memcallback.devices.catalogue import find_device

CARD, LENGTH = "NVIDIA A100-SXM4-80GB", 64


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 100)

    def forward(self, words):
        return self.head(self.layers(self.words(words)))


def next_word(model, words):
    return nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())


def step_of(batch_size, length=LENGTH, **options):
    words = torch.zeros(batch_size, length, dtype=torch.long)
    return mc.TrainingStep(Encoder(), words, loss=next_word, optimizer=torch.optim.AdamW, **options)


@cache
def of_its_own(batch_size, length=LENGTH, device=CARD):
    """The prediction of a step that has this batch size and length."""
    return mc.predict(step_of(batch_size, length), device=device)


@cache
def of_one_sample():
    """The prediction for all lengths from one sample, and what its progress said."""
    told = []
    step = step_of(1, sequence_length=LENGTH)
    one = mc.predict(step, device=CARD, progress=lambda done, num: told.append((done, num)))
    return one, told


def peaks(prediction):
    return [
        (window.label, window.peak_allocated_bytes, window.peak_reserved_bytes)
        for step in prediction.steps
        for window in step.windows
    ]


@pytest.mark.parametrize("device", [CARD, "cpu"])
def test_a_step_of_one_sample_is_predicted_at_every_batch_size(device):
    one = of_its_own(1, device=device)
    assert not [caveat for caveat in one.caveats if "Only batch size" in caveat]
    assert one.trace.exceptions
    for batch_size in (2, 3, 20):
        own = of_its_own(batch_size, device=device)
        assert peaks(one.at(batch_size)) == peaks(own)
        assert one.at(batch_size).by_module == own.by_module
    # And the way back.
    assert peaks(one.at(20).at(1)) == peaks(one)


def test_with_one_sample_other_sequence_lengths_are_known():
    one, _ = of_one_sample()
    for batch_size, length in ((1, 32), (1, 48), (5, 32)):
        other = one.at(batch_size, sequence_length=length)
        assert peaks(other) == peaks(of_its_own(batch_size, length))


def test_a_suggestion_from_one_sample_is_that_from_more():
    small = replace(find_device(CARD), capacity_bytes=GiB)
    one, more = (mc.suggest_batch_size(step_of(size), device=small) for size in (1, 4))
    assert one.batch_size == more.batch_size > 100
    assert one.limit == more.limit


class Largest(nn.Linear):
    """With less than four samples the step is another one each time."""

    def forward(self, inputs):
        if len(inputs) < 4:
            inputs = torch.cat([inputs] * len(inputs))
        return super().forward(inputs).relu()


def test_a_step_that_differs_at_other_sizes_too_is_known_at_its_own_alone():
    step = mc.TrainingStep(
        Largest(8, 8), torch.ones(1, 8), loss=lambda model, batch: model(batch).sum()
    )
    prediction = mc.predict(step, device=CARD)
    assert any("Only batch size 1 is predicted" in caveat for caveat in prediction.caveats)
    with pytest.raises(ValueError, match="so batch size 2 is unknown"):
        prediction.at(2)


class Rare(Encoder):
    """With one short sample it does something else."""

    def forward(self, words):
        outputs = super().forward(words)
        if len(words) == 1 and words.shape[1] < 30:
            outputs = outputs.exp().log()
        return outputs


def test_with_one_sample_a_sequence_length_that_differs_is_found_and_told():
    words = torch.zeros(1, LENGTH, dtype=torch.long)
    step = mc.TrainingStep(Rare(), words, loss=next_word, sequence_length=LENGTH)
    prediction = mc.predict(step, device=CARD)
    assert prediction.trace.exceptions
    told = "Only sequence length 64 is predicted"
    for one in (prediction, prediction.at(2)):
        assert any(told in caveat for caveat in one.caveats)
    with pytest.raises(ValueError, match="so length 24 is unknown"):
        prediction.at(sequence_length=24)


def test_progress_counts_every_trace():
    _, told = of_one_sample()
    assert [done for done, _ in told] == [*range(1, 13)][: len(told)]
    assert all(done < num for done, num in told)
    assert told[-1] == (12, 13)
