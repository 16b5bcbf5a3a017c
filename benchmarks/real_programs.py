"""Programs of other libraries: what a step is predicted to take, and what it takes.

    pip install -r benchmarks/programs/requirements.txt
    python benchmarks/real_programs.py [--only NAME ...]       # on a CUDA device, real or virtual
    python benchmarks/real_programs.py --measure FILE --jobs 8         # its first half, there
    python benchmarks/real_programs.py --measured FILE                 # the second, anywhere

With `--only` the other programs' figures of the same day stay. Each program of
`benchmarks/programs/` is predicted before it runs, then trained for six updates in
a loop without memcallback, in a process of its own; the figures are those of the last update. The
result goes to `benchmarks/results/<device>-<date>/` as JSON and Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from copy import copy
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accuracy_cudnn import GROUPS, group_of
from machine import command, driver, is_virtual, not_reported, processor, results_folder, today
from programs import Program, names
from two_machines import Measured, in_new_process, measure_all

NOT_REPORTED = (
    "The libraries' own trainers: see real_trainers.py.",
    "Other batch sizes than that of the program.",
    "Programs whose path depends on values that the device computes, on a virtual device: it "
    "computes zeros. They are predicted and not measured.",
)
NUM_UPDATES = 6
NOT_MEASURED = "not measured"
#: How what is said of every card begins.
ALWAYS_SAID = ("512.00 MiB of the card",)
#: Of each phase, the peak of allocated and of reserved bytes.
Peaks = list[tuple[int, int]]
PHASES = ("forward", "backward", "optimizer step")


def step_of(program: Program) -> Any:
    """A program's step, to be predicted."""
    import memcallback as mc

    return mc.TrainingStep(
        program.model,
        program.batch,
        loss=program.loss,
        optimizer=program.optimizer,
        precision=program.precision,
        also=list(program.also),
    )


