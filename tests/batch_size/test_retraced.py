"""A step that differs at each batch size: each size that is tried is traced."""

import pickle

import pytest
import torch
from torch import nn

import memcallback as mc
from memcallback.batch_size.advice import BatchSizeAdvice
from memcallback.core.units import MiB

CARD = "Tesla T4"


def loss_of_images(model, images):
    """Each image by itself, as detection models treat them: as many operators as images."""
    return sum(model(image).square().mean() for image in images)


def detection(num_images=2, *, height=32768, hidden=4096, loss=loss_of_images):
    with torch.device("meta"):
        images = torch.zeros(num_images, height, 1024)
        model = nn.Sequential(nn.Linear(1024, hidden), nn.ReLU(), nn.Linear(hidden, 1024))
    return mc.TrainingStep(model, images, loss=loss, optimizer=torch.optim.AdamW)


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
    assert (
        "The peaks were simulated from a trace at each batch size that was tried."
        in advice.sentence()
    )
    assert not any("a check " in part for part in advice.leaves_out)
    sizes = [size for size, _ in advice.curve]
    assert {2, advice.batch_size, advice.largest} <= set(sizes)
    assert len(sizes) <= 8
    assert dict(advice.curve)[2] == peak(2).peak_reserved_bytes
    assert advice.fits(advice.largest)
    assert not advice.fits(advice.largest + 1)
    assert pickle.loads(pickle.dumps(advice)).fits(advice.largest)


def test_no_size_above_what_is_wanted_is_traced():
    bounded = mc.suggest_batch_size(detection(), device=CARD, multiple_of=1, max_batch_size=5)
    assert bounded.batch_size == 5
    assert "Largest batch size: 5 (max_batch_size) with" in bounded.sentence()
    assert max(size for size, _ in bounded.curve) == 5


def test_a_bound_below_twice_the_own_size_that_does_not_fit_is_searched_below(advice):
    exact = advice.largest
    bounded = mc.suggest_batch_size(
        detection(exact - 2), device=CARD, multiple_of=1, max_batch_size=exact + 3
    )
    assert bounded.batch_size == exact


def test_whole_groups_below_a_bound_are_suggested():
    def loss(model, images):
        if len(images) % 8:
            raise ValueError("eight views of each image are needed")
        return loss_of_images(model, images)

    step = detection(8, height=1024, loss=loss)
    advice = mc.suggest_batch_size(step, device=CARD, multiple_of=1, max_batch_size=12)
    assert advice.batch_size == 8


def test_where_no_other_size_can_be_traced_the_reason_is_told():
    def loss(model, images):
        if len(images) != 2:
            raise ValueError("two images are needed")
        return loss_of_images(model, images)

    with pytest.raises(mc.PredictionError, match="two images are needed"):
        mc.suggest_batch_size(detection(loss=loss), device=CARD)


def test_a_step_that_takes_whole_groups_alone_is_tried_at_multiples():
    def loss(model, images):
        if len(images) % 3:
            raise ValueError("three views of each image are needed")
        return loss_of_images(model, images)

    advice = mc.suggest_batch_size(detection(3, loss=loss), device=CARD, multiple_of=1)
    assert advice.largest % 3 == 0
    assert peak(advice.largest).peak_reserved_bytes <= advice.budget_bytes
    assert peak(advice.largest + 3).peak_reserved_bytes > advice.budget_bytes
    assert any("cannot be traced, such as" in part for part in advice.leaves_out)


def test_a_peak_that_small_batches_do_not_change_is_no_end_of_the_search():
    # Of a few small images AdamW's update is the peak.
    small = detection(1, height=1, hidden=131072)
    advice = mc.suggest_batch_size(small, device=CARD, multiple_of=1, max_batch_size=16)
    sizes = dict(advice.curve)
    # With PyTorch 2.6 a workspace of two images takes one more segment of the small pool.
    assert sizes[1] <= sizes[2] <= sizes[1] + 2 * MiB
    assert advice.batch_size == 16


def test_a_validation_that_differs_at_each_size_bounds_the_training():
    with torch.device("meta"):
        images = torch.zeros(2, 32768, 1024)
        model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
    step = mc.TrainingStep(
        model, images, loss=lambda model, images: model(images).mean(), optimizer=torch.optim.AdamW
    )

    def outputs(model, images):
        return [model[0](image).repeat(1, 8) for image in images]

    validation = mc.InferenceStep(model, images, forward=outputs, after=step)
    alone = mc.suggest_batch_size(step, device=CARD, multiple_of=1)
    both = mc.suggest_batch_size(step, device=CARD, multiple_of=1, validation=validation)
    assert 0 < both.largest < alone.largest
    assert (both.limit, both.limit_without_retry) == (None, None)
    at = mc.predict(validation, device=CARD, batch_size=both.largest)
    assert at.peak_reserved_bytes <= both.budget_bytes
