"""fit_batch_size(): finds the largest batch size by trials of the Trainer, and sets it."""

from __future__ import annotations

import tempfile
from typing import Any

from memcallback.batch_size.fitted import FittedBatchSize
from memcallback.core.errors import warn_and_go_on
from memcallback.core.interruptions import ENDS, raise_if_meant
from memcallback.core.units import parse_bytes
from memcallback.core.validation import DEFAULT_HEADROOM, DEFAULT_MULTIPLE
from memcallback.diagnose.out_of_memory.errors import release_memory
from memcallback.integrations.lightning.fit.loaders import batch_size_settings, leaves
from memcallback.integrations.lightning.fit.run_state import RunState
from memcallback.integrations.lightning.fit.search import FitSearch
from memcallback.integrations.lightning.fit.settings import FitSettings
from memcallback.integrations.lightning.fit.signals import ended_by_sigterm
from memcallback.integrations.lightning.trainer.package import (
    as_callback,
    lightning_of,
    of_lightning,
    write_nowhere_else,
)
from memcallback.report.console import FULL, Console
from memcallback.step.copies.modes import untouched_globals
from memcallback.step.lightning_private import (
    end_of_fit,
    forget_loaders,
    has_made_loaders,
    loader_sources,
)

#: Callbacks that do not affect memory, or that search something themselves.
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

    The step is predicted from its first batch (`memcallback.predict`). The largest size that is
    predicted to leave the headroom free is then run by the Trainer itself: sanity check, a few
    optimizer updates, validation. The size is accepted if half of the headroom stays free. The
    other half is for what the prediction does not cover, above all validation. If less stays free,
    or much more than predicted, the prediction is corrected by the measurement and the corrected
    size is run. If memory runs out, the error is caught, the memory released and a smaller size
    run. So the returned size has been run. Usually this takes one trial, without an error.

    These are put back exactly, to the bit, into the same objects: parameters, buffers, optimizers,
    schedulers, callbacks, metrics, loops, random generators, the attributes of Trainer, module and
    data module, and the global variables and classes of your own files. The loggers get nothing,
    and Lightning writes nothing to disk. CUDA's peak statistics are reset. Hooks of callbacks run
    up to `on_fit_start`; the module's hooks at the end of training (`on_train_epoch_end`,
    `on_train_end`) do not run. `prepare_data` and `setup` run as in `fit`, and what they write
    remains. The docs have a table of all that is put back, refused and not put back (What does a
    search put back?). An interrupt or a SIGTERM ends the search with everything put back.

    With a GradientAccumulationScheduler, the predicted step accumulates the largest number of
    batches that the scheduler sets. Callbacks that later change what trains, such as
    BaseFinetuning, cannot take part, and a note names them.

    On several devices (`strategy="ddp"`) each rank runs its own trials, and the smallest size
    counts.

    Args:
        trainer: The Trainer that will train.
        module: The LightningModule.
        datamodule: Its LightningDataModule, if it has one.
        train_dataloaders: The training loaders, if `fit` gets them.
        val_dataloaders: The validation loaders, if `fit` gets them; their batch size stays.
        capacity: The memory to plan for, such as `24GiB`, or in bytes; by default that of the
            device that trains. Required on a CPU.
        headroom: The fraction of it to keep free, at least 0 and below 1.
        num_updates: Optimizer updates in a trial, at least 2.
        multiple_of: Round the size down to a multiple of this if that many samples fit; 1 for any
            size.
        max_batch_size: The largest size to consider; by default limited by the data only.

    Returns:
        The size, and all trials. The attribute `batch_size` or the hyperparameter
        `hparams.batch_size` of module and data module is set to it. If you gave loaders, train with
        the copies in `train_dataloaders`, which have this size.

    Raises:
        ValueError: If an argument is out of range, the batch size cannot be read or set, nothing
            limits it, or a trial would use up an iterator that cannot be wound back.
        TypeError: If a number has the wrong type, `trainer` is not a Trainer, or `datamodule` is
            not a LightningDataModule.
        RuntimeError: If not even one sample fits, or a SIGTERM ended the search and the program's
            own handler of it returned.
        Exception: Errors of the module's own code, except out of memory.

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
    callbacks = of_lightning(trainer, "callbacks")
    launcher = trainer.strategy.launcher
    if launcher is not None and "Subprocess" not in type(launcher).__name__:
        raise ValueError(
            f"The strategy {type(trainer.strategy).__name__} trains in processes of its own, which "
            "would not get the batch size found here. Use Trainer(strategy='ddp'), or search "
            "within the training: MemoryCallback(fit_batch_size=True)."
        )
    if hasattr(train_dataloaders, "prepare_data"):  # fit accepts a data module here too
        datamodule, train_dataloaders = train_dataloaders, None
    if datamodule is not None and not hasattr(datamodule, "prepare_data"):
        raise TypeError(
            f"datamodule must be a LightningDataModule, got {type(datamodule).__name__}. Give "
            "loaders as train_dataloaders=..."
        )
    compiled, module = module, getattr(module, "_orig_mod", module)
    loaders = (*leaves(train_dataloaders), *leaves(val_dataloaders))
    device = trainer.strategy.root_device
    state = RunState(
        trainer,
        module,
        datamodule,
        *loaders,
        device=device,
        leave_alone=(*trainer.loggers, launcher),
    )
    finder = as_callback(trainer, Finder)(settings)
    try:
        with ended_by_sigterm(), state.trial(), tempfile.TemporaryDirectory() as folder:
            unneeded = tuple(getattr(callbacks, name) for name in _UNNEEDED)
            trainer.callbacks = [
                *(other for other in trainer.callbacks if not isinstance(other, unneeded)),
                finder,
            ]
            write_nowhere_else(trainer, folder)
            trainer.fit(compiled, train_dataloaders, val_dataloaders, datamodule)
    finally:
        release_memory(device)
    if finder.error is not None:
        raise finder.error
    fitted: FittedBatchSize = finder.fitted
    _set_batch_size(fitted, module, datamodule)
    return fitted


