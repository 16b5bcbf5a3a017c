"""How large the page of a large step is, and how long Chromium takes to show it.

    python benchmarks/page.py [--browser chromium]

Two steps: one of 100,000 allocations and frees, generated, of 1,000 layers with different names;
and Llama 2 7B's, traced on the meta device. Each page is opened in headless Chromium, in a profile
of its own. By the page's clock, from the beginning of its loading to the end of its script and of
the layout; and by ours, the whole run of the browser with a picture of the page, less that of an
empty page.

The result goes to `benchmarks/results/cpu-<date>/` as JSON and Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

from machine import command, not_reported, processor, results_folder, today

import memcallback as mc
from memcallback.core.allocation_trace import (
    Alloc,
    AllocationTrace,
    Event,
    Free,
    PhaseEnd,
    PhaseStart,
    StepEnd,
    StepStart,
)
from memcallback.core.types import Category, Phase
from memcallback.core.units import MiB
from memcallback.devices.catalogue import find_device
from memcallback.prediction.batch_trace import BatchTrace
from memcallback.prediction.prediction import Prediction
from memcallback.trace.traced_step import TracedStep

NUM_LAYERS, NUM_OPERATORS = 1000, 25
ROUNDS = 5
EMPTY = "<!DOCTYPE html><title>empty</title>"
#: When the layout is done, by the page's own clock.
CLOCK = (
    "<script>document.body.getBoundingClientRect();"
    "document.title = 'shown after ' + performance.now();</script></body>"
)
NOT_REPORTED = ("A phone or a slow disk.", "How long the prediction itself takes.")


def by_hand() -> Prediction:
    """A step of 1,000 layers of 25 operators, each of which allocates and frees twice."""
    return Prediction.of(
        BatchTrace.fit(*(_traced(batch_size) for batch_size in (2, 3, 7))),
        find_device("NVIDIA H200"),
    )


def _traced(batch_size: int) -> TracedStep:
    ids = count()
    events: list[Event] = []

    def alloc(size: int, category: Category, operator: str, module: str) -> int:
        number = next(ids)
        events.append(Alloc(number, size, 0, category, operator, module))
        return number

    names = [f"part{number % 40}.layer_{number}" for number in range(NUM_LAYERS)]
    for name in names:
        alloc(4 * MiB, Category.PARAMETER, "", name)
    for _ in range(2):
        events += [StepStart(), PhaseStart(Phase.FORWARD)]
        saved = [
            alloc(batch_size * 64 * 1024 * (1 + number % 3), Category.ACTIVATION, operator, name)
            for name in names
            for number in range(NUM_OPERATORS)
            for operator in (f"aten::operator_{number}",)
        ]
        events += [PhaseEnd(Phase.FORWARD), PhaseStart(Phase.BACKWARD)]
        for number, one in enumerate(reversed(saved)):
            name = names[-1 - number // NUM_OPERATORS]
            passed = alloc(batch_size * MiB, Category.TEMPORARY, "aten::operator_backward", name)
            events += [Free(passed), Free(one)]
        events += [PhaseEnd(Phase.BACKWARD), StepEnd()]
    return TracedStep(AllocationTrace(tuple(events)), batch_size)


def llama() -> Prediction:
    """Llama 2 7B in bfloat16 on the meta device, one sequence of 4,096 tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig())
        model = model.to(torch.bfloat16)
        tokens = torch.zeros(1, 4096, dtype=torch.long)

    def loss_of(model: Any, tokens: Any) -> Any:
        return model(input_ids=tokens, labels=tokens).loss

    step = mc.TrainingStep(model, tokens, loss=loss_of, optimizer=torch.optim.AdamW)
    return mc.predict(step, device="NVIDIA H200", timeout_s=3600)


def num_events(prediction: Prediction) -> int:
    """Allocations and frees of the steady step."""
    events = prediction.trace.at(prediction.batch_size).events
    start = max(number for number, event in enumerate(events) if isinstance(event, StepStart))
    return sum(isinstance(event, (Alloc, Free)) for event in events[start:])


