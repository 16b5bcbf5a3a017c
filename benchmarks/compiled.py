"""Compiled steps: what is predicted of them beside what they take on the device.

    python benchmarks/compiled.py [NAME ...]
    python benchmarks/compiled.py --measure FILE --jobs 8     # its first half, on a device
    python benchmarks/compiled.py --measured FILE             # the second, anywhere

Each step is trained twice in new processes with an empty cache of Inductor: the first one compiles
(cold), the second one finds its code in the cache (warm). Then it is predicted in a third. Each
update moves a batch to the device, as the prediction assumes. Compared is the last update, the
fourth: its peak allocated, and what is reserved at the end of it. Steps with CUDA graphs reserve
most as they warm up or are recorded: that is compared too. In steps "after another size" a smaller
batch comes after the first update, as at the end of an epoch, and the fifth update is compared;
that smaller batch is not predicted.

The result goes to `benchmarks/results/<device>-<date>/` as compiled.json and compiled.md, to those
of the same day that are there already.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compiled_cases import CASES
from machine import command, driver, not_reported, outside_pool_bytes, results_folder, today
from torch.utils._pytree import tree_map_only
from two_machines import Measured, in_new_process, measure_all

import memcallback as mc
from memcallback.core.units import MiB

NUM_UPDATES = 4


def measured(name: str) -> dict[str, int | None]:
    """Peak allocated and reserved in the last update of a training, and reserved before."""
    case = CASES[name]
    case.set_up()
    model = case.model().cuda()
    trained = case.compiled(model)
    on_host = case.batch()
    optimizer = case.optimizer(model.parameters())
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(case.precision)
    scaler = torch.amp.GradScaler("cuda", enabled=case.precision == "16-mixed")

    def update(batch: Any) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = case.loss(trained, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    if case.compile_update is not None:
        update = case.compile_update(update)
    most: list[int] = []
    batches = [on_host] * NUM_UPDATES
    if case.another is not None:
        batches.insert(1, case.another())
    for batch in batches:
        torch.cuda.reset_peak_memory_stats()
        update(tree_map_only(torch.Tensor, torch.Tensor.cuda, batch))
        most.append(torch.cuda.max_memory_reserved())
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "reserved_first": most[0],
        "reserved_most": max(most),
        "outside_pool": outside_pool_bytes(),
    }


def predicted(name: str, device: str) -> dict[str, int]:
    """What is predicted of the same."""
    CASES[name].set_up()
    step = CASES[name].step()
    prediction = mc.predict(step, device=device)
    as_eager = [one for one in prediction.caveats if "without compilation" in one]
    if as_eager:
        raise RuntimeError(f"{name} was not compiled: {as_eager}")
    assert prediction.peak_reserved_bytes is not None
    return {
        "allocated": prediction.peak_allocated_bytes,
        "reserved": prediction.peak_reserved_bytes,
        "reserved_first": prediction.warm_up.peak_reserved_bytes or 0,
        "reserved_most": prediction.run_peak_reserved_bytes or 0,
    }


def do(what: str, name: str, device: str, cache: str) -> dict[str, int]:
    """Figures from a process of its own."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    figures: dict[str, int] = in_new_process(
        __file__, "--do", what, "--device", device, name, env=env
    )
    return figures


def trained(name: str, device: str) -> dict[str, dict[str, int]]:
    """What a step takes in a process that compiles, and in one that finds its code."""
    with tempfile.TemporaryDirectory() as cache:
        return {way: do("measure", name, device, cache) for way in ("cold", "warm")}


