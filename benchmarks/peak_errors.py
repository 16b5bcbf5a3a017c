"""How far predicted peaks are off over many trainings.

Median, 95th percentile, signed extremes, under-estimates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from accuracy_comparison import Figure

PEAK_ALLOCATED, PEAK_RESERVED = "peak allocated", "peak reserved"


@dataclass(frozen=True, kw_only=True)
class PeakErrors:
    """The errors of one kind of peak in a group of trainings, in percent of the measured peak.

    Positive where the prediction is too high.

    Attributes:
        group: Which.
        quantity: `PEAK_ALLOCATED` or `PEAK_RESERVED`.
        num_peaks: How many were compared.
        median_pct: The median size of the error, at least 0.
        percentile_95_pct: 95 % of the errors are at most of this size.
        lowest_pct: The error that is lowest with its sign.
        highest_pct: The highest.
        under_estimated_share: The share of the peaks that were predicted lower than measured, by a
            byte or more; 0 to 1.
        above_bound_share: The share that was measured higher than predicted by more than the
            stated bound (see `Figure.is_above_bound`).
    """

    group: str
    quantity: str
    num_peaks: int
    median_pct: float
    percentile_95_pct: float
    lowest_pct: float
    highest_pct: float
    under_estimated_share: float
    above_bound_share: float


def peak_errors(group: str, quantity: str, found: Sequence[Figure]) -> PeakErrors:
    """The errors of a group.

    Args:
        group: Its name.
        quantity: Which figures of it.
        found: Figures of any quantity, at least one of that one.
    """
    peaks = [figure for figure in found if figure.quantity == quantity]
    errors = sorted(100 * figure.error_share for figure in peaks)
    sizes = sorted(map(abs, errors))
    return PeakErrors(
        group=group,
        quantity=quantity,
        num_peaks=len(peaks),
        median_pct=median(sizes),
        percentile_95_pct=sizes[math.ceil(0.95 * len(sizes)) - 1],
        lowest_pct=errors[0],
        highest_pct=errors[-1],
        under_estimated_share=sum(figure.error_bytes < 0 for figure in peaks) / len(peaks),
        above_bound_share=sum(figure.is_above_bound for figure in peaks) / len(peaks),
    )


def step_peaks(found: Iterable[Figure]) -> list[Figure]:
    """The peaks of whole steps: the largest figure over all phases and micro-batches.

    Measured and predicted ones each have their own.
    """
    by_step: dict[tuple[str, str], list[Figure]] = {}
    for figure in found:
        if figure.quantity in (PEAK_ALLOCATED, PEAK_RESERVED):
            by_step.setdefault((figure.config, figure.quantity), []).append(figure)
    return [
        Figure(
            config=config,
            window="step",
            quantity=quantity,
            measured_bytes=max(figure.measured_bytes for figure in figures),
            predicted_bytes=max(figure.predicted_bytes for figure in figures),
        )
        for (config, quantity), figures in by_step.items()
    ]


def by_phase(found: Iterable[Figure]) -> dict[str, list[Figure]]:
    """The same figures by phase.

    A phase is the window's name without the number of the micro-batch or of the optimizer.
    """
    phases: dict[str, list[Figure]] = {}
    for figure in found:
        phases.setdefault(re.sub(r"^micro-batch \d+: | \d+$", "", figure.window), []).append(figure)
    return phases


def all_peak_errors(
    found: Mapping[str, Sequence[Figure]], groups: Mapping[str, Sequence[str]]
) -> list[PeakErrors]:
    """Errors of whole steps, of each phase, and of the steps of each group of configurations.

    Allocated first, then reserved.

    Args:
        found: Configuration -> its figures, none where it was not predicted.
        groups: Name of a group -> its configurations.
    """
    every = [figure for figures in found.values() for figure in figures]
    by_group = {
        "all steps": step_peaks(every),
        **{f"phase {name}": figures for name, figures in by_phase(every).items()},
    }
    by_group |= {
        group: step_peaks(figure for name in names for figure in found[name])
        for group, names in sorted(groups.items())
    }
    return [
        peak_errors(group, quantity, figures)
        for quantity in (PEAK_ALLOCATED, PEAK_RESERVED)
        for group, figures in by_group.items()
        if figures
    ]


def peaks_table(rows: Iterable[PeakErrors]) -> list[str]:
    """The lines of a Markdown table."""
    return [
        "| group | peak | compared | median error | 95th percentile | lowest | highest | "
        "under-estimated | above the stated bound |",
        "|:---|:---|---:|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {row.group} | {row.quantity.removeprefix('peak ')} | {row.num_peaks} | "
            f"{row.median_pct:.3f} % | {row.percentile_95_pct:.3f} % | {row.lowest_pct:+.3f} % | "
            f"{row.highest_pct:+.3f} % | {row.under_estimated_share:.1%} | "
            f"{row.above_bound_share:.1%} |"
            for row in rows
        ),
    ]
