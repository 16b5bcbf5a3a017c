"""How the cost of a trace grows with layers, parameters and events.

Beside a bare fake run and MemTracker.

Models are Llama-like and lie on the meta device. Each figure comes from a process of its own, which
makes the model and takes two updates:

- *layers*: 12 to 96 at width 512, batch 1 x 256.
- *parameters*: 0.1 to 70 billion, in the shapes of models that there are, batch 1 x 2048.
- *events*: 24 layers of width 512, with gradients of 1, 8 and 80 batches for each update: the
  events of a trace are 10^4 to 10^6.

    python benchmarks/tracing_growth.py layers 96 memcallback    # one figure, as JSON
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from accuracy_configs import Parts
from models.transformers import Llama
from models.workloads import next_token
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from memcallback import TrainingStep, format_bytes
from memcallback.devices.catalogue import DeviceSpec, find_device
from memcallback.step.copies.objects import fake_copy
from memcallback.trace.request import TraceRequest
from memcallback.trace.tracer import trace

DEVICE = "NVIDIA H200"
NUM_STEPS = 2
BARE, OURS, THEIRS = "bare fake run", "memcallback", "MemTracker"
#: What would take longer, by the value before and the layers and batches, is not run; ours always
#: is.
LONG_SECONDS = 120
VOCABULARY = 32000


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and its step.

    Attributes:
        name: Its name in its row.
        width: Features.
        depth: Layers.
        num_heads: Heads of the queries.
        num_kv_heads: Heads of keys and values.
        hidden: Features inside a feed-forward half.
        length: Tokens of its one sequence.
        accumulate: Batches for each update.
    """

    name: str
    width: int = 512
    depth: int
    num_heads: int = 8
    num_kv_heads: int = 8
    hidden: int = 1408
    length: int = 256
    accumulate: int = 1

    def parts(self) -> Parts:
        """The model on the meta device, its batch, loss and optimizer."""
        with torch.device("meta"):
            model = Llama(
                width=self.width, depth=self.depth, num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads, hidden=self.hidden, vocabulary=VOCABULARY,
                length=self.length,
            ).to(torch.bfloat16)  # fmt: skip
            batch = {"tokens": torch.empty((1, self.length + 1), dtype=torch.int64)}
        return Parts(
            model=model,
            batch=batch,
            losses=(next_token,),
            optimizers=(lambda model: torch.optim.AdamW(model.parameters()),),
        )

    def step(self) -> TrainingStep:
        """The same as the package's users say it."""
        parts = self.parts()
        return TrainingStep(
            parts.model,
            parts.batch,
            loss=next_token,
            optimizer=torch.optim.AdamW,
            precision="bf16-true",
            accumulate=self.accumulate,
        )


def _real(
    name: str, width: int, depth: int, num_heads: int, num_kv_heads: int, hidden: int
) -> Shape:
    return Shape(
        name=name,
        width=width,
        depth=depth,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        hidden=hidden,
        length=2048,
    )


