"""What each rank of a job was predicted to hold, beside its measurement.

Many ways to spread models over CUDA devices.

    python benchmarks/ranks.py [--ranks 2] [--out FOLDER]

Needs as many CUDA devices as there are ranks (virtual ones will do: VGPU_DEVICES=4). Each rank
predicts itself, trains six updates, and compares the steady one: the cases of
`tests/rank_cases.py`. Between steps it is waited until NCCL's watchdog has seen the end of all
collectives, as it has in steps that take longer than 0.1 s. Asked is that each phase's peak is
within 1 % allocated and 4 % reserved; the exit code is 1 if one is not. The result goes to
`benchmarks/results/<device>-<date>/ranks-<number>.json` and `.md`, and the latter to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from machine import command, driver, not_reported, results_folder, today

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

rank_cases: Any = import_module("rank_cases")

from memcallback import __version__  # noqa: E402

MOST_PCT = {"allocated": 1.0, "reserved": 4.0}
NOT_REPORTED = (
    "What NCCL takes outside the allocator.",
    "On virtual devices: communication that takes time.",
)


def off_pct(ranks: Sequence[dict[str, Any]], case: str, figure: str) -> float:
    """The largest error of any phase of any rank, signed, in percent of what was measured."""
    errors: list[float] = [
        100 * (ours[figure] / theirs[figure] - 1)
        for found in ranks
        for ours, theirs in zip(found[case]["predicted"], found[case]["measured"], strict=True)
    ]
    return max(errors, key=abs)


def to_markdown(about: dict[str, str], rows: Sequence[dict[str, Any]]) -> str:
    """The page beside the JSON file."""
    lines = [
        "# Ranks: predicted beside measured",
        "",
        *(f"- {name}: {text}" for name, text in about.items()),
        "",
    ]
    exact = {figure: sum(row[figure] == 0 for row in rows) for figure in MOST_PCT}
    lines += [
        f"{len(rows)} cases; peaks exact to the byte in every phase of every rank: allocated in "
        f"{exact['allocated']}, reserved in {exact['reserved']}.",
        "",
        "| case | allocated, worst error | reserved, worst error |",
        "|:---|---:|---:|",
    ]
    lines += [
        f"| {row['case']} | {row['allocated']:+.3f} % | {row['reserved']:+.3f} % |" for row in rows
    ]
    return "\n".join((*lines, *not_reported(NOT_REPORTED))) + "\n"


def main() -> int:
    """Run all cases and write the results; 1 if one is further off than is asked."""
    parser = argparse.ArgumentParser(
        description="Compare what ranks predict with what they measure."
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, help="the folder for the result")
    options = parser.parse_args()
    names = list(rank_cases.cases(options.ranks))
    with tempfile.TemporaryDirectory() as folder:
        spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
        spawn(rank_cases.run, (options.ranks, folder, names), nprocs=options.ranks)
        ranks = [
            json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.ranks)
        ]
    rows = [
        {"case": case, **{figure: off_pct(ranks, case, figure) for figure in MOST_PCT}}
        for case in names
    ]
    about = {
        "device": f"{options.ranks} x {torch.cuda.get_device_name()}",
        "driver": driver(),
        "torch": torch.__version__,
        "memcallback": __version__,
        "date": today(),
        "command": command(),
    }
    out = options.out or results_folder(torch.cuda.get_device_name())
    out.mkdir(parents=True, exist_ok=True)
    results = {"environment": about, "rows": rows, "ranks": ranks, "not_reported": NOT_REPORTED}
    (out / f"ranks-{options.ranks}.json").write_text(json.dumps(results, indent=1) + "\n")
    text = to_markdown(about, rows)
    (out / f"ranks-{options.ranks}.md").write_text(text)
    print(text)
    return (
        0
        if all(abs(row[figure]) <= most for row in rows for figure, most in MOST_PCT.items())
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
