"""Runs a trial: a few steps of the Trainer's own loop, with their peak memory.

The Trainer runs as in training, so that a trial measures what training needs: sanity check, batches
on the device, accumulation, clipping, optimizer updates, validation. Callbacks, loggers, profiler
and folder are replaced, since they would leave traces outside the process. A `RunState` restores
everything afterwards, these attributes too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from memcallback.core.step_memory import MemoryStats, PhaseMemory, StepMemory, largest
from memcallback.core.tensors import is_on, storage_bytes
from memcallback.core.types import Category, Kind, Phase
from memcallback.devices.meters import AllocatorMeter, CpuMeter, Meter
from memcallback.integrations.lightning.fit.loaders import (
    batch_size_of,
    check_can_be_read_again,
    leaves,
    num_samples,
    resized,
)
from memcallback.integrations.lightning.fit.settings import GIVE_LIMIT
from memcallback.integrations.lightning.trainer.loaded_batch import LoadedBatch
from memcallback.integrations.lightning.trainer.package import write_nowhere_else
from memcallback.step.batch import infer_batch_size
from memcallback.step.holdings import holdings
from memcallback.step.lightning_private import (
    ask_no_rank_for_signals,
    forget_loaders,
    loader_sources,
    run_loop,
)

#: A trial ends after so many epochs without a batch.
_MAX_EMPTY_EPOCHS = 2
_PERSISTENT = (Category.PARAMETER, Category.BUFFER, Category.OPTIMIZER_STATE)


class TrialMeter:
    """Measures the peak memory of a trial.

    On an accelerator it reads the allocator over the whole trial. The memory of a CPU holds the
    data too, which is not part of a step: there it reads each training and validation step.
    """

    def __init__(self, device: torch.device, module: torch.nn.Module) -> None:
        self._device, self._module = device, module
        self._is_by_step = device.type == "cpu"
        self._meter: Meter = CpuMeter() if self._is_by_step else AllocatorMeter(device)
        self._is_open = False
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._reset()

    def _reset(self) -> None:
        self._peak_allocated_bytes: int | None = None
        self._peak_reserved_bytes: int | None = None
        self.num_alloc_retries = 0
        self.num_ooms = 0

    @property
    def device_name(self) -> str:
        """The name of the device."""
        return self._meter.device_name

    @property
    def counts(self) -> str:
        """Which peak must fit: `allocated` on a CPU, else `reserved`."""
        return "allocated" if self._is_by_step else "reserved"

    def begin(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Begin a trial."""
        self._reset()
        self._optimizers = optimizers
        if not self._is_by_step:
            self._open(None)

    def begin_step(self, batch: object) -> None:
        """Begin a training or validation step."""
        if self._is_by_step:
            self._close()
            self._open(batch)

    def end_step(self, batch: object) -> None:
        """End a training or validation step."""
        if self._is_by_step:
            self._close(batch)

    def end(self) -> None:
        """End the trial, whether it completed or failed."""
        self._close()

    def step(self, batch_size: int) -> StepMemory | None:
        """The whole trial as one measured step; None if no peak could be read."""
        if largest((self._peak_allocated_bytes, self._peak_reserved_bytes)) is None:
            return None
        window = PhaseMemory(
            phase=Phase.BACKWARD,
            covers=tuple(Phase),
            start=MemoryStats(),
            end=MemoryStats(),
            peak_allocated_bytes=self._peak_allocated_bytes,
            peak_reserved_bytes=self._peak_reserved_bytes,
        )
        return StepMemory(
            kind=Kind.MEASURED,
            source=self._meter.source,
            device_name=self.device_name,
            windows=(window,),
            batch_size=batch_size,
        )

    def persistent_bytes(self) -> int:
        """Bytes of parameters, buffers and optimizer state on the device now."""
        by_category = holdings([self._module], self._optimizers, None, self._device).by_category
        return sum(by_category.get(category, 0) for category in _PERSISTENT)

    def elsewhere_bytes(self) -> int:
        """Bytes this process allocated outside the module: another model, buckets of DDP."""
        if self._is_by_step:
            return 0
        self._meter.begin()
        self._meter.read(None)
        (stats,) = self._meter.end()
        tensors: Iterable[torch.Tensor] = (*self._module.parameters(), *self._module.buffers())
        module_bytes = storage_bytes(
            tensor for tensor in tensors if is_on(tensor.device, self._device)
        )
        return max(0, (stats.allocated_bytes or 0) - module_bytes)

    def forget_peaks(self) -> None:
        """Reset the device's peaks after a trial, since they are not those of the training."""
        if not self._is_by_step:
            self._meter.begin()
            self._meter.read(None)

    def _open(self, batch: object) -> None:
        self._meter.begin()
        self._is_open = True
        self._read(batch)

    def _read(self, batch: object) -> None:
        # A CPU's allocation events show changes only, so its meter needs the persistent bytes.
        self._meter.read(
            holdings([self._module], self._optimizers, batch, self._device)
            if self._is_by_step
            else None
        )

    def _close(self, batch: object = None) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._read(batch)
        first, *later = self._meter.end()
        self._peak_allocated_bytes = largest(
            (self._peak_allocated_bytes, *(stats.peak_allocated_bytes for stats in later))
        )
        self._peak_reserved_bytes = largest(
            (self._peak_reserved_bytes, *(stats.peak_reserved_bytes for stats in later))
        )
        last = later[-1]
        self.num_alloc_retries += (last.num_alloc_retries or 0) - (first.num_alloc_retries or 0)
        self.num_ooms += (last.num_ooms or 0) - (first.num_ooms or 0)