#: By what grows.
ROWS: dict[str, dict[str, Shape]] = {
    "layers": {str(depth): Shape(name=str(depth), depth=depth) for depth in (12, 24, 48, 96)},
    "parameters": {
        shape.name: shape
        for shape in (
            _real("0.1 B", 768, 12, 12, 12, 2048),
            _real("1 B", 2048, 22, 32, 4, 5632),
            _real("7 B", 4096, 32, 32, 32, 11008),
            _real("13 B", 5120, 40, 40, 40, 13824),
            _real("70 B", 8192, 80, 64, 8, 28672),
        )
    },
    "events": {
        f"{count} batches": Shape(name=f"{count} batches", depth=24, accumulate=count)
        for count in (1, 8, 80)
    },
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """What one way through one shape took.

    Attributes:
        num_parameters: Of the model.
        num_events: Of our trace; None by the other ways.
        cpu_seconds: The processor's time for two updates, without making the model.
        resident_bytes: The largest resident size of the process, PyTorch included.
        kept_bytes: What of it is beyond that before the updates.
    """

    num_parameters: int
    num_events: int | None
    cpu_seconds: float
    resident_bytes: int
    kept_bytes: int


def fake_run(
    parts: Parts,
    tracker: MemTracker | None,
    *,
    autocast_dtype: torch.dtype | None = None,
    accumulate: int = 1,
) -> int:
    """Two updates on fake tensors; the peak that a tracker saw, 0 without one."""
    mode = FakeTensorMode()
    model, batch = fake_copy((parts.model, parts.batch), mode)
    (make_optimizer,), (loss_function,) = parts.optimizers, parts.losses
    with mode:
        optimizer = make_optimizer(model)
        for group in optimizer.param_groups:
            group["foreach"] = True
        if tracker:
            tracker.track_external(model, optimizer, *batch.values())
        with tracker or contextlib.nullcontext():
            for _ in range(NUM_STEPS):
                optimizer.zero_grad(set_to_none=True)
                for _ in range(accumulate):
                    with (
                        torch.autocast("cpu", autocast_dtype)
                        if autocast_dtype
                        else contextlib.nullcontext()
                    ):
                        loss = loss_function(model, batch)
                    loss.backward()
                    del loss
                optimizer.step()
                if tracker:
                    tracker.reset_mod_stats()
    return (
        0
        if tracker is None
        else sum(int(by_kind["Total"]) for by_kind in tracker.get_tracker_snapshot("peak").values())
    )


def resident_bytes() -> int:
    """The largest resident size that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def point(shape: Shape, way: str) -> Point:
    """What it takes in this process."""
    warnings.simplefilter("ignore")
    if way == OURS:
        step = shape.step()
        num_parameters = sum(parameter.numel() for parameter in step.model.parameters())
        spec = find_device(DEVICE)
        assert isinstance(spec, DeviceSpec)
        before_bytes, began = resident_bytes(), time.process_time()
        num_events: int | None = len(
            trace(TraceRequest(step, spec, num_updates=NUM_STEPS)).trace.events
        )
    else:
        parts = shape.parts()
        num_parameters, num_events = (
            sum(parameter.numel() for parameter in parts.model.parameters()),
            None,
        )
        before_bytes, began = resident_bytes(), time.process_time()
        fake_run(parts, MemTracker() if way == THEIRS else None, accumulate=shape.accumulate)
    return Point(
        num_parameters=num_parameters,
        num_events=num_events,
        cpu_seconds=time.process_time() - began,
        resident_bytes=resident_bytes(),
        kept_bytes=resident_bytes() - before_bytes,
    )


Points = dict[str, dict[str, dict[str, Point | None]]]


def measure() -> Points:
    """By what grows, by its value, by way; None where a way is not run."""
    found: Points = {}
    for row, shapes in ROWS.items():
        found[row] = {}
        before: dict[str, float | None] = dict.fromkeys(
            (BARE, OURS, THEIRS), 0.0
        )  # seconds for each layer of each batch
        for value, shape in shapes.items():
            num_layers, points = shape.depth * shape.accumulate, dict[str, Point | None]()
            for way, seconds in before.items():
                is_long = seconds is None or (way != OURS and seconds * num_layers > LONG_SECONDS)
                points[way] = one = None if is_long else _in_a_process_of_its_own(row, value, way)
                before[way] = one.cpu_seconds / num_layers if one else None
            found[row][value] = points
            times = (f"{one.cpu_seconds:.1f} s" if one else "-" for one in points.values())
            print(f"{row}, {value}: {', '.join(times)}", file=sys.stderr)
    return found


def _in_a_process_of_its_own(row: str, value: str, way: str) -> Point:
    answer = subprocess.run(
        [sys.executable, __file__, row, value, way], check=True, capture_output=True, text=True
    )
    return Point(**json.loads(answer.stdout))


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The power with which a figure grows: the slope of its logarithms, by least squares."""
    xs, ys = zip(*((math.log(x), math.log(y)) for x, y in points), strict=True)
    return statistics.linear_regression(xs, ys).slope


def size(row: str, value: str, points: Points) -> float:
    """What grows, as a number."""
    ours = points[row][value][OURS]
    assert ours is not None
    assert ours.num_events is not None
    return {
        "layers": ROWS[row][value].depth,
        "parameters": ours.num_parameters,
        "events": ours.num_events,
    }[row]


def exponents(points: Points) -> dict[str, dict[str, dict[str, float]]]:
    """By what grows, by way: the powers with which time and memory grow.

    Only ways that have three values.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row, by_value in points.items():
        for way in (BARE, OURS, THEIRS):
            known = [(size(row, value, points), one[way]) for value, one in by_value.items()]
            here = [(x, one) for x, one in known if one is not None]
            if len(here) > 2:
                of_way = found.setdefault(row, {})[way] = {}
                of_way["cpu_seconds"] = exponent([(x, one.cpu_seconds) for x, one in here])
                of_way["kept_bytes"] = exponent([(x, max(1, one.kept_bytes)) for x, one in here])
    return found


def most_over_n_log_n(points: Points) -> float:
    """The most that a trace takes over n log n, n its events, from the shortest of its row on."""
    worst = 0.0
    for by_value in points.values():
        ours = [one[OURS] for one in by_value.values()]
        per_event = [
            one.cpu_seconds / (one.num_events * math.log2(one.num_events))
            for one in ours
            if one is not None and one.num_events
        ]
        worst = max(worst, *(each / per_event[0] for each in per_event))
    return worst


def to_markdown(points: Points) -> list[str]:
    """The rows as tables."""
    lines = ["", "## Growth", ""]
    lines += [
        "Two updates of a Llama-like model on the meta device, once, each in a process of its "
        "own. Seconds are the processor's; memory is the largest resident size of the process, of "
        f"which PyTorch and the model are at least {format_bytes(min(_before(points)))}. Not run "
        f"(-): what would take more than {LONG_SECONDS} s, estimated from the row above.",
    ]
    powers = exponents(points)
    for row, by_value in points.items():
        lines += [
            "",
            f"| {row} | parameters | events | {BARE}, s | {OURS}, s | {THEIRS}, s | {BARE} | "
            f"{OURS} | {THEIRS} |",
        ]
        lines += ["|:---|---:|---:|---:|---:|---:|---:|---:|---:|"]
        for value, by_way in by_value.items():
            ours = by_way[OURS]
            assert ours is not None
            ways = list(by_way.values())
            times = " | ".join(f"{one.cpu_seconds:.1f}" if one else "-" for one in ways)
            sizes = " | ".join(format_bytes(one.resident_bytes) if one else "-" for one in ways)
            lines.append(
                f"| {value} | {ours.num_parameters:,} | {ours.num_events:,} | {times} | {sizes} |"
            )
        for figure, what in (
            ("cpu_seconds", "Time"),
            ("kept_bytes", "Memory beyond PyTorch and the model"),
        ):
            of_ways = ", ".join(
                f"{power[figure]:.2f} ({way})" for way, power in powers[row].items()
            )
            lines += ["", f"{what} grows with {row} to the power of {of_ways}."]
    return lines


def _before(points: Points) -> list[int]:
    every = [
        one
        for by_value in points.values()
        for by_way in by_value.values()
        for one in by_way.values()
        if one is not None
    ]
    return [one.resident_bytes - one.kept_bytes for one in every]


if __name__ == "__main__":
    print(json.dumps(asdict(point(ROWS[sys.argv[1]][sys.argv[2]], sys.argv[3]))))
