"""Libraries' own trainers, whole: what a step is predicted to take beside what is recorded.

    pip install -r benchmarks/programs/requirements.txt
    python benchmarks/real_trainers.py [--only NAME ...]       # on a CUDA device, real or virtual

Each training of `benchmarks/trainers/` runs for six updates in a process of its own, with a
`MemoryCallback`, a `MemoryTrainerCallback` or a `MemoryLog` as users have it. The figures are those
of the last update.
With `--only` the other trainings' figures of the same day stay. The result goes to
`benchmarks/results/<device>-<date>/` as JSON and Markdown.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import sys
import warnings
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from machine import command, driver, is_virtual, not_reported, processor, results_folder, today
from real_programs import ALWAYS_SAID, earlier_result, in_its_own_process, is_compared, off
from trainers import Trained, names

NOT_REPORTED = (
    "What a training takes between its steps: evaluation, generation outside of a step, "
    "checkpoints.",
    "Generation inside of a step (GRPO) is recorded with its forward phase, and not predicted.",
    "Values that a virtual device does not compute: benchmarks/trainers/_virtual.py lists what "
    "replaces them.",
)


def train(name: str) -> dict[str, Any]:
    """Run one training, in this process."""
    import torch

    torch.manual_seed(0)
    module = import_module(f"trainers.{name}")
    trained: Trained = module.train()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    row = {
        "name": name,
        "about": (module.__doc__ or "").strip(),
        "versions": {one: version(one) for one in module.LIBRARIES},
        # The prediction is the only child of this process that works.
        "predict_processor_s": children.ru_utime + children.ru_stime,
    }
    prediction = trained.prediction
    if prediction is None or not hasattr(prediction, "trace"):
        return {**row, "error": "no prediction by a trace"}
    recorded = {one.label: one for one in trained.steps[-1].windows}
    return {
        **row,
        "caveats": list(prediction.caveats),
        "phases": [
            {
                "phase": window.label,
                "allocated_bytes": recorded[window.label].peak_allocated_bytes,
                "reserved_bytes": recorded[window.label].peak_reserved_bytes,
                "predicted_allocated_bytes": window.peak_allocated_bytes,
                "predicted_reserved_bytes": window.peak_reserved_bytes,
            }
            for window in prediction.step.windows
        ],
    }


def to_markdown(rows: list[dict[str, Any]], about: dict[str, str]) -> str:
    """The page beside the JSON file."""
    good = [row for row in rows if is_compared(row)]
    allocated = [abs(off(row, "allocated")) for row in good]
    within = sum(
        abs(off(row, "allocated")) <= 0.005 and abs(off(row, "reserved")) <= 0.02 for row in good
    )
    lines = [
        "# Trainers of other libraries",
        "",
        f"{within} of {len(rows)} trainings are within 0.5 % allocated and 2 % reserved in every "
        f"phase; the median error is {100 * statistics.median(allocated or [0]):.3f} %.",
        "",
        *(f"- {name}: {text}" for name, text in about.items()),
        "",
        "| training | peak allocated | allocated off at most | reserved off at most | processor "
        "time of the prediction | what the prediction says |",
        "|:---|---:|---:|---:|---:|:---|",
    ]
    for row in rows:
        if not is_compared(row):
            lines.append(f"| {row['name']} | | | | | {row['error']} |")
            continue
        libraries = ", ".join(f"{name} {number}" for name, number in row["versions"].items())
        told = " ".join(one for one in row["caveats"] if not one.startswith(ALWAYS_SAID))
        lines.append(
            f"| {row['about'].rstrip('.')} ({libraries}) "
            f"| {max(one['allocated_bytes'] for one in row['phases']):,} B "
            f"| {100 * off(row, 'allocated'):+.3f} % | {100 * off(row, 'reserved'):+.2f} % "
            f"| {row['predict_processor_s']:.1f} s | {told} |"
        )
    lines += not_reported(NOT_REPORTED)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all trainings and write the results, or run one."""
    parser = argparse.ArgumentParser(description="Predict and record trainings of libraries.")
    parser.add_argument("--only", nargs="+", choices=names(), default=names())
    parser.add_argument("--out", type=Path, help="the folder for trainers.json and trainers.md")
    parser.add_argument("--one", choices=names(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        print(json.dumps(train(options.one)), flush=True)
        sys.exit()
    import torch

    name_of_device = torch.cuda.get_device_name()
    out = options.out or results_folder(name_of_device)
    new: dict[str, dict[str, Any]] = {}
    for name in options.only:
        new[name] = in_its_own_process(name, Path(__file__))
        print(name, new[name].get("error", "compared"), flush=True)
    rows: dict[str, dict[str, Any]] = {}
    commands: list[str] = []
    if len(options.only) < len(names()):  # read now: another run may have written some
        rows, commands = earlier_result(out / "trainers.json")
    rows |= new
    about = {
        "device": name_of_device + (" (virtual device)" if is_virtual() else ""),
        "driver": driver(),
        "processor": processor(),
        "versions": f"Python {platform.python_version()}, torch {version('torch')}",
        "date": today(),
        "command": ", then ".join([*commands, command()]),
    }
    out.mkdir(parents=True, exist_ok=True)
    listed = [rows[name] for name in names() if name in rows]
    content = json.dumps({"about": about, "rows": listed, "not_reported": NOT_REPORTED}, indent=2)
    (out / "trainers.json").write_text(content + "\n")
    text = to_markdown(listed, about)
    (out / "trainers.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