class TrialOver(Exception):
    """Leaves Lightning's loops at the end of a trial. Not an error."""


class Probe:
    """The only callback of a trial: keeps the first batch or counts batches, and ends the trial.

    With `num_batches` 0 it only looks at the first batch.

    Attributes:
        batch: The first batch, on the device, if none is to run.
        loaded: The same before the module's hooks brought it there; None if there are no hooks.
        batch_size: Samples per batch as the loaders say; None before the first epoch.
        num_samples: Samples per epoch on this rank; None if unlimited or unknown.
        num_run: Batches run so far.
    """

    def __init__(
        self,
        meter: TrialMeter,
        num_batches: int,
        *,
        batch_size: int | None = None,
        is_inferred: bool = False,
        attributes: str = "",
    ) -> None:
        self._meter = meter
        self.num_batches = num_batches
        self.batch: object = None
        self.loaded: Any = None
        self._loaded_batch = LoadedBatch()
        self.batch_size: int | None = None
        self.num_samples: int | None = None
        self.num_run = 0
        self._wanted = batch_size
        self._is_inferred = is_inferred
        self._attributes = attributes
        self._num_epochs = 0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Check that the loaders use the batch size of the trial."""
        self._num_epochs += 1
        loaders = trainer.train_dataloader
        self.batch_size, self.num_samples = batch_size_of(loaders), num_samples(loaders)
        if self._wanted not in (None, self.batch_size):
            raise ValueError(
                f"train_dataloader() returns batches of {self.batch_size} samples although "
                f"{self._attributes} is {self._wanted}, so it does not use that. Write "
                "DataLoader(..., batch_size=self.batch_size) there, or self.hparams.batch_size for "
                "a hyperparameter."
            )
        if self._num_epochs - self.num_run > _MAX_EMPTY_EPOCHS:
            raise TrialOver
        if self.num_batches == 0:
            self._loaded_batch.watch(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the batch if none is to run; else check the size of the first one."""
        if self.num_batches == 0:
            self.batch, self.loaded = batch, self._loaded_batch.take()
            raise TrialOver
        if (
            self._is_inferred
            and self.num_run == 0
            and (inferred := infer_batch_size(batch).batch_size) != self._wanted
        ):
            raise ValueError(
                f"The training loader's batch size is {self._wanted}, but its first batch has "
                f"{inferred} samples. Let the loader's batch sampler use its batch_size. If the "
                f"data have no more samples than that, give their number: {GIVE_LIMIT}."
            )
        self._meter.begin_step(batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; after the last one Lightning validates."""
        self._meter.end_step(batch)
        self.num_run += 1
        trainer.should_stop = self.num_run >= self.num_batches

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin a validation step."""
        self._meter.begin_step(batch)

    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """End a validation step."""
        self._meter.end_step(batch)

    def end(self) -> None:
        """See no further batches."""
        self._loaded_batch.end()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End the trial before the module's own hooks at the end of training write results."""
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
    """Run a Trainer's loop until the probe ends it. The caller restores the Trainer."""
    _isolate(trainer, probe, num_updates, folder)
    trainer.accumulate_grad_batches = accumulate
    forget_loaders(trainer)
    training, validation = loader_sources(trainer)
    if train_loaders is not None:
        training.instance = train_loaders
    if not validation.is_module():
        # A copy, because the teardown below takes the worker processes from a loader that keeps
        # them.
        validation.instance = resized(validation.instance, None)
    try:
        run_loop(trainer)
    except TrialOver:
        pass
    finally:
        trainer.fit_loop.teardown()  # ends the worker processes of its loaders
        probe.end()


def _isolate(trainer: Any, probe: Any, num_updates: int, folder: str) -> None:
    """Remove what acts outside the process, and what would end or skip a part of the trial."""
    trainer.callbacks = [probe]
    write_nowhere_else(trainer, folder)
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
    if trainer.world_size > 1:
        _isolate_rank(trainer)


def _isolate_rank(trainer: Any) -> None:
    """Let a rank run alone, so that no other waits for it if it runs out of memory.

    The module runs without DistributedDataParallel, whose buckets stay allocated, and this rank
    answers Lightning's own communication. The module's own collectives (SyncBatchNorm, a
    torchmetrics metric at the end of an epoch) still reach all ranks.
    """
    strategy, world_size = trainer.strategy, trainer.world_size
    strategy.model = trainer.lightning_module
    replacements: dict[str, Callable[..., Any]] = {
        "barrier": lambda *args, **kwargs: None,
        "broadcast": lambda obj, *args, **kwargs: obj,
        "reduce": lambda tensor, *args, **kwargs: tensor,
        "reduce_boolean_decision": lambda decision, *args, **kwargs: decision,
        "all_gather": lambda tensor, *args, **kwargs: torch.stack([tensor] * world_size),
    }
    for name, replacement in replacements.items():
        setattr(strategy, name, replacement)
    ask_no_rank_for_signals(trainer)


def given_loaders(trainer: Any) -> Any:
    """The training loaders passed to `fit`; None if a module or data module makes them."""
    source = loader_sources(trainer).training
    return None if source.is_module() else source.instance


def check_loaders(trainer: Any) -> None:
    """Make the training loaders as the loop does, and check that trials can use them."""
    loaders = loader_sources(trainer).training.dataloader()
    batch_size_of(loaders)
    check_can_be_read_again(loaders)


def loaders_in(trainer: Any) -> list[object]:
    """Every loader passed to `fit`."""
    return [
        loader
        for source in loader_sources(trainer)
        if not source.is_module() and source.instance is not None
        for loader in leaves(source.instance)
    ]
