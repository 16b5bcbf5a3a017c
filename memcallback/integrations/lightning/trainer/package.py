"""The two packages of Lightning: the same code with unrelated classes, which do not mix."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from memcallback.step.lightning_private import set_root_folder


def lightning_of(trainer: Any) -> str:
    """The package of a Trainer: `lightning.pytorch` or `pytorch_lightning`."""
    for kind in type(trainer).__mro__:
        for name in ("lightning.pytorch", "pytorch_lightning"):
            if kind.__module__.startswith(f"{name}."):
                return name
    raise TypeError(f"trainer must be a Lightning Trainer, got {type(trainer).__name__}.")


def of_lightning(trainer: Any, module: str) -> Any:
    """A module of the package of a Trainer, such as `callbacks`."""
    return import_module(f"{lightning_of(trainer)}.{module}")


def as_callback(trainer: Any, own: type) -> type:
    """Derive a class of ours from the Callback of the Trainer's package."""
    return type(own.__name__, (own, of_lightning(trainer, "callbacks").Callback), {})


def write_nowhere_else(trainer: Any, folder: str) -> None:
    """Have a Trainer write into a temporary folder alone, log nothing and profile nothing."""
    if trainer.loggers:
        base = of_lightning(trainer, "loggers.logger").DummyLogger
        folders = dict.fromkeys(("save_dir", "log_dir", "root_dir"), property(lambda self: folder))
        trainer.loggers = [type("QuietLogger", (base,), folders)()]
    else:
        trainer.loggers = []
    trainer.profiler = of_lightning(trainer, "profilers").PassThroughProfiler()
    set_root_folder(trainer, folder)
