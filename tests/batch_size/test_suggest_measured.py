"""suggest_batch_size(measured=...): a measured step is compared with its own size and length."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import memcallback as mc
from memcallback.core.types import Kind

CARD = "Tesla T4"


def step(batch_size=4):
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    return mc.TrainingStep(
        model,
        torch.zeros(batch_size, 512, 256),
        optimizer=torch.optim.SGD,
        sequence_length=512,
    )


def measured(times=1, **changes):
    """A step that takes so many times the reserved memory that is predicted at length 512."""
    predicted = mc.predict(step(), device=CARD, batch_size=64).step
    windows = tuple(
        replace(window, peak_reserved_bytes=int(times * window.peak_reserved_bytes))
        for window in predicted.windows
    )
    return replace(predicted, kind=Kind.MEASURED, windows=windows, **changes)


def suggested(measured, sequence_lengths):
    return mc.suggest_batch_size(
        step(), device=CARD, measured=measured, sequence_lengths=sequence_lengths
    )


def test_a_step_that_is_as_predicted_changes_no_suggestion_at_any_length():
    lengths = [128, 256, 512]
    alone, agreeing = suggested(None, lengths), suggested(measured(), lengths)
    assert agreeing.by_sequence_length == alone.by_sequence_length
    assert alone.by_sequence_length[128] > alone.by_sequence_length[512]
    assert "the measured step agrees" in agreeing.basis


def test_what_is_needed_beyond_the_prediction_counts_for_longer_sequences_too():
    advice = suggested(measured(1.5), [1024])
    assert "because the measured step needs more" in advice.basis
    assert advice.batch_size < suggested(None, [1024]).batch_size


def test_a_measured_step_without_a_batch_size_is_refused():
    with pytest.raises(ValueError, match="a step whose batch size is unknown"):
        suggested(measured(batch_size=None), [512])
