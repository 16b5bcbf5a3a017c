"""fit_batch_size()."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib import import_module
from typing import Any

from memcallback.batch_size.advice import DEFAULT_HEADROOM, DEFAULT_MULTIPLE
from memcallback.batch_size.fitted import FittedBatchSize
from memcallback.core.units import parse_bytes
from memcallback.diagnose.out_of_memory.errors import release_memory
from memcallback.integrations.lightning.fit.loaders import leaves, places
from memcallback.integrations.lightning.fit.run_state import RunState
from memcallback.integrations.lightning.fit.search import FitSearch
from memcallback.integrations.lightning.fit.settings import FitSettings
from memcallback.integrations.lightning.trainer.state import as_callback, lightning_of, quiet_logger
from memcallback.step.copies.fakes import untouched_globals

#: Callbacks that show or write what has nothing to do with memory, or that look for something
#: themselves.
_UNNEEDED = ("Checkpoint", "ProgressBar", "ModelSummary", "BatchSizeFinder", "LearningRateFinder")


def fit_batch_size(
    trainer: Any,
    module: Any,
    datamodule: Any = None,
    *,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    capacity: str | int | None = None,
    headroom: float = DEFAULT_HEADROOM,
    num_updates: int = 3,
    multiple_of: int = DEFAULT_MULTIPLE,
    max_batch_size: int | None = None,
) -> FittedBatchSize:
    """Find the largest batch size that fits, and set it.

    The step is predicted from its first batch (`memcallback.predict`), and the size that is
    predicted to leave the headroom free is run by the Trainer itself: sanity check, a few optimizer
    updates, validation. It is taken if half of the headroom is still free then, since a prediction
    is of the training step alone. If not, or if much more is free than was predicted, the
    prediction is corrected by what was measured and the corrected size is run; if memory runs out,
    the error is caught, the memory released and a smaller size run. So the size that is returned
    has been run. Usually that is one trial, without an error.

    Nothing else is changed: parameters, buffers, optimizers, schedulers, callbacks, metrics, loops,
    random generators and the attributes of Trainer, module and data module are put back bit by bit
    into the same objects (`memcallback.run_state`), the loggers get nothing, and nothing stays on
    disk. CUDA's peak statistics start anew. Hooks of callbacks run up to `on_fit_start`; the
    module's hooks at the end of training (`on_train_epoch_end`, `on_train_end`) do not.
    `prepare_data` and `setup` run as they do in `fit`, and what they write remains.

    Of other callbacks a GradientAccumulationScheduler is in the search, with the most batches that
    it comes to for an update; those that change later what trains, such as BaseFinetuning, cannot
    be, and a note names them.

    On several devices (`strategy="ddp"`) each rank tries on its own, and all agree on the smallest.

    Args:
        trainer: The Trainer that will train.
        module: The LightningModule.
        datamodule: Its LightningDataModule, if it has one.
        train_dataloaders: The training loaders, if `fit` gets them.
        val_dataloaders: The validation loaders, if `fit` gets them; their batch size stays.
        capacity: The memory to plan for, as `24GiB` or in bytes; by default that of the device that
            trains. Needed on a CPU.
        headroom: The fraction of it to keep free, at least 0 and below 1.
        num_updates: Optimizer updates in a trial, at least 2.
        multiple_of: The size is to be a multiple of this, if at least so many samples fit; 1 for
            any.
        max_batch_size: The largest size to consider; by default there is no end but the data's.

    Returns:
        The size, and what was tried. The attribute `batch_size` or the hyperparameter
        `hparams.batch_size` of module and data module is set to it; given loaders come back with it
        in `train_dataloaders`, to train with.

    Raises:
        ValueError: If an argument is out of range, the batch size cannot be read or set, or nothing
            limits it.
        TypeError: If a number is none, `trainer` is no Trainer, or `datamodule` no
            LightningDataModule.
        RuntimeError: If not even one sample fits.
        Exception: What the module's own code raises, out of memory aside.

    Examples:
        >>> found = fit_batch_size(trainer, module, datamodule)  # doctest: +SKIP
        >>> trainer.fit(module, datamodule)  # doctest: +SKIP
    """
    settings = FitSettings(
        capacity_bytes=None if capacity is None else parse_bytes(capacity),
        headroom=headroom,
        num_updates=num_updates,
        multiple_of=multiple_of,
        max_batch_size=max_batch_size,
    )
    lightning = lightning_of(trainer)
    launcher = trainer.strategy.launcher
    if launcher is not None and "Subprocess" not in type(launcher).__name__:
        raise ValueError(
            f"The strategy {type(trainer.strategy).__name__} trains in processes of its own, which what is found here does not reach. Use "
            "Trainer(strategy='ddp'), or let the training find it: MemoryCallback(fit_batch_size=True)."
        )
    if hasattr(train_dataloaders, "prepare_data"):  # a data module in their place, as fit takes it
        datamodule, train_dataloaders = train_dataloaders, None
    if datamodule is not None and not hasattr(datamodule, "prepare_data"):
        raise TypeError(
            f"datamodule must be a LightningDataModule, got {type(datamodule).__name__}. Give loaders as train_dataloaders=..."
        )
    compiled, module = module, getattr(module, "_orig_mod", module)
    given = (*leaves(train_dataloaders), *leaves(val_dataloaders))
    device = trainer.strategy.root_device
    state = RunState(
        trainer, module, datamodule, *given, device=device, leave_alone=(*trainer.loggers, launcher)
    )
    finder = as_callback(trainer, Finder)(settings)
    try:
        with tempfile.TemporaryDirectory() as folder:
            unneeded = tuple(
                getattr(import_module(f"{lightning}.callbacks"), name) for name in _UNNEEDED
            )
            trainer.callbacks = [
                *(one for one in trainer.callbacks if not isinstance(one, unneeded)),
                finder,
            ]
            trainer.loggers = [quiet_logger(trainer, folder)] if trainer.loggers else []
            trainer.profiler = import_module(f"{lightning}.profilers").PassThroughProfiler()
            trainer._default_root_dir = folder
            trainer.fit(compiled, train_dataloaders, val_dataloaders, datamodule)
    finally:
        state.restore()
        release_memory(device)
    if finder.error is not None:
        raise finder.error
    found: FittedBatchSize = finder.found
    for place in places(module, datamodule):
        place.set(found.batch_size)
    return found


class Finder:
    """The callback that looks for the batch size once a Trainer is set up, and ends the fit.

    Attributes:
        found: What was found; None if nothing was.
        error: Why not.
    """

    def __init__(self, settings: FitSettings) -> None:
        self._settings = settings
        self.found: FittedBatchSize | None = None
        self.error: Exception | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Look, and leave the fit as Lightning's own tuner does, which is no failure to callbacks
        and loggers.
        """
        try:
            self.found = FitSearch(trainer, pl_module, self._settings, lambda text: None).find()
        except Exception as error:
            self.error = error  # raised again when all has been put back
        raise import_module(f"{lightning_of(trainer)}.utilities.exceptions")._TunerExitException


def fit_in_place(
    trainer: Any, module: Any, settings: FitSettings, say: Callable[[str], None]
) -> FittedBatchSize | None:
    """Find the batch size at the start of a fit and go on with it."""
    if any(isinstance(callback, Finder) for callback in trainer.callbacks):
        return None
    found = FitSearch(trainer, module, settings, say).find()
    for place in places(module, trainer.datamodule):
        place.set(found.batch_size)
    loop = trainer.fit_loop
    if found.train_dataloaders is not None:
        loop._data_source.instance = found.train_dataloaders
    if loop._combined_loader is not None:
        # configure_optimizers has asked how many steps there will be, which made the loaders; there
        # will be other numbers of both.
        loop.teardown()
        loop._combined_loader = loop.epoch_loop.val_loop._combined_loader = None
        with untouched_globals():
            trainer.strategy.setup_optimizers(trainer)
            trainer.strategy.setup_precision_plugin()
    return found
