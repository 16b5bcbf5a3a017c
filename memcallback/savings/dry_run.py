"""dry_run(): predict a step with and without savings.

None is on by default. In a plain loop they are used as they are; `MemoryCallback(accumulate=...,
amp=..., checkpoint=...)` applies them to a Lightning Trainer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from memcallback.core.tables import Printable, Table
from memcallback.core.units import format_bytes
from memcallback.devices.catalogue import Device
from memcallback.prediction.predict import predict
from memcallback.prediction.prediction import Prediction
from memcallback.savings.accumulation import check_accumulate
from memcallback.savings.checkpointing import CheckpointOption, checkpoint_option
from memcallback.savings.mixed_precision import check_precision
from memcallback.step.training_step import TrainingStep


@dataclass(frozen=True, kw_only=True)
class DryRun(Printable):
    """What savings would change in a training step, predicted.

    Attributes:
        before: The step as it is.
        after: The step with the savings, as many samples for each update.
        savings: What was applied, one phrase each.
    """

    before: Prediction
    after: Prediction
    savings: tuple[str, ...]

    @property
    def saved_bytes(self) -> int:
        """By how much the peak of allocated memory falls; negative if it rises."""
        return self.before.peak_allocated_bytes - self.after.peak_allocated_bytes

    def to_text(self) -> str:
        """The peaks without and with the savings, as a table for a console."""
        peaks = {
            "allocated": (self.before.peak_allocated_bytes, self.after.peak_allocated_bytes),
            "reserved": (self.before.peak_reserved_bytes, self.after.peak_reserved_bytes),
        }
        return Table(
            title=f"Peak memory of one training step on {self.before.device_name}, predicted\nwith {', '.join(self.savings)}",
            columns=("", "without", "with", "saved", "share"),
            rows=tuple(
                _row(label, before, after)
                for label, (before, after) in peaks.items()
                if before is not None and after is not None
            ),
        ).to_text()


def _row(label: str, before: int, after: int) -> tuple[str, ...]:
    share = f"{100 * (before - after) / before:.1f} %" if before else ""
    return (label, format_bytes(before), format_bytes(after), format_bytes(before - after), share)


def dry_run(
    step: TrainingStep,
    *,
    accumulate: int | None = None,
    amp: str | None = None,
    checkpoint: CheckpointOption | None = None,
    device: str | int | Device | None = None,
) -> DryRun:
    """Say what savings would save, alone or together, before any is applied: the step is predicted
    without and with them.

    Args:
        step: The step as it is, with the batch of a whole update.
        accumulate: Into how many micro-batches the batch is split.
        amp: The precision, `16-mixed` or `bf16-mixed`.
        checkpoint: True, or what to checkpoint, as for `checkpoint`.
        device: As for `memcallback.predict`.

    Returns:
        Both predictions.

    Raises:
        ValueError: If a saving is none, cannot be applied to this step, or there is none.
        PredictionError: As for `memcallback.predict`.
    """
    batch_size = step.check_predictable()
    with with_savings(step, accumulate=accumulate, amp=amp, checkpoint=checkpoint) as (
        changed,
        savings,
    ):
        if not savings:
            raise ValueError(
                "there is no saving to try. Give accumulate=..., amp=... or checkpoint=...."
            )
        after = predict(
            changed, device=device, batch_size=math.ceil(batch_size / (accumulate or 1))
        )
    return DryRun(before=predict(step, device=device), after=after, savings=savings)


@contextmanager
def with_savings(
    step: TrainingStep,
    *,
    accumulate: int | None = None,
    amp: str | None = None,
    checkpoint: CheckpointOption | None = None,
) -> Iterator[tuple[TrainingStep, tuple[str, ...]]]:
    """The step as it would be with savings, inside the context, and each of them as a phrase."""
    changed, savings = copy.copy(step), []
    if accumulate is not None:
        _check_can_accumulate(step, accumulate)
        changed.accumulate = step.accumulate * accumulate
        changed.has_accumulation = step.lightning is None
        savings.append(f"accumulate={accumulate}")
    if amp is not None:
        _check_can_mix(step, amp)
        changed.precision = amp
        savings.append(f"amp={amp!r}")
    with (
        checkpoint_option(step.model, checkpoint) if checkpoint else nullcontext() as checkpointing
    ):
        if checkpointing is not None:
            savings.append(
                f"checkpoint of {', '.join(name or '(root module)' for name in checkpointing.names)}"
            )
        yield changed, tuple(savings)


def _check_can_accumulate(step: TrainingStep, accumulate: int) -> None:
    check_accumulate(accumulate)
    batch_size = step.batch_size.batch_size
    if batch_size is not None and accumulate > batch_size:
        raise ValueError(
            f"accumulate={accumulate} for a batch of {batch_size}: a micro-batch has at least one sample. Give at most {batch_size}."
        )
    if len(step.losses) > 1:
        raise ValueError(
            f"accumulate={accumulate} with {len(step.losses)} losses is not known: a step of several updates has one batch."
        )


def _check_can_mix(step: TrainingStep, precision: str) -> None:
    check_precision(precision)
    if step.precision != "32-true":
        raise ValueError(
            f"amp={precision!r} is for a step of precision 32-true, and this one is {step.precision}. Leave it out."
        )
