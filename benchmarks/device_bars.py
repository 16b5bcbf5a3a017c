"""What is asked of predictions on a device, judged by a folder that `device_run.sh` made there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from accuracy import read_json
from accuracy_comparison import Figure, figures
from batch_size_results import LEAST_SHARE, pair_from
from peak_errors import PEAK_ALLOCATED, PEAK_RESERVED, peak_errors, step_peaks

#: Quantity -> the largest median and the largest 95th percentile of the errors of the steps' peaks,
#: in percent of what was measured.
LARGEST_PCT = {PEAK_ALLOCATED: (0.5, 2.0), PEAK_RESERVED: (2.0, 6.0)}
#: In at most this share of the trainings a peak may be above the bound that is stated for it.
LARGEST_ABOVE_BOUND_SHARE = 0.02
#: Of how many models the largest batch is to be known.
NUM_MODELS = 8


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One thing that is asked.

    Attributes:
        asked: What is.
        found: What there is instead.
        is_met: Whether that is enough.
    """

    asked: str
    found: str
    is_met: bool


def judged(folder: Path) -> list[Bar]:
    """All bars.

    Args:
        folder: With accuracy.json.gz, predicted.json.gz and batch_size.json; a bar for which one is
            missing is not met.
    """
    return [
        *_unless_missing("accuracy", _accuracy, folder),
        *_unless_missing("batch sizes", _batch_sizes, folder),
    ]


def _unless_missing(name: str, judge: Callable[[Path], Iterator[Bar]], folder: Path) -> list[Bar]:
    try:
        return list(judge(folder))
    except FileNotFoundError as error:
        return [Bar(asked=name, found=f"{Path(error.filename).name} is not there", is_met=False)]


def _accuracy(folder: Path) -> Iterator[Bar]:
    measured = read_json(folder / "accuracy.json.gz")["configs"]
    predicted = read_json(folder / "predicted.json.gz")
    answers, left_out = predicted["answers"], predicted["left_out"]
    ran = [name for name, one in measured.items() if "windows" in one and name not in left_out]
    found: dict[str, list[Figure]] = {
        name: step_peaks(
            figures(name, measured[name]["windows"][-1], answers[name]["result"]["steps"])
        )
        for name in ran
        if "result" in answers.get(name, {})
    }
    peaks = [figure for figures_ in found.values() for figure in figures_]
    for quantity, (largest_median_pct, largest_percentile_pct) in (
        LARGEST_PCT.items() if peaks else ()
    ):
        errors = peak_errors("all steps", quantity, peaks)
        for what, largest_pct, pct in (
            ("median error", largest_median_pct, errors.median_pct),
            ("95th percentile of the error", largest_percentile_pct, errors.percentile_95_pct),
        ):
            yield Bar(
                asked=f"{quantity}: {what} at most {largest_pct:g} %",
                found=f"{pct:.3f} %",
                is_met=pct <= largest_pct,
            )
    bad = [
        name
        for name in ran
        if name not in found or any(figure.is_above_bound for figure in found[name])
    ]
    yield Bar(
        asked="a peak above its stated bound, or no prediction, in at most "
        f"{LARGEST_ABOVE_BOUND_SHARE:.0%} of the trainings",
        found=f"in {len(bad)} of {len(ran)}",
        is_met=len(ran) > 0 and len(bad) <= LARGEST_ABOVE_BOUND_SHARE * len(ran),
    )


def _batch_sizes(folder: Path) -> Iterator[Bar]:
    pairs = [
        pair_from(one) for one in json.loads((folder / "batch_size.json").read_text())["pairs"]
    ]
    num_oom = sum(not pair.trial.ran or pair.trial.num_ooms > 0 for pair in pairs)
    yield Bar(
        asked="the suggested batch never runs out of memory",
        found=f"{num_oom} of {len(pairs)} do",
        is_met=bool(pairs) and not num_oom,
    )
    num_models = len({pair.config for pair in pairs})
    yield Bar(
        asked=f"of at least {NUM_MODELS} models",
        found=f"of {num_models}",
        is_met=num_models >= NUM_MODELS,
    )
    least = min((pair.share for pair in pairs), default=0.0)
    yield Bar(
        asked=f"it is at least {LEAST_SHARE:.0%} of the true one",
        found=f"at least {least:.1%}",
        is_met=least >= LEAST_SHARE,
    )
