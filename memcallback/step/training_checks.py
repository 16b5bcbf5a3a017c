"""Checks of a TrainingStep's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memcallback.core.validation import above_0, described, whole_number


def check_several_losses(number: int, optimizer: object, accumulate: int) -> None:
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
            f"accumulate={accumulate} with {number} losses is not supported: each loss makes an "
            "update of its own, all from one batch. Leave accumulate out."
        )


def check_whole_update(step: Any) -> None:
    """Check that a function of the whole update can be compiled in the step's loop."""
    if not callable(step.compile_update):
        raise TypeError(
            "compile_update must be a function that compiles a function, such as torch.compile, "
            f"got {described(step.compile_update)}. Leave it out if the loop does not compile the "
            "whole update."
        )
    wrong = None
    if len(step.losses) > 1:
        wrong = f"{len(step.losses)} losses"
    elif step.accumulate > 1:
        wrong = f"accumulate={step.accumulate}"
    elif step.ranks is not None:
        wrong = "ranks"
    elif step.keep_outputs == "last":
        wrong = "keep_outputs='last'"
    if wrong is not None:
        raise ValueError(
            f"compile_update with {wrong} is not supported: the compiled function takes one "
            "batch, has one loss, keeps nothing, and runs on one device. Leave one of the two "
            "out; a compiled model can be given instead: TrainingStep(torch.compile(model))."
        )


def check_clipping(name: str, value: float | None, example: str) -> None:
    if value is not None:
        above_0(name, value, f"Give the largest {example}, or None for no clipping.")


def smaller(name: str, other: object, own_name: str, own: int | None) -> int | None:
    """Check that a size of batches in between is smaller than that of the step's own."""
    if other is None:
        return None
    size = whole_number(name, other, "Leave it out if all batches have the same size.")
    if own is None:
        raise ValueError(f"{name}={size} needs {own_name}, which is not known: give it too.")
    if size >= own:
        raise ValueError(
            f"{name} must be less than {own_name}, {own}, got {size}. Give the larger batch as "
            "batch."
        )
    return size


def check_manual_optimization(**options: object) -> None:
    """Check that options of automatic optimization have their defaults."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} is not supported with manual optimization, nor does Lightning "
                "support it: training_step itself decides when to clip and update. "
                f"Leave {name} out."
            )
