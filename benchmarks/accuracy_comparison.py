"""Measured and predicted steps side by side: each figure's error, and whether the bars are met."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from machine import not_reported

from memcallback.prediction.comparison import ALLOCATED_SHARE, RESERVED_SHARE, allocated_band

#: For this share of the configurations all figures are to be within the stated bound,
REQUIRED_SHARE = 0.95
#: and in none a figure of allocated memory further off than this share (or than the bound, where
#: that is more).
WORST_ALLOCATED_SHARE = 0.01

NOT_REPORTED = (
    "time, and the values that are computed",
    "several devices, and several processes on one",
    "settings of the allocator other than PyTorch's own, cuDNN's benchmark mode, CUDA graphs, "
    "compiled models",
    "validation, logging and checkpoints",
)

ALLOCATED = ("start", "end", "peak allocated")
RESERVED = ("peak reserved",)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of one window of one configuration.

    Attributes:
        config: The configuration's name.
        window: Which micro-batch and which phase.
        quantity: One of `ALLOCATED` and `RESERVED`.
        measured_bytes: As measured.
        predicted_bytes: As predicted.
    """

    config: str
    window: str
    quantity: str
    measured_bytes: int
    predicted_bytes: int

    @property
    def error_bytes(self) -> int:
        """Positive where the prediction is too high."""
        return self.predicted_bytes - self.measured_bytes

    @property
    def error_share(self) -> float:
        """The same as a share of what was measured."""
        return self.error_bytes / self.measured_bytes

    @property
    def is_within(self) -> bool:
        """Whether it is right within the bar."""
        if self.quantity in RESERVED:
            return abs(self.error_share) <= RESERVED_SHARE
        return abs(self.error_bytes) <= allocated_band(self.measured_bytes)

    @property
    def is_above_bound(self) -> bool:
        """Whether the measured figure is above the band around the predicted one."""
        return self.error_bytes < 0 and not self.is_within

    @property
    def is_far_off(self) -> bool:
        """Whether it is further off than any may be."""
        return (
            self.quantity in ALLOCATED
            and not self.is_within
            and abs(self.error_share) > WORST_ALLOCATED_SHARE
        )


Step = Sequence[dict[str, Any]]


def figures(config: str, measured: Sequence[Step], predicted: Sequence[Step]) -> list[Figure]:
    """Every figure of the micro-batches of a window.

    Where fewer micro-batches are predicted than measured, the last ones are compared.

    Windows that are not the same in both (LBFGS, whose phases nothing marks) are compared as one.
    """
    measured = measured[len(measured) - len(predicted) :]
    found = []
    for number, (of_device, of_prediction) in enumerate(zip(measured, predicted, strict=True)):
        if [window["phase"] for window in of_device] != [
            window["phase"] for window in of_prediction
        ]:
            of_device, of_prediction = [_as_one(of_device)], [_as_one(of_prediction)]
        for position, (true, guess) in enumerate(zip(of_device, of_prediction, strict=True)):
            name = true["phase"].replace("_", " ")
            name += f" {position // 3 + 1}" if len(of_device) > 3 else ""
            name = f"micro-batch {number + 1}: {name}" if len(measured) > 1 else name
            for quantity, (measured_bytes, predicted_bytes) in zip(
                (*ALLOCATED, *RESERVED),
                zip(_figures(true), _figures(guess), strict=True),
                strict=True,
            ):
                found.append(
                    Figure(
                        config=config,
                        window=name,
                        quantity=quantity,
                        measured_bytes=measured_bytes,
                        predicted_bytes=predicted_bytes,
                    )
                )
    return found


def _figures(window: dict[str, Any]) -> tuple[int, int, int, int]:
    return (
        window["start"]["allocated_bytes"],
        window["end"]["allocated_bytes"],
        window["peak_allocated_bytes"],
        window["peak_reserved_bytes"],
    )


