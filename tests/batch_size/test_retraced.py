"""A step that differs at each batch size: each size that is tried is traced."""

import pytest
import torch
from torch import nn

import memcallback as mc
from memcallback.batch_size.advice import BatchSizeAdvice

CARD = "Tesla T4"


def loss_of_images(model, images):
    """Each image by itself, as detection models treat them: as many operators as images."""
    return sum(model(image).square().mean() for image in images)


def detection(num_images=2, **options):
    with torch.device("meta"):
        images = torch.zeros(num_images, 32768, 1024)
        model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    return mc.TrainingStep(
        model, images, loss=loss_of_images, optimizer=torch.optim.AdamW, **options
    )


@pytest.fixture(scope="module")
def advice() -> BatchSizeAdvice:
    return mc.suggest_batch_size(detection(), device=CARD, multiple_of=4)


def peak(batch_size):
    return mc.predict(detection(), device=CARD, batch_size=batch_size)


def test_the_largest_fits_and_one_more_does_not(advice):
    assert advice.largest > 10
    assert peak(advice.largest).peak_reserved_bytes <= advice.budget_bytes
    assert peak(advice.largest + 1).peak_reserved_bytes > advice.budget_bytes
    assert advice.batch_size == advice.largest // 4 * 4
    assert (advice.limit, advice.limit_without_retry) == (None, None)


def test_it_says_what_was_traced_and_shows_those_sizes_alone(advice):
    assert "With nothing kept free" not in str(advice)
    assert "Simulated from a trace at each batch size that was tried." in advice.sentence()
    assert not any("check that the step runs the same way" in part for part in advice.leaves_out)
    sizes = [size for size, _ in advice.curve]
    assert {2, advice.batch_size, advice.largest} <= set(sizes)
    assert len(sizes) <= 10
    assert dict(advice.curve)[2] == peak(2).peak_reserved_bytes
    assert advice.fits(advice.largest)
    assert not advice.fits(advice.largest + 1)


def test_what_is_wanted_bounds_the_sizes_that_are_traced():
    bounded = mc.suggest_batch_size(detection(), device=CARD, multiple_of=1, max_batch_size=5)
    assert bounded.batch_size == 5


def test_where_no_other_size_can_be_traced_the_reason_is_told():
    def loss(model, images):
        if len(images) != 2:
            raise ValueError("two images are needed")
        return loss_of_images(model, images)

    step = detection()
    step = mc.TrainingStep(step.model, step.batch, loss=loss, optimizer=torch.optim.AdamW)
    with pytest.raises(mc.PredictionError, match="two images are needed"):
        mc.suggest_batch_size(step, device=CARD)
