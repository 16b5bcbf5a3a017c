"""Compare two folders of `device_run.sh`, of a real and a virtual device, figure by figure.

    python benchmarks/device_compare.py REAL VIRTUAL [--out FOLDER]

First the bars, by the first folder alone: predicted against measured peaks, suggested against true
batch sizes. Then each figure of the first beside that of the second: the steady steps of the
accuracy matrix, the first event at which the allocator's histories part (without addresses, which a
driver chooses), what convolutions take, context and workspaces, batch sizes. Times are not
compared: those of a virtual device are not real.

`--out` gets device_compare.md, with the largest differences, and device_compare.json, with all. The
exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from accuracy import read_json
from device_bars import Bar, judged
from machine import not_reported

#: How many differences of a section the page has.
NUM_SHOWN = 30
NOT_REPORTED = (
    "time",
    "where in memory tensors lie",
    "savings, several devices, expandable segments beside the allocator's histories",
    "compiled steps, programs of other libraries, inference: their own pages have these",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure on both devices.

    Attributes:
        where: Of what.
        figure: Which figure.
        real: On the real device; None where it is not there.
        virtual: On the virtual one, likewise.
    """

    where: str
    figure: str
    real: Any
    virtual: Any

    @property
    def difference_pct(self) -> float | None:
        """By how many percent the virtual device's figure is larger; None for non-numbers."""
        are_numbers = all(
            isinstance(one, (int, float)) and not isinstance(one, bool)
            for one in (self.real, self.virtual)
        )
        return 100 * (self.virtual / self.real - 1) if are_numbers and self.real else None


def _beside(where: str, real: dict[str, Any], virtual: dict[str, Any]) -> Iterator[Row]:
    for figure in dict.fromkeys([*real, *virtual]):
        yield Row(where=where, figure=figure, real=real.get(figure), virtual=virtual.get(figure))


def of_steps(real: dict[str, Any], virtual: dict[str, Any]) -> Iterator[Row]:
    """Each figure of the steady steps of the accuracy matrix."""
    for name in dict.fromkeys([*real["configs"], *virtual["configs"]]):
        one, other = (document["configs"].get(name, {}) for document in (real, virtual))
        if "windows" not in one or "windows" not in other:
            if "windows" in one or "windows" in other:
                yield Row(
                    where=name, figure="runs", real="windows" in one, virtual="windows" in other
                )
            continue
        steps = [
            [window for step in found["windows"][-1] for window in step] for found in (one, other)
        ]
        yield Row(where=name, figure="windows", real=len(steps[0]), virtual=len(steps[1]))
        for number, (mine, theirs) in enumerate(zip(*steps, strict=False), 1):
            yield from _beside(
                f"{name}, window {number}, {mine['phase']}", _of_window(mine), _of_window(theirs)
            )


def _of_window(window: dict[str, Any]) -> dict[str, Any]:
    moments = {
        f"{name} at {moment}": value
        for moment in ("start", "end")
        for name, value in window[moment].items()
    }
    return {
        name: window[name] for name in ("phase", "peak_allocated_bytes", "peak_reserved_bytes")
    } | moments


def histories(path: Path) -> dict[str, list[Any]]:
    """The allocator's events by the name of the run, without addresses."""
    found = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            if file is not None:
                events = json.loads(gzip.decompress(file.read()))["events"]
                found[Path(member.name).name.removesuffix(".json.gz")] = [
                    [code, size] for code, _, size, _ in events
                ]
    return found


def of_histories(real: dict[str, list[Any]], virtual: dict[str, list[Any]]) -> Iterator[Row]:
    """The number of events until each two histories part, and of all."""
    for name in dict.fromkeys([*real, *virtual]):
        mine, theirs = real.get(name, []), virtual.get(name, [])
        alike = next(
            (
                number
                for number, (one, other) in enumerate(zip(mine, theirs, strict=False))
                if one != other
            ),
            None,
        )
        if alike is not None:
            yield Row(
                where=f"{name}, event {alike} of {len(mine)}",
                figure="code and bytes",
                real=mine[alike],
                virtual=theirs[alike],
            )
        else:
            yield Row(where=name, figure="number of events", real=len(mine), virtual=len(theirs))


def of_convolutions(real: dict[str, Any], virtual: dict[str, Any]) -> Iterator[Row]:
    """What each convolution took from the allocator, and what cuDNN answered without a device."""
    for figure in ("cases", "workspaces"):
        for name in dict.fromkeys([*real[figure], *virtual[figure]]):
            mine, theirs = (document[figure].get(name, "not there") for document in (real, virtual))
            yield Row(
                where=name,
                figure="allocated" if figure == "cases" else "cuDNN's answer",
                real=mine,
                virtual=theirs,
            )


def of_facts(real: dict[str, Any], virtual: dict[str, Any]) -> Iterator[Row]:
    """Context, workspaces, first segments."""
    for figure in ("context_bytes", "workspace_bytes", "first_segments_bytes"):
        yield from _beside(figure, real[figure], virtual[figure])


def of_batch_sizes(real: dict[str, Any], virtual: dict[str, Any]) -> Iterator[Row]:
    """Suggested and true sizes."""
    mine, theirs = (
        {pair["config"]: _sizes(pair) for pair in document["pairs"]} for document in (real, virtual)
    )
    for name in dict.fromkeys([*mine, *theirs]):
        yield from _beside(name, mine.get(name, {}), theirs.get(name, {}))