def _set_batch_size(fitted: FittedBatchSize, module: Any, datamodule: Any) -> None:
    for setting in batch_size_settings(module, datamodule):
        setting.set(fitted.batch_size)


class Finder:
    """Callback that searches once a Trainer is set up, and then ends the fit.

    Either `fitted` or `error` is set afterwards.
    """

    def __init__(self, settings: FitSettings) -> None:
        self._settings = settings
        self.fitted: FittedBatchSize | None = None
        self.error: Exception | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Search, then leave the fit as Lightning's tuner does, so that it is not a failure."""
        try:
            self.fitted = FitSearch(trainer, pl_module, self._settings, lambda text: None).find()
        except Exception as error:  # any: it is raised after everything is restored
            self.error = error
        raise end_of_fit(lightning_of(trainer))


def fit_in_place(
    trainer: Any, module: Any, settings: FitSettings, console: Console
) -> FittedBatchSize | None:
    """Find the batch size at the start of a fit, and set it; None inside `fit_batch_size`.

    Also None, with a warning, if none is found.
    """
    if any(isinstance(callback, Finder) for callback in trainer.callbacks):
        return None
    try:
        fitted = _search_in_place(trainer, module, settings, console)
    except ENDS as error:  # also the step's own, which training will meet again
        raise_if_meant(error)
        warn_and_go_on(
            "No batch size was found, and training goes on with the size as it is. "
            f"{type(error).__name__}: {error}"
        )
        return None
    if not console.shows(FULL):
        console.say("\n".join([fitted.sentence(), *fitted.notes]))
    console.say(fitted.to_text(), level=FULL)
    return fitted


def _search_in_place(
    trainer: Any, module: Any, settings: FitSettings, console: Console
) -> FittedBatchSize:
    fitted = FitSearch(trainer, module, settings, console.say).find()
    _set_batch_size(fitted, module, trainer.datamodule)
    if fitted.train_dataloaders is not None:
        loader_sources(trainer).training.instance = fitted.train_dataloaders
    if has_made_loaders(trainer):
        # configure_optimizers needed the number of steps, which depends on the batch size, so make
        # loaders and optimizers again.
        trainer.fit_loop.teardown()
        forget_loaders(trainer)
        with untouched_globals():
            trainer.strategy.setup_optimizers(trainer)
            trainer.strategy.setup_precision_plugin()
    return fitted
