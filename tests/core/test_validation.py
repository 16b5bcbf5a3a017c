"""Arguments that are numbers: what is none is refused with the value, the rule and the way out,
wherever it is given.
"""

import re
from functools import partial, wraps
from typing import Literal

import numpy as np
import pytest
import torch
from hand_made import law, prediction

import memcallback as mc
from memcallback import MemoryCallback, MemoryRecorder, TrainingStep
from memcallback.core.allocation_trace import AllocationTrace
from memcallback.core.validation import (
    above_0,
    cannot_take,
    described,
    kind_of,
    name_of,
    one_of,
    share,
    whole_number,
)
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


@pytest.mark.parametrize("name", ["batch_size", "sequence_length"])
@pytest.mark.parametrize("given", [2**31 + 1, 10**20])
def test_what_is_too_large_to_be_predicted_is_refused(name, given):
    with pytest.raises(
        ValueError, match=f"^{name} must be at most 2,147,483,648, got {given:,}. Leave it out for"
    ):
        predict(name, given)


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


@pytest.mark.parametrize("share_", [0, 0.0, 0.999, np.float64(0.5)])
def test_a_share_in_its_range_is_taken(share_):
    assert share("headroom", share_, "") is None


def test_a_number_above_0_is_taken_and_another_is_refused():
    above_0("limit", 1, "")
    above_0("limit", 1e-9, "")
    for given in (0, -1, float("nan")):
        with pytest.raises(ValueError, match=rf"^limit must be above 0, got {given}\. Give 5\."):
            above_0("limit", given, "Give 5.")
    for given in (True, "5", None):
        with pytest.raises(TypeError, match=rf"^limit must be a number, got {given!r}\. Give 5\."):
            above_0("limit", given, "Give 5.")


def test_a_whole_number_may_have_to_be_at_least_another_number():
    assert whole_number("n", 0, "", least=0) == 0
    with pytest.raises(ValueError, match=r"^n must be at least 4, got 3\. Why\."):
        whole_number("n", 3, "Why.", least=4)
    assert whole_number("n", 1, "") == 1


def test_one_of_some_words_is_taken_and_another_is_refused_with_them():
    words = Literal["peak", "mean"]
    assert one_of("figure", "mean", words) == "mean"
    with pytest.raises(
        ValueError, match=r"^figure 'median' is not known\. Use one of 'peak', 'mean'\.$"
    ):
        one_of("figure", "median", words)


def test_whether_a_function_can_be_called_is_asked_without_calling_it():
    def loss(output, target, weight=None):
        raise AssertionError("called")

    @wraps(loss)
    def wrapper(*arguments):
        raise AssertionError("called")

    assert cannot_take(loss, 1) == "missing a required argument: 'target'"
    assert cannot_take(loss, 2) is None
    assert cannot_take(loss, 3) is None
    assert cannot_take(loss, 4) == "too many positional arguments"
    assert cannot_take(wrapper, 9) is None
    assert cannot_take(partial(loss, None), 1) is None
    assert cannot_take(dict, 7) is None  # whose signature Python does not know


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "None"),
        ("adam", "'adam'"),
        (b"x", "b'x'"),
        (3, "3"),
        (2.5, "2.5"),
        (True, "True"),
        (torch.nn.Linear, "the class Linear"),
        (torch.nn.Linear(1, 1), "a Linear"),
        ([1], "a list"),
        (torch.optim.Adam([torch.ones(1)]), "an Adam"),
        (OSError(), "an OSError"),
        ({}, "a dict"),
    ],
)
def test_a_value_is_described_in_a_few_words(value, words):
    assert described(value) == words
    assert kind_of([]) == "a list"


def test_a_callable_has_the_name_of_its_function_or_class():
    assert name_of(torch.nn.functional.mse_loss) == "mse_loss"
    assert name_of(torch.nn.MSELoss) == "MSELoss"
    assert name_of(torch.nn.MSELoss()) == "MSELoss"
    assert name_of(partial(print)) == "partial"
