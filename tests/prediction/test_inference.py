"""Predictions of forward passes alone, in numbers that a reader can check."""

from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

import memcallback as mc
from memcallback.devices.catalogue import HostSpec

MiB = 2**20
CPU = HostSpec()


class Doubles(nn.Module):
    """256 KiB of weights; an output as large as its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(256, 256))

    def forward(self, x):
        return x @ self.weight


def predicted(step, **options):
    return mc.predict(step, device=CPU, isolate=False, **options)


def batch(size=1024):
    return torch.zeros(size, 256)  # 1 MiB for 1024 samples


def peaks(**options):
    prediction = predicted(mc.InferenceStep(Doubles(), batch(), **options))
    return [step.peak_allocated_bytes / MiB for step in prediction.steps]


def test_the_outputs_of_the_last_batch_are_there_while_the_next_one_runs():
    # Weights and batch and output; then the output of before too.
    assert peaks() == [0.25 + 1 + 1, 0.25 + 1 + 1 + 1]


def test_without_outputs_that_are_kept_every_batch_is_the_same():
    assert peaks(keep_outputs="none") == [2.25, 2.25]


def test_outputs_that_are_all_kept_grow_by_one_batch_each():
    assert peaks(keep_outputs="all", num_batches=4) == [2.25, 3.25, 4.25, 5.25]


def test_batches_that_were_not_traced_follow_from_those_that_were():
    step = mc.InferenceStep(Doubles(), batch(), keep_outputs="all", num_batches=300)
    prediction = predicted(step)
    assert prediction.peak_allocated_bytes == (0.25 + 1 + 300) * MiB
    assert len(prediction.steps) == 300
    # At half the batch size all but the weights is half as large.
    assert prediction.at(512).peak_allocated_bytes == (0.25 + 0.5 + 150) * MiB
    assert any("Memory grows by 1024.00 KiB with each batch" in one for one in prediction.caveats)


def test_memory_that_falls_after_the_first_batch_is_not_said_to_grow():
    class KeepsLess(Doubles):
        def forward(self, x):
            self.kept = torch.zeros(64 if hasattr(self, "kept") else 1024, 256)
            return super().forward(x)

    prediction = predicted(mc.InferenceStep(KeepsLess(), batch(), keep_outputs="none"))
    (sentence,) = [one for one in prediction.caveats if one.startswith("Memory ")]
    assert sentence.startswith("Memory falls by 960.00 KiB from batch 1 to batch 2 (batch 2 frees ")


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_prediction_may_be_made_in_inference_mode(mode):
    forward = mc.InferenceStep(Doubles(), batch())
    training = mc.TrainingStep(
        Doubles(), batch(), loss=lambda model, x: model(x).sum(), optimizer=torch.optim.SGD
    )
    outside = [predicted(step).peak_allocated_bytes for step in (forward, training)]
    with mode():
        assert [predicted(step).peak_allocated_bytes for step in (forward, training)] == outside
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        assert not torch.is_grad_enabled()


class Concatenates(Doubles):
    def forward(self, x):
        outputs = super().forward(x)
        self.all = torch.cat([self.all, outputs]) if hasattr(self, "all") else outputs
        return outputs


def test_a_concatenation_that_grows_is_there_twice():
    step = mc.InferenceStep(Concatenates(), batch(), keep_outputs="none", num_batches=100)
    # Weights, batch and output, the 99 outputs of before, and the 100 of now.
    assert predicted(step).peak_allocated_bytes == (0.25 + 1 + 1 + 99 + 100) * MiB


def test_the_largest_batches_fit_with_every_repetition_and_ones_a_little_larger_do_not():
    step = mc.InferenceStep(Concatenates(), batch(), keep_outputs="none", num_batches=200)
    prediction = mc.predict(step, device="4GiB", isolate=False)
    assert prediction.at(prediction.limit_without_retry).fits_without_retry
    assert prediction.at(prediction.limit).fits
    # A concatenation leaves the blocks that it grew out of, which an estimate knows in part.
    assert not prediction.at(prediction.limit_without_retry * 26 // 25).fits_without_retry
    assert not prediction.at(prediction.limit * 26 // 25).fits
    assert any(
        "other batch sizes were replayed with only some" in caveat for caveat in prediction.caveats
    )


def test_grad_mode_keeps_what_a_backward_pass_would_need():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Doubles() for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    def peak(mode):
        step = mc.InferenceStep(Deep(), batch(), mode=mode, keep_outputs="none")
        return predicted(step).peak_allocated_bytes / MiB

    assert peak("inference_mode") == peak("no_grad") == 1 + 1 + 2
    assert peak("grad") == 1 + 1 + 4


def test_a_training_before_leaves_its_parameters_gradients_and_state():
    model = Doubles()
    training = mc.TrainingStep(
        model,
        batch(64),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, foreach=False),
    )

    def peak(**options):
        step = mc.InferenceStep(model, batch(), after=training, keep_outputs="none", **options)
        return predicted(step).peak_allocated_bytes

    forward = 2 * MiB
    # Weights, gradients, two moments, and Adam's count of steps.
    assert peak() == forward + 4 * MiB // 4 + 4
    assert peak(frees_gradients=True) == forward + 3 * MiB // 4 + 4


def test_the_batch_of_the_training_stays_as_it_is():
    model = Doubles()
    training = mc.TrainingStep(model, batch(4096), loss=lambda model, batch: model(batch).sum())
    prediction = predicted(mc.InferenceStep(model, batch(), after=training))
    larger = prediction.at(2048)
    trained = [step for step in larger.steps if step.stage is mc.Stage.TRAINING]
    assert trained[-1].peak_allocated_bytes == prediction.steps[1].peak_allocated_bytes
    assert larger.peak_allocated_bytes == prediction.peak_allocated_bytes + 3 * MiB


def test_the_text_speaks_of_a_forward_pass_alone():
    prediction = mc.predict(mc.InferenceStep(Doubles(), batch()), device="24GiB", isolate=False)
    text = str(prediction)
    assert "Memory of one inference step (batch size 1,024)" in text
    assert "backward" not in text
    assert "optimizer" not in text
    assert set(prediction.step.phases) == {mc.Phase.FORWARD}
    assert prediction.largest_batch_size > 1024
    page = prediction.page().html()
    assert "One inference step, batch size 1,024" in page
    assert "training step" not in page


def test_the_largest_batch_of_a_forward_pass_is_suggested():
    step = mc.InferenceStep(Doubles().eval(), batch())
    advice = mc.suggest_batch_size(step, device="L4", isolate=False, multiple_of=1)
    prediction = mc.predict(step, device="L4", isolate=False)
    assert advice.largest == prediction.largest_batch_size
    assert not any("validation" in part for part in advice.leaves_out)


def test_a_validation_that_keeps_more_than_training_bounds_the_batch_size_of_both():
    model = Doubles()
    training = mc.TrainingStep(model, batch(), loss=lambda model, batch: model(batch).sum())
    advise = partial(mc.suggest_batch_size, training, device="4GiB", isolate=False, multiple_of=1)
    alone = advise()
    assert any("validation" in part for part in alone.leaves_out)

    small = mc.InferenceStep(model, batch(), after=training, keep_outputs="none")
    assert advise(validation=small).largest == alone.largest

    grows = mc.InferenceStep(model, batch(), after=training, keep_outputs="all", num_batches=8)
    both = advise(validation=grows)
    assert both.largest == advise_of(grows) < alone.largest
    assert f"{alone.largest:,} would fit in training alone" in str(both)
    assert both.limit < alone.limit
    assert both.limit_without_retry < alone.limit_without_retry
    assert not both.fits(alone.largest)
    assert dict(both.curve)[1024] > dict(alone.curve)[1024]
    assert not any("validation" in part for part in both.leaves_out)


def advise_of(step):
    return mc.suggest_batch_size(step, device="4GiB", isolate=False, multiple_of=1).largest


def test_a_validation_of_another_training_does_not_bound_a_batch_size():
    model = Doubles()
    training = mc.TrainingStep(model, batch(), loss=lambda model, batch: model(batch).sum())
    with pytest.raises(ValueError, match="after the step"):
        mc.suggest_batch_size(training, device="4GiB", validation=mc.InferenceStep(model, batch()))


def test_evaluation_mode_is_that_of_the_model():
    class Says(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return x * self.weight if self.training else (x * self.weight)[:1].clone()

    def left(model):
        step = mc.InferenceStep(model, batch())
        return predicted(step).saved[0].block_bytes

    assert left(Says()) == MiB
    assert left(Says().eval()) == 1024


class Validates(LightningModule):
    """Keeps the outputs of an epoch."""

    def __init__(self):
        super().__init__()
        self.model, self.kept = Doubles(), []

    def training_step(self, batch, batch_idx):
        return self.model(batch).sum()

    def validation_step(self, batch, batch_idx):
        assert not self.training
        assert torch.is_inference_mode_enabled()
        outputs = self.model(batch)
        self.log("loss", outputs.sum())
        self.kept.append(outputs)

    def test_step(self, batch):
        return self.model(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_validation_step_that_keeps_outputs_grows_over_the_epoch():
    step = mc.InferenceStep.from_lightning(Validates(), batch(), num_batches=50)
    prediction = predicted(step)
    sums = 4  # of the last batch, under its name until the step ends
    assert prediction.peak_allocated_bytes == (0.25 + 1 + 50) * MiB + sums
    assert "Memory of one validation step" in str(prediction)


def test_a_test_step_leaves_nothing():
    prediction = predicted(mc.InferenceStep.from_lightning(Validates(), batch(), stage="test"))
    assert prediction.step.peak_allocated_bytes == (0.25 + 1 + 1) * MiB
    assert prediction.step.stage is mc.Stage.TEST


def test_validation_inside_a_lightning_training_finds_its_gradients_freed():
    module = Validates()
    training = mc.TrainingStep.from_lightning(module, batch())
    step = mc.InferenceStep.from_lightning(module, batch(), stage="test", after=training)
    assert predicted(step).peak_allocated_bytes == (0.25 + 1 + 1) * MiB


def test_batches_that_differ_in_more_than_size_are_refused_where_not_all_are_traced():
    class Alternates(Doubles):
        def __init__(self):
            super().__init__()
            self.calls, self.kept = 0, []

        def forward(self, x):
            self.calls += 1
            self.kept.append(x.new_zeros(self.calls**2))
            return super().forward(x)

    with pytest.raises(mc.PredictionError, match=r"later batches cannot be predicted"):
        predicted(mc.InferenceStep(Alternates(), batch(), num_batches=100))
    assert predicted(mc.InferenceStep(Alternates(), batch(), num_batches=20)).steps


class Classifies(nn.Module):
    """64 KiB of logits for 64 samples."""

    config = None

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(256, 256))

    def forward(self, x, labels=None):
        logits = x @ self.weight
        return {"loss": logits.sum(), "logits": logits}


class TrainerLike:
    """What is read of a Trainer of transformers."""

    def __init__(self, compute_metrics=len, preprocess=None, **changes):
        self.model = Classifies()
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess
        defaults = {
            "eval_accumulation_steps": None,
            "prediction_loss_only": False,
            "fp16": False,
            "bf16": False,
        }
        self.args = type("Arguments", (), {**defaults, **changes})()


def evaluated(num_batches, **changes):
    step = mc.InferenceStep.from_huggingface(
        TrainerLike(**changes), {"x": torch.zeros(64, 256)}, num_batches=num_batches
    )
    return predicted(step).peak_allocated_bytes


def test_a_trainers_evaluation_concatenates_the_logits_of_all_batches():
    weights, logits, loss = 256 * 1024, 64 * 1024, 64 * 4
    # As it concatenates: the batch, its loss and logits, those of before, and all once more.
    of_before, all_of_them = 99 * (logits + loss), 100 * logits + 100 * loss
    peak = weights + logits + logits + loss + of_before + all_of_them
    # The losses of before are freed by the time the logits are concatenated.
    assert evaluated(100) == peak - 99 * loss


def test_a_trainers_evaluation_is_predicted_at_any_batch_size():
    def evaluation(size):
        inputs = {"x": torch.zeros(size, 256)}
        return mc.InferenceStep.from_huggingface(TrainerLike(), inputs, num_batches=20)

    of_64 = predicted(evaluation(64))
    assert of_64.trace.is_any_batch_size_known
    assert of_64.at(48).peak_allocated_bytes == predicted(evaluation(48)).peak_allocated_bytes


def test_moving_results_to_the_host_ends_their_growth():
    assert evaluated(100, eval_accumulation_steps=10) == evaluated(10)
    assert evaluated(100, prediction_loss_only=True) < evaluated(10)


def test_an_evaluation_keeps_the_logits_only_for_metrics_and_as_they_are_preprocessed():
    losses_alone = evaluated(100, prediction_loss_only=True)
    assert evaluated(100, compute_metrics=None) == losses_alone
    of_all, of_classes = evaluated(100), evaluated(100, preprocess=lambda logits, _: logits[:, :1])
    # 64 KiB of logits a batch, once to keep and once as they are concatenated; or 256 bytes of it.
    assert of_all - of_classes > 190 * 63 * 1024
    assert evaluated(100, batch_eval_metrics=True) < evaluated(4)


def test_an_evaluation_needs_a_trainer():
    with pytest.raises(TypeError, match=r"trainer must be a transformers.Trainer, got a Linear"):
        mc.InferenceStep.from_huggingface(nn.Linear(2, 2), {})
