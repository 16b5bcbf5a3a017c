"""Predictions beside what others measured on real GPUs and published.

    pip install torch==2.11.0 torchvision timm transformers einops peft diffusers
    python benchmarks/real_gpus.py [--only SOURCE ...] [--histories FOLDER]

No GPU is needed. `benchmarks/published/` has the measurements with their sources. A program with
many batch sizes is traced at three and replayed for each of them and for each card; one with few is
traced at each. With `--only` the other sources' rows of the same day stay; with `--resume` so do
those of the same source that are there. The result then names the earlier commands too. Rows are
written as they come. The histories of six recorded steps are other people's data and are compared
where their folder is given. The result goes to `benchmarks/results/real-gpus-<date>/` as JSON and
Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import re
import statistics
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from machine import RESULTS, command, not_reported, processor, today
from published import fine_tuning, image_fine_tuning, operators, steps
from published.reasons import is_off, reason_of
from published.steps import cases, program

import memcallback as mc
from memcallback.core.validation import DEFAULT_HEADROOM
from memcallback.devices.catalogue import (
    EAGER_CONTEXT_BYTES,
    DeviceSpec,
    find_device,
)
from memcallback.prediction.apart import predict_apart
from memcallback.prediction.predict_here import predict_here, predict_once
from memcallback.prediction.search import budget

NOT_REPORTED = (
    "Why nvidia-smi shows more than the context and the reserved memory: libraries load kernels "
    "when they first need them.",
)
TRUST = (
    "Trust: A, the program was published whole; B, a part of it was inferred; C, a part is a guess."
)
#: With fewer batch sizes than this a program is traced at each.
_FEW_SIZES = 3
#: The day when PyTorch 2.9 came out; cases with a date do not say which version ran.
PYTORCH_2_9 = "2025-10-15"
#: Such a case gets the workspaces of one of these.
_BEFORE_2_9, _FROM_2_9 = (2, 8), (2, 11)
#: The name of a card in a case -> the card.
_CARDS = {
    "A100-40GB": "NVIDIA A100-SXM4-40GB",
    "A100 80GB": "NVIDIA A100-SXM4-80GB",
    "V100-SXM2-16GB": "Tesla V100-SXM2-16GB",
}
#: The start of a source -> what it is called, and what could not be built as it was.
SOURCES = {
    "huggingface.co": (
        "optimum-benchmark",
        "the models of transformers are today's; AMD's libraries differ",
    ),
    "xMem": ("xMem", "nvidia-smi counts kernels that libraries load"),
    "itu-rad": (
        "GPUMemNet",
        "nvidia-smi once a second; cuDNN's version is not known; a validation pass ran, too",
    ),
    "huggingface/transformers": (
        "Hugging Face's guide",
        "PyTorch 1.10; the batches of the Trainer",
    ),
    "github": ("ColossalAI", "the batch size is inferred"),
    "zhuang-group": ("Mesa", "precision and attention are assumed"),
    "timm": (
        "timm",
        "backward ran under autocast, and cudnn.benchmark chose algorithms of cuDNN 8.3",
    ),
    "linkedin": ("Liger-Kernel", "single operators; PyTorch's version was not recorded"),
    "Lightning-AI": ("litgpt", ""),
    "pytorch/torchtune": ("torchtune", ""),
    "huggingface/peft@5d602fd method_comparison/image-gen": (
        "PEFT, images",
        "the 100 updates before the first evaluation; versions of diffusers and PEFT",
    ),
    "huggingface/peft": (
        "PEFT",
        "the length of the longest batch was taken from one run; evaluation is not predicted",
    ),
}


def all_cases() -> list[dict[str, Any]]:
    """Steps, single operators and runs."""
    return [*cases(), *operators.operators(), *fine_tuning.runs(), *image_fine_tuning.runs()]


def module_of(case: dict[str, Any]) -> Any:
    """The module that builds a case's step."""
    if "operator" in case:
        return operators
    if "peft_config" not in case:
        return steps
    return image_fine_tuning if "image-gen" in case["id"] else fine_tuning


