"""LightningModules and DataModules that bring a batch to the device themselves, or change it there:
foreseen, on a CUDA device, real or virtual, to the byte; and left as they are.
"""

import lightning.pytorch as L
import pytest
import torch
import training
from torch import nn
from torch.nn import functional as F

import memcallback as mc

BATCH, WIDTH = 1024, 4096
INPUT = BATCH * WIDTH * 4
MiB = 1 << 20


class Probe(L.LightningModule):
    """A model whose input is most of its memory."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), foreach=False)


class Augments(Probe):
    """In training alone, as augmentations are documented."""

    def __init__(self):
        super().__init__()
        self.augment = nn.Sequential(nn.Dropout(0.1), nn.Hardtanh())

    def on_after_batch_transfer(self, batch, dataloader_idx):
        features, classes = batch
        if self.trainer.training:
            features = self.augment(features)
        return features, classes


class Normalizes(Probe):
    """Small pixels come to the device, and numbers are made of them there."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0].float().div_(255), batch[1]


class Samples(Probe):
    """Random numbers, and a batch that is a dictionary from here on."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        noise = torch.randn_like(batch[0])
        return {"features": batch[0] + 0.1 * noise, "classes": batch[1]}

    def training_step(self, batch, batch_idx):
        return super().training_step((batch["features"], batch["classes"]), batch_idx)

    validation_step = training_step


class LeavesOnHost(Probe):
    """The third part of a batch stays on the host."""

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        features, classes, names = batch
        moved = super().transfer_batch_to_device((features, classes), device, dataloader_idx)
        return [*moved, names]


class MovesInTheStep(Probe):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch

    def training_step(self, batch, batch_idx):
        return super().training_step([part.to(self.device) for part in batch], batch_idx)

    validation_step = training_step


class Augmenting(L.LightningDataModule):
    """A DataModule with the hook."""

    def __init__(self):
        super().__init__()
        self.augment = nn.Dropout(0.1)
        self.data = dataset(torch.float32, 0)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        features, classes = batch
        return (self.augment(features) if self.trainer.training else features), classes

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.data, batch_size=BATCH)


def dataset(dtype, num_more, num_batches=3):
    features = torch.zeros(BATCH * num_batches, WIDTH, dtype=dtype)
    classes = torch.zeros(BATCH * num_batches, dtype=torch.int64)
    return torch.utils.data.TensorDataset(features, classes, *[features] * num_more)


def batch(dtype=torch.float32, num_more=0):
    return [*dataset(dtype, num_more, num_batches=1).tensors]


def predicted(module, *given, **options):
    step = mc.TrainingStep.from_lightning(module, batch(*given), **options)
    return mc.predict(step, device="NVIDIA H200")


def test_what_a_hook_makes_on_the_device_is_foreseen():
    plain, augmented = predicted(Probe()), predicted(Augments())
    assert augmented.peak_allocated_bytes == plain.peak_allocated_bytes
    # The batch, what the first layer makes of it, and what the second does.
    assert abs(augmented.peak_reserved_bytes - plain.peak_reserved_bytes - 2 * INPUT) <= 4 * MiB


def test_what_a_hook_leaves_on_the_host_is_not_on_the_device():
    plain, left = predicted(Probe()), predicted(LeavesOnHost(), torch.float32, 1)
    assert left.peak_allocated_bytes == plain.peak_allocated_bytes
    assert left.peak_reserved_bytes == plain.peak_reserved_bytes


def test_a_batch_may_move_in_the_step():
    plain, moved = predicted(Probe()), predicted(MovesInTheStep())
    # The backward pass lets go of the features, which nobody else holds.
    assert INPUT < moved.peak_allocated_bytes < plain.peak_allocated_bytes
    (at_start, *_), (plain_at_start, *_) = (one.step.windows for one in (moved, plain))
    assert plain_at_start.start.allocated_bytes - at_start.start.allocated_bytes > INPUT


def test_the_hook_of_a_datamodule_comes_before_that_of_the_module():
    augmented = predicted(Probe(), datamodule=Augmenting())
    assert augmented.peak_reserved_bytes - predicted(Probe()).peak_reserved_bytes >= INPUT - 4 * MiB
    both = predicted(Normalizes(), datamodule=Augmenting())
    assert both.peak_reserved_bytes == augmented.peak_reserved_bytes


def test_a_hook_knows_the_stage():
    def reserved(module):
        step = mc.InferenceStep.from_lightning(module, batch())
        return mc.predict(step, device="NVIDIA H200").peak_reserved_bytes

    assert reserved(Augments()) == reserved(Probe())
    assert reserved(Normalizes()) == reserved(Probe())  # floats stay what they are


def test_a_hook_that_fails_on_fakes_is_left_out_and_named():
    class Reads(Probe):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            raise KeyError("not in a prediction")

    left_out = predicted(Reads())
    assert left_out.peak_reserved_bytes == predicted(Probe()).peak_reserved_bytes
    (said,) = [one for one in left_out.caveats if "on_after_batch_transfer" in one]
    assert "Reads.on_after_batch_transfer cannot be traced" in said
    assert "not in a prediction" in said


def test_a_variant_of_a_step_keeps_the_datamodule():
    step = mc.TrainingStep.from_lightning(Probe(), batch(), datamodule=Augmenting())
    assert step.varied(accumulate=2).datamodule is step.datamodule


class Watching(L.Callback):
    """Notes whether something of ours is on the strategy."""

    def __init__(self):
        self.found = []

    def _note(self, trainer):
        self.found.append("batch_to_device" in vars(trainer.strategy))

    def on_train_batch_end(self, trainer, *_):
        self._note(trainer)

    def on_fit_end(self, trainer, *_):
        self._note(trainer)


class Counts(Augments):
    """Keeps what each call of the hook got."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.seen, self.fails_at = [], fails_at

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if len(self.seen) == self.fails_at:
            raise KeyError("of the user")
        self.seen.append((self.trainer.training, batch[0].shape[0], batch[0].double().sum().item()))
        return super().on_after_batch_transfer(batch, dataloader_idx)


