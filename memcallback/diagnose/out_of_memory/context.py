"""OomContext: what is known of a program in which memory ran out; cheap to import and to make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from memcallback.core.types import Phase
from memcallback.diagnose.out_of_memory.observer import AllocatorFailure, last_failure
from memcallback.prediction.prediction import StepPrediction

#: What was running in a step, as `OomContext.phase` has it.
PHASE_WORDS = {
    Phase.FORWARD: "forward pass",
    Phase.BACKWARD: "backward pass",
    Phase.OPTIMIZER_STEP: "optimizer step",
}


@dataclass(frozen=True, kw_only=True)
class OomContext:
    """What is known of a program in which memory ran out.

    Attributes:
        device: The device that is recorded.
        modules: The models.
        optimizers: The optimizers.
        batch: The batch; None if unknown.
        batch_size: Samples in it; None if unknown.
        phase: What was running, in words, such as `forward pass` or `validation`.
        step: The number of the training step, from 1; None outside of one.
        prediction: The prediction of that step, at any batch size; None if there is none.
        rank: The rank of this process; None in a job of one process.
        failure: The allocator's last failure; None if there was none.
    """

    device: torch.device
    modules: Sequence[torch.nn.Module] = ()
    optimizers: Sequence[torch.optim.Optimizer] = ()
    batch: object = None
    batch_size: int | None = None
    phase: str = ""
    step: int | None = None
    prediction: StepPrediction | None = None
    rank: int | None = None
    failure: AllocatorFailure | None = field(default_factory=last_failure)
