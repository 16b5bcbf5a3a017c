"""Forward passes alone on a device, real or virtual: what is predicted of them is measured."""

import contextlib
from itertools import count

import pytest
import torch
from device_loop import empty_device
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

import memcallback as mc

pytestmark = pytest.mark.cuda


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 512),
    )


def measured(run, num_batches=4):
    """The peaks of the last batch."""
    for _ in range(num_batches):
        torch.cuda.reset_peak_memory_stats()
        run()
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return peaks


def predicted(step):
    prediction = mc.predict(step, device="cuda")
    return prediction.peak_allocated_bytes, prediction.peak_reserved_bytes


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("mode", ["inference_mode", "no_grad", "grad"])
def test_inference_takes_what_is_predicted(mode, precision):
    empty_device()
    model, batch = convolutions().eval(), torch.randn(8, 3, 64, 64)
    expected = predicted(mc.InferenceStep(model, batch, mode=mode, precision=precision))
    model.cuda()
    modes = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad}
    kept = []

    def run():
        inputs = batch.cuda()
        torch.cuda.reset_peak_memory_stats()
        with (
            modes.get(mode, contextlib.nullcontext)(),
            torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16-mixed"),
        ):
            outputs = model(inputs)
        kept[:] = [outputs]

    assert measured(run) == expected


def test_outputs_kept_over_an_epoch_take_what_is_predicted():
    empty_device()
    model, batch, kept = convolutions().eval(), torch.randn(8, 3, 64, 64), []
    expected = predicted(mc.InferenceStep(model, batch, keep_outputs="all", num_batches=40))
    model.cuda()

    def run():
        inputs = batch.cuda()
        torch.cuda.reset_peak_memory_stats()
        with torch.inference_mode():
            kept.append(model(inputs))

    assert measured(run, 40) == expected


class Validates(LightningModule):
    """Keeps the outputs of an epoch until its end."""

    def __init__(self):
        super().__init__()
        self.model, self.kept = convolutions(), []

    def training_step(self, batch, batch_idx):
        return self.model(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.kept.append(self.model(batch))

    def on_validation_epoch_end(self):
        self.kept.clear()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class LastPeaks(Callback):
    """The peaks of the last batch that was validated."""

    def on_validation_batch_start(self, *_):
        torch.cuda.reset_peak_memory_stats()

    def on_validation_batch_end(self, *_):
        self.peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def test_validation_in_a_lightning_training_takes_what_is_predicted(tmp_path):
    empty_device()
    module, images = Validates(), torch.randn(24 * 8, 3, 64, 64)
    training = mc.TrainingStep.from_lightning(module, images[:4])
    expected = predicted(
        mc.InferenceStep.from_lightning(module, images[:8], after=training, num_batches=24)
    )
    last = LastPeaks()
    Trainer(
        accelerator="cuda",
        devices=1,
        max_epochs=2,
        limit_train_batches=6,
        num_sanity_val_steps=0,
        default_root_dir=tmp_path,
        callbacks=[last],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, DataLoader(images, 4), DataLoader(images, 8))
    assert last.peaks == expected


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 2}, {"cache_implementation": "static", "disable_compile": True}],
    ids=["greedy", "beams", "static"],
)
def test_generation_takes_what_is_predicted(options):
    transformers = pytest.importorskip("transformers")
    empty_device()
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=500,
        max_position_embeddings=512,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    batch = {"input_ids": torch.randint(3, 500, (2, 50))}
    generate = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **options}
    expected = predicted(mc.InferenceStep(model, batch, generate=generate))
    model.cuda()
    kept = []

    def run():
        inputs = {name: tensor.cuda() for name, tensor in batch.items()}
        numbers = count(1)
        # No sequence ends early: a virtual device reads every value as 0.
        model._has_unfinished_sequences = lambda *_, **__: next(numbers) <= 40
        torch.cuda.reset_peak_memory_stats()
        with torch.inference_mode():
            outputs = model.generate(**inputs, **generate)
        kept[:] = [outputs]

    assert measured(run) == expected


@pytest.mark.parametrize(
    "functions",
    [
        {},
        {"compute_metrics": lambda _: {}},
        {
            "compute_metrics": lambda _: {},
            "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
        },
    ],
    ids=["losses alone", "metrics", "preprocessed logits"],
)
def test_the_evaluation_of_a_trainer_takes_what_is_predicted(tmp_path, functions):
    transformers = pytest.importorskip("transformers")
    empty_device()
    config = transformers.BertConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=5000,
    )
    model = transformers.BertForMaskedLM(config)
    samples = [{"input_ids": [5] * 32, "labels": [7] * 32} for _ in range(12 * 8)]
    peaks = []

    class Peaks(transformers.TrainerCallback):
        def on_prediction_step(self, *_, **__):
            peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
            torch.cuda.reset_peak_memory_stats()

    arguments = transformers.TrainingArguments(
        tmp_path, per_device_eval_batch_size=8, report_to=[], disable_tqdm=True
    )
    arguments._n_gpu = 1  # of several the Trainer makes a DataParallel
    trainer = transformers.Trainer(
        model,
        arguments,
        eval_dataset=samples,
        callbacks=[Peaks()],
        **functions,
    )
    inputs = {name: torch.tensor([[7] * 32] * 8) for name in ("input_ids", "labels")}
    model.eval()
    expected = predicted(mc.InferenceStep.from_huggingface(trainer, inputs, num_batches=12))
    # It reads lengths from the device, and a virtual device reads every value as 0.
    trainer.accelerator.pad_across_processes = lambda tensor, **_: tensor
    trainer.evaluate()
    allocated, reserved = peaks[-1]
    # Where the forward pass has the peak, the number of labels is there too, which some Trainers
    # count before: one block of the allocator.
    assert allocated - expected[0] in (0, 512)
    assert reserved == expected[1]
