"""FittedBatchSize, and the strategy by which fit_batch_size searches for it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from memcallback.batch_size.bounds import BatchSizeBounds
from memcallback.batch_size.peaks import TracedPeak
from memcallback.core.document import Document, Printable, Table, size_text
from memcallback.core.types import Category
from memcallback.core.units import MiB, format_bytes
from memcallback.prediction.prediction import StepPrediction

#: Categories that do not depend on the batch size.
_HELD = (Category.PARAMETER, Category.BUFFER, Category.GRADIENT, Category.OPTIMIZER_STATE)
#: A larger size is worth another trial if it is at least so many times the best one.
_WORTHWHILE = 1.05
#: A trial is said to miss its prediction above this share of it, and 1 MiB.
_NOTABLE_SHARE = 0.01


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The outcome of running one batch size.

    Attributes:
        batch_size: Samples in a batch.
        peak_bytes: The reserved peak, on a CPU the allocated one, up to the error if there was one;
            None if it could not be read.
        predicted_bytes: The peak expected before the trial; None if unknown.
        budget_bytes: The largest peak that passes: the capacity less memory outside the allocator
            and half of the headroom.
        is_out_of_memory: Whether the device ran out of memory.
        num_alloc_retries: How often the allocator had to free its cache and try again.
    """

    batch_size: int
    peak_bytes: int | None
    predicted_bytes: int | None
    budget_bytes: int
    is_out_of_memory: bool = False
    num_alloc_retries: int = 0

    @property
    def fits(self) -> bool:
        """Whether it ran, without a retry, within the budget as far as that is known."""
        return (
            not self.is_out_of_memory
            and not self.num_alloc_retries
            and (self.peak_bytes is None or self.peak_bytes <= self.budget_bytes)
        )

    @property
    def outcome(self) -> str:
        """What came of it, as part of a sentence."""
        if self.is_out_of_memory:
            return "out of memory"
        if self.num_alloc_retries:
            return "the allocator had to give back its cache and try again"
        if self.peak_bytes is None:
            return "ran; its peak could not be read"
        return (
            "fits"
            if self.fits
            else f"more than the {format_bytes(self.budget_bytes)} that may be used"
        )


@dataclass(frozen=True, kw_only=True)
class LikelyPeak:
    """The replayed peak over batch sizes, with what trials have shown beside it.

    `estimate` errs on the safe side. The size from here is run, so the likelier value counts: the
    difference of a trial to its replay (validation, memory inside kernels, where segments lie) is
    assumed to grow in proportion to the batch size.

    Attributes:
        line: The replayed peaks.
        fixed_bytes: What is allocated besides, at any batch size.
        extra_bytes: What a trial took more than that, perhaps less than 0.
        batch_size: The size of that trial.
    """

    line: TracedPeak
    fixed_bytes: int = 0
    extra_bytes: int = 0
    batch_size: int = 1

    def at(self, batch_size: int) -> int:
        """The peak expected at a batch size."""
        return (
            self.line.at(batch_size)
            + self.fixed_bytes
            + self.extra_bytes * batch_size // self.batch_size
        )

    def after(self, trial: Trial) -> LikelyPeak:
        """The same with what a trial has shown, whose peak is known."""
        assert trial.peak_bytes is not None
        extra_bytes = trial.peak_bytes - self.line.at(trial.batch_size) - self.fixed_bytes
        return replace(self, extra_bytes=extra_bytes, batch_size=trial.batch_size)

    def largest_within(self, budget_bytes: int) -> int | None:
        """The largest batch size whose peak, without a retry, fits a budget; None if unlimited."""
        replays = self.line.replays
        return replays.largest(
            lambda batch_size: (
                replays.fits_without_retry(batch_size) and self.at(batch_size) <= budget_bytes
            ),
            start=self.line.batch_size,
        )