def _as_one(windows: Step) -> dict[str, Any]:
    peaks = {
        name: max(window[name] for window in windows)
        for name in ("peak_allocated_bytes", "peak_reserved_bytes")
    }
    return {"phase": "whole step", "start": windows[0]["start"], "end": windows[-1]["end"], **peaks}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How well a group of configurations is predicted.

    Attributes:
        group: Which.
        num_configs: How many of them were measured.
        num_not_predicted: Those without a prediction; they count as wrong.
        allocated_share: The share with every figure of allocated memory within the bar.
        num_far_off: Figures of allocated memory that are further off than any may be.
        worst_allocated_pct: The largest error of allocated memory, in percent of the figure.
        median_allocated_bytes: The median error of peak allocated memory over all phases, without
            its sign.
        exact_share: The share of configurations with every peak of allocated memory exact to the
            byte.
        reserved_share: The share with every peak of reserved memory within the bar.
        worst_reserved_pct: The largest error of reserved memory, in percent.
    """

    group: str
    num_configs: int
    num_not_predicted: int
    allocated_share: float
    num_far_off: int
    worst_allocated_pct: float | None
    median_allocated_bytes: float | None
    exact_share: float
    reserved_share: float
    worst_reserved_pct: float | None

    @property
    def is_met(self) -> bool:
        """Whether all bars are."""
        return (
            self.allocated_share >= REQUIRED_SHARE
            and self.num_far_off == 0
            and self.reserved_share >= REQUIRED_SHARE
        )


def summarise(group: str, by_config: dict[str, list[Figure]]) -> Summary:
    """Judge a group of configurations; one without figures was not predicted."""
    every = [figure for found in by_config.values() for figure in found]
    allocated = [figure for figure in every if figure.quantity in ALLOCATED]
    reserved = [figure for figure in every if figure.quantity in RESERVED]
    peaks = [abs(figure.error_bytes) for figure in every if figure.quantity == "peak allocated"]

    def share(quantities: Sequence[str], *, is_exact: bool = False) -> float:
        right = [
            bool(found)
            and all(
                not figure.error_bytes if is_exact else figure.is_within
                for figure in found
                if figure.quantity in quantities
            )
            for found in by_config.values()
        ]
        return sum(right) / len(right) if right else 0.0

    return Summary(
        group=group,
        num_configs=len(by_config),
        num_not_predicted=sum(not found for found in by_config.values()),
        allocated_share=share(ALLOCATED),
        num_far_off=sum(figure.is_far_off for figure in allocated),
        worst_allocated_pct=_worst(allocated),
        median_allocated_bytes=median(peaks) if peaks else None,
        exact_share=share(("peak allocated",), is_exact=True),
        reserved_share=share(RESERVED),
        worst_reserved_pct=_worst(reserved),
    )


def _worst(found: Iterable[Figure]) -> float | None:
    return max((100 * figure.error_share for figure in found), key=abs, default=None)


def to_markdown(
    about: dict[str, Any],
    summaries: Sequence[Summary],
    by_config: dict[str, list[Figure]],
    failures: dict[str, str],
    left_out: dict[str, str],
    peaks: Sequence[str],
) -> str:
    """The page of results; `peaks` has the lines of the table of peaks."""
    lines = [
        "# Predicted against measured: "
        f"{about['device']}{' (virtual device)' if about['is_virtual'] else ''}",
        "",
    ]
    lines += [*(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += [
        f"Required: in {REQUIRED_SHARE:.0%} of the configurations, allocated memory of every phase "
        f"(start, end, peak) is within {ALLOCATED_SHARE:.1%} + 1 MiB, and in none is it off by "
        f"more than {WORST_ALLOCATED_SHARE:.0%}. In {REQUIRED_SHARE:.0%}, the reserved peak of "
        f"every phase is within {RESERVED_SHARE:.0%}. "
        f"**{'Met' if summaries[0].is_met else 'Missed'}.**",
        "",
        "| group | configurations | not predicted | allocated within | worst allocated | median "
        "error of the peak | all peaks exact | reserved within | worst reserved |",
        "|:---|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(_summary_row(summary) for summary in summaries),
        "",
    ]
    lines += [
        "The peaks of the steps and of their phases. Errors with a sign are positive where the "
        "prediction is too high. Under-estimated: predicted lower than measured, by a byte or "
        "more. Above the stated bound: measured higher than predicted by more than that bound. The "
        f"stated bound: {ALLOCATED_SHARE:.1%} + 1 MiB for allocated memory and "
        f"{RESERVED_SHARE:.0%} for reserved memory.",
        "",
        *peaks,
        "",
    ]
    lines += _listing("Not predicted", failures) + _listing(
        "Not counted for the requirement", left_out
    )
    lines += [
        "| configuration | phase | start | end | peak allocated | peak reserved |",
        "|:---|:---|---:|---:|---:|---:|",
    ]
    for name, found in by_config.items():
        for window in dict.fromkeys(figure.window for figure in found):
            cells = [_cell(figure) for figure in found if figure.window == window]
            lines.append(f"| {name} | {window} | {' | '.join(cells)} |")
    lines += not_reported(NOT_REPORTED)
    return "\n".join(lines) + "\n"


def _summary_row(summary: Summary) -> str:
    middle = (
        "" if summary.median_allocated_bytes is None else f"{summary.median_allocated_bytes:,.0f} B"
    )
    cells = [
        summary.group, summary.num_configs, summary.num_not_predicted,
        f"{summary.allocated_share:.1%}", _percent(summary.worst_allocated_pct), middle,
        f"{summary.exact_share:.1%}", f"{summary.reserved_share:.1%}",
        _percent(summary.worst_reserved_pct),
    ]  # fmt: skip
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.3f} %"


def _listing(title: str, reasons: dict[str, str]) -> list[str]:
    return (
        [f"{title}:", "", *(f"- {name}: {reason}" for name, reason in reasons.items()), ""]
        if reasons
        else []
    )


def _cell(figure: Figure) -> str:
    mark = "" if figure.is_within else " ✗"
    return (
        f"{figure.error_bytes:+,} ({100 * figure.error_share:+.3f} %){mark}"
        if figure.error_bytes
        else "0"
    )
