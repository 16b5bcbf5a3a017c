"""How many events a second the simulated allocator takes, and how that grows with their number.

    python benchmarks/allocator.py [--rounds 5] [--out FOLDER]

Needs no GPU and no PyTorch. Two kinds of histories, each with 10,000, 100,000 and 1,000,000 events:

- *training*: a trace of three training steps of a model that is the deeper the longer the history
  is, so that more is allocated at once: activations of a few sizes, made in the forward pass and
  freed in the backward pass, temporaries in between, gradients, Adam.
- *random*: sizes from 1 byte to 64 MiB, each as likely on a logarithmic scale, freed in any order;
  as many blocks are allocated at once as a twentieth of the events. There are many free blocks of
  all sizes, which is the worst case for a pool.

*Replay* is what a prediction does: `memcallback.prediction.replay.replay`, with the figures of
every phase. *Allocator* is `CachingAllocator` alone. Both stand beside a bare loop that keeps a
dict of what is alive and adds up sizes, in the same round. Times are of the processor, medians over
the rounds.

The result goes to `benchmarks/results/cpu-<date>/`, or the folder that is named, as
`allocator.json` and `allocator.md`; the exit code is 1 if what is asked of the figures (`judged`)
is not met.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from machine import processor, results_folder, today

from memcallback import __version__
from memcallback.core.allocation_trace import (
    Alloc,
    Event,
    Free,
    PhaseEnd,
    PhaseStart,
    StepEnd,
    StepStart,
)
from memcallback.core.types import Category, Phase
from memcallback.core.units import MiB
from memcallback.prediction.allocator.blocks import Block
from memcallback.prediction.allocator.caching import CachingAllocator
from memcallback.prediction.replay import replay

NUM_EVENTS = (10_000, 100_000, 1_000_000)
#: What is asked: events a second in a replay of the longest training, and how much more than n log
#: n the longest may take.
LEAST_EVENTS_PER_SECOND = 500_000
MOST_OVER_N_LOG_N = 1.5
#: Of an activation, of a weight, of a temporary.
_ACTIVATIONS = (786_432, 3_145_728, 1_572_864, 6_144, 786_432)
_WEIGHT, _TEMPORARY = 2_359_296, 3_145_728
_NUM_STEPS = 3
#: Events of one layer in one step, about.
_PER_LAYER = 4 * len(_ACTIVATIONS) + 4


def training(num_events: int) -> list[Event]:
    """A trace of three steps."""
    num_layers = num_events // _NUM_STEPS // _PER_LAYER
    numbers = iter(range(10 * num_events))
    events: list[Event] = []

    def take(size_bytes: int, category: Category | None = None) -> int:
        number = next(numbers)
        events.append(Alloc(number, size_bytes, category=category))
        return number

    weights = [take(_WEIGHT, Category.PARAMETER) for _ in range(num_layers)]
    for step in range(_NUM_STEPS):
        events.append(StepStart())
        events.append(PhaseStart(Phase.FORWARD))
        saved = []
        for _ in weights:
            for size_bytes in _ACTIVATIONS:
                saved.append(take(size_bytes))
                events.append(Free(take(_TEMPORARY)))
        events += [PhaseEnd(Phase.FORWARD), PhaseStart(Phase.BACKWARD)]
        gradients = []
        while saved:
            events.append(Free(saved.pop()))
            if len(saved) % len(_ACTIVATIONS) == 0:
                gradients.append(take(_WEIGHT, Category.GRADIENT))
        events += [PhaseEnd(Phase.BACKWARD), PhaseStart(Phase.OPTIMIZER_STEP)]
        for gradient in gradients:
            if step == 0:
                take(2 * _WEIGHT, Category.OPTIMIZER_STATE)
            events.append(Free(gradient))
        events += [PhaseEnd(Phase.OPTIMIZER_STEP), StepEnd()]
    return events


def random(num_events: int) -> list[Event]:
    """Blocks of all sizes, freed in any order."""
    source, alive, number, events = Random(0), list[int](), 0, list[Event]()
    while len(events) < num_events:
        if alive and (len(alive) > num_events / 20 or source.random() < 0.5):
            position = source.randrange(len(alive))
            alive[position], alive[-1] = alive[-1], alive[position]
            events.append(Free(alive.pop()))
        else:
            events.append(Alloc(number, int(math.exp(source.uniform(0, math.log(64 * MiB))))))
            alive.append(number)
            number += 1
    return events


def by_replay(events: Sequence[Event]) -> None:
    """What a prediction does."""
    found = replay(events, CachingAllocator())
    assert found.out_of_memory is None


def by_allocator(events: Sequence[Event]) -> None:
    """The allocator alone."""
    allocator, blocks = CachingAllocator(), {}
    for event in events:
        if isinstance(event, Alloc):
            blocks[event.id] = allocator.allocate(event.size_bytes)
        elif isinstance(event, Free):
            allocator.free(blocks.pop(event.id))


def by_bare_loop(events: Sequence[Event]) -> None:
    """What any simulation has to do at least."""
    alive, current, peak = {}, 0, 0
    for event in events:
        if isinstance(event, Alloc):
            alive[event.id] = event
            current += event.size_bytes
            peak = max(peak, current)
        elif isinstance(event, Free):
            current -= alive.pop(event.id).size_bytes


HISTORIES: dict[str, Callable[[int], list[Event]]] = {"training": training, "random": random}
WAYS: dict[str, Callable[[Sequence[Event]], None]] = {
    "replay": by_replay,
    "allocator": by_allocator,
    "bare loop": by_bare_loop,
}


class Counting(CachingAllocator):
    """Counts what it is asked."""

    num_events = 0

    def allocate(self, size_bytes: int, stream: int = 0) -> Block:
        """Counts."""
        self.num_events += 1
        return super().allocate(size_bytes, stream)

    def free(self, block: Block) -> None:
        """Counts."""
        self.num_events += 1
        super().free(block)


def num_put(events: Sequence[Event]) -> int:
    """How many events a replay puts to the allocator.

    The last update comes again until the allocator has settled.
    """
    allocator = Counting()
    replay(events, allocator)
    return allocator.num_events


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way through one history.

    Attributes:
        history: Its kind.
        way: How.
        num_events: How many.
        events_per_second: Of the median round; in a replay those that the allocator was given.
        over_bare_loop: The median of the rounds' quotients.
        over_n_log_n: How much longer it takes for each event and each doubling of their number than
            the shortest history of its kind.
    """

    history: str
    way: str
    num_events: int
    events_per_second: float
    over_bare_loop: float
    over_n_log_n: float


