"""The stated limits where some sizes fit although smaller ones do not."""

from dataclasses import replace

import pytest
import torch
from small_cards import card_of
from torch import nn

import memcallback as mc
from memcallback.core.units import GiB, MiB


@pytest.fixture(scope="module")
def step():
    layer = nn.TransformerEncoderLayer(192, 4, batch_first=True)
    return mc.TrainingStep(
        nn.TransformerEncoder(layer, 3, enable_nested_tensor=False),
        torch.randn(8, 64, 192),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=torch.optim.AdamW,
    )


#: With the workspaces of this PyTorch one size does not fit, and the next one does.
SMALL = replace(card_of(712 * MiB), torch_version=(2, 11))


@pytest.fixture(scope="module")
def prediction(step):
    return mc.predict(step, device=SMALL)


def test_the_limit_is_below_the_first_size_that_does_not_fit(prediction):
    limit = prediction.limit
    fits = [prediction.at(size).fits for size in range(1, limit + 3)]
    assert fits == [True] * limit + [False, True]
    without_retry = prediction.limit_without_retry
    assert 0 < without_retry <= limit
    assert all(prediction.at(size).fits_without_retry for size in range(1, without_retry + 1))
    assert (
        f"{limit + 1} samples do not fit, but {limit + 2} do: at some batch sizes, blocks fill the "
        "gaps in the allocator's memory better than at others."
    ) in prediction.verdict()
    assert not any("are assumed not to fit" in line for line in prediction.verdict())
    assert prediction.to_dict()["limit_fits_again_batch_size"] == limit + 2


def test_the_advice_says_the_same_limits(step, prediction):
    advice = mc.suggest_batch_size(step, device=SMALL, headroom=0)
    assert advice.batch_size <= advice.largest <= advice.limit == prediction.limit
    assert advice.limit_without_retry == prediction.limit_without_retry
    assert advice.limit_fits_again == prediction.limit + 2
    assert f"{advice.limit + 1} samples do not fit" in str(advice)
    assert advice.to_dict()["limit_fits_again_batch_size"] == advice.limit_fits_again


@pytest.mark.parametrize("device", ["NVIDIA L4", SMALL])
def test_predict_suggest_and_what_if_say_the_same_number(step, device):
    prediction = mc.predict(step, device=device)
    advice = mc.suggest_batch_size(step, device=device)
    assert prediction.largest_batch_size == advice.largest == advice.largest_in_bounds
    largest = f"Largest batch size: {advice.largest:,} with 5 %"
    assert advice.sentence().startswith(largest)
    assert prediction.verdict()[1].startswith(largest)
    assert prediction.to_dict()["largest_batch_size"] == advice.largest
    fit = prediction.at(advice.largest).peak_reserved_bytes
    assert fit <= 0.95 * prediction.capacity_bytes - prediction.device.outside_bytes
    assert advice.largest <= prediction.limit_without_retry


def test_for_a_size_alone_the_advice_is_the_smaller_of_two_architectures(step):
    advice = mc.suggest_batch_size(step, device="1GiB")
    of_each = {
        name: mc.suggest_batch_size(step, device=card_of(GiB, like=name))
        for name in ("A100", "H100")
    }
    assert of_each["H100"].largest < of_each["A100"].largest  # or the test shows nothing
    assert advice.largest == of_each["H100"].largest
    assert advice.architecture_of == "NVIDIA H100 80GB HBM3"
    assert "kept free. The architecture of NVIDIA H100 80GB HBM3 was assumed." in advice.sentence()
    assert (
        "With the architecture of NVIDIA A100-SXM4-80GB the largest batch size would be "
        f"{of_each['A100'].largest}."
    ) in advice.caveats
    data = advice.to_dict()
    assert data["architecture_of"] == advice.architecture_of
    assert data["caveats"] == list(advice.caveats)
    assert advice.fits(advice.largest)
    assert not advice.fits(advice.largest + 1)
    # In a list of the ranks' devices as well.
    assert mc.suggest_batch_size(step, device=["1GiB"]).largest == advice.largest


def test_a_card_by_name_has_its_own_architecture(step):
    advice = mc.suggest_batch_size(step, device="NVIDIA L4", max_batch_size=64)
    assert advice.architecture_of is None
    assert [said for said in advice.caveats if "is newer than" not in said] == []
    assert "architecture" not in str(advice)


def test_what_was_assumed_of_the_step_is_said_of_the_suggestion():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    step = mc.TrainingStep(
        model, torch.zeros(4, 3, 32, 32), loss=lambda model, batch: model(batch).square().mean()
    )
    said = [
        caveat
        for caveat in mc.predict(step, device="NVIDIA L4").caveats
        if caveat.startswith("Convolution workspaces are")
    ]
    assert len(said) == 1
    advice = mc.suggest_batch_size(step, device="NVIDIA L4")
    assert said[0] in advice.caveats
    assert "Convolution workspaces are" in advice.to_text()


def test_the_run_s_peak_is_that_of_the_first_step_if_a_retry_gave_memory_back():
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(128 * 49, 2048),
        nn.ReLU(),
        nn.Linear(2048, 10),
    )
    step = mc.TrainingStep(
        model,
        torch.zeros(8, 3, 64, 64),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.Adam,
    )
    prediction = mc.predict(step, device="4GiB")
    at_limit = prediction.at((prediction.limit_without_retry + prediction.limit) // 2)
    assert not at_limit.fits_without_retry
    first = at_limit.warm_up.peak_reserved_bytes
    assert at_limit.run_peak_reserved_bytes == first > at_limit.peak_reserved_bytes
    assert at_limit.to_dict()["run_peak_reserved_bytes"] == first
    assert mc.predict(step, device="cpu").run_peak_reserved_bytes is None
