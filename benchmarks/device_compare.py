"""Two folders that `device_run.sh` made, of a real device and of the virtual one of the same card: what separates them, figure by figure.

    python benchmarks/device_compare.py REAL VIRTUAL [--out FILE]

Of the accuracy matrix: how many figures of the steady steps are the same to the byte, and those that are not. Of the allocator's histories:
the first event at which they part. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accuracy import read_json


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A figure that is not the same.

    Attributes:
        where: Of what.
        real: On the real device.
        virtual: On the virtual one.
    """

    where: str
    real: Any
    virtual: Any


def of_steps(real: dict[str, Any], virtual: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Each figure of the steady steps of the accuracy matrix: where, on the real device, on the virtual one."""
    for name, one in real["configs"].items():
        other = virtual["configs"].get(name, {})
        if "windows" not in one or "windows" not in other:
            yield f"{name}: {'ran' if 'windows' in one else one.get('error')}", "windows" in one, "windows" in other
            continue
        for number, (mine, theirs) in enumerate(zip(one["windows"][-1], other["windows"][-1], strict=False), 1):
            for window, same in zip(mine, theirs, strict=False):
                where = f"{name}, batch {number}, {window['phase']}"
                for figure in ("peak_allocated_bytes", "peak_reserved_bytes"):
                    yield f"{where}, {figure}", window[figure], same[figure]
                for moment in ("start", "end"):
                    for figure, value in window[moment].items():
                        yield f"{where}, {moment}, {figure}", value, same[moment][figure]


def histories(folder: Path) -> dict[str, list[Any]]:
    """The allocator's events by the name of the run, without addresses, which a driver chooses."""
    found = {}
    with tarfile.open(folder / "allocator.tar") as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            if file is not None:
                events = json.loads(gzip.decompress(file.read()))["events"]
                found[Path(member.name).name] = [[code, size] for code, _, size, _ in events]
    return found


def of_histories(real: dict[str, list[Any]], virtual: dict[str, list[Any]]) -> Iterator[tuple[str, Any, Any]]:
    """The first event at which each two histories part; where they do not, their lengths."""
    for name, events in real.items():
        others = virtual.get(name, [])
        parted = next((number for number, pair in enumerate(zip(events, others, strict=False)) if pair[0] != pair[1]), None)
        if parted is None:
            yield f"{name}, number of events", len(events), len(others)
        else:
            yield f"{name}, event {parted} of {len(events)}", events[parted], others[parted]


def to_markdown(title: str, rows: list[tuple[str, Any, Any]]) -> list[str]:
    """A section: how many are the same, and the others."""
    differing = [Difference(where=where, real=real, virtual=virtual) for where, real, virtual in rows if real != virtual]
    lines = [f"## {title}", "", f"{len(rows) - len(differing):,} of {len(rows):,} figures are the same to the byte.", ""]
    if differing:
        lines += [
            "| figure | real | virtual |",
            "|:---|---:|---:|",
            *(f"| {one.where} | {one.real} | {one.virtual} |" for one in differing),
            "",
        ]
    return lines


def main() -> int:
    """Compare and write."""
    parser = argparse.ArgumentParser(description="What separates a real device from the virtual one of the same card.")
    parser.add_argument("real", type=Path)
    parser.add_argument("virtual", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    steps = [read_json(folder / "accuracy.json.gz") for folder in (options.real, options.virtual)]
    sections = {
        "The accuracy matrix": list(of_steps(*steps)),
        "The allocator's histories": list(of_histories(histories(options.real), histories(options.virtual))),
    }
    lines = ["# A real and a virtual device", ""]
    for kind, one in zip(("real", "virtual"), steps, strict=True):
        lines += [f"- {kind}: {', '.join(f'{name} {value}' for name, value in one['environment'].items())}"]
    lines += ["", *(line for title, rows in sections.items() for line in to_markdown(title, rows))]
    text = "\n".join(lines)
    if options.out:
        options.out.write_text(text)
    print(text)
    return 0 if all(real == virtual for rows in sections.values() for _, real, virtual in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