def source_of(case: dict[str, Any]) -> str:
    """The short name of a case's source."""
    return next(name for start, (name, _) in SOURCES.items() if case["source"].startswith(start))


def card_of(case: dict[str, Any]) -> DeviceSpec:
    """The card; one with the allocator's own limit, where a case sets one."""
    name = case["gpu"].split(" (")[0].removeprefix("NVIDIA ")
    if "A10G" in name:
        name = "A10G"
    if "MI2" in name:
        name = "MI250"
    card = find_device(_CARDS["A100 80GB"] if "unknown" in name else _CARDS.get(name, name))
    assert isinstance(card, DeviceSpec)
    card = replace(card, torch_version=torch_version_of(case))
    cap_bytes = case.get("cap_bytes")
    if cap_bytes:
        return replace(card, capacity_bytes=cap_bytes, context_bytes=0)
    if case["source"].startswith("timm"):
        # CUDA 11.3 loads all kernels at once. The capacity is what CUDA gives of the card.
        return replace(card, capacity_bytes=case["gpu_bytes"], context_bytes=EAGER_CONTEXT_BYTES)
    return card


def torch_version_of(case: dict[str, Any]) -> tuple[int, int]:
    """The PyTorch that ran; where only the day is known, 2.8 before 2.9 came out, else 2.11."""
    if named := re.match(r"~?(\d+)\.(\d+)", case.get("torch", "")):
        return int(named[1]), int(named[2])
    return _FROM_2_9 if case.get("date", "") >= PYTORCH_2_9 else _BEFORE_2_9


def would_be_suggested(prediction: mc.Prediction) -> bool:
    """Whether a suggestion may be this batch size: no retry, and enough is kept free."""
    device = prediction.device
    assert isinstance(device, DeviceSpec)
    budget_bytes = budget(
        device.capacity_bytes, DEFAULT_HEADROOM, device.outside_bytes, device.most_outside_bytes
    )
    peak_bytes = prediction.run_peak_reserved_bytes or 0
    return prediction.fits_without_retry and peak_bytes <= budget_bytes


def predicted(case: dict[str, Any], prediction: mc.Prediction) -> dict[str, Any]:
    """What the prediction says of what the case measured."""
    measured, value = case["measured"], case["value"]
    if measured in ("fits", "oom"):
        does_fit = measured == "fits"
        named = find_device(prediction.device.name) if "cap_bytes" not in case else None
        as_named = prediction if named is None else prediction.on(named)
        return {
            "predicted": "fits" if prediction.fits else "oom",
            "is_right": prediction.fits == does_fit,
            "is_right_as_named": as_named.fits == does_fit,
            "is_unsafe": not does_fit and would_be_suggested(as_named),
        }
    run_reserved_bytes = prediction.run_peak_reserved_bytes or 0
    if module_of(case) is image_fine_tuning:
        run_reserved_bytes = image_fine_tuning.peak_reserved_bytes(prediction)
    by_measure = {
        "peak_allocated": prediction.peak_allocated_bytes,
        "peak_reserved": run_reserved_bytes,
        "allocated_after_forward": prediction.step.phases[mc.Phase.FORWARD].end.allocated_bytes,
        "nvidia_smi_used": run_reserved_bytes + case.get("baseline_bytes", 0),
    }
    predicted_bytes = by_measure[measured]
    assert predicted_bytes is not None
    if "peft_config" in case:
        predicted_bytes -= fine_tuning.RESERVED_BEFORE_BYTES
    if case["id"].startswith("colossal-") and measured == "peak_allocated":
        start = prediction.warm_up.phases[mc.Phase.FORWARD].start.by_category or {}
        predicted_bytes -= start[mc.Category.PARAMETER] + start[mc.Category.BUFFER]
    return {"predicted": predicted_bytes, "error": predicted_bytes / value - 1}


