"""Large models on many devices, on paper: one predicted rank beside public reports.

    python benchmarks/scale.py [--only TEXT] [--out FOLDER]

Needs no GPU. Llama 3.1 with 8, 70 and 405 billion parameters, made on the meta device, is trained
with AdamW under FSDP2 (parameters in float32, computation in bfloat16, gradients reduced in
float32) on 8 to 1,024 devices, sequences of 8,192 tokens; one rank is traced, in a process of its
own. Activation checkpointing is `selective` (attention and every other matrix product of a block
are kept, the rest is computed again) or `full` (all of a block is computed again), as in
torchtitan.

Besides, what a rank costs to predict: a Llama-like model of 7 billion parameters on one device, and
one rank of 64 under FSDP2, both by `predict` in processes of their own. Asked is at most twice the
time, and 3 GiB.

Where a public report has the same job, its figure is set beside the predicted one. That is no
proof: a report says little of versions and of how memory was read, and our model follows the
published shapes, not that program. The result goes to `benchmarks/results/cpu-<date>/scale.json`
and `scale.md`, and the latter to stdout.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from machine import command, not_reported, processor, results_folder, today
from models.transformers import Llama
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from memcallback import Ranks, TrainingStep, __version__, format_bytes
from memcallback.core.units import GiB
from memcallback.devices.catalogue import DeviceSpec, find_device
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.predict import predict
from memcallback.prediction.predict_here import predict_once

LENGTH, VOCABULARY = 8192, 128_256
#: Ranks of which the cost is told, and what is asked of it.
NUM_RANKS, MOST_TIMES, MOST_RESIDENT_BYTES = 64, 2.0, 3 * GiB
#: Width, layers, heads, heads of keys and values, features inside: arXiv 2407.21783, table 3;
#: vocabulary in section 3.2.
SHAPES = {
    "8 B": (4096, 32, 32, 8, 14336),
    "70 B": (8192, 80, 64, 8, 28672),
    "405 B": (16384, 126, 128, 8, 53248),
}
_aten = torch.ops.aten
#: What selective checkpointing keeps of a block, besides every other matrix product.
KEPT = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
}
TORCHTITAN_2024 = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TORCHTITAN_A100 = "pytorch/torchtitan, docs/performance.md of 2024"
#: As the sources say.
DEVICES = (
    "Predicted for the card in the column *fits*. The benchmarks of December 2024 ran on H100 GPUs "
    "with 96 GB; those of docs/performance.md on A100 GPUs with 80 GB and, for 405 B, on H100 GPUs "
    "with 94 GB."
)
NOT_REPORTED = (
    "Tensor, pipeline and context parallel jobs, torch.compile and float8, in which most public "
    "reports of 70 and 405 billion parameters are made.",
    "What NCCL takes outside the allocator, which the reports' figures leave out too.",
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job, and what a public report says of it.

    Attributes:
        size: A key of `SHAPES`.
        world_size: Devices.
        batch_size: Sequences of a rank.
        checkpointing: `selective` or `full`.
        device: The card.
        published: What was reported, in words; empty if nothing was found.
        published_gib: The same as a number, where there is one.
        source: Where.
    """

    size: str
    world_size: int
    batch_size: int
    checkpointing: str
    device: str = "NVIDIA H100 80GB HBM3"
    published: str = ""
    published_gib: float | None = None
    source: str = ""

    @property
    def name(self) -> str:
        """All of it in words."""
        return (
            f"{self.size} on {self.world_size}, {self.batch_size} x {LENGTH:,}, "
            f"{self.checkpointing}"
        )


