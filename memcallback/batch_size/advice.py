"""BatchSizeAdvice: the suggested batch size, its limits, and the peak over batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

from memcallback.batch_size.accumulation_plan import AccumulationPlan, samples_of_rank
from memcallback.batch_size.bounds import DEFAULT_BOUNDS, BatchSizeBounds
from memcallback.core.document import Document, Printable, Table
from memcallback.core.units import format_bytes
from memcallback.prediction.search import budget, gap_sentence, kept_free

_NUM_RANKS_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class RankBatchSize:
    """The batch size of ranks with the same step and device.

    Attributes:
        ranks: The ranks.
        device_name: The device of each.
        batch_size: The largest for them alone; 0 if not even one sample is sure to fit.
    """

    ranks: tuple[int, ...]
    device_name: str
    batch_size: int


@dataclass(frozen=True, kw_only=True)
class BatchSizeAdvice(Printable):
    """The largest batch size that stays within a device's memory, in plain numbers.

    Attributes:
        batch_size: The suggestion: the largest within the bounds; 0 if not even one sample fits.
        largest: The most samples that fit, with the headroom, if what was assumed (`caveats`)
            holds; 0 if not even one fits. If `is_measured`, it assumes that memory grows in
            a straight line: above the current size more may fit, below it perhaps less.
        limit: The most samples that fit with nothing kept free. No smaller size is known to fail;
            a larger one may fit again. None if unlimited, if no step was traced, or if each size
            takes a trace.
        limit_without_retry: The most samples up to `limit` that fit with nothing kept free and
            without a retry of the allocator; None if unlimited, or if each size takes a trace.
        limit_fits_again: A size above `limit` that fits, although the one right after `limit` does
            not; None if none is known.
        limit_without_retry_peak_bytes: The peak at `limit_without_retry`; None if there is no such
            limit, or it is 0.
        curve: The expected peak in bytes at each power of two up to twice the suggestion, and at
            the current and the suggested size; if each size takes a trace, at those that were
            tried.
        counts: Which memory the peaks count: `reserved`; on a CPU and with the textbook estimate,
            `allocated`.
        current_batch_size: The batch size of the step.
        bounds: What bounds the batch size besides memory.
        capacity_bytes: The device's memory.
        outside_bytes: Memory of it used outside this process's allocator; None if unknown, and
            then counted as 0.
        most_outside_bytes: The most memory that may be used outside the allocator, if
            `outside_bytes` is assumed; None if it was measured.
        headroom: The fraction of the capacity that is kept free.
        is_measured: Whether the peaks are those of a measured step of this training on this device;
            else they are predicted.
        basis: Where the peaks come from, in a sentence without its period.
        leaves_out: What is not included, as parts of a sentence.
        architecture_of: The card whose architecture was assumed for workspaces and kernels, if only
            a capacity was given; else None.
        caveats: What was assumed of the step and of the device, one sentence each.
        by_sequence_length: The batch size for sequences of each of these lengths, where they were
            asked for; the advice itself is for the longest.
        by_rank: The batch size of each kind of ranks, where the ranks of a job or their devices
            differ: the advice itself is the smallest.
        fits_at: A function that answers `fits`; without one every size up to `largest` fits.
        accumulated: A function that advises for the same step with accumulated gradients; None if
            the step is one of them, or unknown.
    """

    batch_size: int
    largest: int
    limit: int | None
    limit_without_retry: int | None
    limit_without_retry_peak_bytes: int | None
    curve: tuple[tuple[int, int], ...]
    counts: str
    current_batch_size: int
    capacity_bytes: int
    outside_bytes: int | None
    headroom: float
    is_measured: bool
    basis: str
    leaves_out: tuple[str, ...]
    bounds: BatchSizeBounds = DEFAULT_BOUNDS
    architecture_of: str | None = None
    caveats: tuple[str, ...] = field(default=(), repr=False)
    limit_fits_again: int | None = None
    by_sequence_length: Mapping[int, int] = field(default_factory=dict)
    by_rank: tuple[RankBatchSize, ...] = ()
    most_outside_bytes: int | None = None
    fits_at: InitVar[Callable[[int], bool] | None] = None
    accumulated: InitVar[Callable[[], BatchSizeAdvice] | None] = None

    def __post_init__(
        self,
        fits_at: Callable[[int], bool] | None,
        accumulated: Callable[[], BatchSizeAdvice] | None,
    ) -> None:
        object.__setattr__(self, "_fits_at", fits_at)
        object.__setattr__(self, "_accumulated", accumulated)

    def __getstate__(self) -> dict[str, Any]:
        """All but the step, which is not pickled with its advice."""
        accumulated = vars(self)["_accumulated"] and _without_step
        return vars(self) | {"_accumulated": accumulated}

    def fits(self, batch_size: int) -> bool:
        """Whether the peak of a batch size plus the headroom stays within the device.

        A traced step is replayed for it.

        Args:
            batch_size: Samples in the batch, at least 1.
        """
        fits_at: Callable[[int], bool] | None = vars(self)["_fits_at"]
        return batch_size <= self.largest if fits_at is None else fits_at(batch_size)

    @property
    def largest_in_bounds(self) -> int:
        """The `largest`, within `max_batch_size` and the dataset."""
        most = self.bounds.most
        return self.largest if most is None else min(self.largest, most)

    @property
    def has_whole_dataset(self) -> bool:
        """Whether a rank's whole share of the dataset fits and is within `max_batch_size`."""
        share = self.bounds.share_of_dataset
        return share is not None and share == self.largest_in_bounds

    @property
    def global_batch_size(self) -> int:
        """Samples in the batches of all ranks, and in all microbatches of a pipeline."""
        return self.batch_size * self.bounds.num_batches

    @property
    def multiple(self) -> float:
        """The suggestion divided by the current batch size."""
        return self.batch_size / self.current_batch_size

    @property
    def budget_bytes(self) -> int:
        """Capacity minus headroom and outside memory, at most capacity minus `most_outside_bytes`.

        It is the process's share of the device.
        """
        return budget(
            self.capacity_bytes, self.headroom, self.outside_bytes, self.most_outside_bytes
        )

    @property
    def kept_free(self) -> str:
        """How much of the device is kept free: "5 %", or `most_outside_bytes` if that is more."""
        return kept_free(
            self.capacity_bytes, self.headroom, self.outside_bytes, self.most_outside_bytes
        )

    def accumulate_for(self, effective_batch_size: int) -> AccumulationPlan:
        """Exactly so many samples between two updates, in the largest batches that fit.

        If they do not fit into one batch, gradients are accumulated. They take memory during all
        passes but the first. An advice of `suggest_batch_size` therefore predicts the step anew, as
        it accumulates. That of a recorded training is of its steps as they ran: it has these
        gradients only if the training accumulates.

        Args:
            effective_batch_size: Samples between two updates, on all ranks.

        Raises:
            PredictionError: If the step cannot be predicted as it accumulates.
            ValueError: If it cannot be divided among the ranks, not even one sample fits, the
                advice is for a pipeline, which accumulates over its microbatches, or it was
                pickled without its step.
        """
        if self.bounds.num_microbatches > 1:
            raise ValueError(
                f"effective_batch_size {effective_batch_size} cannot be accumulated in a pipeline: "
                "its memory depends on the number of microbatches, here "
                f"{self.bounds.num_microbatches}. Ask again with another "
                "Ranks(..., n_microbatches=...): the samples between two updates are "
                "n_microbatches times the batch size."
            )
        world_size = self.bounds.world_size
        of_rank = samples_of_rank(effective_batch_size, world_size)
        if self.batch_size < 1:
            raise ValueError(
                f"effective_batch_size {effective_batch_size} cannot be accumulated. "
                f"{self.sentence()}"
            )
        if self._is_sure(of_rank):
            return AccumulationPlan(batch_size=of_rank, accumulate=1, world_size=world_size)
        accumulated: Callable[[], BatchSizeAdvice] | None = vars(self)["_accumulated"]
        advice = self if accumulated is None else accumulated()
        sizes = range(min(of_rank // 2, advice.batch_size), 0, -1)
        batch_size = next(
            (size for size in sizes if of_rank % size == 0 and advice._is_sure(size)), None
        )
        if batch_size is None:
            raise ValueError(
                f"effective_batch_size {effective_batch_size} cannot be accumulated: no batch size "
                "that divides it fits."
            )
        return AccumulationPlan(
            batch_size=batch_size, accumulate=of_rank // batch_size, world_size=world_size
        )

    def _is_sure(self, batch_size: int) -> bool:
        """Whether a size is the suggestion, or a smaller one that fits."""
        return batch_size == self.batch_size or (
            batch_size < self.batch_size and self.fits(batch_size)
        )

    def sentence(self) -> str:
        """The suggestion in a few short sentences: the size, the limit, and how it is known."""
        if self.batch_size == 0:
            size, peak = self.curve[0]
            smallest = "one sample" if size == 1 else f"a batch of {size:,}"
            return (
                f"No batch size is sure to fit: {smallest} may need {format_bytes(peak)}, and "
                f"{format_bytes(max(0, self.budget_bytes))} are left of "
                f"{format_bytes(self.capacity_bytes)}. memcallback.what_if says what would make a "
                "training step fit."
            )
        largest = self.largest_in_bounds
        times = f"{_times(self.multiple)}x the current {self.current_batch_size:,}"
        sentences = [
            f"Largest batch size: {largest:,}{self._bound()} with {self.kept_free} of "
            f"{format_bytes(self.capacity_bytes)} kept free."
        ]
        if self.batch_size == largest:
            sentences.append(f"That is {times}.")
        if self.architecture_of is not None:
            sentences.append(f"The architecture of {self.architecture_of} was assumed.")
        if largest < self.largest:
            sentences.append(f"{self.largest:,} would fit.")
        if self.batch_size != largest:
            multiple_of = self.bounds.multiple_of
            is_multiple = multiple_of > 1 and not self.batch_size % multiple_of
            multiple = f", a multiple of {multiple_of}" if is_multiple else ""
            sentences.append(f"Suggested: {self.batch_size:,}{multiple}, {times}.")
        return " ".join([*sentences, f"{self.basis}."])

    def _limits(self, without_retry: int) -> str:
        """What fits with nothing kept free; equal numbers once."""
        if without_retry == self.limit:
            fit = "fits" if without_retry == 1 else "fit"
            return f"{without_retry:,} {fit}" if without_retry else "not even one sample fits"
        with_retries = "" if self.limit is None else f", {self.limit:,} with retries"
        return f"{without_retry:,} fit without a retry{with_retries}"

    def _bound(self) -> str:
        """What bounds the largest batch size besides memory."""
        if self.bounds.most is None or self.largest < self.bounds.most:
            return ""
        if self.has_whole_dataset:
            return (
                " (all samples of the dataset)"
                if self.bounds.num_batches == 1
                else (f" (the dataset has {self.bounds.dataset_size:,} samples)")
            )
        return " (max_batch_size)"

    def to_table(self) -> Table:
        """The peak at each batch size of the curve and at the limit without a retry."""
        marks = {
            self.limit: "limit",
            self.limit_without_retry: "limit without a retry",
            self.current_batch_size: "current",
        }
        marks[self.batch_size] = (
            "suggested, current" if self.batch_size == self.current_batch_size else "suggested"
        )
        rows = dict(self.curve)
        if self.limit_without_retry and self.limit_without_retry_peak_bytes is not None:
            rows[self.limit_without_retry] = self.limit_without_retry_peak_bytes
        return Table(
            title=f"Peak over the batch size. Capacity {format_bytes(self.capacity_bytes)}, "
            f"of which {format_bytes(max(0, self.budget_bytes))} may be used",
            columns=("batch size", f"{self.counts} peak", ""),
            rows=tuple(
                (f"{size:,}", format_bytes(peak), marks.get(size, ""))
                for size, peak in sorted(rows.items())
            ),
            left_columns=frozenset({""}),
        )

    def document(self) -> Document:
        """The suggestion, both limits, what it does not include, and the curve."""
        lines = [self.sentence()]
        if self.limit_without_retry is not None:
            lines.append(f"With nothing kept free, {self._limits(self.limit_without_retry)}.")
        if self.limit is not None and self.limit_fits_again is not None:
            lines.append(gap_sentence(self.limit, self.limit_fits_again))
        if self.bounds.world_size > 1:
            lines.append(
                f"{self.bounds.world_size} ranks: {self.global_batch_size:,} samples in total."
            )
        elif self.bounds.num_microbatches > 1:
            lines.append(
                f"{self.bounds.num_microbatches} microbatches of that size: "
                f"{self.global_batch_size:,} samples in total."
            )
        lines += [
            f"Sequences of length {length}: batch size {batch_size:,}"
            for length, batch_size in self.by_sequence_length.items()
        ]
        lines += [
            f"{_named(kind.ranks)} on {kind.device_name}: batch size {kind.batch_size:,}"
            for kind in self.by_rank
        ]
        lines.append(f"Not included: {'; '.join(self.leaves_out)}.")
        lines += self.caveats
        return Document(*lines, self.to_table())

    def to_dict(self) -> dict[str, Any]:
        """Data for json; names of sizes end in `_bytes`, of numbers of samples in `batch_size`."""
        return {
            "batch_size": self.batch_size,
            "global_batch_size": self.global_batch_size,
            "largest_batch_size": self.largest,
            "limit_without_retry_batch_size": self.limit_without_retry,
            "limit_batch_size": self.limit,
            "limit_fits_again_batch_size": self.limit_fits_again,
            "current_batch_size": self.current_batch_size,
            "world_size": self.bounds.world_size,
            "num_microbatches": self.bounds.num_microbatches,
            "multiple_of_batch_size": self.bounds.multiple_of,
            "capacity_bytes": self.capacity_bytes,
            "outside_bytes": self.outside_bytes,
            "most_outside_bytes": self.most_outside_bytes,
            "budget_bytes": self.budget_bytes,
            "headroom_pct": 100 * self.headroom,
            "is_measured": self.is_measured,
            "basis": self.basis,
            "leaves_out": list(self.leaves_out),
            "architecture_of": self.architecture_of,
            "caveats": list(self.caveats),
            "curve": [{"batch_size": size, "peak_bytes": peak} for size, peak in self.curve],
            "by_sequence_length": [
                {"sequence_length": length, "batch_size": batch_size}
                for length, batch_size in self.by_sequence_length.items()
            ],
            "by_rank": [
                {
                    "ranks": list(kind.ranks),
                    "device_name": kind.device_name,
                    "batch_size": kind.batch_size,
                }
                for kind in self.by_rank
            ],
        }


def _without_step() -> BatchSizeAdvice:
    raise ValueError(
        "This advice was pickled without its step, which must be predicted as it accumulates. Ask "
        "suggest_batch_size again."
    )


def _named(ranks: tuple[int, ...]) -> str:
    if len(ranks) > _NUM_RANKS_NAMED:
        return f"{len(ranks)} ranks, {ranks[0]} to {ranks[-1]},"
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _times(multiple: float) -> str:
    return f"{multiple:,.2f}" if multiple < 10 else f"{multiple:,.0f}"
