"""`MemoryCallback(accumulate=..., amp=..., checkpoint=...)`: what the Trainer's own arguments do,
for the fit alone.
"""

import pytest
import torch
import training
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision, Precision
from observer import differences
from torch import nn

import memcallback as mc
from memcallback import MemoryCallback
from memcallback.core.units import format_bytes


class Deep(training.Automatic):
    """Layers worth checkpointing, with dropout and batch norm."""

    def __init__(self):
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1))
            for _ in range(4)
        ]
        self.network = nn.Sequential(*blocks, nn.Linear(64, 10))


class MadeLate(training.Automatic):
    """Has its layers from configure_model on."""

    def __init__(self):
        super().__init__()
        self.network = None

    def configure_model(self):
        if self.network is None:
            torch.manual_seed(0)
            self.network = Deep().network


def savings_only(**savings):
    """The callback without a prediction, which takes most of the time."""
    return MemoryCallback(predict=False, **savings)


class Seen(Callback):
    """What stands while batches are trained."""

    def __init__(self):
        self.rows = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        forward = vars(pl_module.network).get("forward")
        self.rows.append(
            (
                trainer.accumulate_grad_batches,
                trainer.precision,
                trainer.global_step,
                forward is not None,
            )
        )


def fit(tmp_path, module=None, *, callbacks=(), data=None, ckpt_path=None, seed=0, **options):
    torch.manual_seed(seed)
    module = module or Deep()
    loop = training.trainer(tmp_path, callbacks, **options)
    loop.fit(module, data or training.loader(6), ckpt_path=ckpt_path)
    return loop, module


def scaler_plugin():
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


def left_by(loop, module):
    return {
        "weights": module.state_dict(),
        "optimizer": loop.optimizers[0].state_dict(),
        "generator": torch.get_rng_state(),
    }


@pytest.mark.parametrize(
    ("savings", "options"),
    [
        ({"accumulate": 4}, lambda: {"accumulate_grad_batches": 4}),
        (
            {"accumulate": {0: 2, 1: 3}},
            lambda: {"callbacks": [GradientAccumulationScheduler({0: 2, 1: 3})]},
        ),
        ({"amp": "bf16-mixed"}, lambda: {"precision": "bf16-mixed"}),
        ({"amp": "16-mixed"}, lambda: {"plugins": [scaler_plugin()]}),
        ({"checkpoint": True}, dict),
        (
            {"accumulate": 2, "amp": "16-mixed", "checkpoint": {"network": 2}},
            lambda: {"accumulate_grad_batches": 2, "plugins": [scaler_plugin()]},
        ),
    ],
    ids=["accumulate", "schedule", "bf16", "fp16", "checkpoint", "all"],
)
def test_training_leaves_the_bits_that_lightnings_own_arguments_leave(tmp_path, savings, options):
    with_ours = left_by(
        *fit(tmp_path, callbacks=[savings_only(**savings)], max_epochs=2, gradient_clip_val=0.5)
    )
    with_theirs = left_by(
        *fit(tmp_path, **{"max_epochs": 2, "gradient_clip_val": 0.5, **options()})
    )
    assert differences(with_ours, with_theirs) == []


def test_savings_stand_for_the_fit_and_not_after_it(tmp_path):
    seen = Seen()
    callback = savings_only(accumulate=4, amp="bf16-mixed", checkpoint="network")
    loop, module = fit(tmp_path, callbacks=[seen, callback])
    assert seen.rows == [(4, "bf16-mixed", step, True) for step in (0, 0, 0, 1, 1, 2)]
    assert (loop.accumulate_grad_batches, loop.precision) == (1, "32-true")
    assert type(loop.strategy.precision_plugin) is Precision
    assert "forward" not in vars(module.network)
    # And again for the next fit.
    loop.fit_loop.max_epochs = 2
    loop.fit(module, training.loader(6))
    assert seen.rows[6] == (4, "bf16-mixed", 2, True)


def test_a_schedule_of_epochs_is_lightnings_own_for_the_fit(tmp_path):
    seen = Seen()
    loop, _ = fit(tmp_path, callbacks=[seen, savings_only(accumulate={0: 3, 1: 2})], max_epochs=2)
    assert [row[0] for row in seen.rows] == [3] * 6 + [2] * 6
    assert not any(
        isinstance(callback, GradientAccumulationScheduler) for callback in loop.callbacks
    )
    assert loop.accumulate_grad_batches == 1


