"""A loop that keeps a batch until the next one is on the device: foreseen, and on a CUDA device,
real or virtual, to the byte.
"""

from functools import partial

import pytest
import torch
from device_loop import empty_device
from torch import nn
from torch.nn import functional as F

import memcallback as mc

BATCH, WIDTH = 2048, 4096
INPUT = BATCH * WIDTH * 4
MiB = 1 << 20


class Probe(nn.Module):
    """A model whose input is most of its memory."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def batch():
    return {"x": torch.zeros(BATCH, WIDTH), "labels": torch.zeros(BATCH, dtype=torch.int64)}


def step_of(**options):
    return mc.TrainingStep(Probe(), batch(), optimizer=torch.optim.AdamW, **options)


def predicted(step, device="NVIDIA H200"):
    return mc.predict(step, device=device)


def starts(prediction):
    return prediction.step.windows[0].start.allocated_bytes


def test_the_next_batch_needs_a_segment_of_its_own_while_the_last_one_is_kept():
    without, kept = predicted(step_of()), predicted(step_of(keep_batch=True))
    # Without it the segment of the batch has room for others of a moment too.
    more = kept.peak_reserved_bytes - without.peak_reserved_bytes
    assert INPUT - 4 * MiB <= more <= INPUT
    # When the passes run the last batch is gone.
    assert kept.peak_allocated_bytes == without.peak_allocated_bytes
    # The capacity holds two batches for each sample, not one.
    assert 0.5 <= kept.largest_batch_size / without.largest_batch_size < 0.53


def test_a_kept_batch_of_a_training_is_there_in_the_validation_after_it():
    training = step_of()
    model = training.model

    def start(**options):
        after = mc.TrainingStep(model, batch(), optimizer=torch.optim.AdamW, **options)
        return starts(predicted(mc.InferenceStep(model, batch(), after=after, keep_outputs="none")))

    assert start(keep_batch=True) - start() == INPUT + BATCH * 8


def test_an_inference_can_keep_its_batch_too():
    def reserved(**options):
        step = mc.InferenceStep(Probe(), batch(), keep_outputs="none", **options)
        return predicted(step).peak_reserved_bytes

    assert reserved(keep_batch=True) == reserved() + INPUT


def test_batches_of_an_accumulation_are_kept_one_at_a_time():
    few, many = (predicted(step_of(keep_batch=True, accumulate=n)) for n in (2, 12))
    assert few.peak_reserved_bytes == many.peak_reserved_bytes
    without = predicted(step_of(accumulate=12))
    assert many.peak_reserved_bytes == without.peak_reserved_bytes + INPUT


def test_it_is_true_or_false():
    with pytest.raises(TypeError, match=r"keep_batch must be True or False, got 'last'"):
        step_of(keep_batch="last")


def run(model, optimizer, inputs):
    optimizer.zero_grad()
    model(**inputs)["loss"].backward()
    optimizer.step()


def of_a_function(loader, run):
    for data in loader:
        inputs = {name: tensor.cuda() for name, tensor in data.items()}
        run(inputs)


def let_go(loader, run):
    for data in loader:
        data = {name: tensor.cuda() for name, tensor in data.items()}
        run(data)


def of_accelerate(loader, run):
    accelerate = pytest.importorskip("accelerate")
    for inputs in accelerate.Accelerator().prepare_data_loader(loader):
        run(inputs)


def of_fabric(loader, run):
    fabric = pytest.importorskip("lightning").Fabric(accelerator="cuda", devices=1)
    for inputs in fabric.setup_dataloaders(loader):
        run(inputs)


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
@pytest.mark.parametrize(
    ("loop", "keeps"),
    [
        (of_a_function, True),
        (of_accelerate, True),
        (of_fabric, True),
        (let_go, False),
    ],
)
def test_what_a_loop_reserves_is_predicted_to_the_byte(loop, keeps):
    empty_device()
    model = Probe().cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    rows = [{name: tensor[0] for name, tensor in batch().items()}] * BATCH * 4
    loop(
        torch.utils.data.DataLoader(rows, batch_size=BATCH),
        lambda inputs: run(model, optimizer, inputs),
    )
    reserved = torch.cuda.memory_reserved()
    assert predicted(step_of(keep_batch=keeps), "cuda").peak_reserved_bytes == reserved


class Stream(torch.utils.data.IterableDataset):
    """Rows of which nobody knows how many there are."""

    def __init__(self, rows):
        self._rows = rows

    def __iter__(self):
        return iter(self._rows)


def train_with_transformers(folder, kind=list, **options):
    """A callback whose predictions one can read, after the Trainer's training."""
    transformers = pytest.importorskip("transformers")
    empty_device()
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        max_steps=3,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        **options,
    )
    args._n_gpu = min(1, args.n_gpu)  # of several the Trainer makes a DataParallel
    num_samples = BATCH * args.gradient_accumulation_steps * 3
    rows = [{name: tensor[0] for name, tensor in batch().items()}] * num_samples
    callback = mc.MemoryTrainerCallback()
    trainer = transformers.Trainer(
        Probe(),
        args,
        train_dataset=kind(rows),
        eval_dataset=kind(rows[: BATCH * 3]),
        callbacks=[callback],
    )
    trainer.train()
    return trainer, callback


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", [list, Stream])  # the first batch of a stream is kept, too
def test_the_trainer_of_transformers_loads_the_batches_of_an_update_together(
    tmp_path, accumulate, kind
):
    _, callback = train_with_transformers(tmp_path, kind, gradient_accumulation_steps=accumulate)
    assert callback.prediction.peak_reserved_bytes == torch.cuda.memory_reserved()
    measured, foreseen = callback.report.measured, callback.prediction.step
    for phase in measured.phases:
        sizes = [step.phases[phase].peak_allocated_bytes for step in (measured, foreseen)]
        assert abs(sizes[0] - sizes[1]) <= 16 * 512  # the Trainer's own numbers


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_in_an_evaluation_of_transformers_the_batch_of_the_training_is_still_there(tmp_path):
    trainer, _ = train_with_transformers(tmp_path, eval_strategy="steps", eval_steps=2)
    reserved = torch.cuda.memory_reserved()
    training = mc.TrainingStep(
        trainer.model,
        batch(),
        optimizer=partial(torch.optim.AdamW, fused=True),  # the Trainer's default
        clip_grad_norm=1.0,
        keep_batch=True,
    )
    step = mc.InferenceStep.from_huggingface(trainer, batch(), after=training)
    assert predicted(step, "cuda").run_peak_reserved_bytes == reserved


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_an_evaluation_of_transformers_keeps_the_first_batch_of_a_stream_too(tmp_path):
    _, callback = train_with_transformers(tmp_path, Stream, eval_strategy="steps", eval_steps=2)
    assert callback.evaluation.run_peak_reserved_bytes == torch.cuda.memory_reserved()


@pytest.mark.cuda
@pytest.mark.parametrize("knows", [False, True])
def test_a_report_says_that_a_loop_may_keep_a_batch(tmp_path, capsys, knows):
    empty_device()
    model = Probe().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = mc.MemoryRecorder(model, optimizer)
    step = mc.TrainingStep(model, batch(), optimizer=optimizer, keep_batch=knows)
    mc.MemoryLog(recorder, step, log_dir=tmp_path, wait_for_prediction=True)
    recorder.watch()
    of_a_function([batch()] * 4, lambda inputs: run(model, optimizer, inputs))
    recorder.close()
    said = " ".join(capsys.readouterr().out.split())
    hint = "as much as a batch: the loop may keep one until the next is on the device; then give"
    assert (hint in said) is not knows
    assert ("not as predicted" in said) is not knows
