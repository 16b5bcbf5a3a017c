"""The configurations of the accuracy proof are there, can be built, and give a loss on tensors
without data; its judgement is right.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from accuracy_comparison import figures, summarise
from accuracy_configs import CONFIGS, OPTIMIZERS
from models.workloads import WORKLOADS

from memcallback.step.copies.objects import fake_copy
from memcallback.step.step import AUTOCAST


def test_there_are_enough_and_each_has_a_name_of_its_own():
    assert len({config.name for config in CONFIGS}) == len(CONFIGS)
    judged = [config for config in CONFIGS if config.left_out is None]
    assert len(judged) >= 100
    assert len({config.workload.architecture for config in judged}) >= 20
    assert {config.workload.architecture for config in CONFIGS} == set(WORKLOADS)


def test_they_are_spread_over_the_product():
    judged = [config for config in CONFIGS if config.left_out is None]
    assert {config.optimizer for config in judged} == set(OPTIMIZERS)
    for precision in ("32-true", "16-mixed", "bf16-mixed", "bf16-true"):
        assert precision in AUTOCAST
        assert sum(config.precision == precision for config in judged) >= 10
    assert sum(config.accumulate > 1 for config in judged) >= 5
    assert sum(config.clip_grad_norm is not None for config in judged) >= 5
    assert sum(config.channels_last for config in judged) >= 5
    assert {config.checkpointing for config in judged} == {"none", "reentrant", "non_reentrant"}


@pytest.mark.parametrize("architecture", WORKLOADS)
def test_a_model_gives_a_loss_on_shapes(architecture):
    config = next(config for config in CONFIGS if config.workload.architecture == architecture)
    parts = config.make(initialise=False)
    assert sum(parameter.numel() for parameter in parts.model.parameters()) < 300e6
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model, batch = fake_copy((parts.model, parts.batch), mode)
    with mode:
        for loss_function, make_optimizer in zip(parts.losses, parts.optimizers, strict=True):
            if (
                architecture == "speech-ctc"
            ):  # the loss reads the lengths of the texts, which shapes do not have
                assert model(batch["spectrogram"]).requires_grad
                continue
            loss = loss_function(model, batch)
            assert loss.ndim == 0
            assert loss.requires_grad
            assert make_optimizer(model).param_groups[0]["params"]


def test_the_precision_is_the_models_and_the_batchs():
    config = next(
        config
        for config in CONFIGS
        if config.precision == "bf16-true" and config.workload.architecture == "vit-s16"
    )
    parts = config.make(initialise=False)
    assert {parameter.dtype for parameter in parts.model.parameters()} == {torch.bfloat16}
    assert parts.batch["image"].dtype == torch.bfloat16
    assert parts.batch["label"].dtype == torch.int64


def window(phase, allocated, reserved=2**30):
    return {
        "phase": phase,
        "start": {"allocated_bytes": allocated},
        "end": {"allocated_bytes": allocated},
        "peak_allocated_bytes": allocated,
        "peak_reserved_bytes": reserved,
    }


def judge(*pairs):
    """The summary of configurations with one window each, of which measured and predicted bytes are
    given.
    """
    found = {
        str(n): figures(str(n), [[window("forward", *true)]], [[window("forward", *guess)]])
        for n, (true, guess) in enumerate(pairs)
    }
    return summarise("all", found)


def test_equal_figures_meet_the_bars_and_are_exact():
    summary = judge(((10**9, 10**9), (10**9, 10**9)))
    assert summary.is_met
    assert (summary.allocated_share, summary.exact_share, summary.median_allocated_bytes) == (
        1.0,
        1.0,
        0,
    )


def test_a_mebibyte_and_a_thousandth_are_within():
    right = ((10**9, 10**9), (10**9 + 10**6 + 2**20, 10**9))
    wrong = ((10**9, 10**9), (10**9 + 10**6 + 2**20 + 1, 10**9))
    assert judge(right).is_met
    assert judge(wrong).allocated_share == 0.0
    assert judge(*[right] * 19, wrong).is_met


def test_one_that_is_far_off_is_one_too_many():
    assert not judge(
        *[((10**9, 10**9), (10**9, 10**9))] * 99, ((10**9, 10**9), (10**9 + 2 * 10**7, 10**9))
    ).is_met


def test_reserved_memory_has_a_bar_of_its_own():
    assert judge(((10**9, 10**9), (10**9, 1.02 * 10**9))).is_met
    assert not judge(((10**9, 10**9), (10**9, 1.03 * 10**9))).is_met


def test_what_was_not_predicted_is_wrong():
    summary = summarise("all", {"a": []})
    assert not summary.is_met
    assert summary.num_not_predicted == 1


def test_windows_that_differ_are_compared_as_one_step():
    measured = [[window("optimizer_step", 500)]]
    predicted = [[window("forward", 300), window("backward", 500), window("optimizer_step", 400)]]
    found = {
        figure.quantity: figure.error_bytes for figure in figures("lbfgs", measured, predicted)
    }
    assert found == {"start": -200, "end": -100, "peak allocated": 0, "peak reserved": 0}


def test_of_an_accumulation_window_the_last_micro_batch_is_compared():
    found = figures("a", [[window("forward", 1)], [window("forward", 2)]], [[window("forward", 2)]])
    assert all(figure.error_bytes == 0 for figure in found)