def main() -> None:
    """Measure and predict each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help="the steps; all by default")
    parser.add_argument("--measure", type=Path, help="measure only, into this file")
    parser.add_argument("--measured", type=Path, help="predict what was measured into this file")
    parser.add_argument("--jobs", type=int, default=1, help="how many are measured at a time")
    parser.add_argument("--do", choices=("measure", "predict"), help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.do:
        name = given.names[0]
        print(
            json.dumps(measured(name) if given.do == "measure" else predicted(name, given.device))
        )
        return
    if given.measured:
        compare(Measured.read(given.measured), given.names)
        return
    device = torch.cuda.get_device_name()
    if given.measure:
        measure_all(
            given.names or CASES,
            partial(trained, device=device),
            given.measure,
            device=device,
            jobs=given.jobs,
        )
        return
    rows, problems = earlier(results_folder(device))
    about = {
        "device": device,
        "driver": driver(),
        "versions": f"Python {sys.version.split()[0]}, torch {torch.__version__}",
        "date": today(),
        "command": "python benchmarks/compiled.py, in several runs with names"
        if rows
        else command(),
    }
    for name in given.names or CASES:
        problems.pop(name, None)
        with tempfile.TemporaryDirectory() as cache:
            try:
                rows[name] = trained(name, device) | {
                    "predicted": do("predict", name, device, cache)
                }
            except RuntimeError as problem:
                problems[name] = str(problem)
        print(name, rows.get(name) or problems[name], flush=True)
        if rows:
            write(results_folder(device), about, rows, problems)


def compare(found: Measured, names: Sequence[str]) -> None:
    """Predict what was measured on another machine."""
    rows, problems = earlier(found.folder) if names else ({}, {})
    for name, row in found.cases.items():
        if names and name not in names:
            continue
        problems.pop(name, None)
        try:
            if "error" in row:
                raise RuntimeError(row["error"])
            with tempfile.TemporaryDirectory() as cache:
                rows[name] = row | {"predicted": do("predict", name, found.device, cache)}
        except RuntimeError as problem:
            problems[name] = str(problem)
        print(name, rows.get(name) or problems[name], flush=True)
        if rows:
            write(found.folder, found.told(), rows, problems)


def earlier(folder: Path) -> tuple[dict[str, dict[str, dict[str, int]]], dict[str, str]]:
    """The rows and the problems of the same day."""
    path = folder / "compiled.json"
    if not path.exists():
        return {}, {}
    result = json.loads(path.read_text())
    return result["steps"], result["problems"]


def write(
    folder: Path,
    about: dict[str, str],
    rows: dict[str, dict[str, dict[str, int]]],
    problems: dict[str, str],
) -> None:
    """Write the result; after each step, as all of them take a while."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compiled.json").write_text(
        json.dumps({**about, "steps": rows, "problems": problems}, indent=1) + "\n"
    )
    lines = ["# Compiled steps", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += [
        "Bytes in the last update, peak allocated / reserved. Cold: in the process that "
        "compiled. Warm: in one that found its code in Inductor's cache. First: the most that the "
        "compiling process reserved in its first update, as a share of the prediction for that "
        "update. Most: the most reserved in any update, predicted / warm.",
        "",
        summary(rows),
        "",
        "| step | predicted | warm | off, allocated / reserved | cold | first | most |",
        "|:---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in rows.items():
        told, warm, cold = (
            f"{row[way]['allocated']:,} / {row[way]['reserved']:,}"
            for way in ("predicted", "warm", "cold")
        )
        off = " / ".join(f"{100 * error(row, what):+.2f} %" for what in ("allocated", "reserved"))
        first = row["cold"]["reserved_first"] / row["predicted"]["reserved_first"]
        most = " / ".join(
            f"{row[way]['reserved_most']:,}"
            for way in ("predicted", "warm")
            if "reserved_most" in row[way]
        )
        lines.append(
            f"| {name} | {told} | {warm} | {off} | {cold} | {100 * first:.0f} % | {most} |"
        )
    if problems:
        lines += ["", "Not predicted as compiled, or not trained:", ""]
        lines += [f"- {name}: {problem}" for name, problem in problems.items()]
    left = [name for name in CASES if name not in rows and name not in problems]
    if left:
        lines += ["", f"Not run: {'; '.join(left)}."]
    lines += not_reported(
        [
            "Allocated in the second and third update.",
            "Kernels that PyTorch chooses by timing them on the card. On a virtual device, where "
            "no time is real, the kernels of tuned steps are chosen at random.",
        ]
    )
    (folder / "compiled.md").write_text("\n".join(lines) + "\n")


def error(row: dict[str, dict[str, int]], what: str) -> float:
    """How far a prediction is off, as a share of what the warm process needed."""
    return row["predicted"][what] / row["warm"][what] - 1


def summary(rows: dict[str, dict[str, dict[str, int]]]) -> str:
    """How many steps are exact and how many are near, and how much compiling adds at most."""
    sentences = []
    for what, near in (("allocated", 0.01), ("reserved", 0.03)):
        errors = [abs(error(row, what)) for row in rows.values()]
        exact, close = (sum(size <= most for size in errors) for most in (0, near))
        sentences.append(
            f"{what.capitalize()}: {exact} exact, {close} within {near:.0%}, largest error "
            f"{max(errors):.2%}."
        )
    first, last = (
        max(row["cold"][what] - row["predicted"][what] for row in rows.values())
        for what in ("reserved_first", "reserved")
    )
    return (
        f"{len(rows)} steps, compared with the warm process. {' '.join(sentences)} In the first "
        f"update the cold process reserved at most {first / MiB:.0f} MiB more than predicted; in "
        f"the last, at most {last / MiB:.0f} MiB more."
    )


if __name__ == "__main__":
    main()