class BatchSizeSearch:
    """Chooses the next batch size to try, from the trials so far and the size expected after each.

    A size that fits is the answer unless a larger one is expected to fit. After one that does not
    fit comes the largest now expected to; without an expectation, the middle between the largest
    that fits and the smallest that does not.
    """

    def __init__(self, first: int, bounds: BatchSizeBounds) -> None:
        self._bounds = bounds
        self.best = 0
        self._smallest_bad: int | None = None
        self.next: int | None = bounds.within(first)

    def record(self, batch_size: int, *, fits: bool, expected: int | None) -> None:
        """Record a trial."""
        if fits:
            self.best = max(self.best, batch_size)
        else:
            self._smallest_bad = (
                batch_size if self._smallest_bad is None else min(self._smallest_bad, batch_size)
            )
        self.next = self._next(expected)

    def _next(self, expected: int | None) -> int | None:
        best, bad = self.best, self._smallest_bad
        likely = None if expected is None else self._bounds.within(expected)
        if likely is not None and best < likely < (bad or likely + 1):
            return likely if likely >= _WORTHWHILE * best else None
        is_settled = (
            bad is None or (likely is not None and 0 < likely <= best) or bad <= _WORTHWHILE * best
        )
        middle = self._bounds.within((best + (bad or 0)) // 2)
        return None if is_settled or middle <= best else middle


@dataclass(frozen=True, kw_only=True)
class FittedBatchSize(Printable):
    """The largest batch size that was run and fits.

    Attributes:
        batch_size: That size.
        previous_batch_size: The batch size before the search.
        predicted_batch_size: The size that was predicted to fit before anything ran, even if the
            data have fewer samples; None if none was predicted.
        trials: The sizes that were run, in order.
        device_name: The device.
        capacity_bytes: The memory that was planned for.
        outside_bytes: The part of it that is used outside this process's allocator.
        headroom: The fraction of the capacity that a predicted size leaves free. A size fits if at
            least half of this headroom stayed free in the trial, validation included.
        counts: Which memory the peaks of the trials count: `reserved`, on a CPU `allocated`.
        num_updates: Optimizer updates in each trial.
        has_validation: Whether validation was part of each trial.
        notes: What else to know, one sentence each.
        train_dataloaders: If you gave loaders, copies of them with that batch size, to train with;
            else None.
    """

    batch_size: int
    previous_batch_size: int
    predicted_batch_size: int | None
    trials: tuple[Trial, ...]
    device_name: str
    capacity_bytes: int
    outside_bytes: int
    headroom: float
    counts: str
    num_updates: int
    has_validation: bool
    notes: tuple[str, ...] = ()
    train_dataloaders: Any = field(default=None, repr=False, compare=False)

    @property
    def num_ooms(self) -> int:
        """Trials in which memory ran out."""
        return sum(trial.is_out_of_memory for trial in self.trials)

    @property
    def corrections(self) -> tuple[str, ...]:
        """What each trial showed, and which size was tried next, one sentence each."""
        return tuple(
            f"{_ran(before, self._miss(before))} {after.batch_size:,} was tried next."
            for before, after in zip(self.trials, self.trials[1:], strict=False)
        )

    def _miss(self, trial: Trial) -> str:
        """What was predicted, where a trial took notably more, and what no prediction has."""
        peak, predicted = trial.peak_bytes, trial.predicted_bytes
        if peak is None or predicted is None or trial.is_out_of_memory:
            return ""
        if peak - predicted <= max(MiB, _NOTABLE_SHARE * predicted):
            return ""
        parts = ["validation"] if self.has_validation else []
        parts += ["scratch memory inside operators on a CPU"] if self.counts == "allocated" else []
        left_out = f"; not predicted: {' and '.join(parts)}" if parts else ""
        return f" ({format_bytes(predicted)} were predicted{left_out})"

    def sentence(self) -> str:
        """The result in one sentence."""
        validation = " and validation" if self.has_validation else ""
        ran = f"{self.num_updates} optimizer updates{validation}"
        budget_bytes = self.trials[-1].budget_bytes
        less = ""
        if self.headroom:
            less += f" minus {100 * self.headroom / 2:g} % (half of the headroom)"
        if self.outside_bytes:
            less += f" minus {format_bytes(self.outside_bytes)} used outside the allocator"
        limit = format_bytes(budget_bytes)
        limit += f", which is {format_bytes(self.capacity_bytes)}{less}" if less else ""
        return (
            f"Batch size {self.batch_size:,} (it was {self.previous_batch_size:,}) is the largest "
            f"found to fit {self.device_name}. It ran {ran}. Limit: {limit}."
        )

    def document(self) -> Document:
        """The trials, and what they showed."""
        rows = tuple(
            (
                f"{trial.batch_size:,}",
                # What trials have shown corrects the predictions after them.
                size_text(trial.predicted_bytes) + (" corrected" if number else ""),
                size_text(trial.peak_bytes),
                trial.outcome[:1].upper() + trial.outcome[1:],
            )
            for number, trial in enumerate(self.trials)
        )
        table = Table(
            title=self.sentence(),
            columns=("batch size", f"predicted peak {self.counts}", "measured", "outcome"),
            rows=rows,
            left_columns=frozenset({"outcome"}),
        )
        return Document(table, *self.corrections, *self.notes)

    def to_dict(self) -> dict[str, Any]:
        """The result as data for json; sizes end in `_bytes`, sample counts in `batch_size`."""
        return {
            "batch_size": self.batch_size,
            "previous_batch_size": self.previous_batch_size,
            "predicted_batch_size": self.predicted_batch_size,
            "device_name": self.device_name,
            "capacity_bytes": self.capacity_bytes,
            "outside_bytes": self.outside_bytes,
            "headroom_pct": 100 * self.headroom,
            "counts": self.counts,
            "num_updates": self.num_updates,
            "has_validation": self.has_validation,
            "trials": [
                {
                    "batch_size": trial.batch_size,
                    "predicted_bytes": trial.predicted_bytes,
                    "peak_bytes": trial.peak_bytes,
                    "budget_bytes": trial.budget_bytes,
                    "is_out_of_memory": trial.is_out_of_memory,
                    "num_alloc_retries": trial.num_alloc_retries,
                    "fits": trial.fits,
                }
                for trial in self.trials
            ],
            "corrections": list(self.corrections),
            "notes": list(self.notes),
        }


def nothing_fits(
    trial: Trial, device_name: str, capacity_bytes: int, prediction: StepPrediction | None
) -> str:
    """Why no batch size fits, and what would make one fit."""
    budget = format_bytes(max(0, trial.budget_bytes))
    needs = f"It ran out of memory, with {budget} to use"
    if trial.num_alloc_retries and not trial.is_out_of_memory:
        needs = f"The allocator had to give back its cache and try again, with {budget} to use"
    elif not trial.is_out_of_memory and trial.peak_bytes is not None:
        needs = f"It takes {format_bytes(trial.peak_bytes)}, and {budget} may be used"
    return (
        f"No batch size fits {device_name}: {trial.batch_size:,} is the smallest that was tried. "
        f"{needs} of {format_bytes(capacity_bytes)}. {_way_out(prediction)}"
    )


def _way_out(prediction: StepPrediction | None) -> str:
    """What would make one sample fit, by the categories live at its predicted peak."""
    try:
        by_category = {} if prediction is None else prediction.at(1).by_category
    except ValueError:
        by_category = {}
    held = sum(by_category.get(category, 0) for category in _HELD)
    rest = sum(by_category.values()) - held
    if not by_category:
        return (
            "A smaller model, a precision of 16 bits or recomputing activations "
            "(torch.utils.checkpoint) takes less."
        )
    if held > rest:
        return (
            f"At the predicted peak, parameters, gradients and optimizer state are "
            f"{format_bytes(held)}: a smaller model, an optimizer with less state, "
            "precision='bf16-true' or sharding over several devices takes less; a smaller batch "
            "does not."
        )
    return (
        f"At the predicted peak, activations and temporary memory of one sample are "
        f"{format_bytes(rest)}: precision='bf16-mixed', recomputing activations "
        "(torch.utils.checkpoint), or smaller or shorter samples take less."
    )


def _ran(trial: Trial, miss: str) -> str:
    if trial.is_out_of_memory:
        return f"Batch size {trial.batch_size:,} ran out of memory, and the error was caught:"
    peak = " ran" if trial.peak_bytes is None else f" took {format_bytes(trial.peak_bytes)}{miss}"
    if trial.fits and trial.peak_bytes is None:
        return f"Batch size {trial.batch_size:,} ran; its peak could not be read:"
    if trial.fits:
        return f"Batch size {trial.batch_size:,}{peak} and left room:"
    return f"Batch size {trial.batch_size:,}{peak}, {trial.outcome}:"
