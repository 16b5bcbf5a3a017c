"""estimate_for_rank(): the largest batch size of one rank on its device, verified by a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from memcallback.prediction.search import BatchReplays
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
    """What `suggest_batch_size` was asked for, and what is used of each device."""

    headroom: float
    multiple_of: int
    max_batch_size: int | None
    dataset_size: int | None
    world_size: int | None
    measured: StepMemory | None
    lengths: Lengths
    validation: InferenceStep | None
    memory: Sequence[tuple[Device, LocalMemory | None]]


def estimate_for_rank(
    kind: RankKind, wanted: Wanted, bounds: BatchSizeBounds, progress: TraceProgress
) -> tuple[Estimate, dict[int, int]]:
    """The estimate for a rank on its device, and the batch size at each sequence length."""
    step, measured = kind.step, wanted.measured
    device = with_communication(kind.device, bounds.world_size)
    lengths, are_lengths_read = wanted.lengths
    num_traces = 0
    num_others = 1 + (wanted.validation is not None) + (measured is not None)

    def with_verification(num_done: int, num_all: int) -> None:
        nonlocal num_traces
        num_traces = num_done + 1  # the last one is not reported
        progress(num_done, num_all + num_others)

    prediction = predict_here(
        step,
        device=device,
        sequence_length=lengths[-1] if lengths else None,
        progress=with_verification,
    )
    progress(num_traces, num_traces + num_others)
    memory = next(memory for spec, memory in wanted.memory if spec == kind.device)
    outside = outside_memory(prediction.device, memory)
    has_buckets = bounds.world_size > 1 and step.ranks is None and isinstance(step, TrainingStep)
    buckets_bytes = bucket_bytes(step.model) if has_buckets else 0
    shift = None
    if measured is not None:
        _check_measured(measured, prediction)
        shift = _shift_of(measured, step, prediction.device)

    knows_others = True

    def estimate_alone(
        step: Step,
        prediction: Prediction,
        shift: MeasuredShift | None = None,
    ) -> Estimate | None:
        nonlocal knows_others
        if prediction.capacity_bytes is None:
            return None
        retraced = _retraced(step, prediction, bounds.most, num_traces, with_verification)
        knows_others = prediction.trace.is_any_batch_size_known or retraced is not None
        return estimate_from_trace(
            prediction,
            shift,
            capacity_bytes=prediction.capacity_bytes,
            outside_bytes=outside.expected_bytes if outside else None,
            most_outside_bytes=outside.most_bytes if outside else None,
            headroom=wanted.headroom,
            bounds=bounds,
            # They stay while a validation runs.
            bucket_bytes=buckets_bytes,
            retraced=retraced,
        )

    validated, why_not = None, ""
    if wanted.validation is not None:
        validation = predict_here(wanted.validation, device=prediction.device)
        validated = estimate_alone(wanted.validation, validation)
        if validated is None:
            why_not = (
                "Validation does not limit the batch size: a larger batch needs little or no more "
                "memory there."
                if knows_others
                else "Validation was not taken into account: "
                + _why_none(validation, knows_others=False)
            )

    def estimate_of(prediction: Prediction) -> Estimate | None:
        alone = estimate_alone(step, prediction, shift)
        if alone is None or wanted.validation is None:
            return alone
        if validated is None:
            return replace(alone, caveats=(*alone.caveats, why_not))
        return _in_both(alone, validated)

    estimate = estimate_of(prediction)
    if estimate is None:
        reason = _why_none(prediction, knows_others=knows_others)
        raise PredictionError(f"No batch size can be suggested: {reason}")
    if are_lengths_read:
        # A trace at one length alone knows no other.
        step_of_lengths = prediction.lengths.step if prediction.lengths else 0
        lengths = buckets(lengths, step_of_lengths or lengths[-1])
    by_length = {}
    for length in lengths[:-1]:  # that of the longest is verified below
        of_length = estimate_of(_at_length(prediction, step, length))
        if of_length is not None:
            by_length[length] = of_length.best_batch_size()
    estimate = _verified(estimate, step, prediction, estimate_of)
    if lengths:
        by_length[lengths[-1]] = estimate.best_batch_size()
    return estimate, by_length


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


def _in_both(training: Estimate, validation: Estimate) -> Estimate:
    """The estimate of a training, up to what fits in its validation."""
    largest = min(training.largest, validation.largest)
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


def _verified(
    estimate: Estimate,
    step: Step,
    prediction: Prediction,
    estimate_of: Callable[[Prediction], Estimate | None],
) -> Estimate:
    """The estimate, verified by a trace at its batch size; a new one if the step differs there."""
    why = ""
    for _ in range(_MAX_ESTIMATES):
        size, spec = estimate.best_batch_size(), prediction.device
        is_known = prediction.trace.is_among_traced(size)
        if size == 0 or is_known or not prediction.trace.is_any_batch_size_known:
            return estimate
        try:
            prediction.trace.verified(
                Traces(step, spec, 1, None).at(size, prediction.sequence_length)
            )
            return estimate
        except PredictionError:
            largest = prediction.trace.largest_traced
            why = f", which cannot be traced (the largest traced is {largest:,})"
            break
        except BatchDependentPath:
            why = " by a trace: at the sizes traced so far the step ran other operators"
        prediction = predict_here(
            step, device=spec, batch_size=size, sequence_length=prediction.sequence_length
        )
        another = estimate_of(prediction)
        if another is None:
            break
        estimate = another
    untried = f"a check of batch size {estimate.best_batch_size():,}{why}"
    return replace(estimate, leaves_out=(*estimate.leaves_out, untried))


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
