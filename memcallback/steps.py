"""`TrainingStep`: what one training step is, for any loop; and how many samples a batch has."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memcallback.holdings import tensors_in

Loss = Callable[[Any, Any], torch.Tensor | None]
MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]

#: Lightning's names for precisions -> the type that autocast computes in; None where autocast is off.
AUTOCAST = {
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "16-true": None,
    "bf16-true": None,
    "32-true": None,
    "64-true": None,
}
_SHORT = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """How many samples a batch has.

    Attributes:
        batch_size: The number, None if no tensor in the batch has a first dimension.
        is_ambiguous: Whether the tensors' first dimensions differ; then the number is the most frequent of them.
    """

    batch_size: int | None
    is_ambiguous: bool = False


def infer_batch_size(batch: object) -> BatchSize:
    """How many samples a batch has: its own `batch_size` or `num_graphs` if it has one, else the tensors' first dimension.

    Args:
        batch: Any nesting of mappings, sequences, dataclasses and objects with tensors in it.
    """
    for name in ("batch_size", "num_graphs"):
        own = _attribute(batch, name)
        if isinstance(own, torch.Size):
            own = own[0] if own else None
        if isinstance(own, int) and not isinstance(own, bool) and own > 0:
            return BatchSize(batch_size=own)
    sizes = Counter(tensor.shape[0] for tensor in tensors_in(batch) if tensor.ndim > 0)
    if not sizes:
        return BatchSize(batch_size=None)
    return BatchSize(batch_size=sizes.most_common(1)[0][0], is_ambiguous=len(sizes) > 1)


def _attribute(batch: object, name: str) -> object:
    try:
        return getattr(batch, name, None)
    except Exception:  # a property of a user's batch can fail in any way
        return None


class TrainingStep:
    """One training step: forward pass and loss, backward pass, optimizer update.

    Args:
        model: The model, on any device; it is never changed.
        batch: One batch: any nesting of mappings, sequences, dataclasses and objects with tensors in it.
        loss: A function of the model and the batch that gives the loss, a scalar tensor; by default the sum of whatever
            floating-point tensors `model(batch)` returns.
        optimizer: An optimizer of this model, several of them, or a function from parameters to a new one; None for none.
        precision: A Lightning precision: `32-true`, `16-mixed`, `bf16-mixed`, `16-true`, `bf16-true` or `64-true`. Only the
            mixed ones change anything here: a model of another type already has that type.
        batch_size: Samples in the batch, if they are not to be inferred from it.

    Attributes:
        zero_grad_before_forward: Whether gradients are cleared before the forward pass, as most loops do. Lightning clears
            them after it, so they live through it.

    Raises:
        ValueError: For an unknown precision, or a batch size below 1.
        TypeError: If the model is not a module.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        batch: object,
        *,
        loss: Loss | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | MakeOptimizer | None = None,
        precision: str | int = "32-true",
        batch_size: int | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"model must be a torch.nn.Module, got {type(model).__name__}. Give the model itself, not a function that makes it."
            )
        name = _SHORT.get(str(precision), str(precision))
        if name not in AUTOCAST:
            raise ValueError(f"precision {precision!r} is not known. Use one of {', '.join(AUTOCAST)}.")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}. Leave it out to have it inferred from the batch.")
        self.model = model
        self.batch = batch
        self.loss: Loss = loss if loss is not None else _sum_of_outputs
        self.precision = name
        self.zero_grad_before_forward = True
        self._optimizer = optimizer
        self.batch_size = infer_batch_size(batch) if batch_size is None else BatchSize(batch_size=batch_size)

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
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | MakeOptimizer | None = None,
        precision: str | int = "32-true",
        batch_size: int | None = None,
    ) -> TrainingStep:
        """The step that a LightningModule's `training_step` describes.

        Args:
            module: A LightningModule of either package.
            batch: As for `TrainingStep`.
            optimizer: As for `TrainingStep`; by default what `module.configure_optimizers` makes.
            precision: As for `TrainingStep`.
            batch_size: As for `TrainingStep`.
        """
        step = cls(module, batch, optimizer=optimizer, precision=precision, batch_size=batch_size)
        # Not through the step: that would be a cycle, and keep the batch alive until garbage is collected.
        step.loss = lambda copy, fakes: _lightning_loss(copy, fakes, len(_optimizers_of(copy, optimizer, is_lightning=True)))
        step.zero_grad_before_forward = False
        step._is_lightning = True
        return step

    _is_lightning = False

    def optimizers_of(self, model: torch.nn.Module) -> tuple[torch.optim.Optimizer, ...]:
        """The step's optimizers: the given ones, or new ones for a model, which may be a copy of the step's."""
        return _optimizers_of(model, self._optimizer, is_lightning=self._is_lightning)


def _optimizers_of(
    model: Any, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | MakeOptimizer | None, *, is_lightning: bool
) -> tuple[torch.optim.Optimizer, ...]:
    if optimizer is None:
        return tuple(_configured(model.configure_optimizers())) if is_lightning else ()
    if isinstance(optimizer, torch.optim.Optimizer):
        return (optimizer,)
    if callable(optimizer):
        return (optimizer(model.parameters()),)
    return tuple(optimizer)


def _sum_of_outputs(model: torch.nn.Module, batch: object) -> torch.Tensor:
    outputs = [tensor for tensor in tensors_in(model(batch)) if tensor.is_floating_point()]
    if not outputs:
        raise ValueError("The model returned no floating-point tensor, so there is nothing to train. Give loss=lambda model, batch: ...")
    return torch.stack([output.sum() for output in outputs]).sum()


class _StandIn:
    """In place of an optimizer or a Trainer while a step is followed on shapes: whatever is asked of it does nothing.

    A training step reads `global_step` and `current_epoch` as 0.
    """

    global_step = current_epoch = 0

    def __getattr__(self, name: str) -> _StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: object, **kwargs: object) -> _StandIn:
        return self

    def __getitem__(self, key: object) -> _StandIn:
        return self

    def __enter__(self) -> _StandIn:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def _lightning_loss(module: Any, batch: object, num_optimizers: int) -> torch.Tensor | None:
    """Run the training step of a copy that has no Trainer; None under manual optimization, where there is no loss to return."""
    nothing = _StandIn()
    optimizers = nothing if num_optimizers == 1 else [nothing] * num_optimizers
    module._trainer = nothing
    module.optimizers = lambda *args, **kwargs: optimizers
    for name in ("log", "log_dict", "manual_backward", "clip_gradients", "toggle_optimizer", "untoggle_optimizer", "lr_schedulers"):
        setattr(module, name, nothing)
    # Lightning gives batch_idx to whatever takes a second argument, whatever its name.
    takes_batch_idx = len(inspect.signature(module.training_step).parameters) > 1
    output = module.training_step(batch, 0) if takes_batch_idx else module.training_step(batch)
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, torch.Tensor) and module.automatic_optimization:
        raise ValueError(f"training_step returned {type(loss).__name__}, not a loss.")
    return loss


def _configured(configured: Any) -> list[torch.optim.Optimizer]:
    """The optimizers in what `configure_optimizers` may return: one, several, a pair of lists, dicts, or None."""
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
