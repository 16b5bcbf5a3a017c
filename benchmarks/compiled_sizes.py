"""Compiled steps whose batch size or sequence length changes: predicted beside what they take.

    python benchmarks/compiled_sizes.py [NAME ...]

Each step is trained for three epochs of four updates and a smaller one, and four updates more, in
new processes with an empty cache of Inductor: the first one compiles (cold), the second one finds
its code in the cache (warm). Then it is predicted in a third, with the smaller batch in between.
Compared is the last update: its peak allocated, and the most that was reserved until then.

The result goes to `benchmarks/results/<device>-<date>/` as compiled_sizes.json and
compiled_sizes.md, to those of the same day that are there already.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compiled_cases import CASES, Case
from machine import command, driver, not_reported, results_folder, today
from torch.utils._pytree import tree_map_only
from two_machines import in_new_process

import memcallback as mc
from memcallback.core.units import MiB

NUM_EPOCHS, NUM_UPDATES = 3, 4


@dataclass(frozen=True)
class Change:
    """What is smaller in the batch in between.

    Attributes:
        batch_size: Samples in it; None for as many.
        lengths: The length of the sequences, and that in the smaller batch; None for one length.
    """

    batch_size: int | None = None
    lengths: tuple[int, int] | None = None

    def step(self, case: Case) -> mc.TrainingStep:
        """The step, to be predicted."""
        own, shorter = self.lengths or (None, None)
        return case.step().varied(
            sequence_length=own,
            other_batch_size=self.batch_size,
            other_sequence_length=shorter,
        )

    def smaller(self, batch: Any) -> Any:
        """The smaller batch."""
        own = mc.TrainingStep(torch.nn.Identity(), batch).batch_size.batch_size

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if self.batch_size is not None and tensor.shape[:1] == (own,):
                tensor = tensor[: self.batch_size]
            for dimension, size in enumerate(tensor.shape):
                if self.lengths is not None and dimension and size == self.lengths[0]:
                    tensor = tensor.narrow(dimension, 0, self.lengths[1])
            return tensor.contiguous()

        return tree_map_only(torch.Tensor, cut, batch)

    def __str__(self) -> str:
        samples = "" if self.batch_size is None else f"{self.batch_size} samples"
        return samples if self.lengths is None else f"{samples} of length {self.lengths[1]}".strip()


CHANGES = {
    "perceptron": Change(1000),
    "perceptron, called twice": Change(1000),
    "decoder": Change(5),
    "decoder, bf16": Change(5),
    "decoder, bf16, dynamic": Change(5),
    "decoder, bf16, by layer": Change(5),
    "decoder, bf16, budget 0.5": Change(5),
    "decoder, bf16, flex attention": Change(5),
    "convolutions, bf16": Change(10),
    "resnet18, bf16": Change(5),
    "vit-s16, bf16": Change(5),
    "gpt2, bf16": Change(3),
    "mlp": Change(1000),
    "perceptron, graphs": Change(1000),
    "perceptron, called twice, graphs": Change(1000),
    "convolutions, bf16, graphs": Change(10),
    "decoder, bf16, graphs": Change(5),
    "decoder, bf16, by layer, graphs": Change(5),
    "decoder, bf16, graph breaks, graphs": Change(5),
    "resnet18, bf16, graphs": Change(5),
    "gpt2, bf16, graphs": Change(3),
}
LENGTHS = {
    "decoder, bf16": Change(lengths=(257, 130)),
    "decoder, bf16, graphs": Change(lengths=(257, 130)),
}
STEPS = {f"{name}: {change}": (name, change) for name, change in CHANGES.items()} | {
    f"{name}: {change}": (name, change) for name, change in LENGTHS.items()
}


def measured(case: Case, change: Change) -> dict[str, int]:
    """The peak allocated in the last update of a training, and the most reserved."""
    case.set_up()
    model = case.model().cuda()
    trained = case.compiled(model)
    optimizer = case.optimizer(model.parameters())
    dtype = {"bf16-mixed": torch.bfloat16}.get(case.precision)
    batch = case.batch()
    epoch = [batch] * NUM_UPDATES + [change.smaller(batch)]
    for on_host in epoch * NUM_EPOCHS + [batch] * NUM_UPDATES:
        torch.cuda.reset_peak_memory_stats()
        on_device = tree_map_only(torch.Tensor, torch.Tensor.cuda, on_host)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = case.loss(trained, on_device)
        loss.backward()
        optimizer.step()
        del loss, on_device
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def predicted(case: Case, change: Change, device: str) -> dict[str, int]:
    """What is predicted of the same; beside it what is predicted for one size."""
    case.set_up()
    figures = {}
    for name, one in {"": change, "_of_one_size": Change()}.items():
        prediction = mc.predict(one.step(case), device=device)
        if any("without compilation" in caveat for caveat in prediction.caveats):
            raise RuntimeError(f"not compiled: {prediction.caveats}")
        figures[f"allocated{name}"] = prediction.peak_allocated_bytes
        figures[f"reserved{name}"] = max(step.peak_reserved_bytes or 0 for step in prediction.steps)
    return figures


def do(what: str, name: str, device: str, cache: str) -> dict[str, int]:
    """Figures from a process of its own."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    figures: dict[str, int] = in_new_process(
        __file__, "--do", what, "--device", device, name, env=env
    )
    return figures