def run(browser: str, page: Path, *arguments: str) -> tuple[float, str]:
    """Seconds of one run of the browser, and what it prints."""
    with tempfile.TemporaryDirectory() as profile:
        start = time.perf_counter()
        done = subprocess.run(
            [
                browser,
                "--headless",
                # Chromium refuses its sandbox to root; it sees our own pages alone.
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--no-first-run",
                "--window-size=1160,2400",
                f"--user-data-dir={profile}",
                *arguments,
                page.as_uri(),
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        return time.perf_counter() - start, done.stdout


def measure(browser: str, html: str, folder: Path) -> dict[str, Any]:
    """The page's clock and ours; the median of some rounds."""
    page, empty, picture = folder / "page.html", folder / "empty.html", folder / "page.png"
    page.write_text(html.replace("</body>", CLOCK), encoding="utf-8")
    empty.write_text(EMPTY, encoding="utf-8")
    shown, more = [], []
    for _ in range(ROUNDS):
        _, text = run(browser, page, "--dump-dom")
        found = re.search(r"shown after ([\d.]+)", text)
        if found is None:
            raise RuntimeError("the page's script did not run to its end")
        shown.append(float(found[1]) / 1000)
        of_page, _ = run(browser, page, f"--screenshot={picture}")
        of_empty, _ = run(browser, empty, f"--screenshot={picture}")
        more.append(of_page - of_empty)
    return {
        "shown_s": statistics.median(shown),
        "shown_most_s": max(shown),
        "more_than_empty_s": statistics.median(more),
    }


def main() -> None:
    """Predict, write, open, and write down."""
    parser = argparse.ArgumentParser(description="Measure the page of a large step.")
    parser.add_argument("--browser", default=shutil.which("chromium"), help="Chromium or Chrome")
    browser = parser.parse_args().browser
    if browser is None:
        raise SystemExit("chromium is not on the path. Install it, or give --browser.")
    results = []
    for name, make in (("1,000 layers, generated", by_hand), ("Llama 2 7B", llama)):
        prediction = make()
        start = time.process_time()
        html = prediction.page().html()
        written_s = time.process_time() - start
        with tempfile.TemporaryDirectory() as folder:
            measured = measure(browser, html, Path(folder))
        row = {
            "step": name,
            "num_events": num_events(prediction),
            "page_bytes": len(html.encode()),
            "written_processor_s": written_s,
            **measured,
        }
        print(row)
        results.append(row)
    said = subprocess.run([browser, "--version"], capture_output=True, text=True, check=True)
    environment = {
        "processor": processor(),
        "load": f"{os.getloadavg()[0]:.1f} processes wanted to run, in the last minute",
        "browser": said.stdout.strip(),
        "versions": f"Python {platform.python_version()}, torch {version('torch')}",
        "date": today(),
        "command": command(),
        "rounds": ROUNDS,
    }
    lines = ["# The page of a large step", ""]
    lines += [f"- {key}: {value}" for key, value in environment.items()]
    lines += [
        "",
        "| step | events | page, MB | shown after, s | slowest, s | picture, s more than an empty "
        "page | written in, s of processor time |",
        "|:---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['step']} | {row['num_events']:,} | {row['page_bytes'] / 1e6:.2f} | "
        f"{row['shown_s']:.2f} | {row['shown_most_s']:.2f} | {row['more_than_empty_s']:.2f} | "
        f"{row['written_processor_s']:.1f} |"
        for row in results
    ]
    lines += not_reported(NOT_REPORTED)
    results_in = results_folder("cpu")
    results_in.mkdir(parents=True, exist_ok=True)
    data = json.dumps({"environment": environment, "pages": results}, indent=2)
    (results_in / "page.json").write_text(data + "\n", encoding="utf-8")
    (results_in / "page.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
