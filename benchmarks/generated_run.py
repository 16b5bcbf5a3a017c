"""A long run of random programs: each check of the tests with many seeds.

The checks are those of `tests/prediction/test_generated_programs.py`; each seed runs in its own
process.

    python benchmarks/generated_run.py --seeds 1-10 --programs 500
        [--checks boundaries observer card] [--out FOLDER]

Checks:

- *boundaries*: what a prediction for a CPU says of every start and end of a phase is what PyTorch's
  own allocation events say of the real run.
- *observer*: weights and losses are bit for bit those of a training that nobody watches, and every
  step is recorded.
- *card*: a prediction for a card holds together, and a larger batch needs no less.

In all of them an exception that escapes is a failure. The result goes to
`benchmarks/results/cpu-<date>/generated.json` and `.md`, or the folder that is named, after every
seed: what has passed there with as many programs is not run again, so the run can be stopped and
continued, several can share the folder, and a failure is tried again once it is mended. The exit
code is 1 if any failed.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

import hypothesis
import torch
from machine import command, not_reported, processor, results_folder, today

from memcallback import __version__

ROOT = Path(__file__).parent.parent
#: The test behind each check.
CHECKS = {
    "boundaries": "test_on_a_cpu_bytes_alive_at_every_boundary_are_those_of_the_real_run",
    "observer": "test_watching_a_training_changes_no_bit_of_it",
    "card": "test_a_prediction_for_a_card_holds_together",
}
NOT_REPORTED = (
    "How many of the programs are alike: with one seed all checks draw the same programs, and each "
    "seed begins with the smallest program; the others are drawn from more than 10^12.",
    "Programs beyond those that `tests/generated.py` can draw: one to six layers of a few kinds, "
    "batches of two to nine samples, no Lightning.",
    "Peaks inside a phase on a CPU; anything measured on a device.",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One check with one seed.

    Attributes:
        check: Of `CHECKS`.
        seed: Hypothesis's.
        num_programs: How many were to be drawn.
        num_passed: How many were, and passed; 0 if one failed.
        seconds: On the clock, the imports included.
        failure: The error and the smallest program that shows it, as pytest and hypothesis print
            it; None if all passed.
    """

    check: str
    seed: int
    num_programs: int
    num_passed: int
    seconds: float
    failure: str | None

    @property
    def key(self) -> tuple[str, int, int]:
        """What is to be run once."""
        return self.check, self.seed, self.num_programs


def run(check: str, seed: int, num_programs: int) -> Run:
    """Draw programs in a process of its own, and check each."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        test = f"tests/prediction/test_generated_programs.py::{CHECKS[check]}"
        options = [
            f"--hypothesis-seed={seed}",
            f"--num-programs={num_programs}",
            f"--junitxml={report}",
            "-p",
            "no:cacheprovider",
        ]
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", test, *options],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        num_passed, failure = (
            outcome(report.read_text()) if report.exists() else (0, ended.stdout + ended.stderr)
        )
    return Run(
        check=check,
        seed=seed,
        num_programs=num_programs,
        num_passed=num_passed,
        seconds=round(time.perf_counter() - began, 1),
        failure=failure,
    )


def outcome(report: str) -> tuple[int, str | None]:
    """How many programs passed, and the failure, of pytest's report in XML."""
    test = ElementTree.fromstring(report).find(".//testcase")
    assert test is not None
    wrong = next((part for part in test if part.tag in ("failure", "error")), None)
    if wrong is not None:
        said = [
            line[1:].strip() for line in (wrong.text or "").splitlines() if line.startswith("E ")
        ]
        return 0, "\n".join(said) or wrong.get("message", "")
    return int(test.findall(".//property[@name='num_programs']")[0].get("value", "")), None


