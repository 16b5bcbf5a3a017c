"""TraceRequest: which step to trace, at which sizes, on which card."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memcallback.devices.catalogue import DeviceSpec
from memcallback.step.inference_step import InferenceStep
from memcallback.step.lightning_batch import has_batch_hooks
from memcallback.step.step import Step
from memcallback.step.training_step import TrainingStep
from memcallback.trace.dispatch.placeholders import Bounds


@dataclass(frozen=True)
class TraceRequest:
    """What to trace.

    Attributes:
        step: The step.
        device: The card; None to train on a CPU.
        batch_size: Samples in the batch; None for the step's own.
        sequence_length: Length of the batch's sequences; None for the step's own.
        num_updates: Optimizer updates to trace; None for as many as it takes to settle, and one.
        period: After how many repetitions (tokens, batches) the same kernels run again.
        bounds: Choices that all traces of a step share, so that sizes stay linear in the batch.
        compiles: Whether compiled code is compiled for the card, in a process that nothing else
            needs: Dynamo's state changes. Else it runs as it would without compilation.
        restores_program: Whether each attempt leaves the user's variables and objects as it found
            them, in a process that nothing else needs.
        takes_known_shapes: Whether shapes that depend on values are those of the batch's values,
            where these are known, not the largest possible.
        follows_other_batch: Whether the step's batch of another size comes in between.
        runs_batch_hooks: Whether hooks of Lightning's modules bring their batches to the device.
            Else the step's `moved_batch` is there, if it has one.
    """

    step: Step
    device: DeviceSpec | None = None
    batch_size: int | None = None
    sequence_length: int | None = None
    num_updates: int | None = None
    period: int = 1
    bounds: Bounds = field(default_factory=Bounds)
    compiles: bool = False
    restores_program: bool = False
    takes_known_shapes: bool = False
    follows_other_batch: bool = True
    runs_batch_hooks: bool = True

    @property
    def training(self) -> TrainingStep | None:
        """The training that the step is, or that runs before it."""
        training = self.step.after if isinstance(self.step, InferenceStep) else self.step
        return training if isinstance(training, TrainingStep) else None

    def runs_hooks_of(self, step: Step) -> bool:
        """Whether hooks bring the batches of the step, or of the training before, to the device."""
        return self.runs_batch_hooks and step.runs_batch_hooks and step.lightning is not None

    def batch_of(self, step: Step) -> Any:
        """The batch of the step, or of the training before it."""
        has_moved = step.moved_batch is not None and not self.runs_hooks_of(step)
        return step.moved_batch if has_moved else step.batch

    @property
    def has_moved_batches(self) -> bool:
        """Whether a batch that hooks bring to the device is known as they made it, too."""
        return any(
            one.moved_batch is not None and self.runs_hooks_of(one)
            for one in (self.step, self.training)
            if one is not None
        )

    @property
    def datamodule(self) -> Any:
        """The DataModule whose hooks run; None for none."""
        steps = [one for one in (self.step, self.training) if one and self.runs_hooks_of(one)]
        owners = (one.lightning.datamodule for one in steps if one.lightning is not None)
        return next((owner for owner in owners if has_batch_hooks(None, owner)), None)