JOBS = (
    Job(
        size="8 B",
        world_size=8,
        batch_size=2,
        checkpointing="selective",
        published="82.4 GiB reserved",
        published_gib=82.4,
        source=f"{TORCHTITAN_2024}, table 1",
    ),
    Job(size="8 B", world_size=64, batch_size=2, checkpointing="selective"),
    Job(
        size="8 B",
        world_size=128,
        batch_size=2,
        checkpointing="selective",
        published="67.0 GiB reserved",
        published_gib=67.0,
        source=f"{TORCHTITAN_2024}, table 3",
    ),
    Job(size="8 B", world_size=1024, batch_size=2, checkpointing="selective"),
    Job(
        size="70 B",
        world_size=64,
        batch_size=1,
        checkpointing="full",
        device="NVIDIA A100-SXM4-80GB",
        published="trains on 80 GB",
        source=TORCHTITAN_A100,
    ),
    Job(size="70 B", world_size=256, batch_size=1, checkpointing="full"),
    Job(size="70 B", world_size=1024, batch_size=1, checkpointing="full"),
    Job(
        size="405 B",
        world_size=128,
        batch_size=1,
        checkpointing="full",
        published="out of memory on 94 GB",
        source=TORCHTITAN_A100,
    ),
    Job(size="405 B", world_size=512, batch_size=1, checkpointing="full"),
    Job(size="405 B", world_size=1024, batch_size=1, checkpointing="full"),
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was predicted of a job.

    Attributes:
        peak_allocated_bytes: Of the steady step.
        peak_reserved_bytes: Of the steady step.
        held_bytes: Parameters, gradients and optimizer state at their most.
        fits: Whether it fits the card.
        seconds: Of the processor, with importing PyTorch.
        resident_bytes: The largest resident size of the process.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    held_bytes: int
    fits: bool
    seconds: float
    resident_bytes: int


class Checkpointed(nn.Module):
    """A block that is computed again in the backward pass, all of it or but for what is kept."""

    def __init__(self, block: nn.Module, kind: str) -> None:
        super().__init__()
        self.block = block
        is_selective = kind == "selective"
        self._contexts: dict[str, Any] = (
            {"context_fn": lambda: create_selective_checkpoint_contexts(_policy())}
            if is_selective
            else {}
        )

    def forward(self, *inputs: Tensor) -> Tensor:
        """Run."""
        found: Tensor = checkpoint(self.block, *inputs, use_reentrant=False, **self._contexts)
        return found


def _policy() -> Any:
    """Which operators' results are kept; asked anew for each pass through a block."""
    num_products: dict[bool, int] = defaultdict(int)

    def decide(context: Any, function: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
        if function is _aten.mm.default:
            num_products[context.is_recompute] += 1
            is_kept = num_products[context.is_recompute] % 2 == 1
        else:
            is_kept = function in KEPT
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def spread(model: Any, mesh: DeviceMesh) -> None:
    """FSDP2 as torchtitan applies it: each block, then the rest.

    The last block stays gathered after its forward pass.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for number, block in enumerate(model.blocks):
        fully_shard(
            block, mesh=mesh, mp_policy=policy, reshard_after_forward=number < len(model.blocks) - 1
        )
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=mesh.device_type)


def next_token(model: Any, tokens: Tensor) -> Tensor:
    """Each token, of shape (sequences, length + 1), from those before it; logits in float32."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def predict_job(job: Job) -> Found:
    """Predict one rank, in this process."""
    warnings.simplefilter("ignore")
    width, depth, num_heads, num_kv_heads, hidden = SHAPES[job.size]
    with torch.device("meta"):
        model = Llama(
            width=width,
            depth=depth,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            hidden=hidden,
            vocabulary=VOCABULARY,
            length=LENGTH,
        )
        for number, block in enumerate(model.blocks):
            model.blocks[number] = Checkpointed(block, job.checkpointing)
        tokens = torch.empty((job.batch_size, LENGTH + 1), dtype=torch.int64)
    step = TrainingStep(
        model,
        tokens,
        loss=next_token,
        optimizer=torch.optim.AdamW,
        ranks=Ranks(job.world_size, spread),
    )
    device = find_device(job.device)
    assert isinstance(device, DeviceSpec)
    prediction = predict_once(
        step, device=device, batch_size=job.batch_size, settings=AllocatorSettings()
    )
    steady = prediction.step
    held = steady.held_bytes
    return Found(
        peak_allocated_bytes=prediction.peak_allocated_bytes,
        peak_reserved_bytes=prediction.peak_reserved_bytes or 0,
        held_bytes=held or 0,
        fits=prediction.fits,
        seconds=time.process_time(),
        resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def in_a_process(job: Job) -> Found:
    """The same in a process of its own."""
    answer = subprocess.run(
        [sys.executable, __file__, "--job", job.name], check=True, capture_output=True, text=True
    )
    return Found(**json.loads(answer.stdout))


def predict_seven_billion(num_ranks: int) -> dict[str, float]:
    """What it costs to predict 7 billion parameters in this process.

    The processor's time of `predict`, and the largest resident size.
    """
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        model = Llama(
            width=4096,
            depth=32,
            num_heads=32,
            num_kv_heads=32,
            hidden=11008,
            vocabulary=32000,
            length=2048,
        ).to(torch.bfloat16)
        tokens = torch.empty((1, 2049), dtype=torch.int64)
    ranks = Ranks(num_ranks, "fsdp2") if num_ranks > 1 else None
    step = TrainingStep(
        model,
        tokens,
        loss=next_token,
        optimizer=torch.optim.AdamW,
        precision="bf16-true",
        ranks=ranks,
    )
    start = time.process_time()
    predict(step, device="NVIDIA H100 80GB HBM3").peak_reserved_bytes  # noqa: B018  (it is replayed when it is asked for)
    return {
        "seconds": time.process_time() - start,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def cost() -> dict[str, dict[str, float]]:
    """The same for one device and for one rank of many, each in a process of its own."""
    found = {}
    for num_ranks in (1, NUM_RANKS):
        answer = subprocess.run(
            [sys.executable, __file__, "--cost", str(num_ranks)],
            check=True,
            capture_output=True,
            text=True,
        )
        found[str(num_ranks)] = json.loads(answer.stdout)
    return found


def environment() -> dict[str, str]:
    """What the figures hold for."""
    versions = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "memcallback": __version__,
    }
    return {"processor": processor(), **versions, "date": today(), "command": command()}


def to_markdown(
    about: dict[str, str], rows: list[tuple[Job, Found]], costs: dict[str, dict[str, float]]
) -> str:
    """The page beside the JSON file."""
    lines = [
        "# Large models on many devices, on paper",
        "",
        *(f"- {name}: {text}" for name, text in about.items()),
        "",
    ]
    lines += [
        f"Llama 3.1, FSDP2, AdamW, sequences of {LENGTH:,}; one rank predicted.",
        "",
        "| parameters | devices | batch | checkpointing | held | peak allocated | peak reserved | "
        "fits | reported | off | source | time, s | resident |",
        "|:---|---:|---:|:---|---:|---:|---:|:---|:---|---:|:---|---:|---:|",
    ]
    for job, found in rows:
        off = (
            ""
            if job.published_gib is None
            else f"{100 * (found.peak_reserved_bytes / GiB / job.published_gib - 1):+.1f} %"
        )
        sizes = (found.held_bytes, found.peak_allocated_bytes, found.peak_reserved_bytes)
        lines.append(
            f"| {job.size} | {job.world_size:,} | {job.batch_size} | {job.checkpointing} | "
            f"{' | '.join(map(format_bytes, sizes))} | {'yes' if found.fits else 'no'}, "
            f"{job.device} | {job.published} | {off} | {job.source} | {found.seconds:.0f} | "
            f"{format_bytes(found.resident_bytes)} |"
        )
    lines += ["", DEVICES]
    alone, of_many = costs["1"], costs[str(NUM_RANKS)]
    times = of_many["seconds"] / alone["seconds"]
    is_met = times <= MOST_TIMES and of_many["resident_bytes"] <= MOST_RESIDENT_BYTES
    lines += [
        "",
        f"7 billion parameters: predicted on one device in {alone['seconds']:.1f} s of the "
        f"processor, one rank of {NUM_RANKS} under FSDP2 in {of_many['seconds']:.1f} s, "
        f"{times:.2f} times as long, within {format_bytes(int(of_many['resident_bytes']))}. "
        f"Asked: at most {MOST_TIMES:g} times and {format_bytes(MOST_RESIDENT_BYTES)}; "
        f"{'met' if is_met else '**not met**'}.",
    ]
    lines += not_reported(NOT_REPORTED)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Predict all jobs and write the results."""
    parser = argparse.ArgumentParser(
        description="Predict ranks of large jobs, and set what was reported beside it."
    )
    parser.add_argument("--only", default="", help="jobs with this in their name")
    parser.add_argument(
        "--job", help="predict the job of this name in this process and print the figures as JSON"
    )
    parser.add_argument(
        "--cost",
        type=int,
        help="predict 7 billion parameters on so many ranks in this process and print the cost as "
        "JSON",
    )
    parser.add_argument("--out", type=Path, help="the folder for scale.json and scale.md")
    options = parser.parse_args()
    if options.job:
        print(json.dumps(asdict(predict_job(next(job for job in JOBS if job.name == options.job)))))
        return
    if options.cost:
        print(json.dumps(predict_seven_billion(options.cost)))
        return
    rows = []
    for job in JOBS:
        if options.only in job.name:
            rows.append((job, in_a_process(job)))
            print(
                f"{job.name}: {format_bytes(rows[-1][1].peak_reserved_bytes)} reserved",
                file=sys.stderr,
            )
    about, costs = environment(), cost()
    out = options.out or results_folder("cpu")
    out.mkdir(parents=True, exist_ok=True)
    results = {
        "environment": about,
        "jobs": [{**asdict(job), **asdict(found)} for job, found in rows],
        "cost": costs,
        "not_reported": NOT_REPORTED,
    }
    (out / "scale.json").write_text(json.dumps(results, indent=2) + "\n")
    text = to_markdown(about, rows, costs)
    (out / "scale.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
