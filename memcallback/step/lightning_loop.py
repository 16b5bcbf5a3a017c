"""Run a LightningModule's training_step on a copy without a Trainer."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch


class _StandIn:
    """In place of a Trainer and what it has, while a step is followed on shapes: whatever is asked
    of it does nothing.

    What is asked for that no Trainer is sure to have reads as 1 where a number is needed.
    """

    def __getattr__(self, name: str) -> _StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn()

    def __call__(self, *args: object, **kwargs: object) -> _StandIn:
        return self

    def __getitem__(self, key: object) -> _StandIn:
        return self

    def __iter__(self) -> Iterator[object]:
        return iter(())

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> _StandIn:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def __index__(self) -> int:
        return 1

    __int__ = __index__

    def __float__(self) -> float:
        return 1.0


def _calculates(name: str, *, is_reflected: bool) -> Callable[[_StandIn, Any], Any]:
    operation = getattr(operator, name)
    return (
        (lambda self, other: operation(other, 1))
        if is_reflected
        else (lambda self, other: operation(1, other))
    )


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(_StandIn, f"__{_name}__", _calculates(_name, is_reflected=False))
    setattr(_StandIn, f"__r{_name}__", _calculates(_name, is_reflected=True))
for _name in ("lt", "le", "gt", "ge"):
    setattr(_StandIn, f"__{_name}__", _calculates(_name, is_reflected=False))


class _TrainerStandIn(_StandIn):
    """In place of a Trainer at the beginning of a training on one device."""

    def __init__(self) -> None:
        self.global_step = self.current_epoch = self.global_rank = self.local_rank = (
            self.node_rank
        ) = 0
        self.world_size = self.num_nodes = self.num_devices = self.accumulate_grad_batches = 1
        self.max_epochs, self.max_steps, self.log_every_n_steps = 10, 1000, 50
        self.num_training_batches = self.estimated_stepping_batches = 1000
        self.is_global_zero = self.training = True
        self.is_last_batch = self.validating = self.testing = self.predicting = (
            self.sanity_checking
        ) = False
        self.fast_dev_run = self.barebones = self.should_stop = False
        self.callback_metrics: dict[str, Any] = {}
        self.logged_metrics: dict[str, Any] = {}
        self.progress_bar_metrics: dict[str, Any] = {}


class LightningLoop:
    """Runs the training step of a LightningModule, on a copy that has no Trainer."""

    def __init__(self, default_dtype: torch.dtype | None = None) -> None:
        self._default_dtype = default_dtype

    @staticmethod
    def autocast_cache_enabled(module: Any) -> bool:
        """Whether half-precision copies of weights live until autocast is left; not in those
        versions of Lightning that turn that off.
        """
        package = next(
            kind.__module__.partition(".core")[0]
            for kind in type(module).__mro__
            if kind.__name__ == "LightningModule"
        )
        plugin = import_module(f"{package}.plugins.precision").MixedPrecision(
            "bf16-mixed", device="cpu"
        )
        return bool(plugin.autocast_context_manager()._cache_enabled)

    def training_step(self, module: Any, batch: object) -> object:
        """What `training_step` returns."""
        # Lightning gives batch_idx to whatever takes a second argument, whatever its name.
        takes_batch_idx = len(inspect.signature(module.training_step).parameters) > 1
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._default_dtype or before)
        try:
            return (
                module.training_step(batch, 0) if takes_batch_idx else module.training_step(batch)
            )
        finally:
            torch.set_default_dtype(before)

    @staticmethod
    def zero_grad(module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Let go of gradients as the module does it: its hook `optimizer_zero_grad`."""
        module.optimizer_zero_grad(0, 0, optimizer)

    @staticmethod
    def backward(module: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward pass as the module does it: its hook `backward`, which `manual_backward`
        gives what it was given.
        """
        module.backward(loss, *args, **kwargs)

    @staticmethod
    def clip_gradients(
        module: Any, optimizer: torch.optim.Optimizer, norm: float | None, value: float | None
    ) -> None:
        """Clip as the module does it: its hook `configure_gradient_clipping`, called with the
        Trainer's setting.
        """
        limit, algorithm = (
            (norm, "norm") if norm is not None else (value, None if value is None else "value")
        )

        def clip_gradients(
            optimizer: Any,
            gradient_clip_val: float | None = None,
            gradient_clip_algorithm: str | None = None,
        ) -> None:
            _clip_gradients(
                optimizer,
                limit if gradient_clip_val is None else gradient_clip_val,
                gradient_clip_algorithm or algorithm,
            )

        module.clip_gradients = clip_gradients
        module.configure_gradient_clipping(
            optimizer, gradient_clip_val=limit, gradient_clip_algorithm=algorithm
        )

    @staticmethod
    def call_through(module: Any, whole: Any) -> None:
        """Let `training_step` be called by way of what wraps a module, as a strategy does."""
        if whole is module:
            return
        training_step, forward = module.training_step, module.forward

        @functools.wraps(training_step)
        def through(*args: Any) -> Any:
            def first(*inputs: Any) -> Any:
                module.forward = forward
                return training_step(*inputs)

            module.forward = first
            return whole(*args)

        module.training_step = through

    @contextmanager
    def manual(
        self,
        module: Any,
        optimizers: Sequence[torch.optim.Optimizer],
        manual_backward: Callable[..., None],
        update: Callable[..., Any],
    ) -> Iterator[None]:
        """Let a module's `optimizers()` and `manual_backward` do what they are told, inside the
        context.
        """
        _stand_alone(module)
        wrapped = [_ManualOptimizer(optimizer, optimizers, update) for optimizer in optimizers]

        def optimizers_of_module(use_pl_optimizer: bool = True) -> Any:
            found: list[Any] = list(wrapped if use_pl_optimizer else optimizers)
            return found[0] if len(found) == 1 else found

        module.optimizers = optimizers_of_module
        module.manual_backward = manual_backward
        module.clip_gradients = _clip_gradients

        def wrapper_of(optimizer: Any) -> Any:
            return next((one for one in wrapped if one._optimizer is optimizer), optimizer)

        module.toggle_optimizer = lambda optimizer, *args: wrapper_of(optimizer).toggle()
        module.untoggle_optimizer = lambda optimizer, *args: wrapper_of(optimizer).untoggle()
        yield


class _ManualOptimizer:
    """What `self.optimizers()` gives under manual optimization."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        every: Sequence[torch.optim.Optimizer],
        update: Callable[..., Any],
    ) -> None:
        self._optimizer = optimizer
        self._every = every
        self._update = update
        self._toggled: list[tuple[torch.nn.Parameter, bool]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        return self._update(self._optimizer, closure or (lambda: None), **kwargs)

    def toggle(self) -> None:
        """Only this optimizer's parameters require gradients (`LightningModule.toggle_optimizer`)."""
        own = {id(parameter) for parameter in _parameters(self._optimizer)}
        for parameter in (
            parameter for optimizer in self._every for parameter in _parameters(optimizer)
        ):
            self._toggled.append((parameter, parameter.requires_grad))
            if id(parameter) not in own:
                parameter.requires_grad = False

    def untoggle(self) -> None:
        """All require them again as before."""
        while self._toggled:
            parameter, requires_grad = self._toggled.pop()
            parameter.requires_grad = requires_grad

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        self.toggle()
        yield
        self.untoggle()


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _stand_alone(module: Any) -> None:
    """Let a module do without its Trainer: what it says to it goes nowhere."""
    nothing = _StandIn()
    module._trainer = _TrainerStandIn()
    for name in (
        "log",
        "log_dict",
        "print",
        "manual_backward",
        "clip_gradients",
        "toggle_optimizer",
        "untoggle_optimizer",
        "lr_schedulers",
    ):
        setattr(module, name, nothing)
    module.all_gather = lambda data, *args, **kwargs: data


def _clip_gradients(
    optimizer: Any,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
) -> None:
    """`LightningModule.clip_gradients` where the Trainer has no setting; by norm unless another
    algorithm is named.
    """
    if gradient_clip_val is None or gradient_clip_val <= 0:
        return
    clip = (
        torch.nn.utils.clip_grad_value_
        if str(gradient_clip_algorithm) == "value"
        else torch.nn.utils.clip_grad_norm_
    )
    clip(list(_parameters(optimizer)), gradient_clip_val)


def lightning_loss(loop: LightningLoop, module: Any, batch: object, num_optimizers: int) -> Any:
    """Run the training step of a copy that has no Trainer; the loss that it returns, alone or in a
    dict, or whatever else it does.
    """
    nothing = _StandIn()
    optimizers = nothing if num_optimizers == 1 else [nothing] * num_optimizers
    _stand_alone(module)
    module.optimizers = lambda *args, **kwargs: optimizers
    output: Any = loop.training_step(module, batch)
    loss = output.get("loss") if isinstance(output, dict) else None
    return loss if isinstance(loss, torch.Tensor) else output


def configured_optimizers(module: Any) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that `configure_optimizers` makes: of a module that has no Trainer with one
    that stands for it.
    """
    trainer = module._trainer
    if trainer is None:
        module._trainer = _TrainerStandIn()
    try:
        return tuple(_configured(module.configure_optimizers()))
    finally:
        module._trainer = trainer


def _configured(configured: Any) -> list[torch.optim.Optimizer]:
    """The optimizers in what `configure_optimizers` may return: one, several, a pair of lists,
    dicts, or None.
    """
    if configured is None:
        return []
    if isinstance(configured, dict):
        return [configured["optimizer"]]
    if isinstance(configured, torch.optim.Optimizer):
        return [configured]
    if isinstance(configured, (tuple, list)):
        if len(configured) == 2 and isinstance(configured[0], (list, tuple)):
            return list(configured[0])
        return [one["optimizer"] if isinstance(one, dict) else one for one in configured]
    return [configured]
