"""Trainings on a device that begin with segments which something before them has left."""

import gc

import lightning.pytorch as L
import pytest
import torch
import training
from device_loop import empty_device
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import memcallback as mc

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


def trained(model, batch, optimizer=None, num_steps=3):
    """What is predicted of a training, and its last step."""
    optimizer = torch.optim.Adam(model.parameters()) if optimizer is None else optimizer
    step = mc.TrainingStep(
        model, batch, loss=lambda model, batch: model(batch).sum(), optimizer=optimizer
    )
    recorder = mc.MemoryRecorder(model, optimizer)
    with mc.MemoryLog(recorder, step, log_dir=None, wait_for_prediction=True) as log:
        for _ in range(num_steps):
            on_device = batch.cuda()
            with recorder.step(on_device):
                optimizer.zero_grad()
                with recorder.phase(mc.Phase.FORWARD):
                    loss = model(on_device).sum()
                with recorder.phase(mc.Phase.BACKWARD):
                    loss.backward()
                with recorder.phase(mc.Phase.OPTIMIZER_STEP):
                    optimizer.step()
            del on_device, loss
        prediction = log.prediction
    return prediction, recorder.steps[-1]


def layers():
    return nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 512)).cuda()


def loop(batch):
    """A training with a model of its own."""
    found = trained(layers(), batch)
    gc.collect()
    return found


def test_a_second_training_in_a_process():
    empty_device()
    first, measured = loop(torch.zeros(4096, 2048))
    assert first.at_start == ()
    assert first.peak_reserved_bytes == measured.peak_reserved_bytes
    second, measured = loop(torch.zeros(512, 2048))
    assert second.peak_reserved_bytes == measured.peak_reserved_bytes
    assert sum("something ran before" in caveat for caveat in second.caveats) == 1
    # For a process of its own it is the same as if nothing had been there.
    assert second.on("RTX 3090").peak_reserved_bytes < measured.peak_reserved_bytes / 1.5


def test_an_allocator_that_has_no_snapshot(monkeypatch):
    def fail(**_):
        raise RuntimeError("no snapshot")

    empty_device()
    monkeypatch.setattr(torch.cuda, "memory_snapshot", fail)
    prediction, measured = loop(torch.zeros(512, 2048))
    assert prediction.peak_reserved_bytes == measured.peak_reserved_bytes


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("keeps_optimizer", [False, True])
def test_the_same_model_once_more(has_gradients, keeps_optimizer):
    empty_device()
    model = layers()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, torch.zeros(4096, 2048), optimizer)
    if not has_gradients:
        optimizer.zero_grad()
    if not keeps_optimizer:
        optimizer = torch.optim.Adam(model.parameters())
    gc.collect()
    prediction, measured = trained(model, torch.zeros(512, 2048), optimizer)
    assert prediction.peak_allocated_bytes == measured.peak_allocated_bytes
    assert prediction.peak_reserved_bytes == measured.peak_reserved_bytes


def test_a_batch_on_the_device_that_all_steps_share():
    empty_device()
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).cuda()
    batch = torch.zeros(1024, 1024).cuda()
    prediction, measured = trained(model, batch)
    assert prediction.peak_reserved_bytes == measured.peak_reserved_bytes


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
    loop(torch.zeros(8, 2048))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", of_before)
    loop(torch.zeros(8, 2048))
    assert calls == [False, "all"]
    torch.cuda.memory._record_memory_history(max_entries=10)
    try:
        loop(torch.zeros(8, 2048))
    finally:
        torch.cuda.memory._record_memory_history(None)
    assert calls == [False, "all"]
