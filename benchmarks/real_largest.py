"""The largest batch of programs of other libraries: what is suggested trains, one more does not.

    python benchmarks/real_largest.py [--arch h200 rtx3090] [--only NAME ...]     # virtual devices
    python benchmarks/real_largest.py --compiled --arch h200         # the same of compiled steps

Each card has 12 GiB and the architecture named. The step is predicted there, and so for the size
alone (`device="12GiB"`), where the advice is the smaller of two architectures. Then it is trained
for six updates without memcallback, in processes of their own: with the suggested batch, with the
limit without a retry, with the limit, and with one sample more.

A compiled step is trained twice with each size, in processes that share a cache of Inductor. The
figures are those of the second, which is what is predicted; of the first, which compiles, is said
whether it trains too. Each size of it is traced, so its limits are those without a retry. The next
size that was traced, at most 1 part in 64 above, has to need a retry or more memory than there is.

The result goes to `benchmarks/results/virtual-cards-<date>/` as JSON and Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from machine import RESULTS, command, driver, not_reported, processor, today
from programs import Program
from real_programs import measure, step_of

NAMES = (
    "distillation",
    "llama_8bit_adam",
    "llama_lora",
    "llama_qlora",
    "monai_unet",
    "resnet_average",
    "schedulefree_vit",
    "swin",
    "t5_mask",
    "whisper",
)
#: Of the steps in compiled_cases.py.
COMPILED = (
    "perceptron",
    "perceptron, graphs",
    "convolutions, bf16",
    "decoder, bf16",
    "decoder, bf16, by layer",
    "vae",
)
ARCHITECTURES = ("h200", "rtx3090")
CAPACITY = "12GiB"
CAPACITY_BYTES = 12 << 30
NOT_REPORTED = (
    "Sizes between the suggestion and the limits: they were not run.",
    "Sizes further above the limit, of which some may train again.",
)


def program_of(name: str) -> Program:
    """A program of a library, or a compiled step."""
    if name in COMPILED:
        from compiled_cases import CASES

        case = CASES[name]
        return Program(
            case.compiled(case.model()),
            case.batch(),
            case.loss,
            (),
            case.optimizer,
            case.precision,
        )
    program: Program = import_module(f"programs.{name}").make()
    return program


def suggest(name: str) -> dict[str, Any]:
    """What is suggested for a program on the device here, and for its size alone."""
    import memcallback as mc

    program = program_of(name)
    program.model.train()
    step = step_of(program)
    advice = mc.suggest_batch_size(step, device="cuda")
    by_size = mc.suggest_batch_size(step, device=CAPACITY)
    limit, without_retry = advice.limit, advice.limit_without_retry
    above = None if limit is None else limit + 1
    if limit is None:
        # Each size was traced, which finds the largest with so much kept free, and a size above it
        # that does not fit.
        traced = mc.suggest_batch_size(step, device="cuda", headroom=0)
        limit = without_retry = traced.largest
        above = min((size for size, _ in traced.curve if size > limit), default=limit + 1)
    return {
        "current": advice.current_batch_size,
        "suggested": advice.batch_size,
        "fits": advice.largest,
        "limit_without_retry": without_retry,
        "limit": limit,
        "above": above,
        "by_size": by_size.largest,
        "by_size_architecture": by_size.architecture_of,
    }


def train(name: str, size: int) -> dict[str, Any]:
    """Train a program with batches of a size."""
    import torch
    from torch.utils._pytree import tree_leaves, tree_map_only

    program = program_of(name)
    program.model.train()
    current = len(tree_leaves(program.batch)[0])

    def sized(tensor: torch.Tensor) -> torch.Tensor:
        """The batch's samples, again and again."""
        return tensor[torch.arange(size) % current] if len(tensor) == current else tensor

    program.batch = tree_map_only(torch.Tensor, sized, program.batch)
    try:
        measure(program)
    except torch.OutOfMemoryError:
        return {"size": size, "trains": False, "num_retries": None}
    num_retries = torch.cuda.memory_stats()["num_alloc_retries"]
    return {"size": size, "trains": True, "num_retries": num_retries}


def in_its_own_process(arch: str, *arguments: str, cache: str | None = None) -> dict[str, Any]:
    """What this file prints with these arguments, on a card of that architecture."""
    card = {"VGPU_ARCH": arch, "VGPU_TOTAL_BYTES": str(CAPACITY_BYTES)}
    of_inductor = {"TORCHINDUCTOR_CACHE_DIR": cache} if cache else {}
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=os.environ | card | of_inductor,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(arguments)} on {arch} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def trained(name: str, arch: str, size: int) -> dict[str, Any]:
    """What trains, with compiled code as it is found in a cache."""
    arguments = ("--train", name, "--size", str(size))
    if name not in COMPILED:
        return in_its_own_process(arch, *arguments)
    with tempfile.TemporaryDirectory() as cache:
        cold = in_its_own_process(arch, *arguments, cache=cache)
        return in_its_own_process(arch, *arguments, cache=cache) | {"cold_trains": cold["trains"]}


def row_of(name: str, arch: str) -> dict[str, Any]:
    """The advice for a program, and what trains."""
    row = in_its_own_process(arch, "--suggest", name)
    tried = {
        size: trained(name, arch, size)
        for size in dict.fromkeys(
            (row["suggested"], row["limit_without_retry"], row["limit"], row["above"])
        )
    }
    return {"name": name, "arch": arch, **row, "tried": list(tried.values())}


