"""What a trace costs and how accurate it is.

Ours, a bare fake run and torch's MemTracker on the same steps, side by side.

    python benchmarks/tracing.py [--rounds 3] [--out FOLDER]

Needs no GPU; takes about 20 minutes. It does five things, one after the other, and says on stderr
how far it is:

1. Times. Five cases (GPT-2 small in two precisions and two batch sizes, ResNet-50, a small Llama)
   are each run in three ways: `trace` as `predict` calls it, for an H200; the same steps on fake
   tensors with nothing that looks on; and those under MemTracker. In each round every way takes two
   training steps (forward, backward, foreach optimizer) in a process of its own, twice: the first
   time fills PyTorch's caches of fake operators, the second finds them full. Each makes its own
   copies of the model on fake tensors, which is in its time. Quotients are of the processor's times
   in one round, and given with the least and the largest: one thread works at a time, so this is
   how long it takes where nothing else runs. Times on the wall are in the JSON.
2. Peaks. The largest allocated figure by `predict` and by MemTracker, which is told of the model,
   the optimizer and the batch before the first step, against the one that the accuracy proof
   measured on a virtual H200.
3. Large models. Llama-like models of 7 and 70 billion parameters, made on the meta device, are
   predicted each in a process of its own, which begins with importing PyTorch and is measured as a
   whole: `--only-large "70 B"` is that process.
4. Growth with layers, parameters and events: `tracing_growth.py`.
5. The curve over batch sizes, of GPT-2 small and ResNet-50, from a prediction that is there: the
   reserved peaks at each power of two up to 4,096, as `BatchSizeAdvice.curve` has them, each a
   replay to the byte. And by 64 other sizes what every one up to there would take, and how far a
   line between the powers is off.

What is asked of the figures (`judged`) is set against them; the exit code is 1 if something is not
met. The result goes to `benchmarks/results/cpu-<date>/`, or the folder that is named, as
`tracing.json` and `tracing.md`, and the latter to stdout.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()

import torch  # noqa: E402  (its import is part of what the large model takes)
from accuracy import in_a_process_of_its_own, read_json, training_step  # noqa: E402
from accuracy_configs import CONFIGS, Config, Parts  # noqa: E402
from machine import latest_result, processor, results_folder, today  # noqa: E402
from models.workloads import token_sequences  # noqa: E402
from torch.distributed._tools.mem_tracker import MemTracker  # noqa: E402
from tracing_growth import (  # noqa: E402
    BARE,
    DEVICE,
    NUM_STEPS,
    OURS,
    ROWS,
    THEIRS,
    Points,
    exponents,
    fake_run,
    most_over_n_log_n,
    resident_bytes,
)
from tracing_growth import measure as measure_growth  # noqa: E402
from tracing_growth import to_markdown as growth_to_markdown  # noqa: E402

from memcallback import __version__, format_bytes  # noqa: E402
from memcallback.batch_size.peaks import TracedPeak  # noqa: E402
from memcallback.devices.catalogue import DeviceSpec, find_device  # noqa: E402
from memcallback.prediction.predict import predict  # noqa: E402
from memcallback.trace.request import TraceRequest  # noqa: E402
from memcallback.trace.tracer import trace  # noqa: E402

MEASURED = latest_result("nvidia-h200-virtual", "accuracy.json.gz")
GPT2_8 = "gpt2-adamw-32-true, batch 8 x 512"
#: The curve: of which cases, where, how large at most, and of how many sizes the time of every one
#: is told.
CURVES, NO_END, LARGEST, NUM_TIMED = (
    ("gpt2-adamw-32-true", "resnet50-momentum-32-true"),
    f"{1 << 20}GiB",
    4096,
    64,
)
#: What is asked of the figures.
MOST_OVER_BARE = 1.2
LEAST_BELOW_THEIRS = 5.0
MOST_FOR_LARGE = {"7 B": (30.0, 2 << 30), "70 B": (90.0, 3 << 30)}
MOST_OVER_N_LOG_N = 1.5
MOST_CURVE_SECONDS = 1.0
NOT_REPORTED = (
    "Fake tensors of a CUDA device under MemTracker: a machine without a GPU cannot make them, so "
    "MemTracker sees the steps as a CPU runs them.",
    "Reserved memory and workspaces by MemTracker: it has neither.",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is traced.

    Attributes:
        name: Its name.
        config: A configuration of the accuracy proof.
        truth_bytes: The largest allocated figure of its training on the device; None if it was not
            measured.
    """

    name: str
    config: Config
    truth_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Figures of several rounds."""

    median: float
    least: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Their median, the least and the largest of them."""
        return cls(median=statistics.median(values), least=min(values), largest=max(values))

    def text(self) -> str:
        """In words."""
        return f"{self.median:.2f} ({self.least:.2f} to {self.largest:.2f})"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case, with empty or with full caches.

    Attributes:
        case: Its name.
        caches: `empty` or `full`.
        wall_seconds: For each way, the time of both steps.
        cpu_seconds: The processor's.
        over_bare: Our time over that of a bare fake run.
        theirs_over_ours: MemTracker's time over ours.
    """

    case: str
    caches: str
    wall_seconds: dict[str, Spread]
    cpu_seconds: dict[str, Spread]
    over_bare: Spread
    theirs_over_ours: Spread


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """The largest figure of one case.

    Attributes:
        case: Its name.
        truth_bytes: Measured, allocated; None if it was not.
        ours_bytes: Predicted.
        theirs_bytes: MemTracker's.
    """

    case: str
    truth_bytes: int | None
    ours_bytes: int
    theirs_bytes: int

    def error_pct(self, found_bytes: int) -> float | None:
        """How far a figure is from the truth."""
        return None if self.truth_bytes is None else 100 * (found_bytes / self.truth_bytes - 1)

    @property
    def is_ours_closer(self) -> bool:
        """Whether ours is as near to the truth as theirs, or nearer; also if there is none."""
        truth = self.truth_bytes
        return truth is None or abs(self.ours_bytes - truth) <= abs(self.theirs_bytes - truth)


@dataclass(frozen=True, kw_only=True)
class Large:
    """The prediction of a large model, and the process that made it.

    Attributes:
        num_parameters: Of the model.
        import_seconds: Importing PyTorch and the package, on the wall.
        predict_seconds: All traces and their replay, on the wall.
        process_seconds: The whole: importing, making the model, predicting, on the wall.
        cpu_seconds: The whole, of the processor.
        resident_bytes: The largest resident size of the process.
        peak_allocated_bytes: What was predicted.
        num_events: Of the trace.
    """

    num_parameters: int
    import_seconds: float
    predict_seconds: float
    process_seconds: float
    cpu_seconds: float
    resident_bytes: int
    peak_allocated_bytes: int
    num_events: int


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The curve over batch sizes of one case.

    Attributes:
        case: Its name.
        num_sizes: How many sizes it has.
        cpu_seconds: The processor's time for these.
        every_seconds: What every size up to the largest would take, by some of them.
        most_off_percent: How far at most a straight line between two sizes of the curve is from a
            replay, at these.
    """

    case: str
    num_sizes: int
    cpu_seconds: float
    every_seconds: float
    most_off_percent: float


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """What is asked, and what was found."""

    asked: str
    found: str
    is_met: bool


