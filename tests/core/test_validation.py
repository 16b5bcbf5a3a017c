"""Arguments that are numbers: what is none is refused with the value, the rule and the way out,
wherever it is given.
"""

import re

import numpy as np
import pytest
import torch
from hand_made import law, prediction

import memcallback as mc
from memcallback import MemoryCallback, MemoryRecorder, TrainingStep
from memcallback.core.allocation_trace import AllocationTrace
from memcallback.core.validation import share, whole_number
from memcallback.trace.traced_step import TracedStep

STEP = TrainingStep(torch.nn.Linear(8, 4), torch.ones(4, 16, 8), sequence_length=16)


def predict(name, value):
    return mc.predict(STEP, device="cpu", **{name: value})


#: Where a whole number is given -> what it is called there, and the largest that is too small.
WHOLE = {
    "TrainingStep(batch_size)": (
        lambda value: TrainingStep(torch.nn.Linear(8, 4), torch.ones(4, 8), batch_size=value),
        "batch_size",
        0,
    ),
    "TrainingStep(accumulate)": (
        lambda value: TrainingStep(torch.nn.Linear(8, 4), torch.ones(4, 8), accumulate=value),
        "accumulate",
        0,
    ),
    "TrainingStep(sequence_length)": (
        lambda value: TrainingStep(torch.nn.Linear(8, 4), torch.ones(4, 8), sequence_length=value),
        "sequence_length",
        3,
    ),
    "predict(batch_size)": (lambda value: predict("batch_size", value), "batch_size", 0),
    "predict(sequence_length)": (
        lambda value: predict("sequence_length", value),
        "sequence_length",
        3,
    ),
    "Prediction.at": (lambda value: prediction().at(value), "batch_size", 0),
    "Prediction.at(sequence_length)": (
        lambda value: prediction().at(sequence_length=value),
        "sequence_length",
        0,
    ),
    "TextbookPrediction.at": (lambda value: law().at(value), "batch_size", 0),
    "TracedStep": (lambda value: TracedStep(AllocationTrace(()), value), "batch_size", 0),
    "MemoryCallback": (lambda value: MemoryCallback(batch_size=value), "batch_size", 0),
    "MemoryRecorder": (
        lambda value: MemoryRecorder(sample_every_n_steps=value),
        "sample_every_n_steps",
        0,
    ),
    "MemoryRecorder.step": (
        lambda value: MemoryRecorder().begin_step(batch_size=value),
        "batch_size",
        0,
    ),
}


@pytest.mark.parametrize("given", ["8", 2.5, True, np.float64(8), np.True_, torch.tensor(True)])
@pytest.mark.parametrize("where", WHOLE)
def test_what_is_no_whole_number_is_refused_wherever_one_is_given(where, given):
    take, name, _ = WHOLE[where]
    with pytest.raises(
        TypeError, match=f"^{name} must be a whole number, got {re.escape(repr(given))}. [A-Z]"
    ):
        take(given)


@pytest.mark.parametrize("where", WHOLE)
def test_what_is_too_small_is_refused_wherever_it_is_given(where):
    take, name, too_small = WHOLE[where]
    for given in (too_small, -1):
        with pytest.raises(
            ValueError, match=f"^{name} must be at least {too_small + 1}, got {given}. [A-Z]"
        ):
            take(given)


def test_numpys_whole_numbers_are_taken_and_made_pythons():
    for number in (np.int64(8), np.uint8(8), 8):
        assert type(whole_number("n", number, "")) is int
    assert prediction().at(np.int32(20)).step == prediction().at(20).step
    assert type(prediction().at(np.int32(20)).batch_size) is int
    assert predict("batch_size", np.int64(4)).step == predict("batch_size", 4).step
    assert MemoryCallback(batch_size=np.int64(4)) is not None


@pytest.mark.parametrize(
    "take",
    [
        lambda value: share("headroom", value, "Give 0.05."),
        lambda value: MemoryCallback(headroom=value),
        lambda value: mc.suggest_batch_size(STEP, device="24GiB", headroom=value),
    ],
    ids=["share", "MemoryCallback", "suggest_batch_size"],
)
def test_a_share_is_a_number_from_0_to_below_1(take):
    for given in ("a", True, None):
        with pytest.raises(TypeError, match=f"^headroom must be a number, got {given!r}. [0A-Z]"):
            take(given)
    for given in (1, -0.1, float("nan"), 5):
        with pytest.raises(
            ValueError, match=f"^headroom must be at least 0 and below 1, got {given}. [0A-Z]"
        ):
            take(given)