def traced(group: list[dict[str, Any]]) -> dict[int, mc.Prediction]:
    """The predictions of a program at its batch sizes, by batch size."""
    step: mc.TrainingStep | mc.InferenceStep = module_of(group[0]).step_of(group[0])
    card = card_of(group[0])
    sizes = sorted({case["batch"] for case in group})

    def work(progress: Callable[[int, int], None]) -> dict[int, mc.Prediction]:
        if len(sizes) < _FEW_SIZES:
            return {size: predict_once(step, device=card, batch_size=size) for size in sizes}
        prediction = predict_here(step, device=card, progress=progress)
        return {size: prediction.at(size) for size in sizes}

    return predict_apart(work, timeout_s=3600, progress=lambda done, of_all: None)


def compare(only: set[str], known: set[str]) -> Iterator[list[dict[str, Any]]]:
    """Each case that is not known yet beside its prediction, by program."""
    programs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for case in all_cases():
        if (only and source_of(case) not in only) or case["id"] in known:
            continue
        built_by = module_of(case)
        if reason := built_by.reason_left_out(case):
            yield [{**case, "left_out": reason}]
        else:
            programs[program(case) if built_by is steps else case["id"]].append(case)
    for number, group in enumerate(programs.values(), 1):
        start = time.perf_counter()
        print(f"{number}/{len(programs)}", group[0]["id"], end=" ", file=sys.stderr, flush=True)
        try:
            predictions = traced(group)
        except mc.PredictionError as error:
            yield [{**case, "left_out": f"cannot be predicted: {error}"} for case in group]
            continue
        rows = []
        for case in group:
            card, at_size = card_of(case), predictions[case["batch"]]
            at_case = at_size if card == at_size.device else at_size.on(card)
            rows.append({**case, **predicted(case, at_case)})
        yield rows
        print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


def programs_of(rows: list[dict[str, Any]]) -> set[str]:
    """The programs of some rows; of timm each has one or two steps of its ladder."""
    return {program(row) for row in rows}


