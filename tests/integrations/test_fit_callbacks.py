"""What other callbacks of a Trainer do to a training is in the search, or said."""

from __future__ import annotations

from itertools import repeat

import pytest
import torch
import training
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelPruning,
    StochasticWeightAveraging,
)
from test_fit_batch_size import SHORT, Sized, Stream, fit
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import memcallback as mc
from memcallback.core.units import MiB
from memcallback.integrations.lightning.fit.settings import notes_on_callbacks


class Wide(Sized):
    """Its gradients are a good part of what it takes, so that those that live through a forward
    pass show.
    """

    def __init__(self, **options):
        super().__init__(**options)
        self.network = nn.Sequential(
            nn.Linear(training.NUM_FEATURES, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.Linear(512, training.NUM_CLASSES),
        )


CAPACITY = "8MiB"
#: Little data: enough for two updates of four batches, and no limit to the size.
OPTIONS = {"max_epochs": 2, "limit_train_batches": 8}


def found_with(tmp_path, callbacks=(), **options):
    return fit(
        tmp_path, Wide(), capacity=CAPACITY, callbacks=callbacks, trainer_options=OPTIONS | options
    )


def test_a_schedule_of_accumulation_is_tried_as_the_number_that_it_reaches(tmp_path):
    once, _ = found_with(tmp_path)
    four, _ = found_with(tmp_path, accumulate_grad_batches=4)
    assert four.batch_size < 0.95 * once.batch_size
    for schedule, expected in (({0: 4}, four), ({1: 3}, four), ({0: 1, 2: 4}, once)):
        found, loop = found_with(tmp_path, [GradientAccumulationScheduler(schedule)])
        assert (found.trials, found.predicted_batch_size) == (
            expected.trials,
            expected.predicted_batch_size,
        )
        assert loop.accumulate_grad_batches == 1
        assert [type(one) for one in loop.callbacks] == [GradientAccumulationScheduler]


@pytest.mark.parametrize("is_the_callbacks_own", [True, False])
def test_training_with_a_schedule_takes_what_the_trial_took(tmp_path, is_the_callbacks_own):
    schedule = {0: 2, 1: 4}
    own = mc.MemoryCallback(
        accumulate=schedule if is_the_callbacks_own else None, fit_batch_size=True, device=CAPACITY
    )
    callbacks = [own] if is_the_callbacks_own else [GradientAccumulationScheduler(schedule), own]
    loop, module = (
        training.trainer(tmp_path, callbacks, log_every_n_steps=1, **(SHORT | OPTIONS)),
        Wide(),
    )
    loop.fit(module)
    peak = max(step.peak_allocated_bytes for step in own.recorder.steps)
    assert own.recorder.steps[-1].batch_size == own.fitted.batch_size == module.batch_size
    assert 0.9 * 8 * MiB < peak <= own.fitted.trials[-1].peak_bytes
    assert loop.global_step == 6
    assert loop.accumulate_grad_batches == (1 if is_the_callbacks_own else 4)


def test_a_trainer_that_accumulates_without_end_of_epochs_is_tried_with_all_of_its_schedule(
    tmp_path,
):
    four, _ = found_with(tmp_path, accumulate_grad_batches=4)
    found, _ = found_with(tmp_path, [GradientAccumulationScheduler({0: 1, 900: 4})], max_epochs=-1)
    assert found.batch_size == four.batch_size


# What is said.


class Freezes(BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.network[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.network[0], optimizer)


class TrainsWhatCanBeTrained(Sized):
    def configure_optimizers(self):
        return torch.optim.Adam(one for one in self.parameters() if one.requires_grad)


def test_callbacks_that_change_what_trains_later_are_named():
    later = [Freezes(), StochasticWeightAveraging(swa_lrs=0.01), ModelPruning("l1_unstructured")]
    for callbacks, names in (
        (later[:1], "Freezes"),
        (later, "Freezes, StochasticWeightAveraging, ModelPruning"),
    ):
        loop = Trainer(
            callbacks=[LearningRateMonitor(), *callbacks],
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
        )
        assert notes_on_callbacks(loop) == (
            f"{names} may make later steps take much more memory than the trials, which run only "
            "the first steps. Give a larger headroom, or search with a Trainer and a module that "
            "are set up as they will be in later steps.",
        )
    assert (
        notes_on_callbacks(
            Trainer(callbacks=[LearningRateMonitor()], accelerator="cpu", logger=False)
        )
        == ()
    )


def test_a_search_with_such_a_callback_says_so(tmp_path):
    found, _ = fit(tmp_path, TrainsWhatCanBeTrained(), callbacks=[Freezes()], max_batch_size=64)
    note = found.notes[-1]
    assert note.startswith("Freezes may make later steps take much more memory")
    assert note in " ".join(found.to_text().split())


def test_how_many_samples_make_an_update_is_said_where_batches_are_accumulated(tmp_path, capsys):
    found, _ = fit(tmp_path, max_batch_size=64, trainer_options={"accumulate_grad_batches": 4})
    assert found.notes[-1] == "One update uses 256 samples (4 batches of 64); previously 32."
    own = mc.MemoryCallback(
        accumulate={0: 1, 1: 3}, fit_batch_size=True, device="4MiB", predict=False
    )
    training.trainer(tmp_path, [own], **(SHORT | {"max_epochs": 2, "limit_val_batches": 0})).fit(
        Sized(num_samples=120)
    )
    note = "One update uses up to 120 samples (a whole epoch); previously up to 24."
    assert own.fitted.notes[-1] == note
    assert note in capsys.readouterr().out
    plain, _ = fit(tmp_path, max_batch_size=64)
    assert not any("update" in note for note in plain.notes)


# The way out where the callback looks.


class Unused(Sized):
    """Its memory does not grow with the batch."""

    def training_step(self, batch, batch_idx):
        return self.network(torch.ones(4, training.NUM_FEATURES)).sum()


class Endless(IterableDataset):
    def __iter__(self):
        return repeat(torch.empty(0))


@pytest.mark.parametrize(
    ("module", "data"), [(Unused, Endless), (training.Automatic, lambda: Stream(40))]
)
def test_the_words_of_the_callback_name_a_way_out_that_it_has(tmp_path, module, data):
    own = mc.MemoryCallback(fit_batch_size=True, device="4MiB", predict=False)
    loop = training.trainer(tmp_path, [own], max_steps=3, limit_val_batches=0)
    with pytest.warns(mc.MemoryWarning, match="No batch size was found") as caught:
        loop.fit(module(), DataLoader(data(), 8))
    (text,) = (str(one.message) for one in caught if one.category is mc.MemoryWarning)
    assert text.endswith(
        "memcallback.fit_batch_size(trainer, module, max_batch_size=...) before trainer.fit, "
        "without MemoryCallback(fit_batch_size=True)."
    )
    assert loop.global_step == 3
    # As it says.
    loop = training.trainer(tmp_path, limit_val_batches=0)
    found = mc.fit_batch_size(
        loop, module(), train_dataloaders=DataLoader(data(), 8), capacity="4MiB", max_batch_size=40
    )
    assert found.batch_size == 40
