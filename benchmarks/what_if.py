"""What savings buy: each row of `memcallback.what_if` beside the same saving in a training.

    python benchmarks/what_if.py

Each row is trained in a process of its own, so that the allocator begins empty; a setting of the
allocator is in the environment of a new one. `savings_loop.py` says how each saving is had there.
What is said not to work is tried too.

Compared are the largest allocated and the largest reserved figure in the phases of the last update,
all its micro-batches.

The result goes to `benchmarks/results/<device>-<date>/` as what_if.json and what_if.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from accuracy import (
    Answer,
    environment,
    in_a_process_of_its_own,
    in_processes_of_their_own,
    training_step,
)
from accuracy_configs import Config
from machine import command, is_virtual, not_reported, results_folder
from models import convolutional, others, transformers
from models.workloads import (
    BATCH_NORM_IS_A_GUESS,
    WORKLOADS,
    clicks,
    features,
    images,
    segmented_images,
    texts,
    token_sequences,
)
from savings_loop import Module, Training
from torch import nn

from memcallback import PlanRow, TrainingStep, __version__, what_if
from memcallback.core.units import format_bytes

#: A row's figures are right within this share of what was measured, in percent.
BAR_PCT = 1.0
NOT_REPORTED = (
    "what a saving costs in time",
    "whether a model still learns with it",
    "several devices",
)
AS_IT_IS, EXPANDABLE = "as it is", "expandable_segments"
SETTINGS = "PYTORCH_CUDA_ALLOC_CONF"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained.

    Attributes:
        name: Its name.
        config: A configuration like those of the accuracy proof, of 32 bits.
        is_lightning: Whether a Trainer trains it.
    """

    name: str
    config: Config
    is_lightning: bool = False

    def step(self) -> TrainingStep:
        """The step without savings."""
        parts = self.config.make(initialise=False)
        if not self.is_lightning:
            return training_step(self.config, parts)
        module = Module(parts.model, parts.losses[0])
        return TrainingStep.from_lightning(module, parts.batch)


def _case(
    architecture: str, model: Callable[[], nn.Module], batch: Any, optimizer: str = "adamw"
) -> Case:
    """A workload of the accuracy proof in another size."""
    workload = replace(WORKLOADS[architecture], model=model, batch=batch)
    return Case(
        name=architecture,
        config=Config(workload=workload, optimizer=optimizer, precision="32-true"),
    )