def is_right(row: dict[str, Any]) -> bool:
    """Whether what is said to fit trains, without a retry where that is said, and more does not."""
    tried = {one["size"]: one for one in row["tried"]}
    clean = (row["suggested"], row["limit_without_retry"])
    above = tried[row["above"]]
    return (
        all(tried[size]["trains"] and not tried[size]["num_retries"] for size in clean)
        and tried[row["limit"]]["trains"]
        and not (above["trains"] and (row["name"] not in COMPILED or not above["num_retries"]))
    )


def to_markdown(rows: list[dict[str, Any]], about: dict[str, str]) -> str:
    """The page beside the JSON file."""
    num_right = sum(is_right(row) for row in rows)
    num_safe = sum(row["by_size"] <= row["limit_without_retry"] for row in rows)
    suggested = [one for row in rows for one in row["tried"] if one["size"] == row["suggested"]]
    cold = [one["cold_trains"] for one in suggested if "cold_trains" in one]
    lines = [
        f"# The largest batch of {'compiled steps' if cold else 'programs of other libraries'}",
        "",
        f"Of {len(rows)} pairs of a program and a card of {CAPACITY}, {num_right} are right: "
        + (
            "the suggestion and the limit train without a retry, and the next size that was "
            "traced does not. "
            if cold
            else "the suggestion and the limit without a retry train without a retry, the limit "
            "trains, and one sample more runs out of memory. "
        )
        + f"If only the size of the card is given (device='{CAPACITY}'), the predicted largest "
        f"batch is at most the limit without a retry in {num_safe} pairs.",
        "",
    ]
    if cold:
        lines += [
            f"Of the {len(cold)} suggested sizes {sum(cold)} train in the process that compiles, "
            "too. All other figures are of processes that found their code in Inductor's cache.",
            "",
        ]
    lines += [f"- {name}: {text}" for name, text in about.items()]
    lines += [
        "",
        "| program | architecture | suggested | limit without a retry | limit | above | for the "
        "size alone |",
        "|:---|:---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        tried = {one["size"]: one for one in row["tried"]}

        def said(size: int, tried: dict[int, dict[str, Any]] = tried) -> str:
            one = tried[size]
            if not one["trains"]:
                return f"{size:,} (runs out of memory)"
            return f"{size:,} (trains{_retried(one['num_retries'])})"

        sizes = ("suggested", "limit_without_retry", "limit", "above")
        cells = [row["name"], row["arch"], *(said(row[one]) for one in sizes)]
        lines.append(f"| {' | '.join(cells)} | {row['by_size']:,} |")
    if odd := [row["name"] for row in rows if row["limit"] < row["suggested"]]:
        lines += [
            "",
            "A limit is below the first size that is known to need a retry. Larger sizes may train "
            f"without one again, as the suggestion does here: {', '.join(odd)}.",
        ]
    left = set(COMPILED if cold else NAMES) - {row["name"] for row in rows}
    if left:
        lines += ["", f"Not run: {'; '.join(sorted(left))}."]
    lines += not_reported(NOT_REPORTED)
    return "\n".join(lines) + "\n"


def _retried(num_retries: int) -> str:
    """How many retries a training had; nothing for none."""
    if not num_retries:
        return ""
    return ", 1 retry" if num_retries == 1 else f", {num_retries} retries"


def main() -> None:
    """Suggest and train all programs and write the results, or one."""
    parser = argparse.ArgumentParser(description="The largest batch of programs of libraries.")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--compiled", action="store_true", help="compiled steps, not programs")
    parser.add_argument("--arch", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES)
    parser.add_argument("--out", type=Path, help="the folder for the JSON and Markdown files")
    parser.add_argument("--suggest", choices=NAMES + COMPILED, help=argparse.SUPPRESS)
    parser.add_argument("--train", choices=NAMES + COMPILED, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.suggest or options.train:
        result = suggest(options.suggest) if options.suggest else train(options.train, options.size)
        print(json.dumps(result), flush=True)
        return
    known = COMPILED if options.compiled else NAMES
    if unknown := set(options.only or ()) - set(known):
        parser.error(f"--only has {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    about = {
        "device": f"virtual cards of {CAPACITY}",
        "driver": driver(),
        "processor": processor(),
        "versions": f"Python {platform.python_version()}, torch {version('torch')}",
        "date": today(),
        "command": command(),
    }
    out = options.out or RESULTS / f"virtual-cards-{today()}"
    out.mkdir(parents=True, exist_ok=True)
    stem = "largest_compiled" if options.compiled else "largest"
    rows: list[dict[str, Any]] = []
    for arch in options.arch:
        for name in options.only or known:
            rows.append(row_of(name, arch))
            print(arch, name, rows[-1], flush=True)
            # What there is stays if time runs out.
            content = {"about": about, "rows": rows, "not_reported": NOT_REPORTED}
            (out / f"{stem}.json").write_text(json.dumps(content, indent=2) + "\n")
            (out / f"{stem}.md").write_text(to_markdown(rows, about))


if __name__ == "__main__":
    main()