def masks_are_read(program: Program) -> None:
    """Answer as a card would where transformers asks whether a mask is all ones.

    On a virtual device sums are 0, and all values are found to be true.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    mask = program.batch.get("attention_mask") if isinstance(program.batch, dict) else None
    if not is_virtual() or masking is None or mask is None:
        return
    # Both are called, as they take memory.
    if bool(mask.all()):
        fast_all = masking.fast_all
        masking.fast_all = lambda tensor: fast_all(tensor) is not None
    elif mask.ndim == 2:
        ignores = masking._ignore_bidirectional_mask_sdpa
        masking._ignore_bidirectional_mask_sdpa = lambda *args, **kwargs: (
            ignores(*args, **kwargs) and False
        )


def measure(program: Program) -> Peaks:
    """Peaks of allocated and reserved bytes of each phase, in the last of some updates."""
    import torch
    from torch.utils._pytree import tree_map

    masks_are_read(program)
    for one in program.also:
        one.cuda()
    model = program.model.cuda()
    for cell in getattr(program.loss, "__closure__", None) or ():  # where a teacher is
        if isinstance(cell.cell_contents, torch.nn.Module):
            cell.cell_contents.cuda()
    optimizer = program.optimizer([one for one in model.parameters() if one.requires_grad])
    has_autocast = program.precision == "bf16-mixed"
    peaks: Peaks = []

    def end_phase() -> None:
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
        torch.cuda.reset_peak_memory_stats()

    for _ in range(NUM_UPDATES):
        # A batch of PyTorch Geometric moves its own parts.
        batch = tree_map(
            lambda part: copy(part).to("cuda") if hasattr(part, "to") else part, program.batch
        )
        optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16, enabled=has_autocast):
            loss = program.loss(model, batch)
        end_phase()
        loss.backward()
        end_phase()
        optimizer.step()
        end_phase()
        del batch, loss
    return peaks[-len(PHASES) :]


def made(name: str) -> Program:
    """A program, ready to be trained."""
    import torch

    torch.manual_seed(0)
    program: Program = import_module(f"programs.{name}").make()
    program.model.train()
    return program


def compare(name: str, measured: Peaks | None, device: str | None) -> dict[str, Any]:
    """Predict one program in this process, and measure it here unless that was done on `device`."""
    import memcallback as mc

    program = made(name)
    start = time.perf_counter()
    prediction = mc.predict(step_of(program), device=device or "cuda")
    seconds = time.perf_counter() - start
    children = resource.getrusage(resource.RUSAGE_CHILDREN)  # in one of them it is predicted
    peaks: Sequence[tuple[int | None, int | None]] = measured or [(None, None)] * len(PHASES)
    if measured is None and not (program.needs_values and is_virtual()):
        peaks = measure(program)
    return {
        "name": name,
        "about": (sys.modules[f"programs.{name}"].__doc__ or "").strip(),
        "versions": {one: version(one) for one in program.libraries},
        "predict_s": seconds,
        "predict_processor_s": children.ru_utime + children.ru_stime,
        "knows_other_batch_sizes": prediction.trace.slopes is not None,
        "caveats": list(prediction.caveats),
        "phases": [
            {
                "phase": phase,
                "allocated_bytes": allocated,
                "reserved_bytes": reserved,
                "predicted_allocated_bytes": window.peak_allocated_bytes,
                "predicted_reserved_bytes": window.peak_reserved_bytes,
            }
            for phase, (allocated, reserved), window in zip(
                PHASES, peaks, prediction.step.windows, strict=True
            )
        ],
    }


def in_its_own_process(name: str, script: Path, *options: str) -> dict[str, Any]:
    """What a script prints of one program; a program that fails gives its error."""
    done = subprocess.run(
        [sys.executable, str(script), "--one", name, *options],
        capture_output=True,
        text=True,
        check=False,
    )
    with contextlib.suppress(json.JSONDecodeError, IndexError):
        row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return row
    errors = [
        line for line in done.stderr.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)
    ]
    return {"name": name, "error": (errors or ["no result"])[-1]}


def is_compared(row: dict[str, Any]) -> bool:
    """Whether a program was predicted and measured."""
    return "phases" in row and row["phases"][0]["allocated_bytes"] is not None


def off(row: dict[str, Any], kind: str) -> float:
    """By how much the prediction of a row is off at most, in any phase: a signed fraction."""
    errors = [one[f"predicted_{kind}_bytes"] / one[f"{kind}_bytes"] - 1 for one in row["phases"]]
    largest: float = max(errors, key=abs)
    return largest


def to_markdown(rows: list[dict[str, Any]], about: dict[str, str]) -> str:
    """The page beside the JSON file."""
    good = [row for row in rows if is_compared(row)]
    allocated = [abs(off(row, "allocated")) for row in good]
    within = sum(
        abs(off(row, "allocated")) <= 0.005 and abs(off(row, "reserved")) <= 0.02 for row in good
    )
    num_left = sum(row.get("error") == NOT_MEASURED for row in rows)
    num_failed = sum("error" in row for row in rows) - num_left
    lines = ["# Programs of other libraries", ""]
    lines += [
        f"{within} of {len(good)} programs are within 0.5 % allocated and 2 % reserved in every "
        f"phase, {sum(not error for error in allocated)} are exact to the byte; the median error "
        f"is {100 * statistics.median(allocated or [0]):.3f} %. "
        f"{len(rows) - len(good) - num_failed - num_left} more were predicted and not measured. "
        f"{num_failed} could not be predicted or trained."
        + (f" {num_left} were neither, as time ran out." if num_left else ""),
        "",
    ]
    for group in GROUPS:
        which = [row for row in good if group_of(row["caveats"]) == group]
        exact = (sum(off(row, kind) == 0 for row in which) for kind in ("allocated", "reserved"))
        most = max((off(row, "allocated") for row in which), key=abs, default=0.0)
        lines += [
            f"- cuDNN takes memory for {group}: {len(which)} programs; exact in every phase: "
            f"allocated {next(exact)}, reserved {next(exact)}; the largest error of allocated is "
            f"{100 * most:+.2f} %",
        ]
    lines += ["", *(f"- {name}: {text}" for name, text in about.items())]
    lines += [
        "",
        "| program | peak allocated | allocated off at most | reserved off at most | predicted in "
        "| other batch sizes | what the prediction says |",
        "|:---|---:|---:|---:|---:|:---|:---|",
    ]
    for row in rows:
        if "phases" not in row:
            lines.append(f"| {row['name']} | | | | | | {row['error']} |")
            continue
        kind = "" if is_compared(row) else "predicted_"
        peak = max(one[f"{kind}allocated_bytes"] for one in row["phases"])
        allocated_off, reserved_off = (
            (f"{100 * off(row, 'allocated'):+.3f} %", f"{100 * off(row, 'reserved'):+.2f} %")
            if is_compared(row)
            else ("not measured", "not measured")
        )
        told = " ".join(one for one in row["caveats"] if not one.startswith(ALWAYS_SAID))
        libraries = ", ".join(f"{name} {number}" for name, number in row["versions"].items())
        lines.append(
            f"| {row['about'].rstrip('.')} ({libraries}) | {peak:,} B "
            f"| {allocated_off} | {reserved_off} | {_time_of(row)} "
            f"| {'yes' if row['knows_other_batch_sizes'] else 'no'} | {told} |"
        )
    lines += not_reported(NOT_REPORTED)
    return "\n".join(lines) + "\n"


def _time_of(row: dict[str, Any]) -> str:
    """How long a prediction took, and on the processor, where that was measured."""
    on_wall = f"{row['predict_s']:.1f} s"
    if "predict_processor_s" not in row:
        return on_wall
    return f"{on_wall} ({row['predict_processor_s']:.1f} s on the processor)"


def earlier_result(path: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The rows of a file, by program, and the commands that made it; none if it is not there."""
    if not path.exists():
        return {}, []
    content = json.loads(path.read_text())
    return {row["name"]: row for row in content["rows"]}, [content["about"]["command"]]


