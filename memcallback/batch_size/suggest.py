"""suggest_batch_size(): estimates the largest batch size, then verifies it by a trace there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from memcallback.batch_size.advice import BatchSizeAdvice, RankBatchSize
from memcallback.batch_size.bounds import BatchSizeBounds
from memcallback.batch_size.estimate import check_headroom
from memcallback.batch_size.one_rank import Lengths, Wanted, estimate_for_rank
from memcallback.batch_size.rank_kinds import AnyDevice, job_of, listed_devices
from memcallback.batch_size.sequence_lengths import sequence_lengths_of
from memcallback.core.step_memory import StepMemory
from memcallback.core.validation import DEFAULT_HEADROOM, DEFAULT_MULTIPLE
from memcallback.devices.catalogue import Device, architectures
from memcallback.devices.local import local_memory
from memcallback.isolation.isolated import TIMEOUT_S
from memcallback.prediction.apart import predict_apart
from memcallback.prediction.architectures import would_fit
from memcallback.prediction.progress import TraceProgress, part_of
from memcallback.step.inference_step import InferenceStep
from memcallback.step.step import Step
from memcallback.step.training_step import TrainingStep


def suggest_batch_size(
    step: Step,
    *,
    device: AnyDevice | Sequence[AnyDevice] = None,
    headroom: float = DEFAULT_HEADROOM,
    multiple_of: int = DEFAULT_MULTIPLE,
    max_batch_size: int | None = None,
    dataset_size: int | None = None,
    world_size: int | None = None,
    measured: StepMemory | None = None,
    sequence_lengths: Iterable[object] | None = None,
    validation: InferenceStep | None = None,
    progress: TraceProgress | None = None,
    isolate: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> BatchSizeAdvice:
    """The largest batch size that is predicted to fit with the headroom kept free.

    A trace at that size verifies it. If this trace shows that the step runs differently there, the
    size is predicted again from this trace. If the step runs differently at each batch size, each
    size that is tried is traced, some six to ten. The result is then exact below 64 samples, and
    within 2 % above, unless `leaves_out` of the advice says that larger sizes would take minutes to
    trace, or that sizes which are no multiple of the step's own cannot be traced.

    If `device` is only a size of memory, the step is predicted with two architectures, an A100's
    and an H100's, whose libraries take workspaces of different sizes. The advice is the smaller
    one.

    All ranks of a job have one batch size, the smallest of what each could have alone. In a
    pipeline every rank is predicted, and the batch size is that of one microbatch. On several kinds
    of devices one rank on each kind is predicted. Otherwise the step's own rank represents all. If
    a function builds the pipeline, only you know how many copies of the pipeline train at the same
    time, each on batches of its own. Give that number as `world_size`; by default it is one.

    Args:
        step: The step, a `TrainingStep` or an `InferenceStep`.
        device: As for `predict`; or a list with the device of each rank. Memory that others use now
            on a device of this machine is left to them.
        headroom: The fraction of the capacity to keep free, at least 0 and below 1.
        multiple_of: The batch size is a multiple of this, if at least so many samples fit; 1 for
            any.
        max_batch_size: The largest batch size to suggest.
        dataset_size: Samples in the dataset, shared by all ranks.
        world_size: How many ranks train with a batch of their own; the batch size is that of one.
            By default as in the step's `ranks`, or the number of devices. With several ranks and
            a step without `ranks`, DistributedDataParallel is assumed: buckets as large as the
            gradients, and the memory of NCCL, are added.
        measured: A steady step of this training on this device. If it needs more than predicted,
            the predicted curve is raised to it. Its sequences are as long as those of the step.
        sequence_lengths: The lengths of samples or of buckets; or a data loader, whose batches are
            read for their lengths and put into at most eight buckets. The batch size is for the
            longest; `by_sequence_length` of the advice has one for each length. The step must know
            its `sequence_length`.
        validation: An `InferenceStep(..., after=step)` that runs at the same batch size: the advice
            is for the largest size that fits in both. Validation is predicted at its own
            `sequence_length`.
        progress: As for `predict`.
        isolate: As for `predict`.
        timeout_s: As for `predict`.

    Returns:
        The advice; its `leaves_out` lists what it does not include. It keeps the step, which
        `accumulate_for` predicts; `copy.copy(advice)` does not.

    Raises:
        PredictionError: As `predict`; also if only the step's own batch size can be traced, or
            every batch size fits.
        TypeError: If an argument that must be a number is not one.
        ValueError: As `predict`; also if a number is out of range, `sequence_lengths` is empty,
            `measured` is not a steady step of known batch size, measured on a device of this kind,
            or is given for several kinds of ranks, the number of devices is not that of ranks, or
            `validation` was not made with `after=step`.
    """
    devices, is_list = listed_devices(step, device)
    both = [architectures(one) for one in devices]
    candidates = [[of_one[0] for of_one in both]]
    if any(len(of_one) > 1 for of_one in both):
        candidates.append([of_one[-1] for of_one in both])
    check_headroom(headroom)
    if validation is not None and validation.after is not step:
        raise ValueError(
            "validation must come after the step. Give InferenceStep(..., after=step)."
        )
    lengths = Lengths()
    if sequence_lengths is not None:
        lengths = Lengths(*sequence_lengths_of(sequence_lengths, step))
    wanted = Wanted(
        headroom=headroom,
        multiple_of=multiple_of,
        max_batch_size=max_batch_size,
        dataset_size=dataset_size,
        world_size=world_size,
        measured=measured,
        lengths=lengths,
        validation=validation,
        accumulates=False,
        # A child cannot ask the devices of this machine.
        memory=[(spec, local_memory(spec)) for devices in candidates for spec in devices],
    )

    def advised(wanted: Wanted) -> BatchSizeAdvice:
        return predict_apart(
            lambda progress: _smallest(
                [
                    _suggest(
                        step,
                        devices,
                        wanted,
                        part_of(progress, number, len(candidates)),
                        is_list=is_list,
                    )
                    for number, devices in enumerate(candidates)
                ]
            ),
            isolate=isolate,
            timeout_s=timeout_s,
            progress=progress,
        )

    advice = advised(wanted)
    if not isinstance(step, TrainingStep) or step.accumulate > 1:
        return advice
    return replace(
        advice,
        fits_at=advice.fits,
        accumulated=lambda: advised(replace(wanted, accumulates=True)),
    )


def _smallest(advices: Sequence[BatchSizeAdvice]) -> BatchSizeAdvice:
    """The advice of the smallest batch size, which says what the others would be."""
    smallest = min(
        advices,
        # Of equal ones that with the higher peak, as `predict` has it.
        key=lambda advice: (advice.largest, -dict(advice.curve)[advice.current_batch_size]),
    )
    others = [advice for advice in advices if advice.largest != smallest.largest]
    caveats = [would_fit(other.largest, other.architecture_of) for other in others]
    return replace(smallest, caveats=(*smallest.caveats, *caveats), fits_at=smallest.fits)


def _suggest(
    step: Step,
    devices: Sequence[Device],
    wanted: Wanted,
    progress: TraceProgress,
    *,
    is_list: bool,
) -> BatchSizeAdvice:
    job = job_of(step, devices, is_list=is_list)
    kinds = job.kinds
    bounds = BatchSizeBounds(
        multiple_of=wanted.multiple_of,
        max_batch_size=wanted.max_batch_size,
        dataset_size=wanted.dataset_size,
        world_size=_world_size(wanted.world_size, job.num_with_own_batch, is_sure=job.is_sure),
        num_microbatches=job.num_microbatches,
    )
    if len(kinds) > 1 and wanted.measured is not None:
        raise ValueError(
            f"The step in measured=... is of one rank, but there are {len(kinds)} kinds of ranks. "
            "Leave measured out: the peaks of all ranks are predicted."
        )
    estimates = [
        estimate_for_rank(kind, wanted, bounds, part_of(progress, number, len(kinds)))
        for number, kind in enumerate(kinds)
    ]
    sizes = [estimate.best_batch_size() for estimate, _ in estimates]
    smallest, by_length = estimates[sizes.index(min(sizes))]
    if len(kinds) == 1:
        return smallest.advice(by_sequence_length=by_length)
    by_rank = tuple(
        RankBatchSize(ranks=tuple(kind.ranks), device_name=kind.device.name, batch_size=batch_size)
        for kind, batch_size in zip(kinds, sizes, strict=True)
    )
    return smallest.advice(
        by_rank=by_rank,
        by_sequence_length={
            length: min(of_length[length] for _, of_length in estimates) for length in by_length
        },
    )


def _world_size(wanted: int | None, known: int, *, is_sure: bool) -> int:
    if wanted is None:
        return known
    if is_sure and wanted != known:
        raise ValueError(
            f"world_size is {wanted}, but {known} ranks have a batch of their own. Leave it out."
        )
    return wanted
