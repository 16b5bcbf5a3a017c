"""Compiled steps: what is predicted of them beside what they take on the device.

    python benchmarks/compiled.py [NAME ...]

Each step is trained twice in new processes with an empty cache of Inductor: the first one compiles
(cold), the second one finds its code in the cache (warm). Then it is predicted in a third. Compared
is the fourth update: its peak allocated, and what is reserved at the end of it.

The result goes to `benchmarks/results/<device>-<date>/` as compiled.json and compiled.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from machine import command, driver, not_reported, results_folder, today
from torch import nn
from torch.nn import functional as F

import memcallback as mc

NUM_UPDATES = 4


class Block(nn.Module):
    """A block of a decoder."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and a perceptron."""
        parts = self.project(self.norm(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=0.1)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        x = x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))
        return x


class Decoder(nn.Module):
    """A decoder of three blocks, with a graph break after each if asked for."""

    def __init__(self, *, breaks: bool = False, width: int = 384, words: int = 5000) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.layers = nn.ModuleList(Block(width, 6) for _ in range(3))
        self.norm, self.breaks = nn.LayerNorm(width), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the next words."""
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
            if self.breaks:
                torch._dynamo.graph_break()
        scores: torch.Tensor = self.head(self.norm(hidden))
        return scores


class Residual(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the classes."""
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        scores: torch.Tensor = self.head(x.mean((2, 3)))
        return scores


def perceptron() -> nn.Module:
    """A perceptron."""
    return nn.Sequential(
        nn.Linear(1024, 4096), nn.GELU(), nn.LayerNorm(4096), nn.Linear(4096, 1024)
    )


def squares(model: Any, batch: torch.Tensor) -> Any:
    """A loss of any output."""
    return model(batch).float().square().mean()


def next_word(model: Any, batch: torch.Tensor) -> Any:
    """A loss of a decoder."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def compile_layers(model: Any) -> Any:
    """Compile each layer by itself."""
    for layer in model.layers:
        layer.compile()
    return model


def _images() -> torch.Tensor:
    return torch.zeros(16, 3, 64, 64)


def _rows() -> torch.Tensor:
    return torch.zeros(4096, 1024)


def _words() -> torch.Tensor:
    return torch.zeros(8, 257, dtype=torch.long)


#: Name -> model, batch, loss, precision, and how it is compiled.
CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any, str, Callable[[Any], Any]]] = {
    "perceptron": (perceptron, _rows, squares, "32-true", torch.compile),
    "perceptron, bf16": (perceptron, _rows, squares, "bf16-mixed", torch.compile),
    "convolutions": (Residual, _images, squares, "32-true", torch.compile),
    "convolutions, bf16": (Residual, _images, squares, "bf16-mixed", torch.compile),
    "decoder, bf16": (Decoder, _words, next_word, "bf16-mixed", torch.compile),
    "decoder, bf16, by layer": (Decoder, _words, next_word, "bf16-mixed", compile_layers),
    "decoder, bf16, graph breaks": (
        lambda: Decoder(breaks=True),
        _words,
        next_word,
        "bf16-mixed",
        torch.compile,
    ),
}


def measured(name: str) -> tuple[int, int]:
    """Peak allocated and reserved in the last update of a training."""
    make, batch_of, loss_of, precision, compiled = CASES[name]
    model = make().cuda()
    trained, batch = compiled(model), batch_of().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(NUM_UPDATES):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = loss_of(trained, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()


def predicted(name: str) -> tuple[int, int]:
    """What is predicted of the same."""
    make, batch_of, loss_of, precision, compiled = CASES[name]
    step = mc.TrainingStep(
        compiled(make()),
        batch_of(),
        loss=loss_of,
        optimizer=torch.optim.AdamW,
        precision=precision,
    )
    prediction = mc.predict(step, device=torch.cuda.get_device_name())
    not_compiled = [one for one in prediction.caveats if "would without compilation" in one]
    if not_compiled:
        raise RuntimeError(f"{name} was not compiled: {not_compiled}")
    assert prediction.peak_reserved_bytes is not None
    return prediction.peak_allocated_bytes, prediction.peak_reserved_bytes


def in_new_process(what: str, name: str, cache: str) -> list[int]:
    """Two figures from a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--do", what, name],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name}, {what}: {done.stderr[-2000:]}")
    figures: list[int] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Measure and predict each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help="the steps; all by default")
    parser.add_argument("--do", choices=("measure", "predict"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.do:
        run = measured if given.do == "measure" else predicted
        print(json.dumps(run(given.names[0])))
        return
    rows = {}
    for name in given.names or CASES:
        with tempfile.TemporaryDirectory() as cache:
            rows[name] = {
                "cold": in_new_process("measure", name, cache),
                "warm": in_new_process("measure", name, cache),
                "predicted": in_new_process("predict", name, cache),
            }
        print(name, rows[name], flush=True)
        write(rows)


def write(rows: dict[str, dict[str, list[int]]]) -> None:
    """Write the result; after each step, as all of them take a while."""
    device = torch.cuda.get_device_name()
    about = {
        "device": device,
        "driver": driver(),
        "versions": f"Python {sys.version.split()[0]}, torch {torch.__version__}",
        "date": today(),
        "command": command(),
    }
    folder = results_folder(device)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compiled.json").write_text(json.dumps({**about, "steps": rows}, indent=1) + "\n")
    lines = ["# Compiled steps", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += [
        "Bytes in the fourth update, peak allocated / reserved. Cold: in the process that "
        "compiled. Warm: in one that found its code in Inductor's cache.",
        "",
        "| step | predicted | warm | cold |",
        "|:---|---:|---:|---:|",
    ]
    for name, row in rows.items():
        cells = (" / ".join(f"{n:,}" for n in row[way]) for way in ("predicted", "warm", "cold"))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += not_reported(["The first three updates.", "CUDA graphs.", "Choices by measuring."])
    (folder / "compiled.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