def main() -> None:
    """Compare all programs and write the results, or compare one."""
    parser = argparse.ArgumentParser(description="Predict and measure programs of libraries.")
    parser.add_argument("--only", nargs="+", choices=names(), default=names())
    parser.add_argument("--out", type=Path, help="the folder for programs.json and programs.md")
    parser.add_argument("--measure", type=Path, help="measure only, into this file")
    parser.add_argument("--measured", type=Path, help="predict what was measured into this file")
    parser.add_argument("--jobs", type=int, default=1, help="how many are measured at a time")
    parser.add_argument("--one", choices=names(), help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        result: Any
        if options.alone:
            program = made(options.one)
            if program.needs_values and is_virtual():
                raise SystemExit("RuntimeError: it needs values, which a virtual device has not")
            result = measure(program)
        else:
            found = Measured.read(options.measured) if options.measured else None
            peaks = found.cases[options.one] if found else None
            result = compare(options.one, peaks, found.device if found else None)
        print(json.dumps(result), flush=True)
        return
    if options.measured:
        predict_measured(Measured.read(options.measured), options)
        return
    import torch

    device = torch.cuda.get_device_name()
    if options.measure:
        measure_all(
            options.only,
            lambda name: in_new_process(__file__, "--one", name, "--alone"),
            options.measure,
            device=device,
            jobs=options.jobs,
        )
        return
    out = options.out or results_folder(device)
    new: dict[str, dict[str, Any]] = {}
    for name in options.only:
        new[name] = in_its_own_process(name, Path(__file__))
        print(name, new[name].get("error", "compared"), flush=True)
    rows: dict[str, dict[str, Any]] = {}
    commands: list[str] = []
    if len(options.only) < len(names()):  # read now: another run may have written some
        rows, commands = earlier_result(out / "programs.json")
    rows |= new
    about = {
        "device": device + (" (virtual device)" if is_virtual() else ""),
        "driver": driver(),
        "processor": processor(),
        "versions": f"Python {platform.python_version()}, torch {version('torch')}",
        "date": today(),
        "command": ", then ".join([*commands, command()]),
    }
    write(out, rows, about)


def predict_measured(found: Measured, options: argparse.Namespace) -> None:
    """Predict what was measured on another machine, and write both."""
    out = options.out or found.folder
    about, path = found.told(), out / "programs.json"
    rows: dict[str, dict[str, Any]] = {}
    if options.only != names() and path.exists():
        rows, _ = earlier_result(path)
        earlier = json.loads(path.read_text())["about"]["predicted by"]
        about["predicted by"] = f"{earlier}, then {command()}"
    for name in options.only:
        peaks = found.cases.get(name, {"error": NOT_MEASURED})
        rows[name] = (
            {"name": name, **peaks}
            if isinstance(peaks, dict)
            else in_its_own_process(name, Path(__file__), "--measured", str(options.measured))
        )
        print(name, rows[name].get("error", "compared"), flush=True)
        write(out, rows, about)


def write(out: Path, rows: dict[str, dict[str, Any]], about: dict[str, str]) -> None:
    """Write the results so far."""
    out.mkdir(parents=True, exist_ok=True)
    listed = [rows[name] for name in names() if name in rows]
    content = json.dumps({"about": about, "rows": listed, "not_reported": NOT_REPORTED}, indent=2)
    (out / "programs.json").write_text(content + "\n")
    (out / "programs.md").write_text(to_markdown(listed, about))


if __name__ == "__main__":
    main()
