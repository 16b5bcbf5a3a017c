"""Step: what a training step and an inference step have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from memcallback.core.errors import PredictionError
from memcallback.core.types import Stage
from memcallback.core.validation import described, true_or_false, whole_number
from memcallback.step.batch import (
    INFERRED,
    BatchSize,
    check_sequence_length,
    infer_batch_size,
    outline,
)
from memcallback.step.beside import AlsoOption, beside, check_also
from memcallback.step.copies.known import read_from_device
from memcallback.step.model import is_sharded
from memcallback.step.ranks import Ranks, ranks_of, replicated

if TYPE_CHECKING:
    from memcallback.step.lightning_loop import LightningLoop

Prepare = Callable[[nn.Module, Any], Any]
#: Lightning's names for precisions -> the dtype that autocast computes in; None if it is off.
AUTOCAST = {
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "16-true": None,
    "bf16-true": None,
    "32-true": None,
    "64-true": None,
}
#: Lightning's names -> the default dtype inside a step, where it is not PyTorch's.
DEFAULT_DTYPES = {"16-true": torch.float16, "bf16-true": torch.bfloat16, "64-true": torch.float64}
_SHORT = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}


class Step:
    """A model that runs on a batch: the base of `TrainingStep` and `InferenceStep`.

    Attributes:
        stage: The kind of run that it is a step of, such as a training.
        name: The class that a user makes one with.
        prepare: Changes the fake copies of the model and the batch before they are traced, and
            returns the batch; None changes nothing.
        lightning: How a LightningModule is run; None for a plain loop.
        runs_batch_hooks: Whether a LightningModule's hooks `transfer_batch_to_device` and
            `on_after_batch_transfer` are still to run on the batch.
        moved_batch: The batch that they made, for a trace without them; None if nobody saw it.
        keeps_first_batch: Whether the loop keeps its first batch, too, as accelerate's loaders of
            a stream do.
        loads_all_ranks: Whether the batches of all ranks of a job come to each device together, as
            with these loaders; the step runs its rank's part.
    """

    name: ClassVar[str]

    def __init__(
        self,
        model: nn.Module,
        batch: object,
        *,
        precision: str | int,
        batch_size: int | None,
        sequence_length: int | None,
        ranks: Ranks | None,
        also: AlsoOption,
        keep_batch: bool,
    ) -> None:
        self.stage = Stage.TRAINING
        self.model, self.ranks = _model_and_ranks(model, ranks)
        self.batch = batch
        read_from_device(batch)
        self.batch_size = infer_batch_size(batch)
        if batch_size is not None:
            self.batch_size = BatchSize(batch_size=whole_number("batch_size", batch_size, INFERRED))
        self.sequence_length = (
            None if sequence_length is None else check_sequence_length(sequence_length, batch)
        )
        self.precision = _SHORT.get(str(precision), str(precision))
        if self.precision not in AUTOCAST:
            raise ValueError(
                f"precision {precision!r} is not known. Use one of {', '.join(AUTOCAST)}."
            )
        self.also = check_also(also)
        self.keep_batch = true_or_false("keep_batch", keep_batch)
        self.keeps_first_batch = False
        self.loads_all_ranks = False
        self.lightning: LightningLoop | None = None
        self.runs_batch_hooks = True
        self.moved_batch: Any = None
        self.prepare: Prepare | None = None

    @property
    def functions(self) -> Sequence[Callable[..., Any]]:
        """The functions of the model and the batch that the step calls."""
        raise NotImplementedError

    def beside(self) -> dict[str, Any]:
        """What is on the device beside the model, by name: `held`, and modules that a loss reaches.

        Returns:
            Modules, and containers of tensors. A module that is found has the name of the variable.
        """
        return beside(self.model, self.functions_to_copy(), self.held())

    def held(self) -> dict[str, Any]:
        """What is there beside the model whether the step uses it or not, by name: `also`.

        Returns:
            Modules, and containers of tensors.
        """
        return self.also

    def functions_to_copy(self) -> tuple[Callable[..., Any], ...]:
        """The user's functions that a trace copies; for a callable object its `__call__`."""
        if self.lightning is not None:
            return ()
        return tuple(
            MethodType(type(function).__call__, function)
            if isinstance(vars(type(function)).get("__call__"), FunctionType)
            else function
            for function in self.functions
        )

    def check_predictable(self) -> int:
        """Check that the batch size is known and the model is not sharded.

        Returns:
            Samples in the batch.

        Raises:
            PredictionError: If one of them is not so, or the batch has no samples; the message says
                what to do.
        """
        size = self.batch_size.batch_size
        is_container = isinstance(self.batch, (Mapping, list, tuple))
        if size == 0 or (size is None and is_container and not self.batch):
            raise PredictionError(
                f"The batch has 0 samples ({outline(self.batch)}), and a prediction needs at least "
                "1. Give a batch with samples."
            )
        if size is None:
            raise PredictionError(
                "The batch size cannot be inferred: no tensor in the batch has a first dimension. "
                f"Give it: batch_size=32 to {self.name} or MemoryCallback."
            )
        if is_sharded(self.model):
            raise PredictionError(
                "The model is sharded over several devices already. Give the module as it was "
                "before, and how it is sharded: TrainingStep(module, batch, "
                "ranks=memcallback.Ranks(world_size, 'fsdp2'))."
            )
        return size

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype that autocast computes in; None if it is off."""
        return AUTOCAST[self.precision]


def _model_and_ranks(model: object, ranks: object) -> tuple[nn.Module, Ranks | None]:
    """Check both, and unwrap a `DistributedDataParallel`: without ranks, the job is the model's."""
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
    ddp = replicated(model)
    return (model, ranks) if ddp is None else (ddp.module, ranks_of(model, ranks))
