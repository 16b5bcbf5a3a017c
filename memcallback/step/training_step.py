"""TrainingStep: the model, batch, loss, optimizer, precision and ranks of one training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from memcallback.core.errors import PredictionError
from memcallback.core.validation import above_0, described, whole_number
from memcallback.step.batch import (
    INFERRED,
    BatchSize,
    check_sequence_length,
    infer_batch_size,
)
from memcallback.step.lightning_loop import LightningLoop, lightning_loss
from memcallback.step.loss import Loss, check_losses, default_loss
from memcallback.step.model import is_sharded
from memcallback.step.optimizers import OptimizerOption, check_optimizers, optimizers_for
from memcallback.step.ranks import Ranks, ranks_of

Prepare = Callable[[nn.Module, Any], Any]
ChangeOptimizers = Callable[[Sequence[torch.optim.Optimizer]], Sequence[torch.optim.Optimizer]]
#: Lightning's names for precisions -> the type that autocast computes in; None where autocast is
#: off.
AUTOCAST = {
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "16-true": None,
    "bf16-true": None,
    "32-true": None,
    "64-true": None,
}
#: Lightning's names -> the type of tensors that a training step makes without naming one, where it
#: is not PyTorch's default.
_DEFAULT_DTYPES = {"16-true": torch.float16, "bf16-true": torch.bfloat16, "64-true": torch.float64}
_SHORT = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}


class TrainingStep:
    """One training step: forward pass and loss, backward pass, optimizer update.

    Args:
        model: The model, on any device; it is never changed. Of a `DistributedDataParallel` the
            module in it is taken, with `ranks` as it says.
        batch: One batch: any nesting of mappings, sequences, dataclasses and objects with tensors
            in it.
        loss: A function of the model and the batch that gives the loss, a scalar tensor; by default
            the `loss` that `model(batch)` returns, as models of transformers do, or else the sum of
            its floating-point tensors. There a mapping whose keys are arguments of the model's
            `forward` is handed over as `model(**batch)`. Several of them, with as many optimizers,
            for a step of several updates (a GAN).
        optimizer: An optimizer of this model, several of them, or a function from parameters to a
            new one; None for none.
        precision: A Lightning precision: `32-true`, `16-mixed`, `bf16-mixed`, `16-true`,
            `bf16-true` or `64-true`. Only the mixed ones change anything here: a model of another
            type already has that type. With `16-mixed` a GradScaler scales the loss.
        batch_size: Samples in the batch, if they are not to be inferred from it.
        sequence_length: How long the batch's sequences are: the size of every dimension but the
            first of the batch's tensors that is to vary. With it a prediction tells of other
            lengths.
        accumulate: Batches whose gradients are summed before an update, at least 1.
        clip_grad_norm: The largest norm of all gradients together
            (`torch.nn.utils.clip_grad_norm_`), None for no clipping.
        clip_grad_value: The largest value in a gradient (`torch.nn.utils.clip_grad_value_`), None
            for no clipping.
        ranks: The job of several ranks that the step is trained in, and which of them is looked at;
            None for one device.

    Attributes:
        prepare: Changes the fake copies of the model and the batch before they are traced, and
            gives the batch; None to leave them.
        change_optimizers: Gives the optimizers to trace in place of copies of the step's; None to
            leave them.
        losses: The loss, or several: each is followed by its backward pass and the update of the
            optimizer at its place.
        lightning: How a LightningModule is run; None for a plain loop.
        zero_grad_before_forward: Whether gradients are cleared before the forward pass, as most
            loops do. Lightning clears them after it, so they live through it. Cleared they are let
            go of (`set_to_none=True`, PyTorch's default), by Lightning as the module's
            `optimizer_zero_grad` does it.
        has_accumulation: Whether the batches of an update come from `memcallback.accumulate`, which
            clears gradients before it gives the first one and divides the loss in its backward
            pass, whose caller keeps the undivided one; and not as in `loss = loss / accumulate`, or
            Lightning.

    Raises:
        ValueError: For an unknown precision, a number that is out of range, a sequence length that
            no tensor has, no loss in a list, or an optimizer of another model.
        TypeError: For anything that is not of its kind, and a function that cannot be called with
            what it is to be given.
    """

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
    ) -> None:
        self.model, self.ranks = _model_and_ranks(model, ranks)
        self.batch = batch
        self.batch_size = infer_batch_size(batch)
        if batch_size is not None:
            self.batch_size = BatchSize(batch_size=whole_number("batch_size", batch_size, INFERRED))
        self.sequence_length = (
            None if sequence_length is None else check_sequence_length(sequence_length, batch)
        )
        loss = default_loss if loss is None else loss
        check_losses(loss)
        self.losses: tuple[Loss, ...] = tuple(loss) if isinstance(loss, Sequence) else (loss,)
        check_optimizers(self.model, optimizer)
        self._optimizer = optimizer
        self.precision = _SHORT.get(str(precision), str(precision))
        if self.precision not in AUTOCAST:
            raise ValueError(
                f"precision {precision!r} is not known. Use one of {', '.join(AUTOCAST)}."
            )
        self.accumulate = whole_number(
            "accumulate",
            accumulate,
            "It is how many batches there are for one update, 1 by default.",
        )
        if len(self.losses) > 1:
            _check_several_losses(len(self.losses), optimizer, self.accumulate)
        _check_clipping("clip_grad_norm", clip_grad_norm, "norm, such as 1.0")
        _check_clipping("clip_grad_value", clip_grad_value, "value, such as 0.5")
        self.clip_grad_norm = clip_grad_norm
        self.clip_grad_value = clip_grad_value
        self.lightning: LightningLoop | None = None
        self.zero_grad_before_forward = True
        self.has_accumulation = False
        self.prepare: Prepare | None = None
        self.change_optimizers: ChangeOptimizers | None = None

    @property
    def loss(self) -> Loss:
        """The first loss."""
        return self.losses[0]

    @property
    def uses_grad_scaler(self) -> bool:
        """Whether a GradScaler scales the loss."""
        return self.precision == "16-mixed"

    @property
    def given_optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers of this very model that were given, rather than functions that make them."""
        given = self._optimizer if isinstance(self._optimizer, Sequence) else (self._optimizer,)
        return tuple(one for one in given if isinstance(one, torch.optim.Optimizer))

    def check_predictable(self) -> int:
        """See that the step's batch size is known and that its model is whole.

        Returns:
            Samples in the batch.

        Raises:
            PredictionError: If one of them is not so; the text names the way out.
        """
        if self.batch_size.batch_size is None:
            raise PredictionError(
                "The batch size cannot be inferred: no tensor in the batch has a first dimension. Give it: batch_size=32 to TrainingStep or "
                "MemoryCallback."
            )
        if is_sharded(self.model):
            raise PredictionError(
                "The model is sharded over several devices already. Give the module as it was before, and how it is sharded: "
                "TrainingStep(module, batch, ranks=memcallback.Ranks(world_size, 'fsdp2'))."
            )
        return self.batch_size.batch_size

    def of_rank(self, rank: int) -> TrainingStep:
        """The step as another rank of its job has it.

        Args:
            rank: Which rank.
        """
        if self.ranks is None or rank == self.ranks.rank:
            return self
        return self.varied(ranks=self.ranks.as_rank(rank))

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The type that autocast computes in, None where it is off."""
        return AUTOCAST[self.precision]

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
    ) -> TrainingStep:
        """The step that a LightningModule's `training_step` describes.

        Args:
            module: A LightningModule of either package.
            batch: As for `TrainingStep`.
            optimizer: As for `TrainingStep`; by default what `module.configure_optimizers` makes.
            precision: As for `TrainingStep`.
            batch_size: As for `TrainingStep`.
            sequence_length: As for `TrainingStep`.
            accumulate: As for `TrainingStep`.
            clip_grad_norm: As for `TrainingStep`.
            clip_grad_value: As for `TrainingStep`.
            ranks: As for `TrainingStep`.

        Raises:
            TypeError: If the module has no `training_step`; and as `TrainingStep`.
            ValueError: As `TrainingStep`; and for clipping both by norm and by value, or for
                clipping or accumulation with manual optimization, which Lightning refuses too.
        """
        if not callable(getattr(module, "training_step", None)):
            raise TypeError(
                f"module must be a LightningModule, got {described(module)}, which has no training_step. For another loop give "
                "TrainingStep(model, batch, loss=..., optimizer=...)."
            )
        if clip_grad_norm is not None and clip_grad_value is not None:
            raise ValueError(
                f"clip_grad_norm is {clip_grad_norm} and clip_grad_value is {clip_grad_value}; a Trainer clips in one of these ways: give one."
            )
        if not getattr(module, "automatic_optimization", True):
            _check_manual_optimization(
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
        )
        loop = step.lightning = LightningLoop(_DEFAULT_DTYPES.get(step.precision))
        # Not through the step: that would be a cycle, and keep the batch alive until garbage is
        # collected.
        step.losses = (
            lambda copy, fakes: lightning_loss(
                loop, copy, fakes, len(optimizers_for(copy, optimizer, is_lightning=True))
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
        """The same step, some things of it otherwise.

        Args:
            zero_grad_before_forward: As the attribute; None to leave it.
            has_accumulation: As the attribute; None to leave it.
            prepare: As the attribute, after what this step has; None to leave it.
            change_optimizers: As the attribute; None to leave it.
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
        } | changes
        batch = arguments.pop("batch", self.batch)
        if self.lightning is None:
            step = TrainingStep(self.model, batch, **{"loss": self.losses, **arguments})
        else:
            step = TrainingStep.from_lightning(self.model, batch, **arguments)
        if "batch_size" not in changes:
            step.batch_size = self.batch_size
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
        """The step's optimizers: the given ones, or new ones for a model, which may be a copy of
        the step's.
        """
        return optimizers_for(model, self._optimizer, is_lightning=self.lightning is not None)


