"""Small Lightning modules, each named for what it tests, and a Trainer that is quiet."""

from __future__ import annotations

import torch
from device_loop import empty_device
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memcallback as mc

NUM_FEATURES, NUM_HIDDEN, NUM_CLASSES = 64, 256, 10


def network():
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, NUM_HIDDEN),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(NUM_HIDDEN, NUM_CLASSES),
    )


class Automatic(LightningModule):
    """The usual module: Lightning runs the loop."""

    def __init__(self, optimizer=torch.optim.Adam):
        super().__init__()
        self.network = network()
        self.make_optimizer = optimizer

    def forward(self, features):
        return self.network(features)

    def training_step(self, batch, batch_idx):
        features, classes = batch
        loss = nn.functional.cross_entropy(self.network(features), classes)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.network(batch[0]), batch[1]))

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters(), lr=0.01)


class ManualTwoOptimizers(Automatic):
    """Two optimizers in one batch, through Lightning's own calls."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.network[0].parameters(), lr=0.01),
            torch.optim.Adam(self.network[3].parameters()),
        ]


class ManualTwoBackwards(Automatic):
    """Two losses, each with a backward pass, then one update."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for half in (0, 1):
            self.manual_backward(
                nn.functional.cross_entropy(self.network(batch[0][half::2]), batch[1][half::2])
            )
        optimizer.step()


class ManualRaw(Automatic):
    """Torch's optimizer and a bare loss.backward(): Lightning sees neither."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class SkipsOddBatches(Automatic):
    """A training_step that returns None."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


class OverflowsOnce(Automatic):
    """A loss of inf in the second batch, so that a GradScaler skips its update."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 1 else loss


def loader(num_batches=4, batch_size=8):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(num_batches * batch_size, NUM_FEATURES, generator=generator)
    classes = torch.randint(0, NUM_CLASSES, (num_batches * batch_size,), generator=generator)
    return DataLoader(TensorDataset(features, classes), batch_size=batch_size)


def trainer(tmp_path, callbacks=(), **options):
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "default_root_dir": tmp_path,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
        "log_every_n_steps": 1,
    }
    return Trainer(callbacks=list(callbacks), **(defaults | options))


class Reserved(Callback):
    """What is reserved as the training ends; the Trainer empties the allocator afterwards."""

    num_bytes = 0

    def on_train_end(self, trainer, *_):
        self.num_bytes = torch.cuda.memory_reserved()


def check_on_cuda(tmp_path, module, *, accumulate_grad_batches=1, precision="32-true", **data):
    """Compare three updates of a fit with what is predicted in it, to the byte."""
    empty_device()
    callback, reserved = mc.MemoryCallback(wait_for_prediction=True), Reserved()
    loop = trainer(
        tmp_path,
        [callback, reserved],
        accelerator="cuda",
        max_steps=3,
        max_epochs=None,
        accumulate_grad_batches=accumulate_grad_batches,
        precision=precision,
    )
    loop.fit(module, **data)
    foreseen, measured = callback.prediction, callback.report.measured
    both = [one for one in (foreseen, callback.validation) if one is not None]
    assert len(both) == 1 + ("val_dataloaders" in data)
    assert max(one.run_peak_reserved_bytes for one in both) == reserved.num_bytes
    for phase in measured.phases:
        windows = (step.phases[phase] for step in (measured, foreseen.step))
        sizes = [
            (
                window.start.allocated_bytes,
                window.peak_allocated_bytes,
                window.end.allocated_bytes,
            )
            for window in windows
        ]
        for ours, theirs in zip(*sizes, strict=True):
            assert abs(ours - theirs) <= 4 * 512, (phase, sizes)  # the Trainer's own numbers
