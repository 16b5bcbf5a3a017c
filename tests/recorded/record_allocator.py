"""Record what the CUDA caching allocator does in training steps, and reports after every event.

All runs, each in a process of its own, into tests/recorded/allocator/; then the long ones:

    python tests/recorded/record_allocator.py
    python tests/recorded/record_allocator.py --steps 32 --only cnn mlp transformer-fp32
        --out tests/recorded/allocator_long

Needs a CUDA device, real or virtual. The files are read by
tests/prediction/test_allocator_recorded.py; README.md beside this script tells the format.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

OUT = Path(__file__).parent / "allocator"
MODELS = ("cnn", "transformer", "mlp")
PRECISIONS = ("fp32", "bf16")
SETTINGS = {
    "default": "",
    "expandable": "expandable_segments:True",
    "max-split": "max_split_size_mb:32",
    "roundup": "roundup_power2_divisions:[1:8,4:4,>:2]",
}
#: The memory of a device for `mixed`: little enough that much is given back and asked for again,
#: and some is refused.
LIMIT_MIB = 400
CODES = {
    "alloc": "a",
    "free_requested": "r",
    "free_completed": "f",
    "segment_alloc": "S",
    "segment_free": "F",
    "oom": "O",
}
CODES |= {"segment_map": "M", "segment_unmap": "U"}


class Transformer(nn.Module):
    """A small language model: embedding, encoder, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 256)
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(256, 5000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits by class, then position."""
        hidden: torch.Tensor = self.head(self.encoder(self.embedding(tokens)))
        return hidden.transpose(1, 2)


def make(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A model, a batch and its targets, on the device."""
    if name == "cnn":
        widths = (3, 64, 128, 256)
        convolutions = [
            layer
            for i, o in itertools.pairwise(widths)
            for layer in (
                nn.Conv2d(i, o, 3, padding=1),
                nn.BatchNorm2d(o),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
            )
        ]
        model: nn.Module = nn.Sequential(
            *convolutions, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(4096, 100)
        )
        return (
            model.cuda(),
            torch.randn(24, 3, 72, 72, device="cuda"),
            torch.zeros(24, dtype=torch.long, device="cuda"),
        )
    if name == "transformer":
        return (
            Transformer().cuda(),
            torch.zeros(6, 120, dtype=torch.long, device="cuda"),
            torch.zeros(6, 120, dtype=torch.long, device="cuda"),
        )
    mlp = nn.Sequential(
        nn.Linear(784, 3000),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(3000, 1500),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(1500, 10),
    )
    return (
        mlp.cuda(),
        torch.randn(700, 784, device="cuda"),
        torch.zeros(700, dtype=torch.long, device="cuda"),
    )


def train(name: str, precision: str, num_steps: int, *, grows: bool = False) -> None:
    """A few steps; if it grows, the last one after an emptied cache, with a larger batch."""
    model, batch, target = make(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(num_steps):
        if grows and step == num_steps - 1:
            torch.cuda.empty_cache()
            batch, target = (
                torch.cat([batch, batch[: len(batch) // 3]]),
                torch.cat([target, target[: len(target) // 3]]),
            )
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss = nn.functional.cross_entropy(model(batch), target)
        loss.backward()
        optimizer.step()


def mixed(num_requests: int) -> None:
    """Tensors of all sizes on two streams, freed in any order, some while the other stream uses
    them, in too little memory.
    """
    random = Random(1234)
    side = torch.cuda.Stream()
    held: list[torch.Tensor] = []
    for _ in range(num_requests):
        if held and random.random() < 0.47:
            tensor = held.pop(random.randrange(len(held)))
            if random.random() < 0.1:
                tensor.record_stream(torch.cuda.default_stream() if random.random() < 0.5 else side)
            del tensor
        else:
            size_bytes = int(2 ** random.uniform(0, 26))
            try:
                with torch.cuda.stream(
                    side if random.random() < 0.2 else torch.cuda.default_stream()
                ):
                    held.append(torch.empty(size_bytes, dtype=torch.uint8, device="cuda"))
            except torch.cuda.OutOfMemoryError:
                random.shuffle(held)
                del held[: len(held) // 3]


def limited() -> int:
    """Make the device small, if it is not so already, and return what the allocator can have of it.

    With expandable segments PyTorch looks at the fraction only before it maps pages, so there the
    device itself must be small; one that is not real can be.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    if free_bytes > LIMIT_MIB << 20:
        torch.cuda.set_per_process_memory_fraction((LIMIT_MIB << 20) / total_bytes + 1e-12)
    return min(free_bytes, LIMIT_MIB << 20)


def reports(profiler: profile) -> Iterator[tuple[int, int, int, int]]:
    """What the allocator told the profiler, in order: address, bytes (negative for a free),
    allocated, reserved.
    """
    rows = []
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cuda":
            fields = event.extra_fields
            rows.append(
                (
                    event.start_time_ns,
                    fields.ptr,
                    fields.alloc_size,
                    fields.total_allocated,
                    fields.total_reserved,
                )
            )
    return (tuple(row[1:]) for row in sorted(rows))


def matched(events: list[list[Any]], rows: Iterator[tuple[int, int, int, int]]) -> list[list[int]]:
    """For each report the number of its event, allocated and reserved, as differences to the row
    before.
    """
    figures, last = [], [0, 0, 0]
    position = 0
    for address, change, allocated, reserved in rows:
        code = "a" if change > 0 else "r"
        while events[position][0] != code or events[position][1] != address:
            position += 1
        now = [position, allocated, reserved]
        figures.append([b - a for a, b in zip(last, now, strict=True)])
        last, position = now, position + 1
    return figures


def driver() -> str | None:
    """The driver's version, None without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # of a kind that differs between versions
        return None


def record(name: str, precision: str, num_steps: int) -> dict[str, Any]:
    """The history of one run, in the process that this is."""
    capacity_bytes = limited() if name == "mixed" else None
    torch.cuda.memory._record_memory_history(max_entries=200_000, context=None)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        mixed(2500) if name == "mixed" else train(name, precision, num_steps, grows=True)
    stats = torch.cuda.memory_stats()
    snapshot = torch.cuda.memory._snapshot()
    events = [
        [CODES[e["action"]], e.get("addr", 0), e["size"], e["stream"]]
        for e in snapshot["device_traces"][0]
        if e["action"] in CODES
    ]
    kept = (
        "allocated_bytes",
        "active_bytes",
        "inactive_split_bytes",
        "requested_bytes",
        "reserved_bytes",
        "segment",
    )
    meta = {
        "settings": {"PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")},
        "roundup_power2_divisions": list(
            snapshot["allocator_settings"]["roundup_power2_divisions"].values()
        ),
        "capacity_bytes": capacity_bytes,
        "device": torch.cuda.get_device_name(0)
        + (" (virtual device)" if os.environ.get("VGPU") else ""),
        "driver": driver(),
        "torch": torch.__version__,
        "final": {f"{k}.{w}": stats[f"{k}.all.{w}"] for k in kept for w in ("current", "peak")}
        | {k: stats[k] for k in ("num_alloc_retries", "num_ooms")},
    }
    blocks = [
        [b["address"], b["requested_size"], b["size"]]
        for s in snapshot["segments"]
        for b in s["blocks"]
        if b["state"] == "active_allocated"
    ]
    history = {"meta": meta, "initial_segments": [], "initial_blocks": [], "events": events}
    return history | {
        "addresses": "differences",
        "figures": matched(events, reports(profiler)),
        "final_blocks": sorted(blocks),
    }


def compact(history: dict[str, Any]) -> bytes:
    """Gzipped JSON, addresses as differences to the one before: they compress far better so."""
    last = 0
    for event in history["events"]:
        event[1], last = event[1] - last, event[1]
    return gzip.compress(json.dumps(history, separators=(",", ":")).encode(), mtime=0)


def main() -> None:
    """All runs, or with arguments one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "PRECISION", "FILE"))
    parser.add_argument(
        "--steps", type=int, default=3, help="of a training; the last is larger than the others"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="RUN",
        help="runs whose names begin so, as `cnn` or `mlp-bf16-default`",
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    if arguments.one:
        name, precision, file = arguments.one
        Path(file).write_bytes(compact(record(name, precision, arguments.steps)))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)

    def run(name: str, precision: str, setting: str) -> None:
        if not f"{name}-{precision}-{setting}".startswith(tuple(arguments.only)):
            return
        if (name, setting) == ("mixed", "expandable") and not os.environ.get("VGPU"):
            print("mixed-uint8-expandable needs a small device: not recorded")
            return
        file = arguments.out / f"{name}-{precision}-{setting}.json.gz"
        environ = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": SETTINGS[setting]}
        if (name, setting) == ("mixed", "expandable"):
            environ |= {"VGPU_TOTAL_BYTES": str(LIMIT_MIB << 20), "VGPU_CONTEXT_BYTES": "0"}
        one = [
            sys.executable,
            __file__,
            "--one",
            name,
            precision,
            str(file),
            "--steps",
            str(arguments.steps),
        ]
        subprocess.run(one, env=environ, check=True)
        print(file.name, file.stat().st_size)

    runs = [
        *itertools.product(MODELS, PRECISIONS, SETTINGS),
        *(("mixed", "uint8", setting) for setting in SETTINGS),
    ]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda one: run(*one), runs))


if __name__ == "__main__":
    main()
