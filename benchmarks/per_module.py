"""What recording by module costs.

A plain step, a sampled one with and without modules, and a step that is not sampled, side by side.

    python benchmarks/per_module.py [--device cuda]

In each round every kind of step is run some times on the same model; the figures are medians over
the rounds, and a quotient is the median of the rounds' quotients with the plain step. On a card the
time is that of the clock, with the device waited for; else it is the processor's, which others on
the machine disturb less. A virtual device computes nothing: a step there is the host's part alone,
which on a card runs beside the kernels. A CPU is read through PyTorch's profiler, on sampled steps
only.

The result goes to `benchmarks/results/<device>-<date>/` as per_module.json and per_module.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from machine import command, driver, is_virtual, not_reported, processor, results_folder, today
from models.workloads import WORKLOADS, Workload

from memcallback import MemoryRecorder, Phase, __version__

PLAIN, SAMPLED, BY_MODULE, BETWEEN = (
    "plain",
    "sampled",
    "sampled, by module",
    "by module, not sampled",
)
#: How a recorder is made for each kind of step; none for a plain one.
KINDS = {PLAIN: None, SAMPLED: (False, 1), BY_MODULE: (True, 1), BETWEEN: (True, sys.maxsize)}
#: Workload -> samples in a batch, on a CUDA device and on a CPU.
MODELS = {"gpt2": (4, 1), "resnet50": (32, 2)}
#: Of texts on a CPU so many words.
CPU_LENGTH = 128
NUM_WARM_UP_STEPS = 3
NOT_REPORTED = (
    "the time to add up the table of the modules: it is added up on request, outside of the steps",
    "what the readings themselves take of the host's memory",
)
HOST_ALONE = (
    "Here a step is only the work of the host, since kernels do nothing. On a card the host works "
    "while kernels run, and costs time only where it takes longer than they do. That time was not "
    "measured."
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model with one kind of step.

    Attributes:
        model: Its name.
        batch_size: Samples in a batch.
        num_modules: Of the model.
        kind: Which kind of step.
        step_ms: The median over the rounds.
        step_quartiles_ms: The rounds' first and third quartile.
        added_ms: The median over the rounds of the time beyond the plain step's of that round.
        ratio: The median over the rounds of the time as a multiple of the plain step's of that
            round.
        num_readings: Readings of the device in a step.
    """

    model: str
    batch_size: int
    num_modules: int
    kind: str
    step_ms: float
    step_quartiles_ms: tuple[float, float]
    added_ms: float
    ratio: float
    num_readings: int


class Loop:
    """One model in training, with steps of one kind after another.

    Args:
        workload: What is trained.
        device: Where.
        batch_size: Samples in a batch.
    """

    def __init__(self, workload: Workload, device: str, batch_size: int) -> None:
        torch.manual_seed(0)
        (self.loss,) = workload.losses
        self.model = workload.model().to(device)
        length = CPU_LENGTH if device == "cpu" else None
        cut = {
            name: tensor[:batch_size, :length] if tensor.dim() == 2 else tensor[:batch_size]
            for name, tensor in workload.batch().items()
        }
        self.batch = {name: tensor.contiguous().to(device) for name, tensor in cut.items()}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.device = device
        self.num_readings = 0

    def step_plain(self) -> None:
        """Without a recorder."""
        self.optimizer.zero_grad()
        self.loss(self.model, self.batch).backward()
        self.optimizer.step()

    def step_recorded(self, recorder: MemoryRecorder) -> None:
        """With one."""
        self.optimizer.zero_grad()
        with recorder.step(self.batch):
            with recorder.phase(Phase.FORWARD):
                loss = self.loss(self.model, self.batch)
            with recorder.phase(Phase.BACKWARD):
                loss.backward()
            with recorder.phase(Phase.OPTIMIZER_STEP):
                self.optimizer.step()

    def time(self, kind: str, num_steps: int) -> float:
        """The median time of a step of a kind, in milliseconds, after some that are not timed."""
        options = KINDS[kind]
        if options is None:
            return self._time(self.step_plain, num_steps)
        per_module, interval = options
        recorder = MemoryRecorder(
            self.model, self.optimizer, per_module=per_module, sample_every_n_steps=interval
        )
        numbers: list[int] = []
        end = recorder.meter.end

        def counted() -> object:
            stats = end()
            numbers.append(len(stats))
            return stats

        recorder.meter.end = counted  # type: ignore[method-assign, assignment]
        found = self._time(lambda: self.step_recorded(recorder), num_steps)
        self.num_readings = 0 if kind == BETWEEN and self.device == "cpu" else numbers[-1]
        recorder.close()
        return found

    def _time(self, step: Callable[[], None], num_steps: int) -> float:
        clock = (
            time.perf_counter if self.device == "cuda" and not is_virtual() else time.process_time
        )
        times = []
        for number in range(NUM_WARM_UP_STEPS + num_steps):
            start = clock()
            step()
            if self.device == "cuda":
                torch.cuda.synchronize()
            if number >= NUM_WARM_UP_STEPS:
                times.append(1e3 * (clock() - start))
        return statistics.median(times)


