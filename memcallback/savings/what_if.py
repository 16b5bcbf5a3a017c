"""what_if(): predict a step with each saving."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import torch

from memcallback.batch_size.advice import DEFAULT_HEADROOM
from memcallback.batch_size.estimate import check_headroom, estimate
from memcallback.core.errors import PredictionError
from memcallback.core.validation import whole_number
from memcallback.devices.catalogue import Device
from memcallback.devices.local import resolve, used_by_others_bytes
from memcallback.prediction.predict import predict_once, predict_without_limits
from memcallback.prediction.prediction import Prediction
from memcallback.savings.candidates import Saving, left_out, savings_for, together
from memcallback.savings.plan import Plan, PlanRow
from memcallback.savings.rank_candidates import over_ranks, usual
from memcallback.step.ranks import Ranks
from memcallback.step.training_step import TrainingStep

#: Kinds of which the best are tried together.
_TOGETHER = ("precision", "checkpointing", "accumulation", "optimizer", "inplace", "allocator")


def what_if(
    step: TrainingStep,
    *,
    device: str | int | torch.device | Device | None = None,
    batch_size: int | None = None,
    headroom: float = DEFAULT_HEADROOM,
    ranks: int | Sequence[Ranks] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Predict what each saving of memory would buy and cost.

    Each row is a trace of the step with that saving, alone or with others; nothing runs, and
    nothing of the user's is changed.

    Args:
        step: The step as it is.
        device: As for `predict`. Of this machine's own device, what others use of it at this moment
            is left to them.
        batch_size: Samples between two updates; by default as many as the step has.
        headroom: The fraction of the capacity that the largest batch sizes keep free, at least 0
            and below 1.
        ranks: How many devices there may be, for a row each with DistributedDataParallel, FSDP2
            with and without resharding, and HSDP, tensor parallel where the model has a plan for it
            (`tp_plan` of transformers), and a pipeline where it is an `nn.Sequential`; or jobs of
            your own. Figures are those of one rank, of a pipeline those of the stage that takes
            most, and batch sizes too.
        progress: Called after each saving that was tried alone, with the number of those and of
            all.

    Returns:
        The plan.

    Raises:
        PredictionError: If the step as it is cannot be predicted.
        ValueError: As `predict`, or if `headroom` is out of range, or `ranks` below 2.
    """
    check_headroom(headroom)
    if isinstance(ranks, int):
        whole_number("ranks", ranks, "Leave it out for one device.", least=2)
    base = predict_without_limits(step, device=resolve(device), batch_size=batch_size)
    jobs = usual(step, base.batch_size, ranks) if isinstance(ranks, int) else ranks
    trial = _Trial(step, base, headroom, used_by_others_bytes(base.device))
    tried: list[tuple[Saving, PlanRow]] = []
    savings = [
        *savings_for(step, base.batch_size, base.trace.at(base.batch_size).events),
        *over_ranks(jobs),
    ]
    for number, saving in enumerate(savings):
        tried.append((saving, trial.row(saving)))
        if progress is not None:
            progress(number + 1, len(savings))
    plan = trial.plan(row for _, row in tried)
    tried.sort(key=lambda one: one[1].rank)
    best = _best_of_each_kind(saving for saving, row in tried if plan.helps(row))
    return trial.plan((*plan.tried, *trial.several(best)))


def rescues(
    step: TrainingStep, base: Prediction, *, progress: Callable[[int, int], None] | None = None
) -> Iterator[PlanRow]:
    """Predict what the savings under which the same model is trained would do to a step that does
    not fit, at its own batch size alone.

    Each is one trace; `what_if` knows more of each, and asks for more traces.
    """
    savings = [
        one
        for one in savings_for(step, base.batch_size, base.trace.at(base.batch_size).events)
        if one.is_same_training
    ]
    for number, saving in enumerate(savings):
        if progress is not None:
            progress(number, len(savings))
        yield _Trial(step, base, 0.0, None).row(saving, predict=predict_once)


