"""Trainings on a device that begin with segments which something before them has left."""

import lightning.pytorch as L
import own_process
import pytest
import torch
import trained_again
import training
from device_loop import empty_device
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.cuda
WIDTH = 12288


class Restores(L.LightningModule):
    """Its validation is small enough for its segments to be of use in the training."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 512), nn.SiLU())
        self.decoder = nn.Sequential(nn.Linear(512, 512), nn.SiLU(), nn.Linear(512, WIDTH))
        self.kept = []

    def on_after_batch_transfer(self, batch, dataloader_idx):
        images = batch[0].float().div_(255)
        return (images + torch.randn_like(images) if self.trainer.training else images), images

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.decoder(self.encoder(batch[0])), batch[1])

    def validation_step(self, batch, batch_idx):
        self.kept.append(self.decoder(self.encoder(batch[0])))

    def on_validation_epoch_end(self):
        self.kept.clear()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("num_samples", [16, 96, 256, 768])
def test_the_sanity_check_of_a_trainer(tmp_path, num_samples, precision):
    images = torch.zeros(3 * 256, WIDTH, dtype=torch.uint8)
    loaders = (DataLoader(TensorDataset(images), batch_size=size) for size in (256, num_samples))
    data = dict(zip(("train_dataloaders", "val_dataloaders"), loaders, strict=True))
    training.check_on_cuda(tmp_path, Restores(), precision=precision, **data)


@pytest.fixture(scope="module")
def trainings():
    """What trainings one after the other in one process were predicted to take, and took."""
    return own_process.result_of(trained_again.run)


def test_a_second_training_in_a_process(trainings):
    first, second = trainings["first"], trainings["second"]
    assert first["num_segments"] == 0
    assert first["predicted"] == first["measured"]
    assert second["predicted"] == second["measured"]
    assert sum("something ran before" in caveat for caveat in second["caveats"]) == 1
    # For a process of its own it is the same as if nothing had been there.
    assert second["alone"] < second["measured"][1] / 1.5


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("keeps_optimizer", [False, True])
def test_the_same_model_once_more(trainings, has_gradients, keeps_optimizer):
    found = trainings[has_gradients, keeps_optimizer]
    assert found["num_segments"] > 0
    assert found["predicted"] == found["measured"]


def test_a_batch_on_the_device_that_all_steps_share(trainings):
    found = trainings["shared batch"]
    assert found["predicted"] == found["measured"]


def test_an_allocator_that_has_no_snapshot(monkeypatch):
    def fail(**_):
        raise RuntimeError("no snapshot")

    empty_device()
    monkeypatch.setattr(torch.cuda, "memory_snapshot", fail)
    prediction, measured = trained_again.a_model_of_its_own(torch.zeros(512, 2048))
    assert prediction.at_start == ()
    assert prediction.peak_allocated_bytes == measured.peak_allocated_bytes


def test_a_recorded_history_is_not_read(monkeypatch):
    read, calls = torch.cuda.memory_snapshot, []

    def of_today(include_traces=True):
        calls.append(include_traces)
        return read()

    def of_before():
        calls.append("all")
        return read()

    empty_device()
    monkeypatch.setattr(torch.cuda, "memory_snapshot", of_today)
    trained_again.a_model_of_its_own(torch.zeros(8, 2048))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", of_before)
    trained_again.a_model_of_its_own(torch.zeros(8, 2048))
    assert calls == [False, "all"]
    torch.cuda.memory._record_memory_history(max_entries=10)
    try:
        trained_again.a_model_of_its_own(torch.zeros(8, 2048))
    finally:
        torch.cuda.memory._record_memory_history(None)
    assert calls == [False, "all"]
