"""estimate_for_rank(): the largest batch size of one rank on its device, verified by a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from memcallback.batch_size.bounds import BatchSizeBounds
from memcallback.batch_size.estimate import (
    NOT_IN_A_STEP,
    NOT_IN_TRAINING,
    Estimate,
    estimate_from_trace,
)
from memcallback.batch_size.measured_shift import MeasuredShift, measured_shift
from memcallback.batch_size.rank_kinds import RankKind
from memcallback.batch_size.retraced import RetracedSizes
from memcallback.batch_size.sequence_lengths import buckets
from memcallback.core.errors import PredictionError
from memcallback.core.step_memory import StepMemory
from memcallback.core.types import Kind
from memcallback.devices.catalogue import Device
from memcallback.devices.local import LocalMemory, outside_memory
from memcallback.prediction.batch_trace import ONLY, BatchDependentPath, BatchTrace
from memcallback.prediction.length_trace import UnknownSequenceLength
from memcallback.prediction.predict_here import (
    Traces,
    predict_here,
    predict_once,
    with_communication,
)
from memcallback.prediction.prediction import Prediction
from memcallback.prediction.progress import TraceProgress
from memcallback.prediction.search import BatchReplays, largest_up_to
from memcallback.step.holdings import bucket_bytes
from memcallback.step.inference_step import InferenceStep
from memcallback.step.step import Step
from memcallback.step.training_step import TrainingStep

#: How often a batch size is estimated, each time from a trace at the size before.
_MAX_ESTIMATES = 3


class Lengths(NamedTuple):
    """Sequence lengths, and whether they were read from batches."""

    values: Sequence[int] = ()
    are_read: bool = False


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What `suggest_batch_size` was asked for, and what is used of each device.

    With `accumulates` the step is predicted as if it accumulated gradients.
    """

    headroom: float
    multiple_of: int
    max_batch_size: int | None
    dataset_size: int | None
    world_size: int | None
    measured: StepMemory | None
    lengths: Lengths
    validation: InferenceStep | None
    accumulates: bool
    memory: Sequence[tuple[Device, LocalMemory | None]]


def estimate_for_rank(
    kind: RankKind, wanted: Wanted, bounds: BatchSizeBounds, progress: TraceProgress
) -> tuple[Estimate, dict[int, int]]:
    """The estimate for a rank on its device, and the batch size at each sequence length."""
    rank = _Rank(kind, wanted, bounds, progress)
    training = rank.training
    estimate = rank.estimate_of(training.prediction)
    if estimate is None:
        reason = _why_none(training.prediction, knows_others=training.knows_others)
        raise PredictionError(f"No batch size can be suggested: {reason}")
    lengths, are_lengths_read = wanted.lengths
    if are_lengths_read:
        # A trace at one length alone knows no other.
        known = training.prediction.lengths
        lengths = buckets(lengths, (known.step if known else 0) or lengths[-1])
    by_length = {}
    for length in lengths[:-1]:  # that of the longest is verified below
        of_length = rank.estimate_of(_at_length(training.prediction, training.step, length))
        if of_length is not None:
            by_length[length] = of_length.best_batch_size()
    estimate = rank.verified(estimate)
    if lengths:
        by_length[lengths[-1]] = estimate.best_batch_size()
    return estimate, by_length


class _NotTraced(Exception):
    """A run cannot be traced at a batch size; the message is the end of a sentence."""


@dataclass
class _Run:
    """A training step or its validation.

    Attributes:
        step: The step.
        prediction: Its latest prediction.
        where: In which run, as the end of a sentence; empty for the training.
        knows_others: Whether other batch sizes than the traced one are known.
    """

    step: Step
    prediction: Prediction
    where: str = ""
    knows_others: bool = True

    def is_alike_at(self, batch_size: int) -> bool:
        """Whether a trace at a batch size is as predicted, or no trace is needed to know."""
        trace, length = self.prediction.trace, self.prediction.sequence_length
        if trace.is_among_traced(batch_size) or not trace.is_any_batch_size_known:
            return True
        try:
            trace.verified(
                Traces(self.step, self.prediction.device, 1, None).at(batch_size, length)
            )
        except BatchDependentPath:
            return False
        except PredictionError as error:
            raise _NotTraced(
                f"{self.where}, which cannot be traced (the largest traced is "
                f"{trace.largest_traced:,})"
            ) from error
        return True


