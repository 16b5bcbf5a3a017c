"""Trainings by what cuDNN chooses in them: convolutions, recurrent layers, or nothing.

cuDNN takes workspaces, and chooses its algorithms on the card. All else that a step asks for is
PyTorch's own and shows in the bytes that are requested, before the allocator rounds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

#: Group -> how the caveat of its predictions begins; none for the rest.
GROUPS = {
    "nothing": "",
    "convolutions": "Convolution workspaces",
    "recurrent layers": "The memory that cuDNN takes for a recurrent layer",
}
KINDS = ("allocated", "reserved")


def group_of(caveats: Iterable[str]) -> str:
    """The group of a prediction."""
    told = tuple(caveats)
    found = (
        name
        for name, begin in GROUPS.items()
        if begin and any(caveat.startswith(begin) for caveat in told)
    )
    return next(found, next(iter(GROUPS)))


def cudnn_table(measured: Mapping[str, Any], answers: Mapping[str, Any]) -> list[str]:
    """A table of the peaks of whole steps and of the requested bytes, one row for each group.

    Args:
        measured: Configuration -> what `accuracy.py measure` wrote of it.
        answers: Configuration -> what was predicted of it: `steps` and `caveats`.
    """
    lines = [
        "Whole steps, by what cuDNN takes memory for. Requested: the bytes that a step held at the "
        "start and at the end of each phase, as it asked for them; the allocator rounds each up by "
        "at most 1 MiB. How much depends on addresses that the driver chooses. Compared are the "
        "trainings without accumulation whose last two updates are the same.",
        "",
        "| cuDNN takes memory for | trainings | requested exact | peak allocated exact | median "
        "| from | to | peak reserved exact | median | from | to |",
        "|:---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for group in GROUPS:
        names = [name for name in answers if group_of(answers[name]["caveats"]) == group]
        if not names:
            continue
        steady = [name for name in names if _is_steady(measured[name], answers[name])]
        exact = sum(_is_requested_exact(measured[name], answers[name]) for name in steady)
        cells = [group, str(len(names)), f"{exact} of {len(steady)}"]
        for kind in KINDS:
            errors = [
                peak_bytes(answers[name]["steps"], kind)
                / peak_bytes(measured[name]["windows"][-1], kind)
                - 1
                for name in names
            ]
            cells += [
                str(sum(error == 0 for error in errors)),
                f"{100 * median(map(abs, errors)):.3f} %",
                f"{100 * min(errors):+.2f} %",
                f"{100 * max(errors):+.2f} %",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _is_steady(measured: Any, answer: Any) -> bool:
    return measured["period"] == 1 and len(measured["windows"][-1]) == len(answer["steps"])


def _is_requested_exact(measured: Any, answer: Any) -> bool:
    def held(steps: Any) -> list[int]:
        return [
            window[when]["requested_bytes"]
            for step in steps
            for window in step
            for when in ("start", "end")
        ]

    return held(measured["windows"][-1]) == held(answer["steps"])


def peak_bytes(steps: Any, kind: str) -> int:
    """The peak of some steps, as accuracy.json.gz and predicted.json.gz have them.

    Args:
        steps: For each step its phases.
        kind: `allocated` or `reserved`.
    """
    peaks: list[int] = [window[f"peak_{kind}_bytes"] for step in steps for window in step]
    return max(peaks)
