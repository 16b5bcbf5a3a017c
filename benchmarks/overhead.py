"""What one recorded step costs, beside no callback and DeviceStatsMonitor.

No callback, MemoryCallback and Lightning's DeviceStatsMonitor take turns in one run.

    python benchmarks/overhead.py [--device cuda]
    python benchmarks/overhead.py --layers 100 --tensors 10000 --objects 1000000

In each round every callback trains the same small network, where a step is so short that the cost
shows; with `--layers` a deeper one, and with `--tensors` and `--objects` in a process that holds
so many more. The cost is the round's step time with the callback less that without, and the figures
are medians over rounds. Reads of the allocator and synchronisations are counted in a run of their
own, so that counting is not timed.

The result goes to `benchmarks/results/<device>-<date>/` as JSON and Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import logging
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import DeviceStatsMonitor
from machine import command, driver, is_virtual, not_reported, processor, results_folder, today
from torch import Tensor, nn

from memcallback import MemoryCallback, __version__

NONE, OURS, THEIRS = "none", "MemoryCallback", "DeviceStatsMonitor"
CALLBACKS: dict[str, Callable[[], list[Callback]]] = {
    NONE: list,
    # A prediction beside the steps would be timed with them.
    OURS: lambda: [MemoryCallback(wait_for_prediction=True)],
    THEIRS: lambda: [DeviceStatsMonitor()],
}
#: Lightning's default interval, and the one at which every step is logged.
DEFAULT_INTERVAL = 50
INTERVALS = (1, DEFAULT_INTERVAL)
#: Steps before the clock starts: the prediction and the first report fall in them.
NUM_WARM_UP_STEPS = 10
BATCH_SIZE, NUM_FEATURES = 32, 64
NOT_REPORTED = (
    "What happens once a fit (prediction, first and last report with their pictures): the clock "
    "starts after it.",
    "Writing the event file out when training ends.",
    "The cost beside a step of usual length: here a step is as short as Lightning lets it be.",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One callback at one logging interval. Times are medians over rounds, in microseconds.

    Attributes:
        callback: Its name.
        log_every_n_steps: The Trainer's logging interval.
        step_us: A whole step.
        step_quartiles_us: The first and the third quartile of it over rounds.
        cost_us: What the callback adds to a step; None without one.
        ratio: Its cost over DeviceStatsMonitor's; None where that has no meaning.
        num_allocator_reads_per_step: Reads of the CUDA allocator's counters.
        num_synchronisations: In the whole fit, beyond those without a callback: calls that wait for
            the device.
    """

    callback: str
    log_every_n_steps: int
    step_us: float
    step_quartiles_us: tuple[float, float]
    cost_us: float | None
    ratio: float | None
    num_allocator_reads_per_step: float
    num_synchronisations: int


class Network(LightningModule):
    """Linear layers, each but the last with a ReLU, and Adam."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        sizes = [NUM_FEATURES, *(64 for _ in range(num_layers - 1)), 10]
        layers: list[nn.Module] = [nn.Linear(*pair) for pair in pairwise(sizes)]
        self.network = nn.Sequential(
            *(part for layer in layers[:-1] for part in (layer, nn.ReLU())), layers[-1]
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss."""
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters())


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, and where.

    Attributes:
        device: `cpu` or `cuda`.
        num_layers: Linear layers of the network.
        num_steps: Timed steps of each fit.
    """

    device: str
    num_layers: int
    num_steps: int


@dataclass(frozen=True)
class SameBatch:
    """One batch, as often as there are steps."""

    batch: tuple[Tensor, Tensor]
    num_steps: int

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.batch for _ in range(self.num_steps))


class Clock(Callback):
    """Time from the end of the last warm-up step to the end of the last step.

    Whatever lies between is in the time.
    """

    def __init__(self, num_steps: int, counts: Counter[str]) -> None:
        self.num_steps = num_steps
        self.counts = counts
        self.counts_before: Counter[str] = Counter()
        self.counts_after: Counter[str] = Counter()
        self.start = self.end = 0.0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the time."""
        if batch_idx + 1 == NUM_WARM_UP_STEPS:
            self.start, self.counts_before = time.perf_counter(), Counter(self.counts)
        if batch_idx + 1 == NUM_WARM_UP_STEPS + self.num_steps:
            self.end, self.counts_after = time.perf_counter(), Counter(self.counts)

    @property
    def step_us(self) -> float:
        """One step."""
        return 1e6 * (self.end - self.start) / self.num_steps


