"""what_if(): predict a training step with each saving of memory, alone and together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from time import perf_counter

import torch

from memcallback.batch_size.estimate import check_headroom, estimate
from memcallback.core.errors import PredictionError
from memcallback.core.validation import DEFAULT_HEADROOM, whole_number
from memcallback.devices.catalogue import Device, DeviceSpec
from memcallback.devices.local import (
    LocalMemory,
    OutsideMemory,
    local_memory,
    outside_memory,
    resolve,
)
from memcallback.isolation.child import is_in_child
from memcallback.isolation.isolated import TIMEOUT_S
from memcallback.prediction.apart import predict_apart
from memcallback.prediction.architectures import predict_with_least_room
from memcallback.prediction.predict import checked_training
from memcallback.prediction.predict_here import predict_here, predict_once
from memcallback.prediction.prediction import Prediction
from memcallback.prediction.progress import TraceProgress
from memcallback.savings.candidates import left_out, savings_for
from memcallback.savings.compilation import activation_memory_budget, why_not_compiled
from memcallback.savings.plan import Plan, PlanRow
from memcallback.savings.problems import plain_reason
from memcallback.savings.rank_candidates import over_ranks, usual
from memcallback.savings.saving import Saving, together
from memcallback.step.ranks import Ranks
from memcallback.step.training_step import TrainingStep

#: Kinds of savings; the best of each are tried together.
_TOGETHER = ("precision", "checkpointing", "accumulation", "optimizer", "inplace", "allocator")
#: Predictions with several savings at most: three pairs and all together.
_MOST_TOGETHER = 4


def what_if(
    step: TrainingStep,
    *,
    device: str | int | torch.device | Device | None = None,
    batch_size: int | None = None,
    headroom: float = DEFAULT_HEADROOM,
    ranks: int | Sequence[Ranks] = (),
    progress: TraceProgress | None = None,
    isolate: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> Plan:
    """Predict what each saving of memory would buy and cost.

    Each row predicts the step with that saving, alone or with others; nearly every row needs new
    traces. Nothing runs on a device, and neither model nor optimizer is changed.

    Args:
        step: The step as it is.
        device: As for `predict`. On this machine's own device, memory that others use at this
            moment is not counted as free.
        batch_size: Samples in one forward pass of the step as it is; by default as many as its
            batch has.
        headroom: The fraction of the capacity that the largest batch sizes keep free, at least 0
            and below 1.
        ranks: A number of devices to try, at least 2, or jobs of your own. A number adds a row each
            for DistributedDataParallel, FSDP2 with and without resharding, HSDP, tensor parallel if
            the model has a plan for it (`tp_plan` of transformers), and a pipeline if it is an
            `nn.Sequential`. Sizes and batch sizes are those of one rank, in a pipeline those of the
            stage that needs most, also where the step as it is belongs to one.
        progress: Called after each prediction but the last, with the number of predictions done and
            the number to do in all, as far as known. By default as for `predict`.
        isolate: As for `predict`.
        timeout_s: As for `predict`.

    Returns:
        The step as it is and with each saving.

    Raises:
        PredictionError: If the step as it is cannot be predicted.
        ValueError: As `predict`, or if `headroom` is out of range, or `ranks` below 2.
    """
    _, plan = predict_with_plan(
        step,
        device=device,
        batch_size=batch_size,
        headroom=headroom,
        ranks=ranks,
        progress=progress,
        isolate=isolate,
        timeout_s=timeout_s,
    )
    return plan


def predict_with_plan(
    step: TrainingStep,
    *,
    device: str | int | torch.device | Device | None = None,
    batch_size: int | None = None,
    headroom: float = DEFAULT_HEADROOM,
    ranks: int | Sequence[Ranks] = (),
    progress: TraceProgress | None = None,
    isolate: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> tuple[Prediction, Plan]:
    """The step as it is, as `predict` has it, and what `what_if` says of it."""
    check_headroom(headroom)
    if isinstance(ranks, int):
        whole_number("ranks", ranks, "Leave it out for one device.", least=2)
    checked_training(step)
    spec = resolve(device)
    memory = local_memory(spec)
    return predict_apart(
        lambda progress: plan_here(
            step,
            device=spec,
            memory=memory,
            batch_size=batch_size,
            headroom=headroom,
            ranks=ranks,
            progress=progress,
        ),
        isolate=isolate,
        timeout_s=timeout_s,
        progress=progress,
        of="predictions",
    )


def plan_here(
    step: TrainingStep,
    *,
    device: Device,
    memory: LocalMemory | None,
    headroom: float,
    progress: TraceProgress,
    batch_size: int | None = None,
    ranks: int | Sequence[Ranks] = (),
) -> tuple[Prediction, Plan]:
    """Predict as `what_if` does, in this process, with what is used of a device of this machine."""
    progress(0, _MOST_TOGETHER + 1)
    base = predict_with_least_room(step, device=device, batch_size=batch_size)
    jobs = usual(step, base.batch_size, ranks) if isinstance(ranks, int) else ranks
    trial = _Trial(step, base, headroom, outside_memory(base.device, memory))
    events = base.trace.at(base.batch_size).events
    can_compile = is_in_child() and isinstance(base.device, DeviceSpec)
    savings = [
        *(
            saving
            for saving in savings_for(step, base.batch_size, events)
            if can_compile or not saving.compiles
        ),
        *over_ranks(jobs),
    ]
    num_alone = 1 + len(savings)
    rows = []
    for number, saving in enumerate(savings, start=1):
        progress(number, num_alone + _MOST_TOGETHER)
        rows.append(trial.row(saving))
    plan = trial.plan(rows)
    helping = [pair for pair in zip(savings, rows, strict=True) if plan.helps(pair[1])]
    helping.sort(key=lambda pair: pair[1].rank)
    best = _best_of_each_kind(saving for saving, _ in helping)
    num_all = num_alone + _num_of_several(len(best))
    for number, row in enumerate(trial.several(best), start=num_alone):
        rows.append(row)
        progress(number, max(num_all, number + 1))
    return base, trial.plan(rows)


def rescues(
    step: TrainingStep, base: Prediction, *, progress: Callable[[int, int], None] | None = None
) -> Iterator[PlanRow]:
    """Predict a step that does not fit with each saving under which the same model is trained.

    Each row is one trace at the step's own batch size; `what_if` needs more traces for more values.
    Compiling, which can take minutes, is left out.
    """
    events = base.trace.at(base.batch_size).events
    candidates = savings_for(step, base.batch_size, events)
    savings = [saving for saving in candidates if saving.is_same_training and not saving.compiles]
    trial = _Trial(step, base, 0.0, None, predict_once)
    for number, saving in enumerate(savings):
        if progress is not None:
            progress(number, len(savings))
        yield trial.row(saving)


class _Trial:
    """Predicts a step with savings, with as many samples in each update as without.

    The step as it is, too, is predicted on each kind of ranks; `base` is that of its own rank.
    """

    def __init__(
        self,
        step: TrainingStep,
        base: Prediction,
        headroom: float,
        outside: OutsideMemory | None,
        predict: Callable[..., Prediction] = predict_here,
    ) -> None:
        self._step = step
        self._base = base
        self._headroom = headroom
        self._outside = outside
        self._predict = predict
        own = step.ranks.rank if step.ranks else 0
        self._unlike = [
            base
            if rank == own
            else predict(
                step.of_rank(rank),
                device=base.device,
                batch_size=base.batch_size,
                settings=base.settings,
            )
            for rank in _unlike(step)
        ]
        self._flops_before = _flops_per_sample(self._unlike, _num_together(step))

    def plan(self, rows: Iterable[PlanRow]) -> Plan:
        """The table of these rows below the step as it is."""
        return Plan(
            current=self._row_of(
                self._unlike,
                PlanRow(saving="as it is", batch_size=self._base.batch_size),
                _num_together(self._step),
            ),
            tried=tuple(rows),
            device_name=self._base.device_name,
            capacity_bytes=self._base.capacity_bytes,
            outside_bytes=self._outside.expected_bytes if self._outside else None,
            headroom=self._headroom,
            architecture_of=self._base.architecture_of,
            caveats=(*self._base.caveats, *left_out(self._step)),
        )

    def row(self, saving: Saving) -> PlanRow:
        """The step with a saving, or why it cannot be predicted."""
        batch_size, rest = divmod(self._base.batch_size, saving.num_parts)
        row = PlanRow(
            saving=saving.name,
            kind=saving.kind,
            group=saving.group,
            batch_size=batch_size,
            changes=saving.changes,
            line=saving.line,
        )
        settings = (
            replace(self._base.settings, expandable_segments=True)
            if saving.expandable_segments
            else self._base.settings
        )
        if rest:
            return replace(
                row,
                problem=f"a batch of {self._base.batch_size} cannot be cut into "
                f"{saving.num_parts} parts of one size",
            )
        try:
            if saving.kind == "allocator":
                changed = [replace(base, settings=settings) for base in self._unlike]
                return self._row_of(changed, row, _num_together(self._step))
            varied = saving.apply(self._step)
            # Each other batch size would be compiled anew.
            predict = predict_once if saving.compiles else self._predict
            start = perf_counter()
            with activation_memory_budget(saving.activation_memory_budget):
                predictions = [
                    predict(
                        varied.of_rank(rank),
                        device=self._base.device,
                        batch_size=batch_size,
                        settings=settings,
                    )
                    for rank in _unlike(varied)
                ]
            if saving.compiles:
                if reason := why_not_compiled(predictions[0].caveats):
                    return replace(row, problem=plain_reason(PredictionError(reason)))
                took = f"compiling took {perf_counter() - start:.0f} s here"
                row = replace(row, changes=f"{row.changes}; {took}")
            return self._row_of(predictions, row, _num_together(varied))
        except (PredictionError, ValueError) as error:
            return replace(row, problem=plain_reason(error))

    def several(self, best: Sequence[Saving]) -> Iterator[PlanRow]:
        """The best savings in pairs and all together; if all fail together, all but one of them."""
        for pair in combinations(best[:3], 2):
            yield self.row(together(*pair))
        if len(best) < 3:
            return
        row = all_together = self.row(together(*best))
        for left in reversed(best):
            if not row.problem:
                break
            row = self.row(together(*(saving for saving in best if saving is not left)))
        yield all_together if row.problem else row

    def _row_of(
        self, predictions: Sequence[Prediction], row: PlanRow, num_together: int
    ) -> PlanRow:
        """A row with the values of the rank that needs most."""
        worst = max(
            predictions, key=lambda rank: rank.peak_reserved_bytes or rank.peak_allocated_bytes
        )
        estimates = [
            estimate(
                measured=None,
                predicted=prediction,
                capacity_bytes=prediction.capacity_bytes,
                outside_bytes=outside.expected_bytes if outside else None,
                most_outside_bytes=outside.most_bytes if outside else None,
                headroom=self._headroom,
            )
            for prediction in predictions
            for outside in [self._outside_of(prediction)]
        ]
        largest = [each.largest for each in estimates if each is not None]
        return replace(
            row,
            peak_allocated_bytes=worst.peak_allocated_bytes,
            peak_reserved_bytes=worst.peak_reserved_bytes,
            fits=worst.fits,
            largest_batch_size=min(largest) if len(largest) == len(estimates) else None,
            extra_compute_pct=self._extra_compute_pct(predictions, num_together),
            sent_bytes=max(
                rank.trace.of(rank.batch_size).traced.sent_bytes for rank in predictions
            ),
        )

    def _outside_of(self, prediction: Prediction) -> OutsideMemory | None:
        """What is used outside the allocator, with several ranks by their communication too."""
        if self._outside is None:
            return None
        expected, most = self._outside
        more = max(0, prediction.device.outside_bytes - self._base.device.outside_bytes)
        return OutsideMemory(expected + more, None if most is None else most + more)

    def _extra_compute_pct(
        self, predictions: Sequence[Prediction], num_together: int
    ) -> float | None:
        if not self._flops_before:
            return None
        return 100 * (_flops_per_sample(predictions, num_together) / self._flops_before - 1)


def _unlike(step: TrainingStep) -> tuple[int, ...]:
    """The ranks to predict; without a job the only one."""
    return step.ranks.unlike if step.ranks else (0,)


def _num_together(step: TrainingStep) -> int:
    """How many ranks compute one batch together."""
    return step.ranks.num_at_one_batch if step.ranks else 1


def _num_of_several(num_best: int) -> int:
    """Predictions with several of so many best savings; more where all together fail."""
    return min(_MOST_TOGETHER, num_best * (num_best - 1) // 2 + (num_best > 2))


def _flops_per_sample(unlike: Sequence[Prediction], num_together: int) -> float:
    """What all ranks at one batch compute for a sample, by predictions of each kind of ranks."""
    traces = [rank.trace.of(rank.batch_size).traced for rank in unlike]
    flops = (traced.num_flops / (traced.batch_size * traced.num_batches) for traced in traces)
    return sum(flops) * num_together / len(unlike)


def _best_of_each_kind(helping: Iterable[Saving]) -> list[Saving]:
    """The first saving of each kind under which the same model is trained."""
    best: dict[str, Saving] = {}
    for saving in helping:
        if saving.is_same_training:
            best.setdefault(saving.kind, saving)
    return [best[kind] for kind in _TOGETHER if kind in best]
