"""On a CUDA device, real or virtual: the size that is found runs, a larger one does not fit, and no
memory is left behind.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import training
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader, Dataset

import memcallback as mc
from memcallback.core.units import GiB, MiB
from memcallback.devices import local as device_here
from memcallback.devices.catalogue import CONTEXT_BYTES
from memcallback.integrations.lightning.fit.run_state import RunState

pytestmark = pytest.mark.cuda

#: What the allocator may have.
LIMIT_BYTES = 2 * GiB


@pytest.fixture(autouse=True)
def _limited():
    """A device of 2 GiB and a context, in effect."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(LIMIT_BYTES / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


class Made(Dataset):
    """Samples that are made when they are asked for, a batch at a time."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 1_000_000

    def __getitems__(self, indices):
        return len(indices)

    def collate(self, num):
        if self.kind == "images":
            return torch.zeros(num, 3, 32, 32), torch.zeros(num, dtype=torch.long)
        return torch.zeros(num, 64, dtype=torch.long)


class Convolutions(training.Automatic):
    kind = "images"

    def __init__(self, batch_size=16):
        super().__init__()
        self.batch_size = batch_size
        self.network = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.Dropout(0.1),
            nn.Flatten(),
            nn.Linear(32 * 32 * 32, 100),
        )

    def train_dataloader(self):
        data = Made(self.kind)
        return DataLoader(data, self.batch_size, shuffle=False, collate_fn=data.collate)

    def val_dataloader(self):
        return self.train_dataloader()


class Transformer(Convolutions):
    kind = "tokens"

    def __init__(self, batch_size=16):
        super().__init__(batch_size)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
        self.network = nn.Sequential(
            nn.Embedding(500, 128),
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(128, 500),
        )

    def loss(self, batch):
        return nn.functional.cross_entropy(self.network(batch).flatten(0, 1), batch.flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


def trainer(tmp_path, callbacks=(), **options):
    defaults = {"accelerator": "gpu", "limit_val_batches": 2, "use_distributed_sampler": False}
    return training.trainer(tmp_path, callbacks, **(defaults | options))


def reserved_peak(tmp_path, module, **options):
    """The reserved peak of a fit; None if memory ran out."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        trainer(tmp_path, max_steps=4, **options).fit(module)
    except torch.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_reserved()