def seeds_of(text: str) -> list[int]:
    """`1-10` or `3`."""
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def as_ranges(seeds: Iterable[int]) -> str:
    """The other way round: `1-10, 12`."""
    found: list[list[int]] = []
    for seed in sorted(set(seeds)):
        if found and seed == found[-1][-1] + 1:
            found[-1][1:] = [seed]
        else:
            found.append([seed])
    return ", ".join("-".join(map(str, ends)) for ends in found)


def to_markdown(about: dict[str, str], runs: Sequence[Run]) -> str:
    """The page beside the JSON file."""
    lines = [
        "# Programs drawn at random",
        "",
        *(f"- {name}: {text}" for name, text in about.items()),
        "",
    ]
    failures = [one for one in runs if one.failure is not None]
    lines += [
        f"{sum(one.num_passed for one in runs):,} programs passed, {len(failures)} failed.",
        "",
        "| check | test | seeds | programs a seed | programs passed | failed | seconds |",
        "|:---|:---|:---|---:|---:|---:|---:|",
    ]
    for check, test in CHECKS.items():
        of_check = [one for one in runs if one.check == check]
        for number in sorted({one.num_programs for one in of_check}):
            rows = [one for one in of_check if one.num_programs == number]
            num_failed = sum(one.failure is not None for one in rows)
            lines.append(
                f"| {check} | `{test}` | {as_ranges(one.seed for one in rows)} | {number:,} | "
                f"{sum(one.num_passed for one in rows):,} | {num_failed} | "
                f"{sum(one.seconds for one in rows):,.0f} |"
            )
    for one in failures:
        lines += ["", f"{one.check}, seed {one.seed}:", "", "```text", one.failure or "", "```"]
    return "\n".join((*lines, *not_reported(NOT_REPORTED))) + "\n"


def read(out: Path) -> tuple[list[Run], list[str]]:
    """What was run, and the commands that it was run by."""
    path = out / "generated.json"
    found = json.loads(path.read_text()) if path.exists() else {"runs": [], "commands": []}
    return [Run(**one) for one in found["runs"]], found["commands"]


def write(out: Path, runs: Sequence[Run], commands: Sequence[str]) -> None:
    """The JSON file and the page."""
    about = {
        "processor": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hypothesis": hypothesis.__version__,
        "memcallback": __version__,
        "date": today(),
        "command": "; ".join(commands),
    }
    in_order = sorted(
        runs, key=lambda one: (list(CHECKS).index(one.check), one.num_programs, one.seed)
    )
    results = {
        "environment": about,
        "commands": commands,
        "runs": [asdict(one) for one in in_order],
        "not_reported": NOT_REPORTED,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "generated.json").write_text(json.dumps(results, indent=2) + "\n")
    (out / "generated.md").write_text(to_markdown(about, in_order))


def main() -> int:
    """Run what has not passed yet, and write the results after each seed; 1 if any failed."""
    parser = argparse.ArgumentParser(description="Check many programs drawn at random.")
    parser.add_argument(
        "--seeds",
        type=seeds_of,
        default=seeds_of("1-10"),
        help="one, or the first and the last: 1-10",
    )
    parser.add_argument(
        "--programs", type=int, default=500, help="how many are drawn with each seed"
    )
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--out", type=Path, help="the folder for the result")
    options = parser.parse_args()
    out = options.out or results_folder("cpu")
    for seed in options.seeds:
        for check in options.checks:
            key = (check, seed, options.programs)
            if any(one.key == key and one.failure is None for one in read(out)[0]):
                continue
            new = run(*key)
            runs, commands = read(out)  # anew: another call may have written meanwhile
            write(
                out,
                [*(one for one in runs if one.key != key), new],
                list(dict.fromkeys((*commands, command()))),
            )
            print(
                f"{check}, seed {seed}: {new.failure or 'passed'}, {new.seconds:.0f} s",
                file=sys.stderr,
            )
    return 1 if any(one.failure is not None for one in read(out)[0]) else 0


if __name__ == "__main__":
    sys.exit(main())
