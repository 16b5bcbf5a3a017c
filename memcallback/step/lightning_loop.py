"""Run a LightningModule's training_step on a copy without a Trainer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from memcallback.core.types import Stage
from memcallback.step.lightning_private import (
    asks_ranks_for_signals,
    caches_autocast,
    optimizer_in,
    package_of,
    set_trainer,
    trainer_of,
)
from memcallback.step.ranks import replicated
from memcallback.step.trainer_placeholder import Placeholder, TrainerPlaceholder, is_in_fake_world

#: The names of a LightningModule's evaluation steps -> what they are steps of.
_STAGES = {"validation": Stage.VALIDATION, "test": Stage.TEST, "predict": Stage.PREDICTION}


class LightningLoop:
    """Runs the steps of a LightningModule, on a copy that has no Trainer.

    Attributes:
        default_dtype: The default dtype inside a step; None for PyTorch's.
        batch_number: The number of the batch that an evaluation runs, from 0.
        outputs: What the last `training_step` returned beside its loss, by name. The Trainer keeps
            it, with its graph, until the batch has ended.
        datamodule: The LightningDataModule of the fit; None for none.
        facts: Of the Trainer that the module trains with, as `facts_of`.
    """

    def __init__(self, default_dtype: torch.dtype | None, datamodule: Any) -> None:
        self.default_dtype = default_dtype
        self.batch_number = 0
        self.outputs: dict[str, Any] = {}
        self.datamodule = datamodule
        self.facts: dict[str, int] = {}

    def give_placeholder(self, owner: Any, stage: Stage) -> None:
        """Give a LightningModule, or a LightningDataModule, a placeholder as its Trainer."""
        placeholder = TrainerPlaceholder(package_of(owner), stage, self.facts, self.datamodule)
        if isinstance(owner, torch.nn.Module):
            set_trainer(owner, placeholder)
        else:
            owner.trainer = placeholder

    def _detach_from_trainer(self, module: Any, stage: Stage = Stage.TRAINING) -> None:
        """Replace a module's Trainer by a placeholder, and its logging by nothing."""
        nothing = Placeholder()
        self.give_placeholder(module, stage)
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

    @staticmethod
    def autocast_cache_enabled(module: Any) -> bool:
        """Whether half-precision copies of weights are live until autocast is left.

        Some versions of Lightning turn that cache off.
        """
        plugin = import_module(f"{package_of(module)}.plugins.precision").MixedPrecision(
            "bf16-mixed", device="cpu"
        )
        return caches_autocast(plugin)

    @staticmethod
    def begin_batch(module: Any, device_type: str) -> None:
        """Ask rank 0 for signals before a batch, as Lightning does: other collectives end."""
        if is_in_fake_world() and asks_ranks_for_signals(package_of(module)):
            dist.broadcast(torch.tensor([0], device=device_type), src=0)

    def training_step(self, module: Any, batch: object, number: int = 0) -> object:
        """Call `training_step` with the number of the batch, under the step's default dtype."""
        return self._call(module.training_step, batch, number)

    def loss(self, module: Any, batch: object, num_optimizers: int) -> Any:
        """Call `training_step` of a copy; returns its loss, or else its result."""
        nothing = Placeholder()
        optimizers = nothing if num_optimizers == 1 else [nothing] * num_optimizers
        self._detach_from_trainer(module)
        module.optimizers = lambda *args, **kwargs: optimizers
        output: Any = self.training_step(module, batch)
        loss = output.get("loss") if isinstance(output, dict) else None
        if not isinstance(loss, torch.Tensor):
            return output
        self.outputs = {name: value for name, value in output.items() if name != "loss"}
        return loss

    def _call(self, run: Callable[..., object], batch: object, number: int) -> object:
        # Lightning gives batch_idx to whatever takes a second argument, whatever its name.
        takes_batch_idx = len(inspect.signature(run).parameters) > 1
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype or before)
        try:
            return run(batch, number) if takes_batch_idx else run(batch)
        finally:
            torch.set_default_dtype(before)

    def evaluation_step(self, module: Any, batch: object, stage: str) -> object:
        """Call `validation_step` or that of another stage, and the module's hooks around it."""
        number = self.batch_number
        if number == 0:
            self._detach_from_trainer(module, _STAGES[stage])
            for hook in ("start", "epoch_start"):
                getattr(module, f"on_{stage}_{hook}")()
        getattr(module, f"on_{stage}_batch_start")(batch, number)
        outputs = self._call(getattr(module, f"{stage}_step"), batch, number)
        getattr(module, f"on_{stage}_batch_end")(outputs, batch, number)
        return outputs

    def divided(self, loss: torch.Tensor, num_batches: int) -> torch.Tensor:
        """The loss of one of the batches of an update; a copy of it is kept until the batch ends.

        As `ClosureResult.from_training_step_output`, which divides by 1, too, and lets go of what
        `training_step` has returned: the loss of `mse_loss` has the memory of all its elements.
        """
        part = loss / num_batches
        self.outputs["loss"] = part.detach().clone()
        return part

    @staticmethod
    def free_gradients(module: Any) -> None:
        """Free gradients before a validation through the module's hook, where there is one."""
        getattr(module, "on_validation_model_zero_grad", module.zero_grad)()

    @staticmethod
    def zero_grad(module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Clear gradients through the module's hook `optimizer_zero_grad`."""
        module.optimizer_zero_grad(0, 0, optimizer)

    @staticmethod
    def backward(module: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass through the module's hook `backward`, as `manual_backward` does."""
        module.backward(loss, *args, **kwargs)

    @staticmethod
    def clip_gradients(
        module: Any, optimizer: torch.optim.Optimizer, norm: float | None, value: float | None
    ) -> None:
        """Clip through the module's hook `configure_gradient_clipping`, as the Trainer is set."""
        limit = value if norm is None else norm
        algorithm = None if limit is None else "value" if norm is None else "norm"

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
        """Call `training_step` through the wrapper of a module, as a strategy does."""
        if whole is module:
            return
        training_step, forward = module.training_step, module.forward
        ddp = None if module.automatic_optimization else replicated(whole)

        @functools.wraps(training_step)
        def through(*args: Any) -> Any:
            def first(*inputs: Any) -> Any:
                module.forward = forward
                output = training_step(*inputs)
                if ddp is not None:
                    ddp.require_backward_grad_sync = False
                return output

            module.forward = first
            output = whole(*args)
            if ddp is not None:
                ddp.require_backward_grad_sync = True
            return output

        module.training_step = through
        if ddp is None:
            return
        # As `DDPStrategy.pre_backward` and `_DDPForwardRedirection`: the backward pass of a manual
        # optimization comes before the end of the wrapper's forward, which would prepare for it.
        prepare = import_module(f"{package_of(module)}.overrides.distributed").prepare_for_backward
        backward = module.backward

        @functools.wraps(backward)
        def prepared(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            prepare(ddp, loss)
            backward(loss, *args, **kwargs)

        module.backward = prepared

    @contextmanager
    def manual(
        self,
        module: Any,
        optimizers: Sequence[torch.optim.Optimizer],
        manual_backward: Callable[..., None],
        update: Callable[..., Any],
    ) -> Iterator[None]:
        """Inside the context, a module's manual optimization calls these functions."""
        self._detach_from_trainer(module)
        wrapped = [_ManualOptimizer(optimizer, optimizers, update) for optimizer in optimizers]

        def optimizers_of_module(use_pl_optimizer: bool = True) -> Any:
            own: list[Any] = list(wrapped if use_pl_optimizer else optimizers)
            return own[0] if len(own) == 1 else own

        module.optimizers = optimizers_of_module
        module.manual_backward = manual_backward
        module.clip_gradients = _clip_gradients

        def wrapper_of(optimizer: Any) -> Any:
            return next((each for each in wrapped if optimizer_in(each) is optimizer), optimizer)

        module.toggle_optimizer = lambda optimizer, *args: wrapper_of(optimizer).toggle()
        module.untoggle_optimizer = lambda optimizer, *args: wrapper_of(optimizer).untoggle()
        yield


class _ManualOptimizer:
    """An optimizer as `self.optimizers()` returns it under manual optimization."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        all_optimizers: Sequence[torch.optim.Optimizer],
        update: Callable[..., Any],
    ) -> None:
        self._optimizer = optimizer
        self._all_optimizers = all_optimizers
        self._update = update
        self._toggled: list[tuple[torch.nn.Parameter, bool]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        return self._update(self._optimizer, closure or (lambda: None), **kwargs)

    def toggle(self) -> None:
        """Let only this optimizer's parameters require gradients, as `toggle_optimizer` does."""
        own = {id(parameter) for parameter in _parameters(self._optimizer)}
        for optimizer in self._all_optimizers:
            for parameter in _parameters(optimizer):
                self._toggled.append((parameter, parameter.requires_grad))
                if id(parameter) not in own:
                    parameter.requires_grad = False

    def untoggle(self) -> None:
        """Restore `requires_grad` of all parameters."""
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


def _clip_gradients(
    optimizer: Any,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
) -> None:
    """Clip as `LightningModule.clip_gradients` without a Trainer's setting; by norm by default."""
    if gradient_clip_val is None or gradient_clip_val <= 0:
        return
    is_by_value = str(gradient_clip_algorithm) == "value"
    clip = torch.nn.utils.clip_grad_value_ if is_by_value else torch.nn.utils.clip_grad_norm_
    clip(list(_parameters(optimizer)), gradient_clip_val)


def configured_optimizers(module: Any) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers of `configure_optimizers`; a module without a Trainer gets a placeholder."""
    trainer = trainer_of(module)
    if trainer is None:
        set_trainer(module, TrainerPlaceholder(package_of(module)))
    try:
        return tuple(_configured(module.configure_optimizers()))
    finally:
        set_trainer(module, trainer)


def _configured(configured: Any) -> list[torch.optim.Optimizer]:
    """The optimizers in any form: one, several, a pair of lists, dicts, or None."""
    if configured is None:
        return []
    if isinstance(configured, dict):
        return [configured["optimizer"]]
    if isinstance(configured, torch.optim.Optimizer):
        return [configured]
    if isinstance(configured, (tuple, list)):
        if len(configured) == 2 and isinstance(configured[0], (list, tuple)):
            return list(configured[0])
        return [each["optimizer"] if isinstance(each, dict) else each for each in configured]
    return [configured]
