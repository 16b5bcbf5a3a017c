"""A card known by its size alone: every command takes the architecture that leaves less room."""

import pytest
import torch
from small_cards import card_of
from torch import nn

import memcallback as mc
from memcallback.core.units import GiB

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


@pytest.fixture(scope="module")
def step():
    return mc.TrainingStep(
        nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 64)),
        torch.zeros(64, 256),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.AdamW,
    )


@pytest.fixture(scope="module")
def prediction(step):
    return mc.predict(step, device="1GiB")


def test_a_prediction_is_that_of_the_architecture_that_leaves_less_room(step, prediction):
    of_each = {
        name: mc.predict(step, device=card_of(GiB, like=name)).largest_batch_size
        for name in (A100, H100)
    }
    assert of_each[H100] < of_each[A100]  # or the test shows nothing
    assert prediction.largest_batch_size == of_each[H100]
    assert prediction.architecture_of == H100
    assert prediction.to_dict()["architecture_of"] == H100
    assert f"The architecture of {H100} was assumed." in prediction.verdict()[1]
    other = f"With the architecture of {A100} the largest batch size would be {of_each[A100]:,}."
    assert other in prediction.caveats
    assert prediction.at(8).architecture_of == H100


def test_predict_suggest_and_what_if_take_the_same_architecture(step, prediction):
    advice = mc.suggest_batch_size(step, device="1GiB")
    plan = mc.what_if(step, device="1GiB")
    assert advice.architecture_of == plan.architecture_of == prediction.architecture_of
    assert plan.to_dict()["architecture_of"] == prediction.architecture_of
    assert advice.largest == plan.current.largest_batch_size == prediction.largest_batch_size
    assert set(prediction.device.caveats) <= set(plan.caveats)


def test_where_both_let_the_same_batch_fit_the_higher_peak_is_told(step):
    # So small a difference is lost where a sample takes more.
    wide = mc.TrainingStep(
        nn.Linear(1024, 1024),
        torch.zeros(1, 64 << 10, 1024, device="meta"),
        loss=lambda model, batch: model(batch).sum(),
    )
    prediction = mc.predict(wide, device="8GiB")
    advice = mc.suggest_batch_size(wide, device="8GiB")
    assert prediction.architecture_of == advice.architecture_of == H100
    of_other = mc.predict(wide, device=card_of(8 * GiB, like=A100))
    assert prediction.largest_batch_size == of_other.largest_batch_size == advice.largest
    assert prediction.peak_reserved_bytes > of_other.peak_reserved_bytes
    other = mc.format_bytes(of_other.peak_reserved_bytes)
    assert f"The peak would be {other} with the architecture of {A100}." in prediction.caveats


def test_another_batch_size_or_length_has_no_sentence_of_the_old_one():
    step = mc.TrainingStep(
        nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 64)),
        torch.zeros(64, 32, 256),
        loss=lambda model, batch: model(batch).square().mean(),
        sequence_length=32,
    )
    prediction = mc.predict(step, device="1GiB")
    of_other = f"the architecture of {A100}"
    assert any(of_other in caveat for caveat in prediction.caveats)
    for another in (
        prediction.at(8),
        prediction.at(sequence_length=16),
        prediction.at(8, sequence_length=16),
        prediction.on("2GiB"),
    ):
        assert not any(of_other in caveat for caveat in another.caveats)
    assert prediction.at(64).caveats == prediction.caveats


def test_who_waits_is_told_of_the_traces_with_both_architectures(step):
    told = []
    mc.predict(step, device="1GiB", progress=lambda *numbers: told.append(numbers))
    assert told == [(number, 6) for number in range(1, 6)]


def test_a_card_by_name_has_its_own_architecture(step):
    prediction = mc.predict(step, device="NVIDIA L4")
    assert prediction.architecture_of is None
    assert "the architecture of" not in str(prediction)