def cases() -> list[Case]:
    """Four configurations of the accuracy proof, and GPT-2 with a larger batch."""
    measured = read_json(MEASURED)["configs"]
    names = (
        "gpt2-adamw-32-true",
        "gpt2-adamw-bf16-mixed",
        "resnet50-momentum-32-true",
        "llama-adamw-bf16-true",
    )
    configs = {config.name: config for config in CONFIGS if config.name in names}
    found = [
        Case(name=name, config=configs[name], truth_bytes=_largest(measured[name]["windows"]))
        for name in names
    ]
    workload = configs[names[0]].workload
    larger = replace(
        configs[names[0]],
        workload=replace(workload, batch=token_sequences(8, 512, vocabulary=50257)),
    )
    return [Case(name=GPT2_8, config=larger, truth_bytes=None), *found]


def _largest(windows: list[list[list[dict[str, Any]]]]) -> int:
    """The peak of the first and of the steady update."""
    return max(
        int(phase["peak_allocated_bytes"])
        for window in (windows[0], windows[-1])
        for step in window
        for phase in step
    )


# The three ways.


def our_trace(config: Config, parts: Parts) -> None:
    """Two steps by our tracer, for the card."""
    spec = find_device(DEVICE)
    assert isinstance(spec, DeviceSpec)
    trace(TraceRequest(training_step(config, parts), spec, num_updates=NUM_STEPS))


WAYS: dict[str, Callable[[Config, Parts], object]] = {
    BARE: lambda config, parts: fake_run(parts, None, autocast_dtype=config.autocast_dtype),
    OURS: our_trace,
    THEIRS: lambda config, parts: fake_run(
        parts, MemTracker(), autocast_dtype=config.autocast_dtype
    ),
}


def seconds(config: Config, way: str) -> list[tuple[float, float]]:
    """A way's time in this process, by the clock and of the processor.

    With empty caches, and with full ones.
    """
    warnings.simplefilter("ignore")
    parts = config.make(initialise=False)
    times = []
    for _ in range(2):
        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        WAYS[way](config, parts)
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