def small(module, tmp_path, callbacks, **options):
    """A fit of a few small batches."""
    trainer = training.trainer(
        tmp_path, callbacks, limit_val_batches=1, num_sanity_val_steps=1, **options
    )
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.rand(12, WIDTH), torch.zeros(12, dtype=torch.int64)),
        batch_size=4,
    )
    trainer.fit(module, loader, loader)
    return trainer


def test_the_hook_runs_as_often_as_without_and_nothing_stays(tmp_path):
    seen, weights = [], []
    for callbacks in ([], [mc.MemoryCallback(wait_for_prediction=True)]):
        torch.manual_seed(3)
        module, watching = Counts(), Watching()
        small(module, tmp_path, [*callbacks, watching])
        seen.append(module.seen)
        weights.append([*module.parameters()])
        assert not any(watching.found)
    assert seen[0] == seen[1]
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("fails_at", [0, 1, 2])  # in the sanity check, the first batch, the second
def test_nothing_stays_after_an_error(tmp_path, fails_at):
    callback = mc.MemoryCallback()
    strategies = []

    class Sees(L.Callback):
        def on_exception(self, trainer, *_):
            strategies.append(trainer.strategy)

    with pytest.raises(KeyError, match="of the user"):
        small(Counts(fails_at), tmp_path, [Sees(), callback])
    assert "batch_to_device" not in vars(strategies[0])


def test_what_others_put_on_the_strategy_stays(tmp_path):
    class Wraps(L.Callback):
        calls = 0

        def __init__(self, hook):
            setattr(self, hook, self._wrap)

        def _wrap(self, trainer, *_):
            before = trainer.strategy.batch_to_device

            def batch_to_device(*args, **kwargs):
                self.calls += 1
                return before(*args, **kwargs)

            trainer.strategy.batch_to_device = batch_to_device

    earlier, later = Wraps("on_fit_start"), Wraps("on_train_start")
    small(Counts(), tmp_path, [earlier, mc.MemoryCallback(), later], max_epochs=1)
    assert (earlier.calls, later.calls) == (5, 4)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("make", "dtype", "num_more"),
    [
        (Probe, torch.float32, 0),
        (Augments, torch.float32, 0),
        (Normalizes, torch.uint8, 0),
        (Samples, torch.float32, 0),
        (LeavesOnHost, torch.float32, 1),
        (MovesInTheStep, torch.float32, 0),
    ],
)
@pytest.mark.parametrize("validates", [False, True])
def test_what_a_trainer_reserves_is_predicted_to_the_byte(
    tmp_path, make, dtype, num_more, validates
):
    loader = torch.utils.data.DataLoader(dataset(dtype, num_more), batch_size=BATCH)
    data = {"train_dataloaders": loader} | ({"val_dataloaders": loader} if validates else {})
    training.check_on_cuda(tmp_path, make(), **data)


@pytest.mark.cuda
def test_that_with_the_hook_of_a_datamodule_too(tmp_path):
    training.check_on_cuda(tmp_path, Probe(), datamodule=Augmenting())