def test_after_an_error_in_training_all_is_as_before(tmp_path):
    class Fails(Deep):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise ZeroDivisionError("on purpose")
            return super().training_step(batch, batch_idx)

    module = Fails()
    loop = training.trainer(tmp_path, [savings_only(accumulate=2, amp="16-mixed", checkpoint=True)])
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        loop.fit(module, training.loader(6))
    assert (loop.accumulate_grad_batches, loop.precision) == (1, "32-true")
    assert "forward" not in vars(module.network)


def test_layers_that_are_made_in_configure_model_are_checkpointed(tmp_path):
    seen = Seen()
    fit(tmp_path, MadeLate(), callbacks=[seen, savings_only(checkpoint="network")])
    assert all(is_checkpointed for *_, is_checkpointed in seen.rows)


def test_what_is_predicted_is_the_step_with_the_savings(tmp_path):
    data = training.loader(6, batch_size=256)
    plain, saved = MemoryCallback(), MemoryCallback(accumulate=2, amp="bf16-mixed", checkpoint=True)
    fit(tmp_path, callbacks=[plain], data=data)
    fit(tmp_path, callbacks=[saved], data=data)
    for callback in (plain, saved):
        step = callback.report.measured
        for phase, window in callback.prediction.phases.items():
            assert window.end.allocated_bytes == pytest.approx(
                step.phases[phase].end.allocated_bytes, abs=64
            )
    assert saved.prediction.peak_allocated_bytes < plain.prediction.peak_allocated_bytes


def test_the_report_has_what_they_save_predicted_and_measured(tmp_path):
    plain, saved = MemoryCallback(), MemoryCallback(accumulate=2, amp="bf16-mixed", checkpoint=True)
    fit(tmp_path, callbacks=[plain], data=training.loader(6, batch_size=512))
    _, module = fit(tmp_path, callbacks=[saved], data=training.loader(6, batch_size=256))
    assert plain.report.without_savings is None
    assert saved.report.without_savings.batch_size == 512
    assert (
        saved.report.without_savings.peak_allocated_bytes == plain.prediction.peak_allocated_bytes
    )
    text = saved.report.to_text()
    assert "saved, against 512 samples without savings" in text
    before, after = plain.prediction.peak_allocated_bytes, saved.prediction.peak_allocated_bytes
    row = next(line for line in text.splitlines() if "saved, allocated" in line)
    assert format_bytes(before - after) in row
    assert format_bytes(before - saved.report.measured.peak_allocated_bytes) in row
    assert "forward" not in vars(module.network)


def test_a_step_that_cannot_be_traced_without_them_is_told_of(tmp_path):
    class NeedsCheckpointing(Deep):
        def training_step(self, batch, batch_idx):
            if "forward" not in vars(self.network):
                raise ZeroDivisionError("on purpose")
            return super().training_step(batch, batch_idx)

    callback = MemoryCallback(checkpoint=True)
    with pytest.warns(
        mc.MemoryWarning, match="Cannot compare with and without memory savings: .* on purpose"
    ):
        fit(tmp_path, NeedsCheckpointing(), callbacks=[callback])
    assert callback.report.without_savings is None
    assert callback.report.prediction is not None


def test_the_report_says_what_the_savings_are(tmp_path):
    callback = savings_only(accumulate=4, amp="16-mixed", checkpoint=True)
    fit(tmp_path, callbacks=[callback])
    assert callback.report.notes[-3:] == (
        "4 batches of 8, so 32 samples on this device, make one update (accumulate).",
        "0 of 2 steps were skipped for gradients with inf or nan (amp).",
        "Recomputed in the backward pass: network (checkpoint).",
    )


def test_skipped_steps_are_told_of_and_counted(tmp_path, capsys):
    callback = savings_only(amp="16-mixed")
    fit(tmp_path, training.OverflowsOnce(), callbacks=[callback])
    assert (
        "Step 2 was skipped: a gradient is inf or nan at loss scale 65536, which is lowered now."
        in capsys.readouterr().out
    )
    assert (
        callback.report.notes[-1]
        == "1 of 6 steps were skipped for gradients with inf or nan (amp)."
    )