class _Rank:
    """The training step of a rank and its validation, predicted and estimated together."""

    def __init__(
        self, kind: RankKind, wanted: Wanted, bounds: BatchSizeBounds, progress: TraceProgress
    ) -> None:
        step, measured, lengths = kind.step, wanted.measured, wanted.lengths.values
        if wanted.accumulates:
            assert isinstance(step, TrainingStep)  # others accumulate nothing
            step = step.varied(accumulate=2)  # in each further batch as much is allocated
        self._wanted = wanted
        self._bounds = bounds
        self._progress = progress
        self._num_traces = 0
        self._num_others = 1 + (wanted.validation is not None) + (measured is not None)
        prediction = predict_here(
            step,
            device=with_communication(kind.device, bounds.world_size),
            sequence_length=lengths[-1] if lengths else None,
            progress=self._with_others,
        )
        progress(self._num_traces, self._num_traces + self._num_others)
        self.training = _Run(step, prediction)
        memory = next(memory for spec, memory in wanted.memory if spec == kind.device)
        self._outside = outside_memory(prediction.device, memory)
        has_buckets = (
            bounds.world_size > 1 and step.ranks is None and isinstance(step, TrainingStep)
        )
        self._buckets_bytes = bucket_bytes(step.model) if has_buckets else 0
        self._shift = None
        if measured is not None:
            _check_measured(measured, prediction)
            self._shift = _shift_of(measured, kind.step, prediction.device)
        self._validation = None
        if wanted.validation is not None:
            validation = predict_here(wanted.validation, device=prediction.device)
            self._validation = _Run(wanted.validation, validation, " in validation")
            self._validated = self._estimate_alone(self._validation, validation)

    def _with_others(self, num_done: int, num_all: int) -> None:
        """Report progress with the predictions and traces that come after these traces."""
        self._num_traces = num_done + 1  # the last one is not reported
        self._progress(num_done, num_all + self._num_others)

    def _estimate_alone(
        self, run: _Run, prediction: Prediction, shift: MeasuredShift | None = None
    ) -> Estimate | None:
        if prediction.capacity_bytes is None:
            return None
        retraced = _retraced(
            run.step, prediction, self._bounds.most, self._num_traces, self._with_others
        )
        run.knows_others = prediction.trace.is_any_batch_size_known or retraced is not None
        outside = self._outside
        return estimate_from_trace(
            prediction,
            shift,
            capacity_bytes=prediction.capacity_bytes,
            outside_bytes=outside.expected_bytes if outside else None,
            most_outside_bytes=outside.most_bytes if outside else None,
            headroom=self._wanted.headroom,
            bounds=self._bounds,
            bucket_bytes=self._buckets_bytes,  # they stay while a validation runs
            retraced=retraced,
        )

    def estimate_of(self, prediction: Prediction) -> Estimate | None:
        """The estimate of a prediction of the training, up to what fits in its validation."""
        alone = self._estimate_alone(self.training, prediction, self._shift)
        validation = self._validation
        if alone is None or validation is None:
            return alone
        if self._validated is not None:
            return in_both(alone, self._validated)
        why_not = (
            "Validation does not limit the batch size: a larger batch needs little or no more "
            "memory there."
            if validation.knows_others
            else "Validation was not taken into account: "
            + _why_none(validation.prediction, knows_others=False)
        )
        return replace(alone, caveats=(*alone.caveats, why_not))

    def verified(self, estimate: Estimate) -> Estimate:
        """The estimate, verified by traces at its batch size; a new one if a run differs there."""
        runs = [run for run in (self.training, self._validation) if run is not None]
        why = ""
        for _ in range(_MAX_ESTIMATES * len(runs)):
            size = estimate.best_batch_size()
            if size == 0:
                return estimate
            try:
                unlike = next((run for run in runs if not run.is_alike_at(size)), None)
            except _NotTraced as error:
                why = str(error)
                break
            if unlike is None:
                return estimate
            why = f"{unlike.where} by a trace: at the sizes traced so far it ran other operators"
            another = self._estimate_anew(unlike, size)
            if another is None:
                break
            estimate = another
        untried = f"a check of batch size {estimate.best_batch_size():,}{why}"
        return replace(estimate, leaves_out=(*estimate.leaves_out, untried))

    def _estimate_anew(self, run: _Run, batch_size: int) -> Estimate | None:
        """The estimate after a run is predicted from a batch size at which it runs differently."""
        run.prediction = predict_here(
            run.step,
            device=run.prediction.device,
            batch_size=batch_size,
            sequence_length=run.prediction.sequence_length,
        )
        if run is self._validation:
            self._validated = self._estimate_alone(run, run.prediction)
        return self.estimate_of(self.training.prediction)


