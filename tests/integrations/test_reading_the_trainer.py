"""What a LightningModule's step reads of its Trainer is there while the step is predicted."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning import LightningDataModule, LightningModule, Trainer
from needs import needs_ranks
from torch import nn
from torch.utils.data import DataLoader

import memcallback as mc

WIDTH, BATCH_SIZE, NUM_BATCHES, RANKS = 64, 4, 6, 3


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch, batch_idx):
        return self.network(batch).mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class DataModule(LightningDataModule):
    def __init__(self):
        super().__init__()
        self.num_classes, self.seen, self.notes = 7, [], SimpleNamespace()

    @property
    def num_devices(self):
        return self.trainer.world_size

    def loader(self):
        return DataLoader(torch.ones(NUM_BATCHES * BATCH_SIZE, WIDTH), BATCH_SIZE)

    train_dataloader = val_dataloader = loader


def trainer(folder, **options):
    return Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=folder, **options,
    )  # fmt: skip


READS = {
    "batches of its loader": lambda it: len(it.trainer.train_dataloader),
    "batches": lambda it: it.trainer.num_training_batches,
    "epochs": lambda it: it.trainer.max_epochs,
    "its epoch": lambda it: it.current_epoch,
    "updates so far": lambda it: it.global_step,
    "updates in all": lambda it: it.trainer.estimated_stepping_batches,
    "its data module": lambda it: it.trainer.datamodule is None,
    "devices": lambda it: it.trainer.world_size,
    "stage": lambda it: (it.trainer.training, it.trainer.validating),
}


#: A copy of the module has no other.
FOUND: dict = {}


class Reads(Module):
    """Notes what it finds, predicted (on fake tensors) and trained."""

    def training_step(self, batch, batch_idx):
        self.note(batch, "training")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:  # before which Lightning makes no training loader
            self.note(batch, "validation")

    def note(self, batch, stage):
        kind = "trained" if type(batch) is torch.Tensor else "predicted"
        for name, read in READS.items():
            FOUND.setdefault((kind, stage, name), read(self))


def test_a_step_reads_of_its_fit_what_is_so(tmp_path):
    first = trainer(tmp_path, max_epochs=2)
    first.fit(Module(), datamodule=DataModule())
    first.save_checkpoint(tmp_path / "last.ckpt")
    fit = trainer(tmp_path, max_epochs=3, limit_train_batches=NUM_BATCHES - 1,
        callbacks=[mc.MemoryCallback(wait_for_prediction=True)],
    )  # fmt: skip
    FOUND.clear()
    fit.fit(Reads(), DataModule().loader(), DataModule().loader(), ckpt_path=tmp_path / "last.ckpt")
    found = {
        kind: {key[1:]: it for key, it in FOUND.items() if key[0] == kind} for kind, *_ in FOUND
    }
    assert len(found["predicted"]) == 2 * len(READS)
    # The validation is predicted as the training begins.
    found["trained"]["validation", "updates so far"] -= NUM_BATCHES - 1
    assert found["predicted"] == found["trained"]
    assert found["predicted"]["training", "its epoch"] == 2


class UsesData(Module):
    """Has as many rows as the DataModule has classes and its Trainer devices, and writes to it."""

    def training_step(self, batch, batch_idx):
        data = self.trainer.datamodule
        data.seen.append(len(batch))
        data.notes.last = len(batch)
        rows = torch.ones(data.num_classes * data.num_devices * 1000, WIDTH, device=self.device)
        return super().training_step(batch, batch_idx) + rows.sum()


class Rows(Module):
    def training_step(self, batch, batch_idx):
        rows = torch.ones(7000, WIDTH, device=self.device)
        return super().training_step(batch, batch_idx) + rows.sum()


def test_the_data_module_is_there_and_nothing_is_written_to_it(monkeypatch):
    data, batch = DataModule(), torch.ones(BATCH_SIZE, WIDTH)

    def phases(module, **options):
        step = mc.TrainingStep.from_lightning(module, batch, datamodule=data)
        return mc.predict(step, device="cpu", **options).phases

    monkeypatch.setenv("MEMCALLBACK_ISOLATE", "1")
    assert phases(UsesData()) == phases(Rows())
    assert (data.seen, vars(data.notes)) == ([], {})
    # In this process, what a step writes to an object would stay there.
    phases(UsesData(), isolate=False)
    assert (data.seen, vars(data.notes)) == ([], {})


class Contrastive(Module):
    """Compares its features with those of all ranks."""

    def __init__(self, gather):
        super().__init__()
        self.gather = gather

    def training_step(self, batch, batch_idx):
        features = self.network(batch)
        return (self.gather(self, features).flatten(0, 1) @ features.T).logsumexp(0).mean()


def stacked(features):
    """As Lightning's documentation says: of shape (ranks, batch, ...)."""
    return torch.stack(torch.distributed.nn.functional.all_gather(features))


@needs_ranks
@pytest.mark.parametrize(
    ("gather", "same"),
    [
        (lambda it, own: it.all_gather(own, sync_grads=True), stacked),
        (lambda it, own: it.all_gather(own), lambda own: stacked(own.detach())),
        (
            lambda it, own: it.trainer.strategy.all_gather(own, sync_grads=True)[
                : it.trainer.world_size
            ],
            stacked,
        ),
        (lambda it, own: it.all_gather({"features": own})["features"].detach(),
         lambda own: stacked(own.detach())),
    ],
    ids=["with gradients", "without", "by the strategy", "in a dict"],
)  # fmt: skip
def test_features_are_gathered_from_all_ranks(gather, same):
    batch = torch.ones(BATCH_SIZE, WIDTH)

    def phases(gather):
        step = mc.TrainingStep.from_lightning(Contrastive(gather), batch, ranks=mc.Ranks(RANKS))
        found = mc.predict(step, device="cpu")
        return [(phase, window.peak_allocated_bytes) for phase, window in found.phases.items()]

    assert phases(gather) == phases(lambda it, own: same(own))
    assert phases(gather) != phases(lambda it, own: own[None])


def test_one_device_gathers_its_own_features():
    batch = torch.ones(BATCH_SIZE, WIDTH)
    sizes = []

    class Alone(Module):
        def training_step(self, batch, batch_idx):
            features = self.network(batch)
            sizes.append(self.all_gather(features).shape)
            return features.mean()

    assert not dist.is_initialized()
    mc.predict(mc.TrainingStep.from_lightning(Alone(), batch), device="cpu", isolate=False)
    assert {size[1:] for size in sizes} == {torch.Size([WIDTH])}


@needs_ranks
def test_a_collective_that_fails_says_why():
    class Wrong(Module):
        def training_step(self, batch, batch_idx):
            dist.all_gather_into_tensor(batch, "no tensor")

    step = mc.TrainingStep.from_lightning(
        Wrong(), torch.ones(BATCH_SIZE, WIDTH), ranks=mc.Ranks(RANKS)
    )
    with pytest.raises(mc.PredictionError, match="input_tensor"):
        mc.predict(step, device="NVIDIA L4", isolate=False)


def test_a_class_of_the_users_may_have_the_name_of_lightnings():
    class LightningModule(Module):
        __module__ = "project.core.base"

        def training_step(self, batch, batch_idx):
            return self.all_gather(self.network(batch)).mean()

    step = mc.TrainingStep.from_lightning(LightningModule(), torch.ones(BATCH_SIZE, WIDTH))
    assert mc.predict(step, device="cpu", isolate=False).peak_allocated_bytes > 0
