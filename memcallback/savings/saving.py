"""Saving: a way to need less memory, as `what_if` tries it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from memcallback.savings.plan import SavingGroup
from memcallback.step.training_step import TrainingStep

#: The kind of savings that have PyTorch compile the step.
COMPILATION = "compilation"
#: What a saving changes that changes nothing.
SAME = "changes nothing"


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A way to need less memory.

    Attributes:
        name: Its name.
        kind: What it changes; a step has at most one saving of each kind.
        apply: Returns the step with it.
        group: What it does to the training.
        changes: What it changes in the numbers that training computes.
        line: The line to paste into a program.
        num_parts: Into how many forward passes it divides the batch.
        expandable_segments: Whether it is a setting of the allocator and not of the step.
        activation_memory_budget: What `torch.compile` may keep for the backward pass, as a share of
            what it would keep; None for its default.
    """

    name: str
    kind: str
    group: SavingGroup
    apply: Callable[[TrainingStep], TrainingStep]
    changes: str
    line: str
    num_parts: int = 1
    expandable_segments: bool = False
    activation_memory_budget: float | None = None

    @property
    def compiles(self) -> bool:
        """Whether it is a way to compile the step."""
        return COMPILATION in self.kind.split(" + ")

    @property
    def is_same_training(self) -> bool:
        """Whether the same model is trained by the same rule on the same data, but for rounding."""
        return self.group is not SavingGroup.CHANGES_TRAINING


def together(*savings: Saving) -> Saving:
    """Several savings at once."""

    def apply(step: TrainingStep) -> TrainingStep:
        for saving in savings:
            step = saving.apply(step)
        return step

    changes = dict.fromkeys(saving.changes for saving in savings if saving.changes != SAME)
    return Saving(
        name=" + ".join(saving.name for saving in savings),
        kind=" + ".join(saving.kind for saving in savings),
        group=SavingGroup.latest(saving.group for saving in savings),
        apply=apply,
        changes="; ".join(changes) or SAME,
        line="\n".join(saving.line for saving in savings),
        num_parts=math.prod(saving.num_parts for saving in savings),
        expandable_segments=any(saving.expandable_segments for saving in savings),
        activation_memory_budget=min(
            (
                saving.activation_memory_budget
                for saving in savings
                if saving.activation_memory_budget is not None
            ),
            default=None,
        ),
    )