def _in_sequence(first: Prepare | None, second: Prepare | None) -> Prepare | None:
    if first is None or second is None:
        return first or second
    return lambda model, batch: second(model, first(model, batch))


def _model_and_ranks(model: object, ranks: object) -> tuple[nn.Module, Ranks | None]:
    """Check both; the module in a `DistributedDataParallel`, which says what its ranks are."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {described(model)}. "
            "Give the model itself, not a function that makes it."
        )
    if ranks is not None and not isinstance(ranks, Ranks):
        raise TypeError(
            f"ranks must be memcallback.Ranks, got {described(ranks)}. "
            "Give Ranks(world_size, 'ddp'), or None for one device."
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.module, ranks or ranks_of(model)
    return model, ranks


def _check_several_losses(number: int, optimizer: object, accumulate: int) -> None:
    """Check that there is an optimizer for each of several losses, and no accumulation."""
    if not isinstance(optimizer, Sequence) or len(optimizer) != number:
        value = (
            f"a list of {len(optimizer)}"
            if isinstance(optimizer, Sequence)
            else described(optimizer)
        )
        raise ValueError(
            f"{number} losses need as many optimizers, got {value}. "
            "Give optimizer=[one for each loss]."
        )
    if accumulate > 1:
        raise ValueError(
            f"accumulate={accumulate} with {number} losses is not known: a step of several "
            "updates has one batch. Leave accumulate out."
        )


def _check_clipping(name: str, value: float | None, example: str) -> None:
    if value is not None:
        above_0(name, value, f"Give the largest {example}, or None for no clipping.")


def _check_manual_optimization(**options: object) -> None:
    """Check that options of automatic optimization have their defaults."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} with manual optimization is not known: the training_step says "
                "itself when it clips and updates, and Lightning refuses it too. Leave it out."
            )
