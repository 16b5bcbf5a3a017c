"""Every private part of Lightning that is used, named once.

A part that an installed Lightning lacks raises a `MissingPartError` that names it and what it
costs. Training and recording need none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from memcallback.core.errors import MissingPartError

_FIT = "fit_batch_size"
_TRACE = "predictions"


class Sources(NamedTuple):
    """Where a Trainer's loops take their loaders from; `instance` is what was passed to `fit`."""

    training: Any
    validation: Any


def loader_sources(trainer: Any) -> Sources:
    """The sources of a fit's training and validation loaders."""
    loops = _loops(trainer)
    return Sources(*(_part(loop, "_data_source", _FIT) for loop in loops))


def has_made_loaders(trainer: Any) -> bool:
    """Whether the fit loop has made its loaders already."""
    return _part(trainer.fit_loop, "_combined_loader", _FIT) is not None


def forget_loaders(trainer: Any) -> None:
    """Let the loops make loaders anew, for another batch size."""
    for loop in _loops(trainer):
        for name in ("_combined_loader", "_data_fetcher"):
            _part(loop, name, _FIT)
            setattr(loop, name, None)


def run_loop(trainer: Any) -> None:
    """Run the loop of a Trainer that is set up."""
    _part(trainer, "_run_stage", _FIT)()


def set_root_folder(trainer: Any, folder: str) -> None:
    """Let a Trainer write below another folder."""
    _part(trainer, "_default_root_dir", _FIT)
    trainer._default_root_dir = folder


def ask_no_rank_for_signals(trainer: Any) -> None:
    """Let steps not ask the other ranks whether they received a SIGTERM, as in Lightning 2.6."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def asks_ranks_for_signals(package: str) -> bool:
    """Whether each batch begins with a broadcast that tells of a SIGTERM, as in Lightning 2.6."""
    loop = import_module(f"{package}.loops.training_epoch_loop")._TrainingEpochLoop
    return hasattr(loop, "_broadcast_sigterm_tensor")


def end_of_fit(package: str) -> type[Exception]:
    """The exception by which Lightning's tuner ends a fit without a failure."""
    error: type[Exception] = _part(
        import_module(f"{package}.utilities.exceptions"), "_TunerExitException", _FIT
    )
    return error


def checkpoint_fsdp(strategy: Any, wrapped: Any) -> None:
    """Checkpoint the layers that an FSDPStrategy was asked to."""
    name = next(
        kind.__module__ for kind in type(strategy).__mro__ if kind.__name__ == "FSDPStrategy"
    )
    checkpoint = _part(import_module(name), "_setup_activation_checkpointing", _TRACE)
    checkpoint(wrapped, _part(strategy, "_activation_checkpointing_kwargs", _TRACE))


def set_device_mesh(module: Any, mesh: Any) -> None:
    """Give a LightningModule the mesh that its `configure_model` asks for."""
    module._device_mesh = mesh


def package_of(owner: Any) -> str:
    """The package of a LightningModule or LightningDataModule, such as `lightning.pytorch`."""
    return next(
        kind.__module__.partition(".core")[0]
        for kind in type(owner).__mro__
        if kind.__name__ in ("LightningModule", "LightningDataModule")
        and kind.__module__.startswith(("lightning.", "pytorch_lightning."))
    )


def all_gather(package: str, tensor: Any, group: Any, sync_grads: bool) -> Any:
    """What a strategy of several devices makes of a tensor of each rank."""
    module = import_module(f"{package}.strategies.parallel")
    return _part(module, "_all_gather_ddp_if_available", _TRACE)(tensor, group, sync_grads)


def caches_autocast(precision: Any) -> bool:
    """Whether autocast of a precision plugin keeps the weights that it has cast."""
    return bool(_part(precision.autocast_context_manager(), "_cache_enabled", _TRACE))


def optimizer_in(wrapper: Any) -> Any:
    """The optimizer inside a LightningOptimizer."""
    return _part(wrapper, "_optimizer", _TRACE)


def trainer_of(module: Any) -> Any:
    """The Trainer of a LightningModule; None without one, where its property would raise."""
    return _part(module, "_trainer", _TRACE)


def set_trainer(module: Any, trainer: Any) -> None:
    """Attach a Trainer to a LightningModule, or a placeholder, or None."""
    module._trainer = trainer


def _loops(trainer: Any) -> tuple[Any, Any]:
    return trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop


def _part(owner: Any, name: str, needed_for: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        kind = getattr(owner, "__name__", type(owner).__name__)
        raise MissingPartError(
            f"Lightning's {kind} has no {name} (needed for {needed_for}). Use a release of "
            "Lightning that memcallback was tested with (docs/versions.md)"
        ) from error
