"""The largest batch that fits, from the law and, where there is one, a measured step."""

from __future__ import annotations

from dataclasses import dataclass

from memcallback.events import Phase
from memcallback.prediction import Prediction
from memcallback.stats import StepMemory
from memcallback.units import format_bytes

DEFAULT_HEADROOM = 0.05


@dataclass(frozen=True, kw_only=True)
class BatchSizeAdvice:
    """The largest batch size that stays within a device.

    Attributes:
        batch_size: The suggestion; 0 if not even one sample fits.
        current_batch_size: The one it starts from.
        capacity_bytes: The device's memory.
        outside_bytes: Of it, used by others than this process's allocator; None if unknown, and then counted as 0.
        headroom: The fraction of the capacity that is kept free.
        fixed_bytes: What does not depend on the batch.
        per_sample_bytes: What each sample adds.
        floor_bytes: What a step needs at any batch size (an optimizer update).
        is_measured: Whether a step of this training on this device was measured; else it is predicted.
        basis: How it knows, one sentence.
        leaves_out: What it does not know, one sentence each.
    """

    batch_size: int
    current_batch_size: int
    capacity_bytes: int
    outside_bytes: int | None
    headroom: float
    fixed_bytes: int
    per_sample_bytes: int
    floor_bytes: int
    is_measured: bool
    basis: str
    leaves_out: tuple[str, ...]

    @property
    def multiple(self) -> float:
        """How many times the current batch size the suggestion is."""
        return self.batch_size / self.current_batch_size

    def peak_bytes(self, batch_size: int) -> int:
        """The peak that this advice expects of the process's allocator at a batch size."""
        return max(self.floor_bytes, self.fixed_bytes + batch_size * self.per_sample_bytes)

    @property
    def budget_bytes(self) -> int:
        """What the process's allocator may take: capacity less headroom less what is used outside."""
        return int(self.capacity_bytes * (1 - self.headroom)) - (self.outside_bytes or 0)

    def sentence(self) -> str:
        """The suggestion in one sentence."""
        if self.batch_size == 0:
            return (
                f"Not even one sample fits: {format_bytes(self.peak_bytes(1))} are needed and {format_bytes(max(0, self.budget_bytes))} "
                f"are left of {format_bytes(self.capacity_bytes)}."
            )
        return (
            f"Largest batch size: {self.batch_size} ({self.multiple:,.2f} times the current {self.current_batch_size}), {self.basis}, within "
            f"{format_bytes(self.capacity_bytes)} less {self.headroom:.0%} headroom."
        )


def suggest(
    *,
    measured: StepMemory | None,
    predicted: Prediction | None,
    held_bytes: int | None = None,
    capacity_bytes: int | None,
    outside_bytes: int | None = None,
    headroom: float = DEFAULT_HEADROOM,
) -> BatchSizeAdvice | None:
    """The largest batch size whose peak plus headroom stays within a capacity.

    With a measured steady step: what the model holds (counted) is fixed, all the rest of the step's reserved peak is taken to
    grow with the batch. Workspaces and parameter-sized temporaries do not, so a larger batch is judged on the safe side. A
    device without a caching allocator has no reserved memory, and its allocated peak counts instead. Without a measured step,
    or without a count of what is held, the law of the prediction decides, which knows allocated memory only.

    Args:
        measured: A steady step, or None.
        predicted: The prediction, or None.
        held_bytes: What the model holds whatever the batch, for a measured step on which it was not counted.
        capacity_bytes: The device's memory; None if unknown.
        outside_bytes: What is used of it outside this process's allocator.
        headroom: The fraction of the capacity to keep free, at least 0 and below 1.

    Returns:
        The advice; None where neither a step nor a prediction, no batch size or no capacity is known.

    Raises:
        ValueError: If `headroom` is out of range.
    """
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom must be at least 0 and below 1, got {headroom}. 0.05 keeps 5 % of the device free.")
    if capacity_bytes is None:
        return None
    line = _from_measured(measured, held_bytes) if measured else None
    is_measured = line is not None
    if line is None and predicted is not None:
        line = _from_law(predicted)
    if line is None:
        return None
    leaves_out = ["what validation, logging and longer samples need beyond a training step"]
    if outside_bytes is None:
        leaves_out.append("memory outside this process's allocator (CUDA context, other processes), which is not known here")
    if not is_measured:
        leaves_out.append("the allocator's reserved but unallocated memory, kernel workspaces and rounding")
    budget = int(capacity_bytes * (1 - headroom)) - (outside_bytes or 0)
    return BatchSizeAdvice(
        batch_size=line.largest_within(budget),
        current_batch_size=line.batch_size,
        capacity_bytes=capacity_bytes,
        outside_bytes=outside_bytes,
        headroom=headroom,
        fixed_bytes=line.fixed_bytes,
        per_sample_bytes=line.per_sample_bytes,
        floor_bytes=line.floor_bytes,
        is_measured=is_measured,
        basis=line.basis,
        leaves_out=tuple(leaves_out),
    )


@dataclass(frozen=True, kw_only=True)
class _Line:
    """A peak over batch sizes: a straight line, and a floor under it."""

    batch_size: int
    fixed_bytes: int
    per_sample_bytes: int
    floor_bytes: int
    basis: str

    def largest_within(self, budget_bytes: int) -> int:
        if self.floor_bytes > budget_bytes:
            return 0
        if self.per_sample_bytes == 0:
            return self.batch_size if self.fixed_bytes <= budget_bytes else 0
        return max(0, (budget_bytes - self.fixed_bytes) // self.per_sample_bytes)


def _from_measured(step: StepMemory, held_bytes: int | None) -> _Line | None:
    held_bytes = step.held_bytes if step.held_bytes is not None else held_bytes
    peak = step.peak_reserved_bytes if step.peak_reserved_bytes is not None else step.peak_allocated_bytes
    if not step.batch_size or peak is None or held_bytes is None:
        return None
    fixed = min(held_bytes, peak)
    what = "reserved" if step.peak_reserved_bytes is not None else "allocated"
    return _Line(
        batch_size=step.batch_size,
        fixed_bytes=fixed,
        per_sample_bytes=-(-(peak - fixed) // step.batch_size),
        floor_bytes=0,
        basis=f"from the {what} memory measured on this device",
    )


def _from_law(prediction: Prediction) -> _Line:
    backward, update = (prediction.phases[phase].peak_allocated_bytes or 0 for phase in (Phase.BACKWARD, Phase.OPTIMIZER_STEP))
    return _Line(
        batch_size=prediction.batch_size,
        fixed_bytes=backward - prediction.batch_size * prediction.per_sample_bytes,
        per_sample_bytes=prediction.per_sample_bytes,
        floor_bytes=update - prediction.input.at(prediction.batch_size),
        basis=f"predicted by the {prediction.source}",
    )
