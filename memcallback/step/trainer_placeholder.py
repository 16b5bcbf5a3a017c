"""TrainerPlaceholder: replaces a Trainer, and what belongs to it, while a step is traced."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from memcallback.core.interruptions import PassOver
from memcallback.core.types import Stage
from memcallback.isolation.child import is_in_child
from memcallback.step.lightning_batch import stand_in
from memcallback.step.lightning_private import all_gather

#: The number of batches in the training's loader, which may have more than a fit runs.
_LOADER = "batches of the loader"
#: What a Trainer knows of its loader. Asked without one it makes it, and waits for all ranks.
_OF_LOADER = ("num_training_batches", "estimated_stepping_batches", _LOADER)
#: What a placeholder has of the Trainer of a fit -> what it says where no Trainer is known.
_FACTS: dict[str, int] = {
    "global_step": 0,
    "current_epoch": 0,
    "max_epochs": 10,
    "max_steps": 1000,
    "log_every_n_steps": 50,
    "num_training_batches": 1000,
    "estimated_stepping_batches": 1000,
    "accumulate_grad_batches": 1,
    _LOADER: 1000,
}


def facts_of(trainer: Any) -> dict[str, int]:
    """Where the fit of a Trainer stands, and how long it goes on: what of it is a whole number."""
    facts: dict[str, int] = {}
    has_loader = trainer.train_dataloader is not None
    for name in _FACTS:
        if name in _OF_LOADER and not has_loader:
            continue
        with PassOver():  # a loader of the user's can fail in any way
            value = len(trainer.train_dataloader) if name == _LOADER else getattr(trainer, name)
            if type(value) is int:
                facts[name] = value
    return facts


class Placeholder:
    """Replaces a Trainer and its parts while a step is traced: every call does nothing.

    An attribute that not every Trainer has reads as 1 where a number is needed.
    """

    def __getattr__(self, name: str) -> Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder()

    def __call__(self, *args: object, **kwargs: object) -> Placeholder:
        return self

    def __getitem__(self, key: object) -> Placeholder:
        return self

    def __iter__(self) -> Iterator[object]:
        return iter(())

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Placeholder:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def __index__(self) -> int:
        return 1

    def __len__(self) -> int:
        return 1

    __int__ = __index__

    def __float__(self) -> float:
        return 1.0


def _calculates(name: str, *, is_reflected: bool) -> Callable[[Placeholder, Any], Any]:
    operation = getattr(operator, name)
    return (
        (lambda self, other: operation(other, 1))
        if is_reflected
        else (lambda self, other: operation(1, other))
    )


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Placeholder, f"__{_name}__", _calculates(_name, is_reflected=False))
    setattr(Placeholder, f"__r{_name}__", _calculates(_name, is_reflected=True))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Placeholder, f"__{_name}__", _calculates(_name, is_reflected=False))


class TrainerPlaceholder(Placeholder):
    """Replaces a Trainer: on one device, or as a rank of `fake_world`."""

    def __init__(
        self,
        package: str,
        stage: Stage = Stage.TRAINING,
        facts: Mapping[str, int] | None = None,
        datamodule: Any = None,
    ) -> None:
        of_fit = {**_FACTS, **(facts or {})}
        num_in_loader = of_fit.pop(_LOADER)
        vars(self).update(of_fit)
        has_ranks = is_in_fake_world()
        self.world_size = self.num_devices = dist.get_world_size() if has_ranks else 1
        self.global_rank = self.local_rank = dist.get_rank() if has_ranks else 0
        self.node_rank, self.num_nodes = 0, 1
        self.is_global_zero = self.global_rank == 0
        self.training, self.validating, self.testing, self.predicting = (
            stage is one for one in (Stage.TRAINING, Stage.VALIDATION, Stage.TEST, Stage.PREDICTION)
        )
        self.is_last_batch = self.sanity_checking = False
        self.fast_dev_run = self.barebones = self.should_stop = False
        self.callback_metrics: dict[str, Any] = {}
        self.logged_metrics: dict[str, Any] = {}
        self.progress_bar_metrics: dict[str, Any] = {}
        self.train_dataloader = _LoaderPlaceholder(num_in_loader)
        self.strategy = _StrategyPlaceholder(package)
        self._datamodule, self._is_of_fit = datamodule, bool(facts)

    @functools.cached_property
    def datamodule(self) -> Any:
        """The DataModule where a step may write to it, in a child; else a placeholder.

        None where a Trainer is known to have none.
        """
        if self._datamodule is None:
            return None if self._is_of_fit else Placeholder()
        if not is_in_child():
            return Placeholder()
        datamodule = stand_in(self._datamodule, {})
        datamodule.trainer = self
        return datamodule


class _LoaderPlaceholder(Placeholder):
    """Replaces a loader whose number of batches is known."""

    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches

    def __len__(self) -> int:
        return self._num_batches


class _StrategyPlaceholder(Placeholder):
    """Replaces a Trainer's strategy: of one device, or of a rank of `fake_world`."""

    def __init__(self, package: str) -> None:
        self._package = package

    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """The tensor of all ranks, in a new first dimension; of one device as it is."""
        if not is_in_fake_world():
            return tensor
        gathered: torch.Tensor = all_gather(self._package, tensor, group, sync_grads)
        return gathered

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """The tensor as it is: a reduced one has the same size."""
        return tensor

    def broadcast(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """The object as it is: rank 0's is assumed to be alike."""
        return obj

    def reduce_boolean_decision(self, decision: bool, *args: Any, **kwargs: Any) -> bool:
        """The ranks decide alike."""
        return decision


def is_in_fake_world() -> bool:
    """Whether this thread is a rank of `fake_world`; ranks of the process are not asked."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    from memcallback.step.fake_world import is_rank

    return is_rank()
