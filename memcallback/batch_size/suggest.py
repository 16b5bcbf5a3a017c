"""suggest_batch_size(): estimate, then verify by a trace at that size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from memcallback.batch_size.advice import (
    DEFAULT_HEADROOM,
    DEFAULT_MULTIPLE,
    BatchSizeAdvice,
    BatchSizeBounds,
    RankBatchSize,
)
from memcallback.batch_size.estimate import Estimate, check_headroom, estimate_from_trace
from memcallback.batch_size.sequence_lengths import buckets, sequence_lengths_of
from memcallback.core.errors import PredictionError
from memcallback.core.step_memory import StepMemory
from memcallback.core.types import Kind
from memcallback.devices.catalogue import Device
from memcallback.devices.local import resolve, used_by_others_bytes
from memcallback.prediction.batch_trace import BatchDependentPath
from memcallback.prediction.predict import ONLY, Traces, predict_without_limits
from memcallback.prediction.prediction import Prediction
from memcallback.step.holdings import bucket_bytes
from memcallback.step.ranks import Ranks
from memcallback.step.training_step import TrainingStep

#: As for `predict`.
AnyDevice = str | int | torch.device | Device | None
#: How often a batch size is estimated, each time from a trace at the size before.
_MAX_ESTIMATES = 3


def suggest_batch_size(
    step: TrainingStep,
    *,
    device: AnyDevice | Sequence[AnyDevice] = None,
    headroom: float = DEFAULT_HEADROOM,
    multiple_of: int = DEFAULT_MULTIPLE,
    max_batch_size: int | None = None,
    dataset_size: int | None = None,
    world_size: int | None = None,
    measured: StepMemory | None = None,
    sequence_lengths: Iterable[object] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> BatchSizeAdvice:
    """The largest batch size that is predicted to fit: never one whose reserved peak plus headroom
    exceeds the capacity.

    It is verified by a trace at that size; where the step does something else there, it is
    predicted anew from there.

    The ranks of a job have one batch size, the smallest of what each could have alone: the stages
    of a pipeline are looked at one by one (and its batch size is that of a microbatch), ranks of
    unlike devices too. Of other jobs the step's own rank stands for all. How many copies of a
    pipeline that a function makes are trained is not known: then `world_size` says it, by default
    one.

    Args:
        step: The step.
        device: As for `predict`; or the device of each rank, in a list. Of this machine's own
            device, what others use of it at this moment is left to them.
        headroom: The fraction of the capacity to keep free, at least 0 and below 1.
        multiple_of: The batch size is to be a multiple of this, if at least so many samples fit; 1
            for any.
        max_batch_size: It is at most this.
        dataset_size: Samples in the dataset, of which each rank has its part.
        world_size: How many ranks train with a batch of their own; the batch size is that of one.
            By default as the step's `ranks` say, or as many as there are devices. Where the step
            says nothing of them, it is beside buckets as large as its gradients
            (DistributedDataParallel).
        measured: A steady step of this training on this device, by which the predicted curve is
            raised to what was measured.
        sequence_lengths: How long the sequences can be, of samples or of buckets: the batch size is
            for the longest, and `by_sequence_length` of the advice has one for each length. Or a
            data loader, whose batches are read for their lengths; then there are at most eight
            buckets, each as long as its longest may be. The step must say how long its own are.
        progress: As for `predict`.

    Returns:
        The advice; `leaves_out` says what it does not know.

    Raises:
        PredictionError: As `predict`; also if the step was traced at its own batch size alone, or
            there is no end of memory.
        TypeError: If one of the numbers is none.
        ValueError: As `predict`, or if one of the numbers is out of range, `sequence_lengths` is
            empty, `measured` is no steady step that was measured on a device of this kind, or is
            given for ranks that are unlike, or there are more or fewer devices than ranks.
    """
    job = _job(step, device)
    places = job.places
    bounds = BatchSizeBounds(
        multiple_of=multiple_of,
        max_batch_size=max_batch_size,
        dataset_size=dataset_size,
        world_size=_world_size(world_size, job.num_with_own_batch, is_sure=job.is_sure),
        num_microbatches=job.num_microbatches,
    )
    check_headroom(headroom)
    lengths, are_read = (
        ((), False) if sequence_lengths is None else sequence_lengths_of(sequence_lengths, step)
    )
    if len(places) > 1 and measured is not None:
        raise ValueError(
            f"measured is a step of one rank, and {len(places)} kinds of ranks are planned for. Leave it out: their curves are predicted."
        )
    estimates = [
        _for_one(place, headroom, bounds, measured, lengths, progress, are_lengths_read=are_read)
        for place in places
    ]
    sizes = [estimate.best_batch_size() for estimate, _ in estimates]
    smallest, by_length = estimates[sizes.index(min(sizes))]
    if len(places) == 1:
        return smallest.advice(by_sequence_length=by_length)
    kinds = (
        RankBatchSize(
            ranks=tuple(place.ranks), device_name=place.device.name, batch_size=batch_size
        )
        for place, batch_size in zip(places, sizes, strict=True)
    )
    return smallest.advice(
        by_rank=tuple(kinds),
        by_sequence_length={
            length: min(of_length[length] for _, of_length in estimates) for length in by_length
        },
    )


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Ranks that are alike: the step of one of them, its device, and which ranks they are."""

    step: TrainingStep
    device: Device
    ranks: list[int]


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The kinds of ranks, how many ranks have a batch of their own, whether that is sure, and how
    many microbatches a batch has.
    """

    places: list[_Place]
    num_with_own_batch: int
    is_sure: bool
    num_microbatches: int


def _job(step: TrainingStep, device: AnyDevice | Sequence[AnyDevice]) -> _Job:
    """What is to be looked at, so that all ranks are."""
    ranks: Ranks | None = getattr(step, "ranks", None)  # what is no step is told by `predict`
    if isinstance(device, Sequence) and not isinstance(device, str):
        given, is_list = list(device), True
    else:
        given, is_list = [device], False
    if is_list and (not given or (ranks is not None and len(given) != ranks.world_size)):
        expected = (
            "at least one" if ranks is None else f"one for each of the {ranks.world_size} ranks"
        )
        raise ValueError(
            f"device is a list of {len(given)} devices, and must have {expected}. Give one device if all are alike."
        )
    devices = dict(enumerate(resolve(one) for one in given))
    if ranks is None:
        return _Job(
            places=_alike({0: step}, devices),
            num_with_own_batch=len(devices),
            is_sure=is_list,
            num_microbatches=1,
        )
    num_microbatches, unlike, num_together = (
        ranks.num_microbatches,
        ranks.unlike,
        ranks.num_at_one_batch,
    )
    if callable(ranks.strategy):
        # Whether a function makes a pipeline only a trace tells; then its ranks hold unlike things.
        traced = Traces(step, devices[0], 1, None).at(
            step.check_predictable(), step.sequence_length
        )
        num_microbatches = traced.num_batches // step.accumulate
        if num_microbatches > 1:
            unlike, num_together = tuple(range(ranks.world_size)), ranks.world_size
    steps = {rank: step.of_rank(rank) for rank in unlike}
    return _Job(
        places=_alike(steps, devices if is_list else dict.fromkeys(steps, devices[0])),
        num_with_own_batch=ranks.world_size // num_together,
        is_sure=not callable(ranks.strategy),
        num_microbatches=num_microbatches,
    )


def _alike(steps: Mapping[int, TrainingStep], devices: Mapping[int, Device]) -> list[_Place]:
    """Ranks with the same step and device together; a rank without a step of its own has the first
    one.
    """
    found: list[_Place] = []
    for rank, on in devices.items():
        of_rank = steps.get(rank, next(iter(steps.values())))
        alike = next(
            (place for place in found if place.step is of_rank and place.device == on), None
        )
        if alike is None:
            found.append(_Place(step=of_rank, device=on, ranks=[rank]))
        else:
            alike.ranks.append(rank)
    return found


def _for_one(
    place: _Place,
    headroom: float,
    bounds: BatchSizeBounds,
    measured: StepMemory | None,
    lengths: Sequence[int],
    progress: Callable[[int, int], None] | None,
    *,
    are_lengths_read: bool,
) -> tuple[Estimate, dict[int, int]]:
    """The estimate for a rank on its device, and the batch size at each sequence length."""
    step, device = place.step, place.device
    prediction = predict_without_limits(
        step, device=device, sequence_length=lengths[-1] if lengths else None, progress=progress
    )
    outside = used_by_others_bytes(prediction.device)
    buckets_bytes = bucket_bytes(step.model) if bounds.world_size > 1 and step.ranks is None else 0
    if measured is not None:
        _check_measured(measured, prediction)

    def estimate_of(one: Prediction) -> Estimate | None:
        if one.capacity_bytes is None:
            return None
        return estimate_from_trace(
            one,
            measured,
            capacity_bytes=one.capacity_bytes,
            outside_bytes=outside,
            headroom=headroom,
            bounds=bounds,
            bucket_bytes=buckets_bytes,
        )

    estimate = estimate_of(prediction)
    if estimate is None:
        raise PredictionError(f"No batch size can be suggested: {_why_none(prediction)}")
    if are_lengths_read:
        # A trace of one length alone says nothing of others.
        step_of_lengths = prediction.lengths.step if prediction.lengths else 0
        lengths = buckets(lengths, step_of_lengths or lengths[-1])
    by_length = {}
    for length in lengths:
        of_length = estimate_of(prediction.at(sequence_length=length))
        if of_length is not None:
            by_length[length] = of_length.best_batch_size()
    estimate = _verified(estimate, step, prediction, estimate_of)
    if lengths:
        by_length[lengths[-1]] = estimate.best_batch_size()
    return estimate, by_length


def _world_size(given: int | None, known: int, *, is_sure: bool) -> int:
    if given is None:
        return known
    if is_sure and given != known:
        raise ValueError(
            f"world_size {given} was asked for, and {known} ranks have a batch of their own. Leave world_size out."
        )
    return given


def _check_measured(measured: StepMemory, prediction: Prediction) -> None:
    is_other_device = (measured.peak_reserved_bytes is None) != (
        prediction.peak_reserved_bytes is None
    )
    if measured.kind is Kind.MEASURED and not measured.is_warm_up and not is_other_device:
        return
    what = (
        "a predicted step"
        if measured.kind is not Kind.MEASURED
        else "a warm-up step"
        if measured.is_warm_up
        else "a step"
    )
    raise ValueError(
        f"measured is {what} on {measured.device_name}; it must be a steady step that was measured on the device that is planned for, here "
        f"{prediction.device_name}. Give recorder.steady of a training there, or leave it out."
    )


def _verified(
    estimate: Estimate,
    step: TrainingStep,
    prediction: Prediction,
    estimate_of: Callable[[Prediction], Estimate | None],
) -> Estimate:
    """The estimate after a trace at its batch size; a new one if the step does something else there."""
    why = ""
    for _ in range(_MAX_ESTIMATES):
        size, spec = estimate.best_batch_size(), prediction.device
        if size == 0 or prediction.trace.is_among_traced(size):
            return estimate
        try:
            prediction.trace.verified(
                Traces(step, spec, 1, None).at(size, prediction.sequence_length)
            )
            return estimate
        except PredictionError:
            why = f", where it cannot be traced: the largest that was traced is {prediction.trace.largest_traced}"
            break
        except BatchDependentPath:
            why = ": it does something else at others"
        prediction = predict_without_limits(
            step, device=spec, batch_size=size, sequence_length=prediction.sequence_length
        )
        another = estimate_of(prediction)
        if another is None:
            break
        estimate = another
    untried = f"whether the step does the same at batch size {estimate.best_batch_size()}{why}"
    return replace(estimate, leaves_out=(*estimate.leaves_out, untried))


def _why_none(prediction: Prediction) -> str:
    """Why no batch size is the largest, and the way out, as the end of a sentence."""
    if prediction.capacity_bytes is None:
        return "how much memory the CPU has is not known. Give it: device=memcallback.devices.catalogue.HostSpec(capacity_bytes=...)."
    reason = next((caveat for caveat in prediction.trace.caveats if caveat.startswith(ONLY)), None)
    if reason is not None:
        return ONLY.lower() + reason.removeprefix(ONLY)
    return (
        "no batch size was found that does not fit: a larger batch needs no more memory, or hardly more. Give the largest that you would train "
        "with: max_batch_size=..."
    )
