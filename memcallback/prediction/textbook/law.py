"""TextbookPrediction: memory of a step that is linear in the batch size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from memcallback.core.document import Document, Printable
from memcallback.core.step_memory import MemoryStats, PhaseMemory, StepMemory
from memcallback.core.types import Category, Kind, Phase
from memcallback.core.units import format_bytes
from memcallback.core.validation import whole_number
from memcallback.trace.traced_step import SAMPLES


@dataclass(frozen=True, kw_only=True)
class LinearBytes:
    """A size in bytes that is linear in the batch size.

    Attributes:
        fixed_bytes: The size at batch size 0.
        per_sample_bytes: What each sample adds.
    """

    fixed_bytes: int
    per_sample_bytes: int

    def at(self, batch_size: int) -> int:
        """The size at a batch size, at least 0."""
        return max(0, self.fixed_bytes + batch_size * self.per_sample_bytes)


@dataclass(frozen=True, kw_only=True)
class TextbookPrediction(Printable):
    """Memory of a steady step: model memory + batch size * memory per sample.

    The textbook estimate: parameters, buffers, gradients and optimizer state do not depend on the
    batch. Every layer's output does; it counts twice in the backward pass, for itself and its
    gradient. Anything else that autograd saves, such as a dropout's mask, counts once. This
    serves as the upper bound and is mostly too high: not every output is kept, and not all
    gradients of outputs are live at the same time. The lower bound counts only what autograd saves
    for the backward pass, once.

    Attributes:
        source: Where the numbers come from.
        device_name: The device's name.
        capacity_bytes: The device's memory; None if unknown.
        batch_size: Samples in the batch.
        held: Bytes of parameters, buffers, gradients and optimizer state.
        input: Bytes of the batch.
        outputs: Bytes of all layers' outputs; in-place operations and views add none.
        kept: Bytes of all layers' outputs, and of everything else that autograd saves.
        saved: Bytes that autograd saves for the backward pass.
        optimizer_transient_bytes: Temporary memory of the update.
        workspace_bytes: Persistent workspaces of the device's libraries.
        gradients_live_in_forward: Whether the last step's gradients are live in the forward pass.
        caveats: What was assumed or left out, one sentence each.
    """

    source: str
    device_name: str
    capacity_bytes: int | None = None
    batch_size: int
    held: Mapping[Category, int]
    input: LinearBytes
    outputs: LinearBytes
    kept: LinearBytes
    saved: LinearBytes
    optimizer_transient_bytes: int = 0
    workspace_bytes: int = 0
    gradients_live_in_forward: bool = False
    caveats: tuple[str, ...] = ()

    def at(self, batch_size: int) -> TextbookPrediction:
        """The same step at another batch size.

        Raises:
            ValueError: If `batch_size` is below 1.
            TypeError: If it is not a whole number.
        """
        return replace(self, batch_size=whole_number("batch_size", batch_size, SAMPLES))

    def document(self) -> Document:
        """The step by phase, what a further sample adds, and what was assumed."""
        per_sample = (
            f"Each further sample adds {format_bytes(self.per_sample_bytes)} to the upper bound "
            "of the peak."
        )
        return Document(self.step.to_table(), per_sample, *self.caveats)

    @property
    def per_sample_bytes(self) -> int:
        """What each further sample adds to the peak."""
        return (
            self.input.per_sample_bytes + self.kept.per_sample_bytes + self.outputs.per_sample_bytes
        )

    @property
    def step(self) -> StepMemory:
        """The predicted step, of the same type as a measured one."""
        before = dict(self.held) | {Category.INPUT: self.input.at(self.batch_size)}
        without_gradients = before | {Category.GRADIENT: 0}
        outputs, kept, saved = (
            law.at(self.batch_size) for law in (self.outputs, self.kept, self.saved)
        )
        in_forward = before if self.gradients_live_in_forward else without_gradients
        workspace = self.workspace_bytes
        all_held, base, forward_held = (
            sum(held.values()) + workspace for held in (before, without_gradients, in_forward)
        )
        windows = (
            _window(
                Phase.FORWARD,
                start=_stats(in_forward, workspace),
                end=_stats(in_forward, workspace + kept),
                peak_bytes=forward_held + kept,
                low_bytes=forward_held + saved,
            ),
            _window(
                Phase.BACKWARD,
                start=_stats(without_gradients, workspace + kept),
                end=_stats(before, workspace),
                peak_bytes=all_held + kept + outputs,
                low_bytes=base + max(saved, before[Category.GRADIENT]),
            ),
            _window(
                Phase.OPTIMIZER_STEP,
                start=_stats(before, workspace),
                end=_stats(before, workspace),
                peak_bytes=all_held + self.optimizer_transient_bytes,
                low_bytes=all_held,
            ),
        )
        return StepMemory(
            kind=Kind.PREDICTED,
            source=self.source,
            device_name=self.device_name,
            windows=windows,
            batch_size=self.batch_size,
        )

    @property
    def phases(self) -> Mapping[Phase, PhaseMemory]:
        """The step's phases."""
        return self.step.phases

    @property
    def peak_allocated_bytes(self) -> int:
        """Peak allocated memory of the step."""
        peak = self.step.peak_allocated_bytes
        assert peak is not None
        return peak

    @property
    def peak_reserved_bytes(self) -> None:
        """None: the formula does not know the allocator."""
        return None

    @property
    def by_category(self) -> Mapping[Category, int]:
        """Bytes live at the peak, by category."""
        peak = max(self.step.windows, key=lambda window: window.peak_allocated_bytes or 0)
        held = dict(self.held) | {
            Category.INPUT: self.input.at(self.batch_size),
            Category.WORKSPACE: self.workspace_bytes,
        }
        outputs = self.outputs.at(self.batch_size)
        if peak.phase is Phase.OPTIMIZER_STEP:
            return held | {Category.TEMPORARY: self.optimizer_transient_bytes}
        return held | {
            Category.ACTIVATION: self.kept.at(self.batch_size),
            Category.TEMPORARY: outputs if peak.phase is Phase.BACKWARD else 0,
        }

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the device's capacity; None if that is unknown."""
        return (
            None
            if self.capacity_bytes is None
            else self.peak_allocated_bytes <= self.capacity_bytes
        )


def _stats(held: Mapping[Category, int], rest_bytes: int) -> MemoryStats:
    return MemoryStats(allocated_bytes=sum(held.values()) + rest_bytes, by_category=held)


def _window(
    phase: Phase, *, start: MemoryStats, end: MemoryStats, peak_bytes: int, low_bytes: int
) -> PhaseMemory:
    return PhaseMemory(
        phase=phase,
        covers=(phase,),
        start=start,
        end=end,
        peak_allocated_bytes=peak_bytes,
        low_bytes=low_bytes,
    )