def measure(name: str, device: str, num_steps: int, num_rounds: int) -> list[Row]:
    """All kinds of steps of one model, round by round; each round begins with another kind."""
    batch_size = MODELS[name][device == "cpu"]
    loop = Loop(WORKLOADS[name], device, batch_size)
    names = list(KINDS)
    times: dict[str, list[float]] = {kind: [] for kind in names}
    numbers: dict[str, int] = {PLAIN: 0}
    for number in range(num_rounds):
        for kind in names[number % len(names) :] + names[: number % len(names)]:
            gc.collect()
            times[kind].append(loop.time(kind, num_steps))
            if kind != PLAIN:
                numbers[kind] = loop.num_readings
        print(f"{name}: round {number + 1} of {num_rounds}", file=sys.stderr)
    return [
        Row(
            model=name,
            batch_size=batch_size,
            num_modules=sum(1 for _ in loop.model.modules()),
            kind=kind,
            step_ms=statistics.median(times[kind]),
            step_quartiles_ms=_quartiles(times[kind]),
            added_ms=statistics.median(
                ours - plain for ours, plain in zip(times[kind], times[PLAIN], strict=True)
            ),
            ratio=statistics.median(
                ours / plain for ours, plain in zip(times[kind], times[PLAIN], strict=True)
            ),
            num_readings=numbers[kind],
        )
        for kind in names
    ]


def _quartiles(values: list[float]) -> tuple[float, float]:
    first, _, third = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return first, third


def environment(device: str) -> dict[str, str]:
    """What the figures hold for."""
    note = " (virtual device: host code is real, kernels do nothing)" if is_virtual() else ""
    clock = "the clock's" if device == "cuda" and not is_virtual() else "the processor's"
    return {
        "device": torch.cuda.get_device_name() + note if device == "cuda" else "CPU",
        **({"driver": driver()} if device == "cuda" else {}),
        "processor": f"{processor()}, of which PyTorch uses {torch.get_num_threads()}",
        "python": platform.python_version(),
        "memcallback": __version__,
        "torch": torch.__version__,
        "time": clock,
        "date": today(),
        "command": command(),
    }


def to_markdown(rows: list[Row], about: dict[str, str]) -> str:
    """The page beside the JSON file."""
    lines = [
        "# Cost of recording by module",
        "",
        *(f"- {name}: {text}" for name, text in about.items()),
        "",
    ]
    lines += [
        "| model | modules | step | time, ms | quartiles, ms | added, ms | times a plain step | "
        "readings |",
        "|:---|---:|:---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        first, third = row.step_quartiles_ms
        lines.append(
            f"| {row.model}, batch size {row.batch_size} | {row.num_modules} | {row.kind} | "
            f"{row.step_ms:,.1f} | {first:,.1f} to {third:,.1f} | {row.added_ms:,.1f} | "
            f"{row.ratio:.2f} | {row.num_readings} |"
        )
    lines += not_reported(NOT_REPORTED)
    lines += ["", HOST_ALONE] if "virtual" in about["device"] else []
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description="Measure what recording by module costs.")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each kind in a round")
    parser.add_argument("--out", type=Path, help="another folder for the results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = [
        row
        for name in MODELS
        for row in measure(name, options.device, options.steps, options.rounds)
    ]
    about = environment(options.device)
    out = options.out or results_folder(about["device"].split(" (")[0])
    out.mkdir(parents=True, exist_ok=True)
    results = {
        "environment": about,
        "rounds": options.rounds,
        "steps": options.steps,
        "rows": [asdict(row) for row in rows],
    }
    (out / "per_module.json").write_text(json.dumps(results, indent=2) + "\n")
    text = to_markdown(rows, about)
    (out / "per_module.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
