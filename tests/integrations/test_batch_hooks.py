"""LightningModules and DataModules that bring a batch to the device themselves, or change it there:
foreseen, on a CUDA device, real or virtual, to the byte; and left as they are.
"""

import pickle
from dataclasses import dataclass

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


class GivesBack(Probe):
    """Its batches are on the device before the Trainer gets them."""

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch


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


def test_what_a_datamodule_keeps_is_not_made_on_fakes():
    class Caches(Augmenting):
        def __init__(self):
            super().__init__()
            self.cache, self.sizes = {}, {"of": {"batches": []}}

        def on_after_batch_transfer(self, batch, dataloader_idx):
            mean = self.cache.setdefault("mean", torch.ones(WIDTH, device=batch[0].device))
            self.sizes["of"]["batches"].append(len(batch[0]))
            return batch[0] - mean, batch[1]

    data = Caches()
    step = mc.TrainingStep.from_lightning(Probe(), batch(), datamodule=data)
    assert mc.predict(step, device="NVIDIA H200", isolate=False).peak_reserved_bytes
    assert (data.cache, data.sizes) == ({}, {"of": {"batches": []}})


def test_what_a_datamodule_has_in_common_with_the_model_counts_once():
    class Shares(Augmenting):
        def __init__(self, module):
            super().__init__()
            self.encoder, self.mean = module.layers, torch.ones(WIDTH)
            self.more = [nn.Linear(WIDTH, WIDTH).requires_grad_(False)]

        def on_after_batch_transfer(self, batch, dataloader_idx):
            with torch.no_grad():
                self.encoder(batch[0])
            return batch

    class OfTheModule(Probe):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            with torch.no_grad():
                self.layers(batch[0])
            return batch

    def foreseen(module, **options):
        found = predicted(module, **options)
        assert not any("left out" in said for said in found.caveats)
        return found.peak_allocated_bytes, found.peak_reserved_bytes

    module = Probe()
    step = mc.TrainingStep.from_lightning(module, batch(), datamodule=Shares(module))
    shared = mc.predict(step, device="NVIDIA H200")
    assert not any("left out" in said for said in shared.caveats)
    # What only the DataModule has is on the host, where the loader's batches come from.
    assert (shared.peak_allocated_bytes, shared.peak_reserved_bytes) == foreseen(OfTheModule())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor.*are deprecated")
def test_a_datamodule_without_hooks_may_hold_what_no_fake_can_stand_for():
    class Holds(L.LightningDataModule):
        def __init__(self):
            super().__init__()
            self.quantized = torch.quantize_per_tensor(torch.ones(4, 2), 0.1, 0, torch.qint8)

    held = predicted(Probe(), datamodule=Holds())
    assert held.peak_reserved_bytes == predicted(Probe()).peak_reserved_bytes

    class HoldsWithHook(Holds):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

    (said,) = [
        one for one in predicted(Probe(), datamodule=HoldsWithHook()).caveats if "HoldsWith" in one
    ]
    assert said.startswith("HoldsWithHook cannot be copied, so what it allocates for a batch")


def test_a_validation_after_a_training_runs_the_datamodules_hooks_in_both():
    def reserved(**options):
        module = Probe()
        training = mc.TrainingStep.from_lightning(module, batch(), **options)
        step = mc.InferenceStep.from_lightning(module, batch(), after=training)
        return mc.predict(step, device="NVIDIA H200").run_peak_reserved_bytes

    assert reserved(datamodule=Augmenting()) >= reserved() + INPUT - 4 * MiB


def test_a_variant_of_a_step_keeps_the_datamodule():
    step = mc.TrainingStep.from_lightning(Probe(), batch(), datamodule=Augmenting())
    assert step.varied(accumulate=2).lightning.datamodule is step.lightning.datamodule


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


def fit_and_predict(module, tmp_path, collate=None, **options):
    """The callback of a fit of one batch of four samples, whose prediction is there."""
    callback = mc.MemoryCallback(wait_for_prediction=True)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.rand(12, WIDTH), torch.zeros(12, dtype=torch.int64)),
        batch_size=4,
        collate_fn=collate,
    )
    training.trainer(tmp_path, [callback], max_epochs=2, **options).fit(module, loader)
    return callback


class Pickles(Counts):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        strategy = self.trainer.strategy
        bring = pickle.loads(pickle.dumps(strategy.batch_to_device))
        assert type(bring.__self__) is type(strategy)
        return super().on_after_batch_transfer(batch, dataloader_idx)


def test_a_strategy_can_be_pickled_while_batches_are_seen(tmp_path):
    small(Pickles(), tmp_path, [mc.MemoryCallback()], max_epochs=1)


class TwoViews(Probe):
    """Twice as many samples as the loader gives."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return torch.cat([batch[0], batch[0].flip(-1)]), batch[1].repeat(2)


def test_the_batch_size_is_that_of_the_model(tmp_path):
    callback = fit_and_predict(TwoViews(), tmp_path)
    assert isinstance(callback.prediction, mc.Prediction)
    assert callback.prediction.batch_size == callback.recorder.steps[-1].batch_size == 8


class Decodes(Probe):
    """What its hook makes of a batch can be made of no fake."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if type(batch[0]) is not torch.Tensor:
            raise TypeError("this is no tensor")
        return {"x": batch[0] + 1, "y": batch[1]}

    def training_step(self, batch, batch_idx):
        return super().training_step((batch["x"], batch["y"]), batch_idx)


def test_where_a_hook_fails_on_fakes_the_batch_that_it_made_is_predicted(tmp_path):
    callback = fit_and_predict(Decodes(), tmp_path)
    assert isinstance(callback.prediction, mc.Prediction)
    (said,) = [one for one in callback.prediction.caveats if "Decodes" in one]
    assert said.startswith("Decodes.on_after_batch_transfer cannot be traced, so what it allocates")
    phases = callback.report.measured.phases
    assert callback.prediction.step.phases.keys() == phases.keys()


@dataclass
class Pair:
    """A batch that its hook changes in place."""

    x: torch.Tensor
    y: torch.Tensor


class Doubles(Probe):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch

    def on_after_batch_transfer(self, batch, dataloader_idx):
        batch.x = torch.cat([batch.x, batch.x], dim=1)
        return batch

    def training_step(self, batch, batch_idx):
        assert batch.x.shape[1] == 2 * WIDTH
        return super().training_step((batch.x[:, :WIDTH], batch.y), batch_idx)


def test_a_batch_that_a_hook_changes_in_place_is_predicted_as_it_was_made(tmp_path):
    def collate(rows):
        return Pair(*map(torch.stack, zip(*rows, strict=True)))

    callback = fit_and_predict(Doubles(), tmp_path, collate)
    assert isinstance(callback.prediction, mc.Prediction)
    # With the hook run once more the step would fail, and a caveat would say what is left out.
    assert not any("left out" in said for said in callback.prediction.caveats)


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
def test_batches_that_are_on_the_device_already(tmp_path):
    def on_device(rows):
        return [torch.stack(part).cuda() for part in zip(*rows, strict=True)]

    loader = torch.utils.data.DataLoader(
        dataset(torch.float32, 0), batch_size=BATCH, collate_fn=on_device
    )
    training.check_on_cuda(tmp_path, GivesBack(), train_dataloaders=loader)


@pytest.mark.cuda
def test_that_with_the_hook_of_a_datamodule_too(tmp_path):
    training.check_on_cuda(tmp_path, Probe(), datamodule=Augmenting())