_PLAIN = (
    _case("resnet18", WORKLOADS["resnet18"].model, images(64, 128), "adam"),
    _case(
        "unet", lambda: convolutional.UNet(num_channels=32, num_levels=3), segmented_images(8, 128)
    ),
    _case("autoencoder", convolutional.autoencoder, images(128, 128), "adam"),
    _case("convnext", lambda: convolutional.convnext((1, 1, 3, 1)), images(32)),
    _case("vit-s16", lambda: transformers.ViT(depth=6), images(32)),
    _case(
        "gpt2-dropout",
        lambda: transformers.Gpt(depth=4, vocabulary=16384, dropout=0.1),
        token_sequences(8, 255, vocabulary=16384),
    ),
    _case(
        "bert", lambda: transformers.Bert(depth=4, vocabulary=8192), texts(32, 128, vocabulary=8192)
    ),
    _case("mlp", lambda: others.mlp(width=2048), features(8192, 1024)),
    _case("dlrm", lambda: others.Dlrm(num_rows=50000), clicks(8192, num_rows=50000)),
)
CASES = (
    *_PLAIN,
    *(
        replace(case, name=f"{case.name} in Lightning", is_lightning=True)
        for case in _PLAIN
        if case.name == "vit-s16"
    ),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a plan beside its measurement.

    Sizes in bytes; None where it could not be predicted, or did not run.

    Attributes:
        case: What was trained.
        saving: The saving, or several joined by ` + `.
        batch_size: Samples in one forward pass.
        predicted_allocated_bytes: The row's.
        predicted_reserved_bytes: The row's.
        measured_allocated_bytes: The largest figure of the last update.
        measured_reserved_bytes: The same of reserved memory.
        problem: Why it could not be predicted; empty if it was.
        error: What ended the training; empty if it ran.
        left_out: Why it proves nothing on this device; empty if it does.
    """

    case: str
    saving: str
    batch_size: int
    predicted_allocated_bytes: int | None
    predicted_reserved_bytes: int | None
    measured_allocated_bytes: int | None
    measured_reserved_bytes: int | None
    problem: str = ""
    error: str = ""
    left_out: str = ""

    @property
    def allocated_error_pct(self) -> float | None:
        """Error of the allocated figure, in percent of the measured one; positive if too high."""
        return _error_pct(self.predicted_allocated_bytes, self.measured_allocated_bytes)

    @property
    def reserved_error_pct(self) -> float | None:
        """The same of reserved memory."""
        return _error_pct(self.predicted_reserved_bytes, self.measured_reserved_bytes)

    @property
    def is_right(self) -> bool:
        """Whether both figures are within the bar, or it neither was predicted nor ran."""
        errors = (self.allocated_error_pct, self.reserved_error_pct)
        if self.problem or self.error:
            return bool(self.problem and self.error)
        return all(error is not None and abs(error) <= BAR_PCT for error in errors)


def _error_pct(predicted_bytes: int | None, measured_bytes: int | None) -> float | None:
    return (
        None
        if predicted_bytes is None or not measured_bytes
        else 100 * (predicted_bytes / measured_bytes - 1)
    )


# Predicted and measured, each in a process of its own.


def planned(case: Case) -> list[dict[str, Any]]:
    """The rows of the plan, the step as it is first."""
    plan = what_if(case.step(), device="cuda")
    return [asdict(row) for row in (plan.current, *plan.tried)]


def trained(case: Case, lines: dict[str, str]) -> dict[str, int]:
    """The largest figures of the last update with savings."""
    steps = Training(
        case.config, lines, initialise=not is_virtual(), is_lightning=case.is_lightning
    ).run()
    return {
        "allocated_bytes": max(step.peak_allocated_bytes or 0 for step in steps),
        "reserved_bytes": max(step.peak_reserved_bytes or 0 for step in steps),
    }


Jobs = list[tuple[str, dict[str, str]]]


def all_trained(jobs: Jobs) -> list[Answer]:
    """The figures of several trainings, each the name of a case and its savings.

    Those that need it run in a new environment.
    """
    is_elsewhere = [EXPANDABLE in lines and SETTINGS not in os.environ for _, lines in jobs]
    elsewhere = [job for job, there in zip(jobs, is_elsewhere, strict=True) if there]
    answers = iter(_in_new_environment(elsewhere) if elsewhere else [])
    cases = {case.name: case for case in CASES}
    works = {
        str(number): partial(trained, cases[name], lines)
        for number, ((name, lines), there) in enumerate(zip(jobs, is_elsewhere, strict=True))
        if not there
    }
    here = {}
    for number, answer in in_processes_of_their_own(works):
        here[number] = answer
        name, lines = jobs[int(number)]
        print(f"{name}, {' + '.join(lines) or AS_IT_IS}: {answer}", file=sys.stderr)
    return [
        next(answers) if there else here[str(number)] for number, there in enumerate(is_elsewhere)
    ]


def _in_new_environment(jobs: Jobs) -> list[Answer]:
    ran = subprocess.run(
        [sys.executable, __file__, "--train", json.dumps(jobs)],
        env={**os.environ, SETTINGS: "expandable_segments:True"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: list[Answer] = json.loads(ran.stdout.splitlines()[-1])
    return found


def compared(case: Case) -> list[Row]:
    """All rows of a case."""
    rows = [PlanRow(**row) for row in in_a_process_of_its_own(partial(planned, case))]
    lines = {row.saving: row.line for row in rows}
    savings = [[] if row.saving == AS_IT_IS else row.saving.split(" + ") for row in rows]
    answers = all_trained([(case.name, {name: lines[name] for name in names}) for names in savings])
    return [_row(case, row, answer) for row, answer in zip(rows, answers, strict=True)]


def _row(case: Case, row: PlanRow, answer: Answer) -> Row:
    measured = answer.get("result", {})
    is_guess = (
        is_virtual() and case.config.workload.has_batch_norm and "channels_last" in row.saving
    )
    return Row(
        case=case.name,
        saving=row.saving,
        batch_size=row.batch_size,
        predicted_allocated_bytes=row.peak_allocated_bytes,
        predicted_reserved_bytes=row.peak_reserved_bytes,
        measured_allocated_bytes=measured.get("allocated_bytes"),
        measured_reserved_bytes=measured.get("reserved_bytes"),
        problem=row.problem,
        error=answer.get("error", ""),
        left_out=BATCH_NORM_IS_A_GUESS if is_guess else "",
    )


# What comes out.


def to_markdown(about: dict[str, Any], rows: Sequence[Row]) -> str:
    """The page beside the JSON file."""
    judged = [row for row in rows if not row.left_out]
    wrong = [row for row in judged if not row.is_right]
    errors = [
        error
        for row in judged
        for error in (row.allocated_error_pct, row.reserved_error_pct)
        if error is not None
    ]
    exact = sum(
        row.predicted_allocated_bytes == row.measured_allocated_bytes is not None for row in judged
    )
    lines = [
        "# What savings buy, predicted and measured: "
        f"{about['device']}{' (virtual device)' if about['is_virtual'] else ''}",
        "",
    ]
    lines += [*(f"- {name}: {text}" for name, text in about.items()), ""]
    lines += [
        f"Required: each of the {len(judged)} rows ({len({row.case for row in judged})} models) "
        f"within {BAR_PCT:g} % of the measured value, allocated and reserved. "
        f"**{_missed(len(wrong))}** The worst error is "
        f"{max(errors, key=abs):+.3f} %; allocated memory is exact to the byte in {exact} rows.",
        "",
    ]
    for reason in dict.fromkeys(row.left_out for row in rows if row.left_out):
        lines += [f"Not judged, marked with a star: {reason}.", ""]
    head = (
        "| saving | batch | allocated, measured | error, % | reserved, measured | error, % | "
        "saved, predicted | saved, measured |"
    )
    for case in dict.fromkeys(row.case for row in rows):
        of_case = [row for row in rows if row.case == case]
        lines += [f"## {case}", "", head, "|:---|---:|---:|---:|---:|---:|---:|---:|"]
        lines += [_line(row, of_case[0]) for row in of_case]
        lines.append("")
    return "\n".join([*lines[:-1], *not_reported(NOT_REPORTED), ""])


def _missed(num_rows: int) -> str:
    """How many rows miss what is required."""
    if not num_rows:
        return "No row misses it."
    return "1 row misses it." if num_rows == 1 else f"{num_rows} rows miss it."


def _line(row: Row, as_it_is: Row) -> str:
    name = f"{row.saving}{'' if row.is_right else ' ✗'}{' *' if row.left_out else ''}"
    if row.measured_allocated_bytes is None or row.measured_reserved_bytes is None or row.problem:
        problem, error = (
            textwrap.shorten(text, 100, placeholder=" ...") for text in (row.problem, row.error)
        )
        return (
            f"| {name} | {row.batch_size} | not predicted: {problem or 'it was'} | | did not run: "
            f"{error or 'it did'} | | | |"
        )
    cells = [
        name,
        str(row.batch_size),
        format_bytes(row.measured_allocated_bytes),
        f"{row.allocated_error_pct:+.3f}",
        format_bytes(row.measured_reserved_bytes),
        f"{row.reserved_error_pct:+.3f}",
        _saved(row.predicted_reserved_bytes, as_it_is.predicted_reserved_bytes),
        _saved(row.measured_reserved_bytes, as_it_is.measured_reserved_bytes),
    ]
    return f"| {' | '.join(cells)} |"


def _saved(with_it: int | None, without: int | None) -> str:
    return "" if with_it is None or not without else f"{100 * (1 - with_it / without):.1f} %"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Check every row of memcallback.what_if on the device."
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="CASE",
        help=f"of {', '.join(case.name for case in CASES)}",
    )
    parser.add_argument(
        "--train",
        type=json.loads,
        help="cases with their savings as JSON; their figures are printed, and nothing written",
    )
    parser.add_argument("--out", type=Path, help="another folder for the results")
    return parser.parse_args()


def main() -> int:
    """Predict, train, compare; 1 if a row is not within the bar."""
    options = arguments()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.train is not None:
        print(json.dumps(all_trained(options.train)))
        return 0
    about = in_a_process_of_its_own(environment)
    about |= {"lightning": lightning.__version__, "memcallback": __version__, "command": command()}
    chosen = [case for case in CASES if not options.only or case.name in options.only]
    rows = [row for case in chosen for row in compared(case)]
    out = options.out or results_folder(about["device"])
    out.mkdir(parents=True, exist_ok=True)
    results = {"environment": about, "bar_pct": BAR_PCT, "rows": [asdict(row) for row in rows]}
    (out / "what_if.json").write_text(json.dumps(results, indent=1) + "\n")
    text = to_markdown(about, rows)
    (out / "what_if.md").write_text(text)
    print(text)
    return 0 if all(row.is_right for row in rows if not row.left_out) else 1


if __name__ == "__main__":
    sys.exit(main())
