"""Deviation: the largest difference of a measured step from its prediction that matters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from memcallback.core.step_memory import PhaseMemory, StepMemory, error_pct
from memcallback.core.types import Category, Phase
from memcallback.core.units import MiB, brief_bytes, format_bytes
from memcallback.prediction.comparison import differences
from memcallback.prediction.prediction import Prediction, StepPrediction

#: A difference matters above this share of the measured value, in percent, and so many bytes.
_NOTABLE_PCT = 1.0
_NOTABLE_BYTES = MiB
_RESERVED = "reserved peak"
#: Smaller batches are of the size of what an allocator rounds.
_NOTABLE_BATCH_BYTES = 8 * MiB
_KEEPS_BATCH = (
    "as much as a batch: the loop may keep one until the next is on the device; then give "
    "TrainingStep(keep_batch=True)"
)
_ON_CPU = (
    "on a CPU, scratch memory inside operators is not predicted, and memory that another thread "
    "releases still counts as allocated"
)


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """A measured value that the prediction misses.

    Attributes:
        where: The value, such as `peak of backward`.
        predicted_bytes: The predicted value.
        measured_bytes: The measured value.
        reason: What is known of the reason, as part of a sentence; empty if nothing is.
        is_of_measurement: Whether the reason is that the value cannot be measured whole.
    """

    where: str
    predicted_bytes: int
    measured_bytes: int
    reason: str = ""
    is_of_measurement: bool = False

    @property
    def size_bytes(self) -> int:
        """How far the two are apart."""
        return abs(self.measured_bytes - self.predicted_bytes)

    @property
    def is_notable(self) -> bool:
        """Whether it is worth a line."""
        error = error_pct(self.predicted_bytes, self.measured_bytes)
        is_far = error is None or abs(error) > _NOTABLE_PCT
        return is_far and self.size_bytes > _NOTABLE_BYTES

    def sentence(self) -> str:
        """The value, both figures, and the reason."""
        error = error_pct(self.predicted_bytes, self.measured_bytes)
        share = "" if error is None else f" ({error:+.1f} %)"
        reason = f"; {self.reason}" if self.reason else ""
        return (
            f"{self.where}: predicted {brief_bytes(self.predicted_bytes)}, measured "
            f"{brief_bytes(self.measured_bytes)}{share}{reason}"
        )


def largest_deviation(
    prediction: StepPrediction | None,
    measured: StepMemory | None,
    *,
    has_buckets: bool = False,
    may_keep_batch: bool = False,
) -> Deviation | None:
    """The largest difference above 1 % and 1 MiB, of peaks before boundaries; None if none is.

    Steps of another batch size, warm-up steps and interrupted ones are not compared. `has_buckets`
    says that DistributedDataParallel holds buckets, which a CPU does not measure; `may_keep_batch`
    that the loop may keep a batch, which the prediction does not.
    """
    if prediction is None or measured is None or not _are_alike(prediction, measured):
        return None
    largest = _largest(_of_peaks(prediction, measured))
    if largest is None:
        largest = _largest(_of_boundaries(prediction, measured))
    if largest is None:
        return None
    if largest.where == _RESERVED and may_keep_batch:
        largest = _explained_by_batch(largest, prediction.step)
    return _explained_by_buckets(largest, prediction.step) if has_buckets else largest


def is_compared(prediction: StepPrediction | None, measured: StepMemory | None) -> bool:
    """Whether at least one peak of a step is known both as predicted and as measured."""
    if prediction is None or measured is None or not _are_alike(prediction, measured):
        return False
    predicted = prediction.step
    are_reserved = None not in (predicted.peak_reserved_bytes, measured.peak_reserved_bytes)
    return are_reserved or any(_pairs(predicted, measured))


def _are_alike(prediction: StepPrediction, measured: StepMemory) -> bool:
    """Whether the prediction is one of such a step."""
    is_steady = not (measured.is_warm_up or measured.is_interrupted)
    return is_steady and measured.batch_size == prediction.batch_size


def _pairs(
    predicted: StepMemory, measured: StepMemory
) -> Iterator[tuple[Phase, PhaseMemory, int, int]]:
    """The phases whose peaks are both known: as predicted, with both peaks."""
    for phase, ours in predicted.phases.items():
        theirs = measured.phases.get(phase)
        if theirs is None or theirs.covers != ours.covers:
            continue
        high, real = ours.peak_allocated_bytes, theirs.peak_allocated_bytes
        if high is not None and real is not None:
            yield phase, ours, high, real


def _largest(deviations: Iterable[Deviation]) -> Deviation | None:
    notable = [deviation for deviation in deviations if deviation.is_notable]
    # Of about equal ones that of the largest value, as the step's peak is.
    return max(notable, key=_weight, default=None)


def _weight(deviation: Deviation) -> tuple[int, int]:
    return deviation.size_bytes // _NOTABLE_BYTES, deviation.predicted_bytes


def _of_peaks(prediction: StepPrediction, measured: StepMemory) -> Iterator[Deviation]:
    """Peaks of phases and the reserved peak; outside of its band those of the textbook estimate."""
    predicted = prediction.step
    reasons = {
        difference.where: _carried(difference.carrier)
        for difference in differences(predicted, measured)
    }
    for phase, ours, high, real in _pairs(predicted, measured):
        if (ours.low_bytes or high) <= real <= high:
            continue
        reason = reasons.get(f"peak allocated in {phase.label}", "")
        if not reason and predicted.peak_reserved_bytes is None and real > high:
            reason = _ON_CPU if isinstance(prediction, Prediction) else ""
        yield Deviation(
            where=f"peak of {phase.label}",
            predicted_bytes=high if real > high or ours.low_bytes is None else ours.low_bytes,
            measured_bytes=real,
            reason=reason,
        )
    reserved, real_reserved = predicted.peak_reserved_bytes, measured.peak_reserved_bytes
    if reserved is not None and real_reserved is not None:
        yield Deviation(
            where=_RESERVED,
            predicted_bytes=reserved,
            measured_bytes=real_reserved,
            reason=reasons.get("peak reserved", ""),
        )


def _of_boundaries(prediction: StepPrediction, measured: StepMemory) -> Iterator[Deviation]:
    if not isinstance(prediction, Prediction):
        return
    for difference in differences(prediction.step, measured):
        if difference.where.startswith("allocated at "):
            yield Deviation(
                where=difference.where,
                predicted_bytes=difference.predicted_bytes,
                measured_bytes=difference.measured_bytes,
                reason=_carried(difference.carrier),
            )


def _carried(carrier: tuple[str, int] | None) -> str:
    if carrier is None:
        return ""
    category, more_bytes = carrier
    than = "more" if more_bytes > 0 else "less"
    return f"{category}: {format_bytes(abs(more_bytes))} {than} than predicted"


def _explained_by_batch(deviation: Deviation, predicted: StepMemory) -> Deviation:
    """The same with a batch that the loop keeps as its reason, if as much more is reserved."""
    held = predicted.windows[0].start.by_category if predicted.windows else None
    batch_bytes = (held or {}).get(Category.INPUT, 0)
    more_bytes = deviation.measured_bytes - deviation.predicted_bytes
    is_as_much = abs(more_bytes - batch_bytes) <= max(2 * MiB, batch_bytes // 20)
    if batch_bytes < _NOTABLE_BATCH_BYTES or not is_as_much:
        return deviation
    return replace(deviation, reason=_KEEPS_BATCH)


def _explained_by_buckets(deviation: Deviation, predicted: StepMemory) -> Deviation:
    """The same with the buckets as its reason, if it is as large as they are."""
    # Nothing but buckets lasts from step to step without a category that a recorder counts.
    buckets_bytes = predicted.windows[0].start.rest_bytes if predicted.windows else None
    too_high_bytes = deviation.predicted_bytes - deviation.measured_bytes
    is_on_cpu = predicted.peak_reserved_bytes is None
    if not is_on_cpu or not buckets_bytes or abs(too_high_bytes - buckets_bytes) > _NOTABLE_BYTES:
        return deviation
    size = brief_bytes(buckets_bytes)
    reason = f"a CPU does not measure the buckets of DistributedDataParallel ({size})"
    return replace(deviation, reason=reason, is_of_measurement=True)