def _at_length(prediction: Prediction, step: Step, length: int) -> Prediction:
    """The prediction at another sequence length, by a trace of its own if no other knows it."""
    try:
        return prediction.at(sequence_length=length)
    except UnknownSequenceLength:
        return predict_here(step, device=prediction.device, sequence_length=length)


def _retraced(
    step: Step, prediction: Prediction, most: int | None, num_done: int, progress: TraceProgress
) -> RetracedSizes | None:
    """The step by traces at other batch sizes, where one trace knows its own alone; None if not."""
    trace = prediction.trace
    traces = Traces(step, prediction.device, 0, progress)
    if trace.is_any_batch_size_known or not traces.has_samples:
        return None
    traces.num_done = num_done

    def at(batch_size: int) -> BatchTrace:
        traces.num_traces = traces.num_done + 2  # nobody knows how many there will be
        return BatchTrace.single(traces.at(batch_size, prediction.sequence_length))

    retraced = RetracedSizes(trace, prediction.device, prediction.settings, at, most)
    if most is not None and most < 2 * trace.batch_size:
        return retraced
    return retraced if retraced.is_traceable(2 * trace.batch_size) else None


def in_both(training: Estimate, validation: Estimate) -> Estimate:
    """The estimate of a training, up to what fits in its validation."""

    def fits(size: int) -> bool:
        return training.fits(size) and validation.fits(size)

    largest = min(training.largest, validation.largest)
    if largest and not fits(largest):  # what fits in one alone may have gaps in the other
        largest = largest_up_to(largest, fits)
    caveats = training.caveats
    if largest < training.largest:
        caveats += (
            f"Validation limits the batch size: {training.largest:,} would fit in training alone.",
        )
    return replace(
        training,
        largest=largest,
        validation=validation,
        leaves_out=tuple(
            NOT_IN_A_STEP if part == NOT_IN_TRAINING else part for part in training.leaves_out
        ),
        caveats=tuple(dict.fromkeys((*caveats, *validation.caveats))),
    )


def _shift_of(measured: StepMemory, step: Step, device: Device) -> MeasuredShift | None:
    """How far a measured step is from a trace of the same size, at the step's own length."""
    assert measured.batch_size is not None  # checked before
    own = predict_once(step, device=device, batch_size=measured.batch_size)
    return measured_shift(own, measured, BatchReplays(own.trace, own.device, own.settings))


def _check_measured(measured: StepMemory, prediction: Prediction) -> None:
    if measured.batch_size is None:
        raise ValueError(
            "measured=... got a step whose batch size is unknown, so it cannot be compared with "
            "the prediction. Record it with batch_size=... (recorder.step), or leave measured out."
        )
    is_other_device = (measured.peak_reserved_bytes is None) != (
        prediction.peak_reserved_bytes is None
    )
    if measured.kind is Kind.MEASURED and not measured.is_warm_up and not is_other_device:
        return
    kind = (
        "a predicted step"
        if measured.kind is not Kind.MEASURED
        else "a warm-up step"
        if measured.is_warm_up
        else "a step"
    )
    raise ValueError(
        f"measured=... got {kind} on {measured.device_name}; it must be a steady step measured on "
        f"{prediction.device_name}. Give recorder.steady of a training there, or leave measured "
        "out."
    )


def _why_none(prediction: Prediction, *, knows_others: bool) -> str:
    """Why no batch size is the largest, with a hint, as the end of a sentence."""
    if prediction.capacity_bytes is None:
        return (
            "the CPU's capacity is unknown. Give it in Python: "
            "device=memcallback.devices.catalogue.HostSpec(capacity_bytes=...). On the command "
            "line, name a card or its size."
        )
    reason = next((caveat for caveat in prediction.trace.caveats if caveat.startswith(ONLY)), None)
    if reason is not None and not knows_others:
        return ONLY.lower() + reason.removeprefix(ONLY)
    return (
        "every batch size fits, because a larger batch needs little or no more memory. Give the "
        "largest batch size that you would train with: max_batch_size=..."
    )
