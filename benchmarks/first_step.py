"""How long a training takes to the end of its first step, with memcallback and without.

    python benchmarks/first_step.py [--device cuda]

Each run is a process of its own, from its start on: imports, model, first step. Runs with and
without take turns; the figure is the median over the rounds of the quotient of neighbouring runs.
Python may keep the bytecode of memcallback, as pip does for every package that it installs.
The prediction runs beside the training, which does not wait for it.

The result goes to `benchmarks/results/<device>-<date>/` as JSON and Markdown.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from machine import (
    command,
    driver,
    is_virtual,
    not_reported,
    processor,
    results_folder,
    today,
)

NOT_REPORTED = ("Later steps while the prediction runs.", "When the prediction arrives.")


class _FirstStepIsOver(BaseException):
    pass


def seconds_since_start() -> float:
    """Seconds since this process was started."""
    import time

    return time.time() - float(psutil.Process().create_time())


def in_lightning(device: str, *, is_watched: bool) -> float:
    """A transformer of 20 million parameters in Lightning's Trainer."""
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seconds: list[float] = []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layer = torch.nn.TransformerEncoderLayer(512, 8, batch_first=True)
            self.encoder = torch.nn.TransformerEncoder(layer, 6)
            self.head = torch.nn.Linear(512, 10)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            inputs, targets = batch
            outputs = self.head(self.encoder(inputs).mean(1))
            return torch.nn.functional.cross_entropy(outputs, targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class Clock(Callback):
        def on_train_batch_end(self, *_: object) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(seconds_since_start())
            raise _FirstStepIsOver

    data = TensorDataset(torch.randn(64, 128, 512), torch.zeros(64, dtype=torch.long))
    callbacks: list[Callback] = [Clock()]
    if is_watched:
        from memcallback import MemoryCallback

        callbacks.insert(0, MemoryCallback())
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=1,
            max_steps=2,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        with suppress(_FirstStepIsOver):
            trainer.fit(Module(), DataLoader(data, batch_size=16))
    return seconds[0]


def of_seven_billion(device: str, *, is_watched: bool) -> float:
    """A loop of one's own with a model of 7 billion parameters on the meta device."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in range(4))
            self.gate, self.up = (nn.Linear(4096, 11008, bias=False) for _ in range(2))
            self.down = nn.Linear(11008, 4096, bias=False)
            self.norms = nn.ModuleList(nn.RMSNorm(4096) for _ in range(2))

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            query, key, value, out = self.attention
            normed = self.norms[0](states)
            q, k, v = (
                layer(normed).unflatten(2, (32, 128)).transpose(1, 2)
                for layer in (query, key, value)
            )
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            states = states + out(mixed.transpose(1, 2).flatten(2))
            normed = self.norms[1](states)
            outputs: torch.Tensor = states + self.down(
                nn.functional.silu(self.gate(normed)) * self.up(normed)
            )
            return outputs

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32000, 4096)
            self.blocks = nn.Sequential(*(Block() for _ in range(32)))
            self.head = nn.Linear(4096, 32000, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.head(self.blocks(self.embedding(tokens)))
            return outputs

    with torch.device("meta"):
        model = Model().bfloat16()
        tokens = torch.zeros(1, 2048, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    def train() -> float:
        loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        return seconds_since_start()

    if not is_watched:
        return train()
    from memcallback import MemoryLog, MemoryRecorder, TrainingStep

    recorder = MemoryRecorder(model, optimizer, device="cpu")
    step = TrainingStep(model, tokens, loss=loss, optimizer=optimizer)
    recorder.watch()
    with tempfile.TemporaryDirectory() as folder:
        MemoryLog(recorder, step, log_dir=folder)
        return train()


CASES: dict[str, Callable[..., float]] = {
    "20 million parameters in Lightning": in_lightning,
    "7 billion parameters on the meta device": of_seven_billion,
}


def run(case: str, device: str, *, is_watched: bool) -> float:
    """Run a program in a process of its own; return its seconds to the end of the first step."""
    arguments = [sys.executable, __file__, "--run", case, "--device", device]
    arguments += ["--watched"] if is_watched else []
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout.strip().splitlines()[-1])


def measure(case: str, device: str, num_rounds: int) -> dict[str, Any]:
    """The medians of a case, and the quotients of neighbouring runs."""
    run(case, device, is_watched=True)  # what a first run compiles and caches
    pairs = [
        (run(case, device, is_watched=False), run(case, device, is_watched=True))
        for _ in range(num_rounds)
    ]
    quotients = sorted(watched / alone for alone, watched in pairs)
    return {
        "case": case,
        "without_s": statistics.median(alone for alone, _ in pairs),
        "with_s": statistics.median(watched for _, watched in pairs),
        "ratio": statistics.median(quotients),
        "ratios": quotients,
    }


def to_markdown(rows: list[dict[str, Any]], about: dict[str, str]) -> str:
    """The page beside the JSON file."""
    lines = ["# Time to the end of the first step", ""]
    lines += [f"- {name}: {text}" for name, text in about.items()]
    lines += [
        "",
        "| program | without, s | with, s | ratio, median | of all rounds |",
        "|:---|---:|---:|---:|---:|",
    ]
    for row in rows:
        ratios = row["ratios"]
        lines.append(
            f"| {row['case']} | {row['without_s']:.2f} | {row['with_s']:.2f} | {row['ratio']:.3f} "
            f"| {min(ratios):.2f} to {max(ratios):.2f} |"
        )
    lines += not_reported(NOT_REPORTED)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the results, or run one program."""
    parser = argparse.ArgumentParser(description="Measure the time to the first step.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="the folder for first_step.json and .md")
    parser.add_argument("--run", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        warnings.simplefilter("ignore")
        print(CASES[options.run](options.device, is_watched=options.watched), flush=True)
        os._exit(0)  # the first step is over; what comes after it is not measured
    rows = [measure(case, options.device, options.rounds) for case in CASES]
    device = "cpu"
    if options.device == "cuda":
        import torch

        device = torch.cuda.get_device_name()
    about = {
        "device": device + (" (virtual device)" if is_virtual() else ""),
        "driver": driver(),
        "processor": processor(),
        "versions": f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning")),
        "date": today(),
        "command": command(),
        "rounds": str(options.rounds),
    }
    out = options.out or results_folder(device)
    out.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"about": about, "rows": rows, "not_reported": NOT_REPORTED}, indent=2)
    (out / "first_step.json").write_text(content + "\n")
    text = to_markdown(rows, about)
    (out / "first_step.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
