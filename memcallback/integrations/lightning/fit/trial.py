"""Run a few steps of the Trainer's own loop.

The Trainer runs as it would train, so that what is measured is what training takes: sanity check,
batches moved to the device, accumulation, clipping, optimizer updates, validation. What would leave
a trace outside of the process is taken from it: callbacks, loggers, profiler, its folder.
Everything inside is put back by a `RunState` afterwards, these attributes too.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from memcallback.integrations.lightning.fit.loaders import (
    batch_size_of,
    check_can_be_read_again,
    leaves,
    num_samples,
    resized,
)
from memcallback.integrations.lightning.fit.settings import GIVE_LIMIT
from memcallback.integrations.lightning.fit.trial_meter import TrialMeter
from memcallback.integrations.lightning.trainer.state import lightning_of, quiet_logger
from memcallback.step.batch import infer_batch_size

#: Epochs in which no batch comes, before a trial is given up.
_NUM_EMPTY_EPOCHS = 2


class TrialOver(Exception):
    """The trial has seen what it was run for; no error, but the way out of Lightning's loops."""


class Probe:
    """The one callback of a trial: looks at the first batch, counts batches, ends the trial.

    Attributes:
        batch: The first batch, on the device, if none is to run.
        batch_size: Samples in a batch, as the loaders say; None before a batch.
        num_samples: Samples in an epoch, on this rank; None if there is no end that is known.
        num_run: Batches that were run.
    """

    def __init__(
        self,
        gauge: TrialMeter,
        num_batches: int,
        *,
        batch_size: int | None = None,
        is_inferred: bool = False,
        asked: str = "",
    ) -> None:
        self._gauge = gauge
        self.num_batches = num_batches
        self.batch: object = None
        self.batch_size: int | None = None
        self.num_samples: int | None = None
        self.num_run = 0
        self._wanted = batch_size
        self._is_inferred = is_inferred
        self._asked = asked
        self._num_epochs = 0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """See what the loaders say of themselves."""
        self._num_epochs += 1
        loaders = trainer.train_dataloader
        self.batch_size, self.num_samples = batch_size_of(loaders), num_samples(loaders)
        if self._wanted not in (None, self.batch_size):
            raise ValueError(
                f"train_dataloader() gives batches of {self.batch_size} samples where {self._asked} is {self._wanted}: it does not use it. "
                "Write DataLoader(..., batch_size=self.batch_size) in it."
            )
        if self._num_epochs - self.num_run > _NUM_EMPTY_EPOCHS:
            raise TrialOver

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the batch if it is what the trial was run for; else see that it is of the size that
        is tried.
        """
        if self.num_batches == 0:
            self.batch = batch
            raise TrialOver
        if (
            self._is_inferred
            and self.num_run == 0
            and (found := infer_batch_size(batch).batch_size) != self._wanted
        ):
            raise ValueError(
                f"The training loader was asked for batches of {self._wanted} samples, and its first one has {found}. Let its batch sampler use "
                f"its batch_size, or give the number of samples that there are: {GIVE_LIMIT}."
            )
        self._gauge.begin_step(batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After the last batch comes validation."""
        self._gauge.end_step(batch)
        self.num_run += 1
        trainer.should_stop = self.num_run >= self.num_batches

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A validation step begins."""
        self._gauge.begin_step(batch)

    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """It has ended."""
        self._gauge.end_step(batch)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Before the module's own hooks at the end of training, which write results."""
        if self.num_run >= self.num_batches:
            raise TrialOver


def run(
    trainer: Any,
    probe: Any,
    *,
    num_updates: int,
    accumulate: int,
    folder: str,
    train_loaders: Any = None,
) -> None:
    """Run a Trainer's loop until the probe ends it. The Trainer is left as the loop leaves it:
    restore it.
    """
    _stand_alone(trainer, probe, num_updates, folder)
    trainer.accumulate_grad_batches = accumulate
    loop = trainer.fit_loop
    # What was made for the batch size before is not asked again.
    loop._combined_loader = loop.epoch_loop.val_loop._combined_loader = None
    loop._data_fetcher = loop.epoch_loop.val_loop._data_fetcher = None
    if train_loaders is not None:
        loop._data_source.instance = train_loaders
    validation = loop.epoch_loop.val_loop._data_source
    if not validation.is_module():
        # A loader that keeps its worker processes would be found without them afterwards.
        validation.instance = resized(validation.instance, None)
    try:
        trainer._run_stage()
    except TrialOver:
        pass
    finally:
        loop.teardown()  # ends the worker processes of its loaders


def _stand_alone(trainer: Any, probe: Any, num_updates: int, folder: str) -> None:
    """Take from a Trainer what reaches beyond the process, and all that ends or skips a part of the
    trial.
    """
    trainer.callbacks = [probe]
    trainer.loggers = [quiet_logger(trainer, folder)] if trainer.loggers else []
    trainer.profiler = import_module(f"{lightning_of(trainer)}.profilers").PassThroughProfiler()
    trainer._default_root_dir = folder
    trainer.should_stop = False
    trainer.num_sanity_val_steps = (
        min(trainer.num_sanity_val_steps, num_updates) if probe.num_batches else 0
    )
    if trainer.limit_val_batches:
        is_number = isinstance(trainer.limit_val_batches, int)
        trainer.limit_val_batches = (
            min(trainer.limit_val_batches, num_updates) if is_number else num_updates
        )
    trainer.check_val_every_n_epoch = 1 if trainer.check_val_every_n_epoch else None
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    fit_loop.min_epochs = epoch_loop.min_steps = None
    fit_loop.max_epochs = epoch_loop.max_steps = -1
    _alone_among_ranks(trainer)


def _alone_among_ranks(trainer: Any) -> None:
    """Let a rank run on its own: where memory runs out on one, no other waits for it.

    The module runs without DistributedDataParallel around it, whose buckets stay allocated, and
    Lightning's own communication is answered by this rank alone. What the module itself sends
    (SyncBatchNorm, a torchmetrics metric at the end of an epoch) still goes to all ranks.
    """
    if trainer.world_size == 1:
        return
    strategy, world_size = trainer.strategy, trainer.world_size
    strategy.model = trainer.lightning_module
    answers: dict[str, Callable[..., Any]] = {
        "barrier": lambda *args, **kwargs: None,
        "broadcast": lambda obj, *args, **kwargs: obj,
        "reduce": lambda tensor, *args, **kwargs: tensor,
        "reduce_boolean_decision": lambda decision, *args, **kwargs: decision,
        "all_gather": lambda tensor, *args, **kwargs: torch.stack([tensor] * world_size),
    }
    for name, answer in answers.items():
        setattr(strategy, name, answer)
    # Asks the other ranks in each step whether they were told to end (Lightning 2.6).
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def given_loaders(trainer: Any) -> Any:
    """The training loaders that were given to `fit`; None if a module or data module makes them."""
    source = trainer.fit_loop._data_source
    return None if source.is_module() else source.instance


def ask_loaders(trainer: Any) -> None:
    """Ask for the training loaders as the loop will, and see that they can be used for trials."""
    loaders = trainer.fit_loop._data_source.dataloader()
    batch_size_of(loaders)
    check_can_be_read_again(loaders)


def loaders_in(trainer: Any) -> list[object]:
    """All loaders that were given to `fit`, one by one."""
    loop = trainer.fit_loop
    sources = (loop._data_source, loop.epoch_loop.val_loop._data_source)
    return [
        one
        for source in sources
        if not source.is_module() and source.instance is not None
        for one in leaves(source.instance)
    ]