@pytest.mark.parametrize("saves", ["in the fit", "after it"])
def test_the_grad_scaler_goes_on_from_a_checkpoint(tmp_path, saves):
    class Saves(Callback):
        def on_train_end(self, trainer, pl_module):
            if saves == "in the fit":
                trainer.save_checkpoint(tmp_path / "last.ckpt")

    loop, _ = fit(
        tmp_path, training.OverflowsOnce(), callbacks=[savings_only(amp="16-mixed"), Saves()]
    )
    if saves == "after it":
        loop.save_checkpoint(tmp_path / "last.ckpt")

    resumed = savings_only(amp="16-mixed")
    fit(
        tmp_path,
        training.Automatic(),
        callbacks=[resumed],
        max_epochs=2,
        ckpt_path=tmp_path / "last.ckpt",
    )
    assert resumed.state_dict()["amp"]["scale"] == 2.0**15
    assert (
        resumed.report.notes[-1]
        == "1 of 12 steps were skipped for gradients with inf or nan (amp)."
    )


def test_a_callback_without_savings_has_no_state_of_them(tmp_path):
    callback = savings_only()
    fit(tmp_path, callbacks=[callback])
    assert "amp" not in callback.state_dict()
    assert not any(
        "accumulate" in note or "amp" in note or "checkpoint" in note
        for note in callback.report.notes
    )


# Bad input.


@pytest.mark.parametrize(
    ("savings", "text"),
    [
        ({"accumulate": 0}, "accumulate must be a whole number of at least 1, got 0"),
        ({"accumulate": {0: 1, 4: 0}}, "accumulate must be a whole number of at least 1, got 0"),
        ({"amp": "fp16"}, "amp must be one of 16-mixed, bf16-mixed, got 'fp16'"),
        (
            {"checkpoint": 4},
            "checkpoint must be True, the name of a module, a list of names, or a mapping from "
            "names to numbers of segments, got 4",
        ),
    ],
)
def test_a_saving_that_is_none_is_refused_at_once(savings, text):
    with pytest.raises(ValueError, match=text):
        MemoryCallback(**savings)


@pytest.mark.parametrize(
    ("savings", "module", "options", "text"),
    [
        (
            {"accumulate": 2},
            training.Automatic,
            {"accumulate_grad_batches": 4},
            r"the Trainer has accumulate_grad_batches=4\. Leave one",
        ),
        (
            {"accumulate": 2},
            training.ManualRaw,
            {},
            r"accumulate=2 is for automatic optimization, and ManualRaw steps its optimizers "
            r"itself",
        ),
        (
            {"amp": "16-mixed"},
            training.Automatic,
            {"precision": "bf16-mixed"},
            r"has precision bf16-mixed \(MixedPrecision, .*Strategy\)\. Leave amp",
        ),
        ({"checkpoint": "body"}, training.Automatic, {}, "Automatic has no module named 'body'"),
    ],
)
def test_a_saving_that_cannot_be_applied_stops_the_fit_and_leaves_nothing(
    tmp_path, savings, module, options, text
):
    before = training.trainer(tmp_path, **options)
    loop = training.trainer(tmp_path, [MemoryCallback(**savings)], **options)
    with pytest.raises(ValueError, match=text):
        loop.fit(module(), training.loader())
    assert (loop.accumulate_grad_batches, loop.precision) == (
        before.accumulate_grad_batches,
        before.precision,
    )


class OwnScheduler(GradientAccumulationScheduler):
    """A subclass is one too."""


@pytest.mark.parametrize("kind", [GradientAccumulationScheduler, OwnScheduler])
def test_a_scheduler_of_the_trainers_own_is_a_conflict(tmp_path, kind):
    loop = training.trainer(tmp_path, [kind({0: 2}), MemoryCallback(accumulate={0: 1, 1: 4})])
    with pytest.raises(
        ValueError,
        match=r"the Trainer has a GradientAccumulationScheduler\. Leave one of them out",
    ):
        loop.fit(training.Automatic(), training.loader())


def test_the_words_are_those_of_the_plain_helpers():
    module = Deep()
    MemoryCallback(accumulate=4, amp="bf16-mixed", checkpoint={"network": 2})
    assert mc.accumulate(4, module, torch.optim.SGD(module.parameters())).num_batches == 4
    assert mc.amp("bf16-mixed", device="cpu").precision == "bf16-mixed"
    assert mc.checkpoint(module, {"network": 2}).names == ("network",)
