"""Report: the measured step, its prediction and the batch size suggested, as one document."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from memcallback.batch_size.advice import BatchSizeAdvice
from memcallback.core.document import Document, Printable, Table
from memcallback.core.step_memory import DeviceMemory, StepMemory
from memcallback.core.units import format_bytes
from memcallback.prediction.prediction import Prediction, StepPrediction
from memcallback.report.deviation import Deviation, largest_deviation
from memcallback.report.long_table import long_table
from memcallback.report.rank_values import RankValues
from memcallback.report.verdict import Verdict, verdict_of
from memcallback.savings.plan import Plan

#: Consumers named of those with most memory at the predicted peak.
_NUM_CONSUMERS = 3


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What trains, in names for people; empty where unknown.

    Attributes:
        model: The model's class.
        optimizer: The optimizer's class, several joined by ` + `.
        precision: As Lightning writes it, such as `bf16-mixed`.
        sequence_length: Length of the batch's sequences; None if unknown.
        has_buckets: Whether DistributedDataParallel sums the gradients in buckets.
        may_keep_batch: Whether the loop is the user's own, whose step says that it lets go of a
            batch before the next one is on the device.
        target: The device to suggest a batch size for, where another one trains.
        target_allocator_bytes: What the allocator can have there; None if unknown.
    """

    model: str = ""
    optimizer: str = ""
    precision: str = ""
    sequence_length: int | None = None
    has_buckets: bool = False
    may_keep_batch: bool = False
    target: str = ""
    target_allocator_bytes: int | None = None


UNKNOWN_SETUP = Setup()


@dataclass(frozen=True, kw_only=True)
class Report(Printable):
    """All that is known of a training's memory at one time.

    Attributes:
        measured: A steady step, or the warm-up step if there is no other; None if no step was
            recorded.
        prediction: The prediction at that step's batch size; None if there is none.
        device: The memory of the whole device.
        advice: The suggested batch size; None if there is none.
        lifetime_peak_allocated_bytes: As `MemoryRecorder.lifetime_peak_allocated_bytes`.
        notes: Further notes, one sentence each.
        without_savings: The prediction of the same update without the callback's savings, with as
            many samples in one batch; None if there are no savings.
        ranks: The values of all ranks of a job at the last step for which they are known; None for
            a job of one rank.
        setup: What trains.
        plan: The step predicted with each saving; None if that was not asked for.
    """

    measured: StepMemory | None
    prediction: StepPrediction | None
    device: DeviceMemory
    advice: BatchSizeAdvice | None
    lifetime_peak_allocated_bytes: int | None = None
    notes: tuple[str, ...] = ()
    without_savings: StepPrediction | None = None
    ranks: RankValues | None = None
    setup: Setup = UNKNOWN_SETUP
    plan: Plan | None = None

    @cached_property
    def verdict(self) -> Verdict:
        """Whether the step fits, and its peak."""
        return verdict_of(
            self.measured,
            self.prediction,
            self.device.capacity_bytes,
            is_for_another=bool(self.setup.target),
            allocator_bytes=self.setup.target_allocator_bytes,
        )

    @cached_property
    def deviation(self) -> Deviation | None:
        """The largest error of the prediction above 1 % and 1 MiB; None if there is none."""
        return largest_deviation(
            self.prediction,
            self.measured,
            has_buckets=self.setup.has_buckets,
            may_keep_batch=self.setup.may_keep_batch,
        )

    def table(self) -> Table:
        """Predicted and measured memory by phase and by category, with errors; then the device."""
        return long_table(
            self.measured,
            self.prediction,
            self.device,
            without_savings=self.without_savings,
            lifetime_peak_allocated_bytes=self.lifetime_peak_allocated_bytes,
        )

    def lines(self) -> tuple[str, ...]:
        """The suggestion, what it does not include, the largest error, and the notes."""
        lines = []
        if self.advice:
            lines.append(self.advice.sentence())
            lines.append("Not included: " + "; ".join(self.advice.leaves_out) + ".")
        if self.deviation:
            lines.append(f"The prediction is off: {self.deviation.sentence()}.")
        if isinstance(self.prediction, Prediction):
            most = [
                f"{consumer.name} {format_bytes(consumer.num_bytes)}"
                for consumer in self.prediction.consumers[:_NUM_CONSUMERS]
            ]
            lines.append(f"Most at the predicted peak: {'; '.join(most)}.")
        if self.prediction:
            lines.extend(self.prediction.caveats)
        if self.device.unavailable:
            lines.append(f"Some values of the device are missing: {self.device.unavailable}.")
        return (*lines, *self.notes)

    def details(self) -> Document:
        """The long table, the lines below it, and the table over the ranks."""
        return Document(
            self.table(), *self.lines(), *([self.ranks.document()] if self.ranks else [])
        )

    def document(self) -> Document:
        """The verdict, then the details."""
        return Document(self.verdict.sentence(), self.details())