def peaks(case: Case) -> dict[str, Any]:
    """The peaks by the prediction and by MemTracker, in this process."""
    warnings.simplefilter("ignore")
    parts = case.config.make(initialise=False)
    prediction = predict(training_step(case.config, parts), device=DEVICE)
    ours = max(step.peak_allocated_bytes or 0 for step in prediction.steps)
    theirs = fake_run(parts, MemTracker(), autocast_dtype=case.config.autocast_dtype)
    return asdict(
        Peaks(case=case.name, truth_bytes=case.truth_bytes, ours_bytes=ours, theirs_bytes=theirs)
    )


def measure(case: Case, num_rounds: int) -> list[Row]:
    """All ways in turn, each round beginning with another one."""
    times: dict[str, list[list[tuple[float, float]]]] = {way: [] for way in WAYS}
    ways = list(WAYS)
    for number in range(num_rounds):
        first = number % len(ways)
        for way in ways[first:] + ways[:first]:
            times[way].append(in_a_process_of_its_own(partial(seconds, case.config, way)))
        print(f"{case.name}: round {number + 1} of {num_rounds}", file=sys.stderr)
    rows = []
    for index, caches in enumerate(("empty", "full")):
        wall, cpu = (
            {way: [of_round[index][clock] for of_round in times[way]] for way in ways}
            for clock in (0, 1)
        )
        rows.append(
            Row(
                case=case.name,
                caches=caches,
                wall_seconds={way: Spread.of(values) for way, values in wall.items()},
                cpu_seconds={way: Spread.of(values) for way, values in cpu.items()},
                over_bare=Spread.of(
                    [ours / bare for ours, bare in zip(cpu[OURS], cpu[BARE], strict=True)]
                ),
                theirs_over_ours=Spread.of(
                    [theirs / ours for theirs, ours in zip(cpu[THEIRS], cpu[OURS], strict=True)]
                ),
            )
        )
    return rows


# Large models.


def predict_large(name: str) -> Large:
    """Predict a large model, in this process."""
    imported = time.perf_counter()
    warnings.simplefilter("ignore")
    step = ROWS["parameters"][name].step()
    made = time.perf_counter()
    prediction = predict(step, device=DEVICE)
    peak_allocated_bytes = prediction.peak_allocated_bytes
    predicted = time.perf_counter()
    return Large(
        num_parameters=sum(parameter.numel() for parameter in step.model.parameters()),
        import_seconds=imported - BEGAN,
        predict_seconds=predicted - made,
        process_seconds=predicted - BEGAN,
        cpu_seconds=time.process_time(),
        resident_bytes=resident_bytes(),
        peak_allocated_bytes=peak_allocated_bytes,
        num_events=len(prediction.trace.traced.trace.events),
    )


def large(name: str) -> Large:
    """The same in a process of its own."""
    answer = subprocess.run(
        [sys.executable, __file__, "--only-large", name], check=True, capture_output=True, text=True
    )
    print(f"{name}: predicted", file=sys.stderr)
    return Large(**json.loads(answer.stdout))


# The curve.