def to_markdown(rows: list[dict[str, Any]], histories: list[dict[str, Any]], about: Any) -> str:
    """The page beside the JSON file."""
    lines = ["# Predictions beside published measurements of real GPUs", ""]
    lines += [f"- {name}: {text}" for name, text in about.items()]
    if histories:
        lines += ["", "Steady steps recorded on real cards, 3.4 billion parameters:", ""]
        lines += [
            "| step | card | PyTorch | peak allocated | peak reserved | requests of equal size |",
            "|:---|:---|:---|---:|---:|---:|",
        ]
        for row in histories:
            (allocated, real), (reserved, real_reserved) = (
                row["allocated_bytes"],
                row["reserved_bytes"],
            )
            lines.append(
                f"| {row['name']} | {row['card']} | {row['torch']} | {allocated / real - 1:+.4%} "
                f"| {reserved / real_reserved - 1:+.3%} | {row['num_same_requests']:,} of "
                f"{row['num_requests'][1]:,} |"
            )
    compared = [row for row in rows if "left_out" not in row]
    by_source: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in compared:
        by_source[source_of(row)].append(row)
    lines += ["", TRUST, "", "Bytes:", ""]
    lines += [
        "| source | trust | what | cases | median error | from | to | what differs |",
        "|:---|:---|:---|---:|---:|---:|---:|:---|",
    ]
    notes = dict(SOURCES.values())
    for source, of_source in by_source.items():
        kinds = sorted({(row["trust"], row["measured"]) for row in of_source if "error" in row})
        for trust, measured in kinds:
            errors = [
                row["error"]
                for row in of_source
                if (row["trust"], row["measured"]) == (trust, measured)
            ]
            lines.append(
                f"| {source} | {trust} | {measured.replace('_', ' ')} | {len(errors)} "
                f"| {statistics.median(map(abs, errors)):.2%} | {min(errors):+.2%} "
                f"| {max(errors):+.2%} | {notes[source]} |"
            )
    lines += ["", "Whether it fits:", ""]
    lines += [
        "| source | cases | right | predicted to fit, ran out | predicted to run out, fits "
        "| programs whose every row is right | right by the card's name alone "
        "| suggested sizes that ran out |",
        "|:---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for source, of_source in by_source.items():
        sides = [row for row in of_source if "is_right" in row]
        wrong = [row for row in sides if not row["is_right"]]
        if sides:
            lines.append(
                f"| {source} | {len(sides)} | {len(sides) - len(wrong)} "
                f"| {sum(row['measured'] == 'oom' for row in wrong)} "
                f"| {sum(row['measured'] == 'fits' for row in wrong)} "
                f"| {len(programs_of(sides) - programs_of(wrong))} of {len(programs_of(sides))} "
                f"| {sum(row['is_right_as_named'] for row in sides)} "
                f"| {sum(row['is_unsafe'] for row in sides)} |"
            )
    lines += rows_that_are_off(compared)
    lines += ["", "Left out:", ""]
    lines += [f"- {row['id']}: {row['left_out']}" for row in rows if "left_out" in row]
    lines += [
        "",
        "Each case:",
        "",
        "| case | measured | predicted | error |",
        "|:---|---:|---:|---:|",
    ]
    for row in compared:
        if "error" in row:
            lines.append(
                f"| {row['id']} | {mc.format_bytes(int(row['value']))} "
                f"| {mc.format_bytes(row['predicted'])} | {row['error']:+.2%} |"
            )
        else:
            side = "" if row["is_right"] else "wrong side"
            lines.append(f"| {row['id']} | {row['measured']} | {row['predicted']} | {side} |")
    lines += not_reported(NOT_REPORTED)
    return "\n".join(lines) + "\n"


def rows_that_are_off(compared: list[dict[str, Any]]) -> list[str]:
    """Each row that is off, and why, as a table."""
    off = [(row, reason_of(row)) for row in compared if is_off(row)]
    counts = Counter(reason.whose for _, reason in off)
    lines = [
        "",
        f"Off are {len(off)} of {len(compared)} rows: peaks of the allocator by more than 0.5 %, "
        "single operators by more than 0.0001 %, nvidia-smi by more than 2.6 % (so far apart are "
        "xMem's own repeats), and the wrong side. Whose: "
        + ", ".join(f"{whose} {counts[whose]}" for whose in ("ours", "unknowable"))
        + ".",
        "",
        "| case | error | whose | why |",
        "|:---|---:|:---|:---|",
    ]
    for row, reason in off:
        error = f"{row['error']:+.2%}" if "error" in row else "wrong side"
        lines.append(f"| {row['id']} | {error} | {reason.whose} | {reason.text} |")
    return lines


def main() -> None:
    """Compare and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [name for name, _ in SOURCES.values()]
    parser.add_argument("--only", nargs="+", choices=names, default=[], metavar="SOURCE")
    parser.add_argument("--resume", action="store_true", help="keep what is there")
    parser.add_argument("--histories", type=Path, help="the folder of recorded histories")
    parser.add_argument("--out", type=Path, help="the folder for real_gpus.json and .md")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    out = options.out or RESULTS / f"real-gpus-{today()}"
    out.mkdir(parents=True, exist_ok=True)
    file = out / "real_gpus.json"
    before = json.loads(file.read_text()) if file.is_file() else {"rows": [], "histories": []}
    histories = before["histories"]
    is_added = options.only or options.resume or (histories and not options.histories)
    commands = [before["about"]["command"]] if is_added and "about" in before else []
    if options.histories:
        from published import histories as recorded

        histories = list(recorded.compare(options.histories))
    about = {
        "predicted on": f"{processor()}, no GPU",
        "versions": f"Python {platform.python_version()}, "
        + ", ".join(
            f"{name} {version(name)}"
            for name in ("torch", "torchvision", "timm", "transformers", "peft", "diffusers")
        ),
        "date": today(),
        "command": ", then ".join([*commands, command()]),
    }
    rows = {row["id"]: row for row in before["rows"]}
    known = (
        {name for name, row in rows.items() if "left_out" not in row} if options.resume else set()
    )
    for new in itertools.chain([[]], compare(set(options.only), known)):
        rows |= {row["id"]: row for row in new}
        content = {
            "about": about,
            "rows": [rows[case["id"]] for case in all_cases() if case["id"] in rows],
            "histories": histories,
            "not_reported": NOT_REPORTED,
        }
        file.write_text(json.dumps(content, indent=1) + "\n")
        (out / "real_gpus.md").write_text(to_markdown(content["rows"], histories, about))


if __name__ == "__main__":
    main()
