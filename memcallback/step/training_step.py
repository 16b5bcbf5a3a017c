"""TrainingStep: the model, batch, loss, optimizer, precision and ranks of one training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from memcallback.core.validation import described, one_of, whole_number
from memcallback.step.beside import AlsoOption, modules_reached
from memcallback.step.copies.optimizers import step_hooks
from memcallback.step.lightning_loop import LightningLoop
from memcallback.step.loss import Loss, check_losses, default_loss
from memcallback.step.optimizers import OptimizerOption, check_optimizers, optimizers_for
from memcallback.step.ranks import Ranks
from memcallback.step.step import DEFAULT_DTYPES, Prepare, Step
from memcallback.step.training_checks import (
    check_clipping,
    check_manual_optimization,
    check_several_losses,
    check_whole_update,
    smaller,
)

#: Which outputs the loop keeps while the next batch runs.
KeptInTraining = Literal["none", "last"]
#: Takes a function and returns it compiled, as `torch.compile` does.
CompileUpdate = Callable[[Callable[..., Any]], Callable[..., Any]]
ChangeOptimizers = Callable[[Sequence[torch.optim.Optimizer]], Sequence[torch.optim.Optimizer]]


class TrainingStep(Step):
    """One training step: forward pass and loss, backward pass, optimizer update.

    Args:
        model: The model, on any device; it is never changed. A `DistributedDataParallel` is
            unwrapped, and `ranks` is read from it.
        batch: One batch: any nesting of mappings, sequences, dataclasses and objects with tensors
            in it.
        loss: A function of the model and the batch that returns the loss, a scalar tensor. By
            default `model(batch)` is called, or `model(**batch)` if the batch is a mapping whose
            keys are arguments of the model's `forward`. The loss is then the returned `loss`, as
            transformers models return it, or else the sum of the returned floating-point tensors,
            which a caveat says. Give a list of losses, with as many optimizers, for a step of
            several updates (a GAN).
        optimizer: An optimizer of this model, several of them, or a function from parameters to a
            new one; None for none.
        precision: A Lightning precision: `32-true`, `16-mixed`, `bf16-mixed`, `16-true`,
            `bf16-true` or `64-true`. Only the mixed ones have an effect here, which is autocast;
            for the others the model must already have that dtype. With `16-mixed` a GradScaler
            scales the loss.
        batch_size: Samples in the batch; inferred from it by default.
        sequence_length: How long the batch's sequences are. To predict another length, each
            dimension of this size in the batch's tensors gets the new length, except a tensor's
            first dimension.
        accumulate: Batches whose gradients are summed before an update, at least 1.
        clip_grad_norm: The largest norm of all gradients together
            (`torch.nn.utils.clip_grad_norm_`), None for no clipping.
        clip_grad_value: The largest value in a gradient (`torch.nn.utils.clip_grad_value_`), None
            for no clipping.
        ranks: The distributed job that trains the step, and which of its ranks to predict; None for
            one device.
        also: What the device holds and the step does not use, such as an average of the weights: a
            list of modules or of containers of tensors, or a mapping from names to them. Modules
            that the loss (a teacher) or a hook of an optimizer (an average) reaches through a
            variable are found without it.
        keep_outputs: Which outputs of the model the loop keeps beside the loss: those of the `last`
            call until the next one has returned, as `outputs = model(batch)` in a loop does; or
            `none`, as `loss = criterion(model(batch), targets)` does.
        keep_batch: Whether the loop keeps a batch until the next one is on the device, as
            `for data in loader: inputs = data[0].cuda()` and accelerate's loaders do. By default it
            lets go of it before, as `for x, y in loader: x, y = x.cuda(), y.cuda()` does.
        other_batch_size: Samples in a smaller batch that comes in between, such as the last one of
            an epoch. For compiled code only: PyTorch may compile again for it, and the prediction
            is for the updates after that.
        other_sequence_length: Length of the sequences in shorter batches that come in between, as
            `other_batch_size`; it needs `sequence_length`.
        compile_update: How the loop compiles a function that does the whole update, from
            `zero_grad` to `optimizer.step`: `torch.compile`, or a partial of it with options; None
            if it does not. It needs a plain loop on one device, with one loss, `accumulate=1`,
            `keep_outputs="none"` and an optimizer other than LBFGS. With
            `torch._dynamo.config.compiled_autograd` the backward pass is compiled, too.

    Attributes:
        prepare: Changes the fake copies of the model and the batch before they are traced, and
            returns the batch; None changes nothing.
        change_optimizers: Returns the optimizers to trace instead of copies of the step's; None
            changes nothing.
        losses: The loss, or several: each is followed by its backward pass and the update of the
            optimizer at the same position.
        keeps_losses: Whether `losses` replaces a LightningModule's `training_step`, here and in
            the variants of this step.
        lightning: How a LightningModule is run; None for a plain loop.
        zero_grad_before_forward: Whether gradients are cleared before the forward pass, as most
            loops do. Lightning clears gradients after the forward pass, so they are live in it.
            Clearing frees gradients (`set_to_none=True`, PyTorch's default); for a LightningModule
            it is the module's `optimizer_zero_grad`.
        has_accumulation: Whether the batches of an update come from `memcallback.accumulate`. It
            clears gradients before the first batch, and divides the loss inside its backward pass,
            so the caller keeps the undivided loss. False if the loop divides the loss itself
            (`loss = loss / accumulate`), as Lightning does.
        keeps_first_batch: Whether the loop keeps its first batch, too, as accelerate's loaders of
            a stream do.
        loads_all_ranks: Whether the batches of all ranks of a job come to each device together, as
            with these loaders; the step runs its rank's part.
        loads_update_at_once: Whether all batches of an update are on the device before the first
            one runs, as in the Trainer of transformers.

    Raises:
        ValueError: For an unknown precision, a number out of range, a sequence length that no
            tensor has, a batch in between that is not smaller, an empty list of losses, an
            optimizer of another model, or a whole update that cannot be compiled as one function.
        TypeError: For an argument of the wrong type, or a function that cannot be called with its
            arguments.
    """

    name = "TrainingStep"

    def __init__(
        self,
        model: nn.Module,
        batch: object,
        *,
        loss: Loss | Sequence[Loss] | None = None,
        optimizer: OptimizerOption = None,
        precision: str | int = "32-true",
        batch_size: int | None = None,
        sequence_length: int | None = None,
        accumulate: int = 1,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        ranks: Ranks | None = None,
        also: AlsoOption = None,
        keep_outputs: KeptInTraining = "none",
        keep_batch: bool = False,
        other_batch_size: int | None = None,
        other_sequence_length: int | None = None,
        compile_update: CompileUpdate | None = None,
    ) -> None:
        super().__init__(
            model,
            batch,
            precision=precision,
            batch_size=batch_size,
            sequence_length=sequence_length,
            ranks=ranks,
            also=also,
            keep_batch=keep_batch,
        )
        loss = default_loss if loss is None else loss
        check_losses(loss)
        self.losses: tuple[Loss, ...] = tuple(loss) if isinstance(loss, Sequence) else (loss,)
        self.keeps_losses = False
        check_optimizers(self.model, optimizer)
        self._optimizer = optimizer
        self.accumulate = whole_number(
            "accumulate",
            accumulate,
            "It is the number of batches for one update, 1 by default.",
        )
        if len(self.losses) > 1:
            check_several_losses(len(self.losses), optimizer, self.accumulate)
        check_clipping("clip_grad_norm", clip_grad_norm, "norm, such as 1.0")
        check_clipping("clip_grad_value", clip_grad_value, "value, such as 0.5")
        self.clip_grad_norm = clip_grad_norm
        self.clip_grad_value = clip_grad_value
        self.keep_outputs = one_of("keep_outputs", keep_outputs, KeptInTraining)
        self.other_batch_size = smaller(
            "other_batch_size", other_batch_size, "batch_size", self.batch_size.batch_size
        )
        self.other_sequence_length = smaller(
            "other_sequence_length", other_sequence_length, "sequence_length", self.sequence_length
        )
        self.compile_update = compile_update
        if compile_update is not None:
            check_whole_update(self)
        self.zero_grad_before_forward = True
        self.has_accumulation = False
        self.loads_update_at_once = False
        self.change_optimizers: ChangeOptimizers | None = None

    @property
    def loss(self) -> Loss:
        """The first loss."""
        return self.losses[0]

    @property
    def functions(self) -> Sequence[Callable[..., Any]]:
        """The losses."""
        return self.losses

    @property
    def uses_grad_scaler(self) -> bool:
        """Whether a GradScaler scales the loss."""
        return self.precision == "16-mixed"

    @property
    def given_optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The user's optimizers of this model; functions that make one are left out."""
        passed = self._optimizer if isinstance(self._optimizer, Sequence) else (self._optimizer,)
        return tuple(each for each in passed if isinstance(each, torch.optim.Optimizer))

    def held(self) -> dict[str, Any]:
        """`also`, and modules that hooks of the optimizers reach, by name.

        Returns:
            Modules, and containers of tensors.
        """
        return {**modules_reached(self.model, step_hooks(self.given_optimizers)), **self.also}

    def of_rank(self, rank: int) -> TrainingStep:
        """The step of another rank of its job.

        Args:
            rank: The rank's number, from 0.
        """
        if self.ranks is None or rank == self.ranks.rank:
            return self
        return self.varied(ranks=self.ranks.as_rank(rank))

    @classmethod
    def from_lightning(
        cls,
        module: Any,
        batch: object,
        *,
        optimizer: OptimizerOption = None,
        precision: str | int = "32-true",
        batch_size: int | None = None,
        sequence_length: int | None = None,
        accumulate: int = 1,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        ranks: Ranks | None = None,
        also: AlsoOption = None,
        datamodule: Any = None,
        other_batch_size: int | None = None,
        other_sequence_length: int | None = None,
    ) -> TrainingStep:
        """The step that a LightningModule's `training_step` describes.

        Args:
            module: A LightningModule of `lightning` or `pytorch_lightning`.
            batch: As for `TrainingStep`, as the loader gives it: where the hooks
                `transfer_batch_to_device` and `on_after_batch_transfer` are overridden, they run.
            optimizer: As for `TrainingStep`; by default those of `module.configure_optimizers`.
            precision: As for `TrainingStep`.
            batch_size: As for `TrainingStep`.
            sequence_length: As for `TrainingStep`.
            accumulate: As for `TrainingStep`.
            clip_grad_norm: As for `TrainingStep`.
            clip_grad_value: As for `TrainingStep`.
            ranks: As for `TrainingStep`.
            also: As for `TrainingStep`. Modules that the module hides in a list are found without
                it.
            datamodule: A LightningDataModule, if it has these hooks, or if the step reads it.
            other_batch_size: As for `TrainingStep`.
            other_sequence_length: As for `TrainingStep`.

        Raises:
            TypeError: As for `TrainingStep`, and if the module has no `training_step`.
            ValueError: As for `TrainingStep`, for clipping both by norm and by value, and for
                clipping or accumulation with manual optimization, which Lightning refuses too.
        """
        if not callable(getattr(module, "training_step", None)):
            raise TypeError(
                f"module must be a LightningModule, got {described(module)}, which has no "
                "training_step. For another loop give TrainingStep(model, batch, loss=..., "
                "optimizer=...)."
            )
        if clip_grad_norm is not None and clip_grad_value is not None:
            raise ValueError(
                f"clip_grad_norm is {clip_grad_norm} and clip_grad_value is {clip_grad_value}; a "
                "Trainer clips in one of these ways: give one."
            )
        if not getattr(module, "automatic_optimization", True):
            check_manual_optimization(
                clip_grad_norm=clip_grad_norm,
                clip_grad_value=clip_grad_value,
                accumulate=None if accumulate == 1 else accumulate,
            )
        step = cls(
            module,
            batch,
            optimizer=optimizer,
            precision=precision,
            batch_size=batch_size,
            sequence_length=sequence_length,
            accumulate=accumulate,
            clip_grad_norm=clip_grad_norm,
            clip_grad_value=clip_grad_value,
            ranks=ranks,
            also=also,
            other_batch_size=other_batch_size,
            other_sequence_length=other_sequence_length,
        )
        loop = step.lightning = LightningLoop(DEFAULT_DTYPES.get(step.precision), datamodule)
        # The loss does not refer to the step: such a cycle would keep the batch alive until
        # Python's garbage collection.
        step.losses = (
            lambda copy, fakes: loop.loss(
                copy, fakes, len(optimizers_for(copy, optimizer, is_lightning=True))
            ),
        )
        step.zero_grad_before_forward = False
        return step

    def varied(
        self,
        *,
        zero_grad_before_forward: bool | None = None,
        has_accumulation: bool | None = None,
        prepare: Prepare | None = None,
        change_optimizers: ChangeOptimizers | None = None,
        **changes: Any,
    ) -> TrainingStep:
        """A copy of this step with some changes.

        Args:
            zero_grad_before_forward: The new attribute; None keeps it.
            has_accumulation: The new attribute; None keeps it.
            prepare: Runs after this step's own `prepare`; None keeps it.
            change_optimizers: The new attribute; None keeps it.
            changes: Arguments of `TrainingStep`.
        """
        arguments = {
            "optimizer": self._optimizer,
            "precision": self.precision,
            "batch_size": self.batch_size.batch_size,
            "sequence_length": self.sequence_length,
            "accumulate": self.accumulate,
            "clip_grad_norm": self.clip_grad_norm,
            "clip_grad_value": self.clip_grad_value,
            "ranks": self.ranks,
            "also": self.also,
        } | changes
        batch = arguments.pop("batch", self.batch)
        if self.lightning is None:
            own = {
                "loss": self.losses,
                "keep_outputs": self.keep_outputs,
                "keep_batch": self.keep_batch,
                "compile_update": self.compile_update,
            }
            step = TrainingStep(self.model, batch, **(own | arguments))
        else:
            step = TrainingStep.from_lightning(
                self.model, batch, datamodule=self.lightning.datamodule, **arguments
            )
            assert step.lightning is not None
            step.lightning.facts = self.lightning.facts
            if self.keeps_losses:
                step.losses, step.keeps_losses = self.losses, True
        if "batch_size" not in changes:
            step.batch_size = self.batch_size
        step.runs_batch_hooks = self.runs_batch_hooks
        step.moved_batch = None if "batch" in changes else self.moved_batch
        step.loads_update_at_once = self.loads_update_at_once
        step.keeps_first_batch = self.keeps_first_batch
        step.loads_all_ranks = self.loads_all_ranks
        for name in ("other_batch_size", "other_sequence_length"):
            if name not in changes:  # the new batch may be the smaller one
                setattr(step, name, getattr(self, name))
        step.zero_grad_before_forward = (
            self.zero_grad_before_forward
            if zero_grad_before_forward is None
            else zero_grad_before_forward
        )
        step.has_accumulation = (
            self.has_accumulation if has_accumulation is None else has_accumulation
        )
        step.change_optimizers = change_optimizers or self.change_optimizers
        step.prepare = _in_sequence(self.prepare, prepare)
        return step

    def optimizers_of(self, model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
        """The user's optimizers, or new ones for a model, which may be a copy of the step's."""
        return optimizers_for(model, self._optimizer, is_lightning=self.lightning is not None)


def _in_sequence(first: Prepare | None, second: Prepare | None) -> Prepare | None:
    if first is None or second is None:
        return first or second
    return lambda model, batch: second(model, first(model, batch))
