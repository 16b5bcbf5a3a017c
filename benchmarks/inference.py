"""Forward passes alone: what is predicted of them, and what they take.

    python benchmarks/inference.py [--only NAME ...]       # on a CUDA device, real or virtual
    python benchmarks/inference.py --measure FILE --jobs 8         # its first half, there
    python benchmarks/inference.py --measured FILE                 # the second, anywhere

Each model of `inference_cases.py` runs in three ways, each in a process of its own: inference (in
evaluation mode, under `torch.inference_mode`), validation (after a training of several updates,
under `torch.no_grad`), and generation. The figures are those of the last of six batches. The result
goes to `benchmarks/results/<device>-<date>/` as JSON and Markdown; with `--only` or `--ways` the
other rows of the same day stay.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import time
import warnings
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import torch
from accuracy import in_a_process_of_its_own, in_processes_of_their_own
from inference_cases import FORWARD, GENERATION, Case
from machine import command, driver, is_virtual, not_reported, processor, results_folder, today
from two_machines import Measured, in_new_process, measure_all

NOT_REPORTED = (
    "Models whose path depends on values that the device computes; a virtual device has zeros.",
    "The loops of Lightning and of the Trainer of transformers around a step: tests compare those.",
)
NUM_BATCHES = 6
_LIBRARIES = ("torch", "transformers", "torchvision", "timm")
NUM_UPDATES = 6
#: All three ways, by name: which models run in it.
WAYS = {
    "inference": FORWARD,
    "validation": {name: case for name, case in FORWARD.items() if case.loss is not None},
    "generation": GENERATION,
}
ALL = [(way, name) for way, cases in WAYS.items() for name in cases]


def step_of(way: str, case: Case, model: Any, batch: Any) -> Any:
    """A case's step, to be predicted."""
    import memcallback as mc

    training = None
    if way == "validation":
        training = mc.TrainingStep(
            model, batch, loss=case.loss, optimizer=_adam, precision=case.precision
        )
    return mc.InferenceStep(
        model,
        batch,
        forward=case.forward,
        generate=case.generate,
        precision=case.precision,
        mode="no_grad" if training else "inference_mode",
        after=training,
    )


def _adam(parameters: Any) -> Any:
    return torch.optim.AdamW([one for one in parameters if one.requires_grad])


def measure(way: str, case: Case, model: Any, batch: Any) -> tuple[int, int]:
    """The peaks of allocated and reserved bytes in the last of some batches."""
    from torch.utils._pytree import tree_map_only

    model = model.cuda()
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(case.precision)

    def autocast() -> Any:
        return torch.autocast("cuda", dtype) if dtype else contextlib.nullcontext()

    def to_device() -> Any:
        return tree_map_only(torch.Tensor, torch.Tensor.cuda, batch)

    if way == "validation":
        assert case.loss is not None
        optimizer = _adam(model.parameters())
        # So small a scale that no update is skipped.
        scaler = torch.amp.GradScaler("cuda", 128.0, enabled=dtype is torch.float16)
        for _ in range(NUM_UPDATES):
            inputs = to_device()
            optimizer.zero_grad()
            with autocast():
                loss = case.loss(model, inputs)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            del inputs, loss
        model.eval()
    outputs = None
    for _ in range(NUM_BATCHES):
        inputs = to_device()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad() if way == "validation" else torch.inference_mode(), autocast():
            outputs = _run(case, model, inputs)
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        del inputs
    del outputs
    return peaks