def fit(
    callback: str, interval: int, setting: Setting, counts: Counter[str] | None = None
) -> Clock:
    """Train with a callback and the default TensorBoardLogger."""
    clock = Clock(setting.num_steps, counts if counts is not None else Counter())
    torch.manual_seed(0)
    batch = torch.randn(BATCH_SIZE, NUM_FEATURES), torch.randint(0, 10, (BATCH_SIZE,))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(
            accelerator="gpu" if setting.device == "cuda" else setting.device,
            devices=1,
            max_epochs=1,
            default_root_dir=folder,
            log_every_n_steps=interval,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            callbacks=[clock, *CALLBACKS[callback]()],
        )
        trainer.fit(
            Network(setting.num_layers), SameBatch(batch, NUM_WARM_UP_STEPS + setting.num_steps)
        )
    gc.collect()
    return clock


READ = "allocator reads"
SYNCHRONISATION = "synchronisations"
#: The innermost call of each kind, so that none is counted twice.
COUNTED = {
    (torch._C, "_cuda_memoryStats"): READ,
    (torch._C, "_cuda_synchronize"): SYNCHRONISATION,
    (torch.cuda.Stream, "synchronize"): SYNCHRONISATION,
    (torch.cuda.Event, "synchronize"): SYNCHRONISATION,
}


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count reads of the allocator and synchronisations.

    PyTorch's own watch counts the implicit ones, such as `.item()`.
    """
    counts: Counter[str] = Counter()

    def counted(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return call(*args, **kwargs)

        return wrapper

    with contextlib.ExitStack() as stack:
        for (owner, attribute), name in COUNTED.items():
            if hasattr(owner, attribute):
                stack.enter_context(
                    mock.patch.object(owner, attribute, counted(getattr(owner, attribute), name))
                )
        seen = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
        yield counts
    counts[SYNCHRONISATION] += sum(
        "synchronizing CUDA operation" in str(warning.message) for warning in seen
    )


def count(callback: str, interval: int, setting: Setting) -> tuple[float, int]:
    """Reads of the allocator in a step after the warm-up, and synchronisations in the whole fit."""
    with counting() as counts:
        clock = fit(callback, interval, setting, counts)
    num_reads = clock.counts_after[READ] - clock.counts_before[READ]
    return num_reads / setting.num_steps, counts[SYNCHRONISATION]


def measure(interval: int, setting: Setting, num_rounds: int) -> list[Row]:
    """All callbacks at one interval, round by round; each round begins with another callback."""
    times: dict[str, list[float]] = {name: [] for name in CALLBACKS}
    names = list(CALLBACKS)
    for number in range(-1, num_rounds):
        for name in names[number % 3 :] + names[: number % 3]:
            step_us = fit(name, interval, setting).step_us
            if number >= 0:  # the first round only loads what is loaded on first use
                times[name].append(step_us)
        print(f"log_every_n_steps={interval}: round {number + 1} of {num_rounds}", file=sys.stderr)
    costs = {
        name: [with_it - without for with_it, without in zip(times[name], times[NONE], strict=True)]
        for name in names
    }
    ratios = [ours / theirs for ours, theirs in zip(costs[OURS], costs[THEIRS], strict=True)]
    counted = {name: count(name, interval, setting) for name in names}
    return [
        Row(
            callback=name,
            log_every_n_steps=interval,
            step_us=statistics.median(times[name]),
            step_quartiles_us=_quartiles(times[name]),
            cost_us=statistics.median(costs[name]) if name != NONE else None,
            ratio=statistics.median(ratios) if name == OURS else None,
            num_allocator_reads_per_step=counted[name][0],
            num_synchronisations=counted[name][1] - counted[NONE][1],
        )
        for name in names
    ]


def _quartiles(values: list[float]) -> tuple[float, float]:
    first, _, third = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return first, third


def environment(device: str) -> dict[str, str]:
    """What the figures hold for."""
    names = {"device": _device_name(device)} | ({"driver": driver()} if device == "cuda" else {})
    names |= {
        "processor": f"{processor()}, of which PyTorch uses one",
        "python": platform.python_version(),
        "memcallback": __version__,
    }
    names |= {package: version(package) for package in ("torch", "lightning", "tensorboard")}
    return names | {"date": today(), "command": command()}


def _device_name(device: str) -> str:
    if device != "cuda":
        return "CPU"
    return torch.cuda.get_device_name() + (
        " (virtual device: host code is real, kernels do nothing)" if is_virtual() else ""
    )


def to_markdown(rows: list[Row], about: dict[str, str]) -> str:
    """The page beside the JSON file."""
    virtual = ", virtual device" if "virtual" in about["device"] else ""
    lines = [
        f"# Cost of one recorded step{virtual}",
        "",
        *(f"- {name}: {text}" for name, text in about.items()),
        "",
    ]
    lines += [
        "| log every | callback | step, µs | quartiles, µs | added to a step, µs | over "
        "DeviceStatsMonitor's | allocator reads a step | synchronisations in a fit |",
        "|---:|:---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        first, third = row.step_quartiles_us
        cost = "" if row.cost_us is None else f"{row.cost_us:,.0f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        lines.append(
            f"| {row.log_every_n_steps} | {row.callback} | {row.step_us:,.0f} | {first:,.0f} to "
            f"{third:,.0f} | {cost} | {ratio} | {row.num_allocator_reads_per_step:g} | "
            f"{row.num_synchronisations} |"
        )
    lines += [
        "",
        "The column over DeviceStatsMonitor's is the median of the rounds' quotients of the two "
        "costs. It says nothing where both costs are within the quartiles.",
    ]
    lines += not_reported(NOT_REPORTED)
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure what one recorded step costs.")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200, help="timed steps of each fit")
    parser.add_argument("--layers", type=int, default=2, help="linear layers of the network")
    parser.add_argument("--tensors", type=int, default=0, help="tensors that live meanwhile")
    parser.add_argument("--objects", type=int, default=0, help="objects that live meanwhile")
    parser.add_argument("--out", type=Path, help="the folder for overhead.json and overhead.md")
    return parser.parse_args()


def main() -> None:
    """Measure and write the results."""
    options = arguments()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(
        1
    )  # threads that wait for a core would be most of the time of so small a step
    setting = Setting(device=options.device, num_layers=options.layers, num_steps=options.steps)
    held: tuple[list[Tensor], list[list[Any]]] = (
        [torch.empty(1) for _ in range(options.tensors)],
        [[] for _ in range(options.objects)],  # empty lists, which a search of the heap visits
    )
    rows = [row for interval in INTERVALS for row in measure(interval, setting, options.rounds)]
    about = environment(options.device) | {
        "network": f"{options.layers} linear layers, {len(held[0]):,} other tensors and "
        f"{len(held[1]):,} other objects alive"
    }
    out = options.out or results_folder(about["device"].split(" (")[0])
    out.mkdir(parents=True, exist_ok=True)
    results = {
        "environment": about,
        "rounds": options.rounds,
        "steps": options.steps,
        "rows": [asdict(row) for row in rows],
    }
    (out / "overhead.json").write_text(
        json.dumps(results | {"not_reported": NOT_REPORTED}, indent=2) + "\n"
    )
    text = to_markdown(rows, about)
    (out / "overhead.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