class _Trial:
    """Predicts a step with savings, as many samples between two updates as without."""

    def __init__(
        self, step: TrainingStep, base: Prediction, headroom: float, outside_bytes: int | None
    ) -> None:
        self._step = step
        self._base = base
        self._headroom = headroom
        self._outside_bytes = outside_bytes

    def plan(self, rows: Iterable[PlanRow]) -> Plan:
        """All that was tried."""
        return Plan(
            current=self._row_of(
                [self._base], PlanRow(saving="as it is", batch_size=self._base.batch_size)
            ),
            tried=tuple(rows),
            device_name=self._base.device_name,
            capacity_bytes=self._base.capacity_bytes,
            outside_bytes=self._outside_bytes,
            headroom=self._headroom,
            caveats=(*self._base.caveats, *left_out(self._step)),
        )

    def row(
        self, saving: Saving, predict: Callable[..., Prediction] = predict_without_limits
    ) -> PlanRow:
        """The step with a saving."""
        batch_size, rest = divmod(self._base.batch_size, saving.num_parts)
        row = PlanRow(
            saving=saving.name,
            kind=saving.kind,
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
                problem=f"a batch of {self._base.batch_size} cannot be cut into {saving.num_parts} parts of one size",
            )
        try:
            if saving.kind == "allocator":
                return self._row_of([replace(self._base, settings=settings)], row)
            varied = saving.apply(self._step)
            unlike, num_together = (
                (varied.ranks.unlike, varied.ranks.num_at_one_batch) if varied.ranks else ((0,), 1)
            )
            predictions = [
                predict(
                    varied.of_rank(rank),
                    device=self._base.device,
                    batch_size=batch_size,
                    settings=settings,
                )
                for rank in unlike
            ]
            return self._row_of(predictions, row, num_together)
        except (PredictionError, ValueError) as error:
            cause = error.__cause__ or error
            return replace(
                row, problem=(str(cause).strip().splitlines() or [type(cause).__name__])[0]
            )

    def several(self, best: Sequence[Saving]) -> Iterator[PlanRow]:
        """Savings in pairs, and all together; without one of them, the least first, where all
        together do not work.
        """
        for pair in combinations(best[:3], 2):
            yield self.row(together(*pair))
        if len(best) > 2:
            row = self.row(together(*best))
            fewer = (
                (
                    self.row(together(*(one for one in best if one is not least)))
                    for least in reversed(best)
                )
                if row.problem
                else ()
            )
            yield next((one for one in fewer if not one.problem), row)

    def _row_of(
        self, predictions: Sequence[Prediction], row: PlanRow, num_together: int = 1
    ) -> PlanRow:
        """A row with the figures of the rank that takes most."""
        worst = max(
            predictions, key=lambda one: one.peak_reserved_bytes or one.peak_allocated_bytes or 0
        )
        estimates = [
            estimate(
                measured=None,
                predicted=one,
                capacity_bytes=one.capacity_bytes,
                outside_bytes=self._outside(one),
                headroom=self._headroom,
            )
            for one in predictions
        ]
        largest = [found.largest for found in estimates if found is not None]
        return replace(
            row,
            peak_allocated_bytes=worst.peak_allocated_bytes,
            peak_reserved_bytes=worst.peak_reserved_bytes,
            fits=worst.fits,
            largest_batch_size=min(largest) if len(largest) == len(estimates) else None,
            extra_compute_pct=self._extra_compute_pct(predictions, num_together),
            sent_bytes=max(one.trace.traced.sent_bytes for one in predictions),
        )

    def _outside(self, prediction: Prediction) -> int | None:
        """What others than the allocator use; with other ranks the communication library too."""
        if self._outside_bytes is None:
            return None
        more = prediction.device.outside_bytes - self._base.device.outside_bytes
        return self._outside_bytes + max(0, more)

    def _extra_compute_pct(
        self, predictions: Sequence[Prediction], num_together: int
    ) -> float | None:
        of_here = _flops_of_sample(self._base)
        if not of_here:
            return None
        of_there = sum(map(_flops_of_sample, predictions)) * num_together / len(predictions)
        return 100 * (of_there / of_here - 1)


def _flops_of_sample(prediction: Prediction) -> float:
    traced = prediction.trace.traced
    return traced.num_flops / (traced.batch_size * traced.num_batches)


def _best_of_each_kind(helping: Iterable[Saving]) -> list[Saving]:
    """Of those under which the same model is trained, the first of each kind."""
    best: dict[str, Saving] = {}
    for saving in helping:
        if saving.is_same_training:
            best.setdefault(saving.kind, saving)
    return [best[kind] for kind in _TOGETHER if kind in best]