def _sizes(pair: dict[str, Any]) -> dict[str, int]:
    truth = {
        f"{name}, {card}": pair[card][name]
        for card in ("less", "whole")
        for name in ("trains", "gets_by")
    }
    return {"suggestion": pair["suggestion"]["size"], **truth}


def _read_convolutions(path: Path) -> Any:
    device = json.loads((path.parent / "facts.json").read_text())["environment"]["device"]
    return read_json(path.with_name(f"{device.replace(' ', '-')}.json.gz"))


@dataclass(frozen=True, kw_only=True)
class Section:
    """One kind of result of both devices.

    Attributes:
        title: Its name.
        file: Where it is in both folders.
        read: Reads it.
        rows: Its figures, from what was read of both.
    """

    title: str
    file: str
    read: Callable[[Path], Any]
    rows: Callable[[Any, Any], Iterable[Row]]


SECTIONS = (
    Section(title="The accuracy matrix", file="accuracy.json.gz", read=read_json, rows=of_steps),
    Section(
        title="The allocator's histories", file="allocator.tar", read=histories, rows=of_histories
    ),
    Section(title="Convolutions", file="facts.json", read=_read_convolutions, rows=of_convolutions),
    Section(
        title="Context, workspaces, segments", file="facts.json", read=read_json, rows=of_facts
    ),
    Section(title="Batch sizes", file="batch_size.json", read=read_json, rows=of_batch_sizes),
)


def compared(section: Section, real: Path, virtual: Path) -> list[Row] | str:
    """All figures of a section, or which file is missing."""
    try:
        return list(
            section.rows(*(section.read(folder / section.file) for folder in (real, virtual)))
        )
    except FileNotFoundError as error:
        return f"{Path(error.filename).parent.name}/{Path(error.filename).name} is not there."


def to_markdown(
    about: dict[str, str], bars: list[Bar], sections: dict[str, list[Row] | str]
) -> str:
    """The page."""
    lines = [
        "# A real and a virtual device",
        "",
        *(f"- {name}: {text}" for name, text in about.items()),
        "",
    ]
    lines += ["| asked of the real device | found | met |", "|:---|---:|:---|"]
    lines += [
        f"| {bar.asked} | {bar.found} | {'yes' if bar.is_met else '**no**'} |" for bar in bars
    ]
    for title, rows in sections.items():
        lines += ["", f"## {title}", "", *([rows] if isinstance(rows, str) else _section(rows))]
    return "\n".join([*lines, *not_reported(NOT_REPORTED), ""])


def _section(rows: list[Row]) -> list[str]:
    differing = [row for row in rows if row.real != row.virtual]
    lines = [f"{len(rows) - len(differing):,} of {len(rows):,} figures are the same."]
    if not differing:
        return lines
    lines += [
        "",
        "| figure | differ | of | median difference | largest |",
        "|:---|---:|---:|---:|---:|",
    ]
    for figure in dict.fromkeys(row.figure for row in differing):
        others = [row for row in differing if row.figure == figure]
        shares = [row.difference_pct for row in others if row.difference_pct is not None]
        sizes = f"{median(shares):+.3f} % | {max(shares, key=abs):+.3f} %" if shares else " | "
        lines.append(
            f"| {figure} | {len(others)} | {sum(row.figure == figure for row in rows)} | {sizes} |"
        )
    shown = sorted(
        differing,
        key=lambda row: float("inf") if row.difference_pct is None else abs(row.difference_pct),
        reverse=True,
    )
    lines += [
        "",
        f"The largest{f' {NUM_SHOWN}' if len(shown) > NUM_SHOWN else ''}:",
        "",
        "| of | figure | real | virtual |",
        "|:---|:---|---:|---:|",
    ]
    return lines + [
        f"| {row.where} | {row.figure} | {row.real} | {row.virtual} |" for row in shown[:NUM_SHOWN]
    ]


def main() -> int:
    """Judge, compare and write."""
    parser = argparse.ArgumentParser(
        description="What separates a real device from the virtual one of the same card."
    )
    parser.add_argument("real", type=Path)
    parser.add_argument("virtual", type=Path)
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="for device_compare.md and device_compare.json"
    )
    options = parser.parse_args()
    bars = judged(options.real)
    sections = {
        section.title: compared(section, options.real, options.virtual) for section in SECTIONS
    }
    about = {
        kind: _device(folder)
        for kind, folder in (("real", options.real), ("virtual", options.virtual))
    }
    text = to_markdown(about, bars, sections)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "device_compare.md").write_text(text)
        differing = {
            title: rows
            if isinstance(rows, str)
            else [asdict(row) for row in rows if row.real != row.virtual]
            for title, rows in sections.items()
        }
        result = {
            "environment": about,
            "bars": [asdict(bar) for bar in bars],
            "differences": differing,
            "not_reported": NOT_REPORTED,
        }
        (options.out / "device_compare.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(text)
    return 0 if all(bar.is_met for bar in bars) else 1


def _device(folder: Path) -> str:
    """What the figures of a folder hold for."""
    path = folder / "facts.json"
    if not path.exists():
        return f"{folder.name}, without facts.json"
    return ", ".join(
        f"{name} {value}" for name, value in json.loads(path.read_text())["environment"].items()
    )


if __name__ == "__main__":
    sys.exit(main())
