"""Checks of a prediction that decide the exit code of `predict`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from memcallback.commands.answer import versions
from memcallback.commands.arguments import max_peak, percentage
from memcallback.commands.saved import saved_prediction
from memcallback.core.units import format_bytes
from memcallback.step.importer import UsageError

if TYPE_CHECKING:
    from memcallback.prediction.prediction import Prediction


def add_checks(parser: argparse.ArgumentParser) -> None:
    """`--check`, `--max-peak`, `--baseline` and `--tolerance`."""
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if the step does not fit the device"
    )
    parser.add_argument(
        "--max-peak",
        metavar="SIZE",
        type=max_peak,
        help="exit with 1 if the peak is above SIZE, such as 20GiB; the peak is that of reserved "
        "memory, or on a CPU of allocated memory",
    )
    parser.add_argument(
        "--baseline",
        metavar="base.json",
        type=saved_prediction,
        help="compare with an earlier prediction, which --json wrote: exit with 1 if the peak has "
        "grown, and say where",
    )
    parser.add_argument(
        "--tolerance",
        metavar="PERCENT",
        type=_tolerance,
        help="percent by which the peak may be above that of --baseline, such as 5%%; 0 by default",
    )


def refuse_checks(arguments: argparse.Namespace) -> None:
    """Refuse checks that contradict each other, before anything is traced."""
    if arguments.tolerance is not None and arguments.baseline is None:
        raise UsageError(
            "--tolerance says how far the peak may be above that of --baseline, which is missing. "
            "Give both, or --max-peak with a size."
        )


def failed_checks(prediction: Prediction, arguments: argparse.Namespace) -> bool:
    """Whether a check failed; those about the peak say on stderr what they found."""
    if arguments.check and prediction.capacity_bytes is None:
        raise UsageError(
            f"--check cannot tell whether the step fits: the capacity of {prediction.device_name} "
            "is unknown. Give --max-peak with a size in its place, such as --max-peak 20GiB, or "
            "name a card."
        )
    compared, is_above = _with_baseline(prediction, arguments)
    too_much = _above_max_peak(prediction, arguments)
    for sentence in (*too_much, *compared):
        print(f"memcallback: {sentence}", file=sys.stderr)
    return bool(too_much) or is_above or (arguments.check and not prediction.fits)


def _above_max_peak(prediction: Prediction, arguments: argparse.Namespace) -> list[str]:
    if arguments.max_peak is None or prediction.peak_bytes <= arguments.max_peak:
        return []
    return [
        f"the peak, {format_bytes(prediction.peak_bytes)}, is above --max-peak "
        f"{format_bytes(arguments.max_peak)}."
    ]


def _with_baseline(prediction: Prediction, arguments: argparse.Namespace) -> tuple[list[str], bool]:
    """How the peak compares with that of the baseline, and whether it is too far above."""
    from memcallback.prediction.prediction_diff import (
        CONDITIONS,
        PredictionDiff,
        differing,
        peak_bytes,
    )

    old = arguments.baseline
    if old is None:
        return [], False
    diff = PredictionDiff(old, {**versions(), **prediction.to_dict()})
    if others := differing(diff.old, diff.new, CONDITIONS):
        raise UsageError(
            f"--baseline {old['path']!r} cannot be compared: {' '.join(others)} Predict with the "
            "same settings, or write a new baseline with --json."
        )
    allowed = arguments.tolerance or 0.0
    old_bytes, new_bytes = peak_bytes(diff.old), peak_bytes(diff.new)
    change = 100 * (new_bytes / old_bytes - 1) if old_bytes else 100.0 * bool(new_bytes)
    side = "above" if change > 0 else "below"
    if new_bytes == old_bytes:
        than = "the same as"
    elif abs(change) < 0.05:
        than = f"less than 0.05 % {side}"
    else:
        than = f"{abs(change):.1f} % {side}"
    sentence = (
        f"the peak, {format_bytes(new_bytes)}, is {than} that of {old['path']}, "
        f"{format_bytes(old_bytes)}; at most {100 * allowed:g} % is allowed."
    )
    is_above = new_bytes > old_bytes * (1 + allowed)
    grown = [diff.verdict(), *diff.notes] if is_above else []
    return [" ".join([sentence, *grown])], is_above


def _tolerance(text: str) -> float:
    return percentage(text, "--tolerance", "5%")