def curve(config: Config) -> dict[str, Any]:
    """The curve over batch sizes of a configuration, in this process."""
    warnings.simplefilter("ignore")
    prediction = predict(training_step(config, config.make(initialise=False)), device=DEVICE).on(
        NO_END
    )
    powers = [1 << power for power in range(LARGEST.bit_length())]
    spread = range(LARGEST // NUM_TIMED, LARGEST + 1, LARGEST // NUM_TIMED)
    seconds, peaks = [], []
    for sizes in (powers, spread):
        line = TracedPeak.of(prediction)
        gc.collect()
        began = time.process_time()
        peaks.append({size: line.at(size) for size in sizes})
        seconds.append(time.process_time() - began)
    found = Curve(
        case=config.name,
        num_sizes=len(powers),
        cpu_seconds=seconds[0],
        every_seconds=seconds[1] * LARGEST / len(spread),
        most_off_percent=max(
            100 * abs(between(size, peaks[0]) / peak - 1) for size, peak in peaks[1].items()
        ),
    )
    return asdict(found)


def between(size: int, peaks: Mapping[int, int]) -> float:
    """The straight line through the peaks of neighbouring powers of two, at a size."""
    low = 1 << (size.bit_length() - 1)
    if size == low:
        return peaks[low]
    return peaks[low] + (peaks[2 * low] - peaks[low]) * (size - low) / low


# What comes out.


def judged(
    rows: Sequence[Row],
    found: Sequence[Peaks],
    larges: Mapping[str, Large],
    points: Points,
    curves: Sequence[Curve],
) -> list[Criterion]:
    """What is asked of the figures, against them.

    Medians are judged, with full caches unless it says otherwise.
    """
    full = [row for row in rows if row.caches == "full"]
    gpt2 = next(row for row in full if row.case == GPT2_8)
    slowest = min(full, key=lambda row: row.theirs_over_ours.median)
    farther = [row.case for row in found if not row.is_ours_closer]
    over = most_over_n_log_n(points)
    slowest_curve = max(curves, key=lambda one: one.cpu_seconds)
    return [
        Criterion(
            asked=f"GPT-2 small, 8 x 512, AdamW: at least {LEAST_BELOW_THEIRS:g} times as fast as "
            "MemTracker",
            found=f"{gpt2.theirs_over_ours.text()} times; of all cases the least is "
            f"{slowest.theirs_over_ours.text()}, {slowest.case}",
            is_met=gpt2.theirs_over_ours.median >= LEAST_BELOW_THEIRS,
        ),
        Criterion(
            asked="MemTracker's peak is no closer than ours to the truth",
            found=f"closer in {', '.join(farther)}" if farther else "in none of the cases",
            is_met=not farther,
        ),
        Criterion(
            asked=f"GPT-2 small, 8 x 512, AdamW: at most {MOST_OVER_BARE:g} times a bare fake run",
            found=f"{gpt2.over_bare.text()} times",
            is_met=gpt2.over_bare.median <= MOST_OVER_BARE,
        ),
        *(criterion for name, one in larges.items() for criterion in _judged_large(name, one)),
        Criterion(
            asked="time over n log n, n the events of a trace, is at most "
            f"{MOST_OVER_N_LOG_N:g} times that of the smallest trace in its table",
            found=f"at most {over:.2f} times",
            is_met=over <= MOST_OVER_N_LOG_N,
        ),
        Criterion(
            asked=f"the curve over batch sizes, each power of two up to {LARGEST:,}: under "
            f"{MOST_CURVE_SECONDS:g} s",
            found=f"at most {slowest_curve.cpu_seconds:.2f} s for {slowest_curve.num_sizes} sizes, "
            f"{slowest_curve.case}",
            is_met=slowest_curve.cpu_seconds < MOST_CURVE_SECONDS,
        ),
        Criterion(
            asked=f"every batch size up to {LARGEST:,}: under {MOST_CURVE_SECONDS:g} s",
            found=f"{max(one.every_seconds for one in curves):.0f} s",
            is_met=all(one.every_seconds < MOST_CURVE_SECONDS for one in curves),
        ),
    ]


def _judged_large(name: str, one: Large) -> list[Criterion]:
    most_seconds, most_bytes = MOST_FOR_LARGE[name]
    return [
        Criterion(
            asked=f"{name} parameters: under {most_seconds:g} s of the processor, PyTorch's import "
            "included",
            found=f"{one.cpu_seconds:.1f} s; on the wall {one.process_seconds:.1f} s",
            is_met=one.cpu_seconds < most_seconds,
        ),
        Criterion(
            asked=f"{name} parameters: under {format_bytes(most_bytes)} of resident memory",
            found=format_bytes(one.resident_bytes),
            is_met=one.resident_bytes < most_bytes,
        ),
    ]


def environment() -> dict[str, str]:
    """What the figures hold for."""
    return {
        "processor": processor(),
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "memcallback": __version__,
        "date": today(),
        "command": shlex.join(["python", "benchmarks/tracing.py", *sys.argv[1:]]),
    }


def to_markdown(
    about: dict[str, str],
    num_rounds: int,
    criteria: Sequence[Criterion],
    rows: Sequence[Row],
    found: Sequence[Peaks],
    larges: Mapping[str, Large],
    points: Points,
    curves: Sequence[Curve],
) -> str:
    """The page beside the JSON file."""
    lines = [
        "# What a trace costs, and how near it comes",
        "",
        *(f"- {name}: {text}" for name, text in about.items()),
        "",
    ]
    lines += ["| asked | found | met |", "|:---|:---|:---|"]
    lines += [
        f"| {one.asked} | {one.found} | {'yes' if one.is_met else '**no**'} |" for one in criteria
    ]
    lines += ["", f"## Time of {NUM_STEPS} steps", ""]
    lines += [
        f"Median of {num_rounds} rounds, seconds of the processor; quotients with the least and "
        "the largest of the rounds. Caches are PyTorch's own of fake operators.",
        "",
    ]
    lines += [
        f"| case | caches | {BARE} | {OURS} | {THEIRS} | {OURS} / {BARE} | {THEIRS} / {OURS} |",
        "|:---|:---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        times = " | ".join(f"{row.cpu_seconds[way].median:.2f}" for way in WAYS)
        lines.append(
            f"| {row.case} | {row.caches} | {times} | {row.over_bare.text()} | "
            f"{row.theirs_over_ours.text()} |"
        )
    lines += [
        "",
        "## Peaks",
        "",
        f"| case | measured | {OURS} | error, % | {THEIRS} | error, % |",
        "|:---|---:|---:|---:|---:|---:|",
    ]
    for peak in found:
        truth = "" if peak.truth_bytes is None else format_bytes(peak.truth_bytes)
        figures = " | ".join(
            f"{format_bytes(size)} | {_signed(peak.error_pct(size))}"
            for size in (peak.ours_bytes, peak.theirs_bytes)
        )
        lines.append(f"| {peak.case} | {truth} | {figures} |")
    lines += ["", "## Llama-like, meta device, batch 1 x 2048, bf16, AdamW", ""]
    lines += [
        f"- {name}: {one.num_parameters:,} parameters, {one.num_events:,} events, predicted for "
        f"{DEVICE}: peak allocated {format_bytes(one.peak_allocated_bytes)}. Importing "
        f"{one.import_seconds:.1f} s, predicting {one.predict_seconds:.1f} s, the whole process "
        f"{one.process_seconds:.1f} s on the wall and {one.cpu_seconds:.1f} s of the processor, "
        f"its largest resident size {format_bytes(one.resident_bytes)}."
        for name, one in larges.items()
    ]
    lines += growth_to_markdown(points)
    lines += [
        "",
        "## The curve over batch sizes",
        "",
        "| case | sizes | seconds | every size would take, s | a line between them is off by at "
        "most, % |",
        "|:---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {one.case} | {one.num_sizes} | {one.cpu_seconds:.2f} | {one.every_seconds:.0f} | "
        f"{one.most_off_percent:.2f} |"
        for one in curves
    ]
    lines += [
        "",
        "Reserved peaks, each replayed to the byte. They are not on straight lines, because every "
        "block and segment is rounded. How far a line between two sizes is off was checked at "
        f"{NUM_TIMED} sizes, from {LARGEST // NUM_TIMED} to {LARGEST:,}.",
        "",
        "Not reported:",
        "",
        *(f"- {text}" for text in NOT_REPORTED),
    ]
    return "\n".join(lines) + "\n"


def _signed(error_pct: float | None) -> str:
    return "" if error_pct is None else f"{error_pct:+.2f}"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure what a trace costs.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only-large",
        choices=MOST_FOR_LARGE,
        help="predict a large model in this process and print the figures as JSON",
    )
    parser.add_argument("--out", type=Path, help="the folder for tracing.json and tracing.md")
    return parser.parse_args()


def main() -> int:
    """Measure and write the results; 1 if something is not met."""
    options = arguments()
    if options.only_large:
        print(json.dumps(asdict(predict_large(options.only_large))))
        return 0
    warnings.simplefilter("ignore")
    chosen = cases()
    rows = [row for case in chosen for row in measure(case, options.rounds)]
    found = [Peaks(**in_a_process_of_its_own(partial(peaks, case))) for case in chosen]
    larges = {name: large(name) for name in MOST_FOR_LARGE}
    points = measure_growth()
    curves = [
        Curve(**in_a_process_of_its_own(partial(curve, config)))
        for config in CONFIGS
        if config.name in CURVES
    ]
    criteria = judged(rows, found, larges, points, curves)
    about = environment()
    out = options.out or results_folder("cpu")
    out.mkdir(parents=True, exist_ok=True)
    results = {
        "environment": about,
        "rounds": options.rounds,
        "criteria": [asdict(one) for one in criteria],
        "rows": [asdict(row) for row in rows],
        "peaks": [asdict(one) for one in found],
        "large": {name: asdict(one) for name, one in larges.items()},
        "growth": {
            row: {
                value: {way: one and asdict(one) for way, one in by_way.items()}
                for value, by_way in by_value.items()
            }
            for row, by_value in points.items()
        },
        "exponents": exponents(points),
        "curves": [asdict(one) for one in curves],
        "not_reported": NOT_REPORTED,
    }
    (out / "tracing.json").write_text(json.dumps(results, indent=2) + "\n")
    text = to_markdown(about, options.rounds, criteria, rows, found, larges, points, curves)
    (out / "tracing.md").write_text(text)
    print(text)
    return 0 if all(one.is_met for one in criteria) else 1


if __name__ == "__main__":
    sys.exit(main())