def seconds(way: Callable[[Sequence[Event]], None], events: Sequence[Event]) -> float:
    """The processor's time."""
    gc.collect()
    began = time.process_time()
    way(events)
    return time.process_time() - began


def measure(num_rounds: int) -> Iterator[Row]:
    """All rows."""
    for history, make in HISTORIES.items():
        shortest: dict[str, float] = {}
        for number in NUM_EVENTS:
            events = make(number)
            num_given = {name: len(events) for name in WAYS} | {"replay": num_put(events)}
            rounds = [
                {name: seconds(way, events) for name, way in WAYS.items()}
                for _ in range(num_rounds)
            ]
            for name in WAYS:
                time_ = statistics.median(one[name] for one in rounds)
                per_n_log_n = time_ / (len(events) * math.log2(len(events)))
                yield Row(
                    history=history,
                    way=name,
                    num_events=len(events),
                    events_per_second=num_given[name] / time_,
                    over_bare_loop=statistics.median(
                        one[name] / one["bare loop"] for one in rounds
                    ),
                    over_n_log_n=per_n_log_n / shortest.setdefault(name, per_n_log_n),
                )
                print(f"{history}, {name}, {len(events):,}: {time_:.3f} s", file=sys.stderr)


def judged(rows: Sequence[Row]) -> dict[str, bool]:
    """What is asked of the figures, and whether it is so."""
    longest = next(
        row for row in reversed(rows) if (row.history, row.way) == ("training", "replay")
    )
    return {
        f"replay of {longest.num_events:,} events of training: at least "
        f"{LEAST_EVENTS_PER_SECOND:,} a second": longest.events_per_second
        >= LEAST_EVENTS_PER_SECOND,
        f"time over n log n, n the events of a history, is at most {MOST_OVER_N_LOG_N} times that "
        "of the shortest history of its kind": all(
            row.over_n_log_n <= MOST_OVER_N_LOG_N for row in rows if row.way != "bare loop"
        ),
    }


def to_markdown(rows: Sequence[Row], verdicts: dict[str, bool], about: dict[str, str]) -> str:
    """The result as a page."""
    lines = [
        "# Events a second of the simulated allocator",
        "",
        *(f"- {name}: {value}" for name, value in about.items()),
        "",
    ]
    lines += [
        f"- {'met' if is_met else '**not met**'}: {what}" for what, is_met in verdicts.items()
    ]
    lines += [
        "",
        "| history | events | way | events a second | time over a bare loop's | over n log n |",
        "|:---|---:|:---|---:|---:|---:|",
    ]
    lines += [
        f"| {row.history} | {row.num_events:,} | {row.way} | {row.events_per_second:,.0f} | "
        f"{row.over_bare_loop:.1f} | {row.over_n_log_n:.2f} |"
        for row in rows
    ]
    lines += [
        "",
        "Not reported: expandable segments, streams, a device that is full (each retry walks "
        "through all free blocks).",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description="Events a second of the simulated allocator.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="the folder for the results")
    options = parser.parse_args()
    rows = list(measure(options.rounds))
    verdicts = judged(rows)
    about = {
        "processor": processor(),
        "python": platform.python_version(),
        "memcallback": __version__,
        "date": today(),
        "command": shlex.join(["python", "benchmarks/allocator.py", *sys.argv[1:]]),
    }
    out = options.out or results_folder("cpu")
    out.mkdir(parents=True, exist_ok=True)
    results = {
        "environment": about,
        "rounds": options.rounds,
        "rows": [asdict(row) for row in rows],
        "judged": verdicts,
    }
    (out / "allocator.json").write_text(json.dumps(results, indent=2) + "\n")
    text = to_markdown(rows, verdicts, about)
    (out / "allocator.md").write_text(text)
    print(text)
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