def main() -> None:
    """Measure and predict each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help="the steps; all by default")
    parser.add_argument("--do", choices=("measure", "predict"), help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.do:
        name, change = STEPS[given.names[0]]
        figures = (
            measured(CASES[name], change)
            if given.do == "measure"
            else predicted(CASES[name], change, given.device)
        )
        print(json.dumps(figures))
        return
    device = torch.cuda.get_device_name()
    path = results_folder(device) / "compiled_sizes.json"
    before = json.loads(path.read_text()) if path.exists() else {"steps": {}, "problems": {}}
    rows, problems = before["steps"], before["problems"]
    about = {
        "device": device,
        "driver": driver(),
        "versions": f"Python {sys.version.split()[0]}, torch {torch.__version__}",
        "date": today(),
        "command": "python benchmarks/compiled_sizes.py, in several runs with names"
        if rows
        else command(),
    }
    for name in given.names or STEPS:
        problems.pop(name, None)
        try:
            with tempfile.TemporaryDirectory() as cache:
                rows[name] = {
                    way: do("measure", name, device, cache) for way in ("cold", "warm")
                } | {"predicted": do("predict", name, device, cache)}
        except RuntimeError as problem:
            problems[name] = str(problem)
        print(name, rows.get(name) or problems[name], flush=True)
        write(path, about, rows, problems)


def write(
    path: Path,
    about: dict[str, str],
    rows: dict[str, dict[str, dict[str, int]]],
    problems: dict[str, str],
) -> None:
    """Write the result; after each step, as all of them take a while."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "steps": rows, "problems": problems}, indent=1) + "\n")
    lines = ["# Compiled steps whose batches change their size", ""]
    lines += [*(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += [
        "Bytes: peak allocated in the last update / most reserved until then. Cold: in the "
        "process that compiled. Warm: in one that found its code in Inductor's cache. One size: "
        "the same step predicted without the smaller batch, and how far that is off.",
        "",
    ]
    if rows:
        lines += [summary(rows), ""]
    lines += [
        "| step: smaller batch | predicted | warm | off | cold | one size | off |",
        "|:---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in rows.items():
        told, warm, cold = (
            f"{row[way]['allocated']:,} / {row[way]['reserved']:,}"
            for way in ("predicted", "warm", "cold")
        )
        one = " / ".join(f"{row['predicted'][f'{what}_of_one_size']:,}" for what in _WHAT)
        off, off_of_one = (
            " / ".join(f"{100 * error(row, what, kind):+.2f} %" for what in _WHAT)
            for kind in ("", "_of_one_size")
        )
        lines.append(f"| {name} | {told} | {warm} | {off} | {cold} | {one} | {off_of_one} |")
    if problems:
        lines += ["", "Not predicted as compiled, or not trained:", ""]
        lines += [f"- {name}: {problem}" for name, problem in problems.items()]
    left = [name for name in STEPS if name not in rows and name not in problems]
    if left:
        lines += ["", f"Not run: {'; '.join(left)}."]
    lines += not_reported(["The updates before the last one."])
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


_WHAT = ("allocated", "reserved")


def error(row: dict[str, dict[str, int]], what: str, kind: str = "") -> float:
    """How far a prediction is off, as a share of what the warm process needed."""
    return row["predicted"][what + kind] / row["warm"][what] - 1


def summary(rows: dict[str, dict[str, dict[str, int]]]) -> str:
    """How many steps are exact, with the smaller batch in between and without it."""
    sentences = []
    for text, kind in (("With the smaller batch", ""), ("As one size", "_of_one_size")):
        parts = []
        for what in _WHAT:
            errors = [error(row, what, kind) for row in rows.values()]
            parts.append(
                f"{what} {sum(not each for each in errors)} exact, from {100 * min(errors):+.2f} "
                f"to {100 * max(errors):+.2f} %"
            )
        sentences.append(f"{text}: {'; '.join(parts)}.")
    most = max(row["cold"]["reserved"] - row["predicted"]["reserved"] for row in rows.values())
    return (
        f"{len(rows)} steps, compared with the warm process. {' '.join(sentences)} The cold "
        f"process reserved at most {most / MiB:.0f} MiB more than predicted."
    )


if __name__ == "__main__":
    main()