def _run(case: Case, model: Any, inputs: Any) -> Any:
    if case.generate is not None:
        with _all_tokens(model, case.generate["max_new_tokens"]):
            return model.generate(**inputs, **case.generate)
    if case.forward is not None:
        return case.forward(model, inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


@contextlib.contextmanager
def _all_tokens(model: Any, num_tokens: int) -> Any:
    """Let no sequence end early: a virtual device reads every value as 0."""
    numbers = count(1)
    model._has_unfinished_sequences = lambda *_, **__: next(numbers) <= num_tokens
    try:
        yield
    finally:
        del model._has_unfinished_sequences


def compare(
    way: str, name: str, measured: tuple[int, int] | None = None, device: str = "cuda"
) -> dict[str, Any]:
    """Predict one case in this process, and measure it here unless that was done on `device`."""
    from memcallback.devices.local import resolve
    from memcallback.prediction.allocator.settings import AllocatorSettings
    from memcallback.prediction.predict_here import predict_once

    case, model, batch = made(way, name)
    start = time.perf_counter()
    # One trace: other batch sizes and the largest one are not compared.
    step = step_of(way, case, model, batch)
    prediction = predict_once(
        step,
        device=resolve(device),
        batch_size=step.check_predictable(),
        settings=AllocatorSettings.from_environ(os.environ),
    )
    seconds = time.perf_counter() - start
    allocated, reserved = measured or measure(way, case, model, batch)
    return {
        "way": way,
        "name": name,
        "precision": case.precision,
        "held_out": case.held_out,
        "trace_s": seconds,
        "caveats": list(prediction.caveats),
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "predicted_allocated_bytes": prediction.peak_allocated_bytes,
        "predicted_reserved_bytes": prediction.peak_reserved_bytes,
    }


def made(way: str, name: str) -> tuple[Case, Any, Any]:
    """A case, its model and its batch."""
    torch.manual_seed(0)
    case = WAYS[way][name]
    model, batch = case.model(), case.batch()
    model.train(way == "validation")
    return case, model, batch


def off(row: dict[str, Any], kind: str) -> float:
    """By how much the prediction of a row is off, as a signed fraction."""
    error: float = row[f"predicted_{kind}_bytes"] / row[f"{kind}_bytes"] - 1
    return error


def to_markdown(rows: list[dict[str, Any]], about: dict[str, str]) -> str:
    """The page beside the JSON file."""
    lines = ["# Inference, validation and generation", ""]
    for held_out in (False, True):
        chosen = [row for row in rows if "error" not in row and row["held_out"] is held_out]
        if not chosen:
            continue
        exact = sum(off(row, "allocated") == off(row, "reserved") == 0 for row in chosen)
        worst = [max(abs(off(row, kind)) for row in chosen) for kind in ("allocated", "reserved")]
        which = "Held-out models: " if held_out else ""
        lines += [
            f"{which}{exact} of {len(chosen)} are exact to the byte, allocated and reserved. The "
            f"largest error is {100 * worst[0]:.3f} % in allocated and {100 * worst[1]:.2f} % in "
            "reserved memory.",
            "",
        ]
    lines += [f"- {name}: {text}" for name, text in about.items()]
    lines += [
        "",
        "| way | model | precision | peak allocated | peak reserved | allocated off | reserved off "
        "| traced in |",
        "|:---|:---|:---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['way']} | {row['name']} | | | | {row['error']} | | |")
            continue
        lines.append(
            f"| {row['way']} | {row['name']}{', held out' if row['held_out'] else ''} "
            f"| {row['precision']} | {row['allocated_bytes']:,} B | {row['reserved_bytes']:,} B "
            f"| {100 * off(row, 'allocated'):+.3f} % | {100 * off(row, 'reserved'):+.3f} % "
            f"| {row['trace_s']:.1f} s |"
        )
    lines += not_reported(NOT_REPORTED)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compare all cases and write the results, or compare one."""
    parser = argparse.ArgumentParser(description="Predict and measure forward passes.")
    parser.add_argument("--only", nargs="+", help="names of models; by default all")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--out", type=Path, help="the folder for inference.json and inference.md")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at the same time")
    parser.add_argument("--measure", type=Path, help="measure only, into this file")
    parser.add_argument("--measured", type=Path, help="predict what was measured into this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        way, name = options.one.split()
        print(json.dumps(measure(way, *made(way, name))), flush=True)
        return
    for name in _LIBRARIES:  # here, so that the processes that are made need not
        import_module(name)
    warnings.simplefilter("ignore")
    chosen = [
        f"{way} {name}"
        for way, name in ALL
        if way in options.ways and (not options.only or name in options.only)
    ]
    if options.measured:
        found = Measured.read(options.measured)
        out = options.out or found.folder
        is_part = len(chosen) < len(found.cases)
        rows = earlier_result(out / "inference.json")[0] if is_part else {}
        compare_all(chosen, out, rows, found.told(), options.jobs, found)
        return
    device = in_a_process_of_its_own(torch.cuda.get_device_name)
    if options.measure:
        measure_all(
            chosen,
            lambda key: in_new_process(__file__, "--one", key),
            options.measure,
            device=device,
            libraries=_LIBRARIES[1:],
            jobs=options.jobs,
        )
        return
    out = options.out or results_folder(device)
    rows, commands = earlier_result(out / "inference.json")
    about = {
        "device": device + (" (virtual device)" if is_virtual() else ""),
        "driver": driver(),
        "processor": processor(),
        "versions": f"Python {platform.python_version()}, "
        + ", ".join(f"{one} {version(one)}" for one in _LIBRARIES),
        "date": today(),
        "command": ", then ".join(dict.fromkeys([*commands, command()])),
    }
    compare_all(chosen, out, rows, about, options.jobs)


def compare_all(
    chosen: Sequence[str],
    out: Path,
    rows: dict[tuple[str, str], dict[str, Any]],
    about: dict[str, str],
    jobs: int,
    found: Measured | None = None,
) -> None:
    """Compare these cases, here or with what was measured, and write them with the other rows."""
    out.mkdir(parents=True, exist_ok=True)
    works = {}
    for key in chosen:
        way, name = key.split()
        work = partial(compare, way, name)
        if found:
            if key not in found.cases:
                continue
            peaks = found.cases[key]
            if isinstance(peaks, dict):
                rows[way, name] = {"way": way, "name": name, **peaks}
                continue
            work = partial(work, tuple(peaks), found.device)
        works[key] = work
    for key, answer in in_processes_of_their_own(works, num_jobs=jobs):
        way, name = key.split()
        row = answer.get("result") or {"way": way, "name": name, **answer}
        rows[way, name] = row
        said = row.get("error") or (
            f"{100 * off(row, 'allocated'):+.3f} % {100 * off(row, 'reserved'):+.3f} %"
        )
        print(f"{way:11} {name:24} {said}", flush=True)
        # What there is stays if time runs out.
        write(out, [rows[each] for each in ALL if each in rows], about)


def write(out: Path, rows: list[dict[str, Any]], about: dict[str, str]) -> None:
    """Write the results so far."""
    content = json.dumps({"about": about, "rows": rows, "not_reported": NOT_REPORTED}, indent=2)
    (out / "inference.json").write_text(content + "\n")
    (out / "inference.md").write_text(to_markdown(rows, about))


def earlier_result(path: Path) -> tuple[dict[tuple[str, str], dict[str, Any]], list[str]]:
    """The rows of a file, by way and model, and the command that made it; none without it."""
    if not path.exists():
        return {}, []
    content = json.loads(path.read_text())
    rows = {(row["way"], row["name"]): row for row in content["rows"]}
    return rows, [content["about"]["command"]]


if __name__ == "__main__":
    main()