@pytest.mark.parametrize("has_validation", [False, True], ids=["training alone", "with validation"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("make", [Convolutions, Transformer])
def test_the_size_that_is_found_runs_and_a_larger_one_does_not_fit(
    tmp_path, make, precision, has_validation
):
    module = make()
    options = {
        "precision": precision,
        "accumulate_grad_batches": 2,
        "limit_val_batches": 2 if has_validation else 0,
    }
    found = mc.fit_batch_size(
        trainer(tmp_path, **options), module, capacity=LIMIT_BYTES + CONTEXT_BYTES
    )
    assert found.counts == "reserved"
    assert found.num_ooms == 0
    # What validation leaves in the allocator's cache is not predicted.
    assert len(found.trials) <= (3 if has_validation else 1)
    trial = next(trial for trial in found.trials if trial.batch_size == found.batch_size > 100)
    assert trial.peak_bytes <= trial.budget_bytes < LIMIT_BYTES
    peak = reserved_peak(tmp_path, make(found.batch_size), **options)
    assert peak is not None
    assert peak <= trial.budget_bytes
    more = reserved_peak(tmp_path, make(int(1.1 * found.batch_size)), **options)
    assert more is None or more > 0.95 * (LIMIT_BYTES + CONTEXT_BYTES) - CONTEXT_BYTES


class Noisy(Convolutions):
    """Its hook takes more memory than its step."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        images, classes = batch
        return torch.stack([images + torch.randn_like(images) for _ in range(100)]).mean(0), classes


def test_what_a_hook_makes_of_a_batch_is_foreseen(tmp_path):
    options = {"limit_val_batches": 0}
    found = mc.fit_batch_size(
        trainer(tmp_path, **options), Noisy(), capacity=LIMIT_BYTES + CONTEXT_BYTES
    )
    assert found.num_ooms == 0
    assert [trial.batch_size for trial in found.trials] == [found.batch_size]
    assert found.predicted_batch_size == found.batch_size
    assert found.trials[0].peak_bytes > 0.85 * found.trials[0].budget_bytes


def test_memory_that_runs_out_is_given_back_and_a_smaller_size_found(tmp_path):
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    module = Convolutions()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    # Twice the memory that there is.
    found = mc.fit_batch_size(trainer(tmp_path), module, capacity=2 * LIMIT_BYTES + CONTEXT_BYTES)
    assert found.trials[0].is_out_of_memory
    assert found.trials[0].peak_bytes > LIMIT_BYTES / 2
    assert found.batch_size < found.predicted_batch_size
    assert len(found.trials) <= 8
    assert (
        LIMIT_BYTES / 2
        < max(trial.peak_bytes for trial in found.trials if trial.fits)
        <= LIMIT_BYTES
    )
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    # cuBLAS keeps a workspace for each of its two handles.
    assert torch.cuda.memory_allocated() - before[0] <= 2 * 33 * MiB
    assert torch.cuda.memory_reserved() - before[1] <= 4 * 33 * MiB
    assert reserved_peak(tmp_path, Convolutions(found.batch_size)) is not None


def test_what_else_is_allocated_on_the_device_leaves_less(tmp_path):
    alone = mc.fit_batch_size(
        trainer(tmp_path, limit_val_batches=0), Convolutions(), capacity=LIMIT_BYTES + CONTEXT_BYTES
    )
    other = torch.empty(512 * MiB, dtype=torch.uint8, device="cuda")
    found = mc.fit_batch_size(
        trainer(tmp_path, limit_val_batches=0), Convolutions(), capacity=LIMIT_BYTES + CONTEXT_BYTES
    )
    assert other.nbytes == 512 * MiB
    assert 0.6 * alone.batch_size < found.batch_size < 0.8 * alone.batch_size
    assert (len(found.trials), found.num_ooms) == (1, 0)


def test_the_callback_trains_with_what_it_found(tmp_path):
    callback = mc.MemoryCallback(fit_batch_size=True, device=LIMIT_BYTES + CONTEXT_BYTES)
    module = Convolutions()
    trainer(tmp_path, [callback], max_steps=4, limit_val_batches=0).fit(module)
    (trial,) = callback.fitted.trials
    assert module.batch_size == callback.fitted.batch_size
    assert {step.batch_size for step in callback.recorder.steps} == {module.batch_size}
    assert callback.recorder.lifetime_peak_reserved_bytes <= trial.budget_bytes


def test_the_memory_of_the_device_is_planned_for_by_default(tmp_path):
    found = mc.fit_batch_size(trainer(tmp_path), Convolutions(), max_batch_size=64)
    assert found.batch_size == 64
    assert found.capacity_bytes == LIMIT_BYTES + found.outside_bytes
    assert 0 < found.outside_bytes < found.capacity_bytes


def test_of_a_bounded_allocator_the_bound_is_planned_for(tmp_path, monkeypatch):
    found = mc.fit_batch_size(trainer(tmp_path, limit_val_batches=0), Convolutions(), headroom=0)
    assert (found.num_ooms, len(found.trials)) == (0, 1)
    assert LIMIT_BYTES / 2 < found.trials[0].peak_bytes <= LIMIT_BYTES
    batch = (torch.zeros(4, 3, 32, 32), torch.zeros(4, dtype=torch.long))
    advice = mc.suggest_batch_size(
        mc.TrainingStep.from_lightning(Convolutions(), batch), device="cuda", headroom=0
    )
    assert 0.9 * found.batch_size < advice.batch_size < 1.1 * found.batch_size
    # What others use of the device leaves as much, where the bound is less than what is left.
    memory = device_here.device_memory(torch.device("cuda"))
    used = replace(memory, used_bytes=memory.used_bytes + 60 * GiB, other_processes_bytes=60 * GiB)
    monkeypatch.setattr(device_here, "device_memory", lambda _: used)
    beside = mc.suggest_batch_size(
        mc.TrainingStep.from_lightning(Convolutions(), batch), device="cuda", headroom=0
    )
    assert 0.9 * advice.batch_size < beside.batch_size < 1.1 * advice.batch_size
    monkeypatch.undo()
    callback = mc.MemoryCallback(headroom=0)
    trainer(tmp_path, [callback], max_steps=4, limit_val_batches=0).fit(Convolutions())
    assert 0.9 * found.batch_size < callback.report.advice.batch_size < 1.1 * found.batch_size


class Looks(Callback):
    """Notes the state of a training on its device, at the start of a fit."""

    def on_fit_start(self, trainer, pl_module):
        tensors = {**dict(pl_module.named_parameters()), **dict(pl_module.named_buffers())}
        self.places = {name: (id(tensor), tensor.data_ptr()) for name, tensor in tensors.items()}
        self.values = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        self.generators = torch.cuda.get_rng_state_all()
        self.optimizer = trainer.optimizers[0].state_dict()
        self.has_gradients = any(parameter.grad is not None for parameter in pl_module.parameters())


def test_the_device_is_as_before_when_training_begins(tmp_path):
    before, after = Looks(), Looks()
    callback = mc.MemoryCallback(
        fit_batch_size=True, device=LIMIT_BYTES + CONTEXT_BYTES, predict=False
    )
    module = Convolutions()
    with torch.no_grad():
        module.network[1].running_mean.fill_(3)
    trainer(tmp_path, [before, callback, after], max_steps=2).fit(module)
    assert callback.fitted.batch_size > 100
    assert after.places == before.places
    assert all(torch.equal(after.values[name], value) for name, value in before.values.items())
    assert all(torch.equal(*pair) for pair in zip(after.generators, before.generators, strict=True))
    assert after.optimizer == before.optimizer
    assert not after.has_gradients


def test_what_a_kernel_has_changed_on_the_device_is_put_back():
    values = torch.arange(8.0)
    tensor = values.cuda()
    first = tensor.cpu()
    state = RunState([tensor], device=tensor.device)
    tensor.mul_(2).add_(1)
    state.restore()
    assert torch.equal(tensor.cpu(), first)
