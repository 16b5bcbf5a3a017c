"""How far the textbook estimate is off, beside the traced step and the measurement.

The law is: memory = model memory + batch size * memory per sample.

    python benchmarks/law.py [--only NAME ...] [--out FOLDER]

Needs no GPU: what was measured is that of the accuracy proof (the newest on a virtual H200 in
`benchmarks/results/`). All its configurations in float32 and in bf16-mixed that neither accumulate
nor recompute nor clip, with one loss, are predicted by the law
(`memcallback.prediction.textbook.predict`: an upper and a lower bound) and by a trace
(`memcallback.predict`), and the largest allocated figure of a steady step is compared.

*Textbook estimate* is the upper bound, as the law is commonly told: every output counts twice. Its
*lower bound* counts what autograd saves, once. The result goes to `benchmarks/results/cpu-<date>/`
as law.json and law.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accuracy import read_json, training_step
from accuracy_configs import CONFIGS, Config
from machine import command, latest_result, not_reported, results_folder, today

from memcallback import PredictionError, __version__, format_bytes, predict
from memcallback.core.document import Table
from memcallback.core.step_memory import error_pct
from memcallback.prediction.textbook.predict import predict as predict_by_law

DEVICE = "NVIDIA H200"
NOT_REPORTED = (
    "reserved memory, which the textbook estimate does not have",
    "configurations that accumulate, recompute, clip, or have several losses, and those of 16-bit "
    "parameters",
    "a real device: what was measured is of a virtual one",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration; the largest allocated figure of a steady step, in bytes.

    Attributes:
        config: Its name.
        measured_bytes: Measured.
        law_bytes: By the law; None if it cannot follow the step.
        low_bytes: Its lower bound.
        traced_bytes: By a trace.
    """

    config: str
    measured_bytes: int
    law_bytes: int | None
    low_bytes: int | None
    traced_bytes: int

    def errors_pct(self) -> tuple[float | None, float | None, float | None]:
        """Of the law, its lower bound and the trace."""
        law, low, traced = (
            error_pct(one, self.measured_bytes)
            for one in (self.law_bytes, self.low_bytes, self.traced_bytes)
        )
        return law, low, traced


def is_plain(config: Config) -> bool:
    """Whether the law has words for it."""
    is_said = (
        config.precision in ("32-true", "bf16-mixed")
        and not config.has_closure
        and len(config.workload.losses) == 1
    )
    is_saving = (
        config.accumulate > 1
        or config.checkpointing != "none"
        or config.clip_grad_norm is not None
        or config.channels_last
    )
    return is_said and not is_saving and config.left_out is None


def row(config: Config, measured: dict[str, Any]) -> Row:
    """Predict one configuration."""
    step = training_step(config, config.make(initialise=False))
    bounds: tuple[int | None, int | None] = None, None
    try:
        law = predict_by_law(step)
        bounds = law.peak_allocated_bytes, max(window.low_bytes or 0 for window in law.step.windows)
    except PredictionError:
        pass  # the law has no answer
    return Row(
        config=config.name,
        measured_bytes=max(window["peak_allocated_bytes"] for window in measured["windows"][-1][0]),
        law_bytes=bounds[0],
        low_bytes=bounds[1],
        traced_bytes=predict(step, device=DEVICE).peak_allocated_bytes or 0,
    )


def to_markdown(about: dict[str, Any], rows: list[Row]) -> str:
    """The result as a page."""
    lines = [
        "# The textbook estimate beside a trace",
        "",
        *(f"- {name}: {value}" for name, value in about.items()),
        "",
    ]
    for label, errors in zip(
        ("textbook estimate", "lower bound of the textbook estimate", "trace"),
        zip(*(one.errors_pct() for one in rows), strict=True),
        strict=True,
    ):
        known = [error for error in errors if error is not None]
        lines.append(
            f"- {label}: error from {min(known):+.1f} % to {max(known):+.1f} %, in the median "
            f"{statistics.median(known):+.1f} %, without signs in the median "
            f"{statistics.median(map(abs, known)):.1f} % ({len(known)} of {len(rows)})"
        )
    cells = [
        (
            one.config,
            format_bytes(one.measured_bytes),
            *("not followed" if e is None else f"{e:+.1f}" for e in one.errors_pct()),
        )
        for one in sorted(rows, key=lambda one: one.config)
    ]
    columns = ("configuration", "measured", "estimate, %", "lower bound, %", "trace, %")
    return (
        "\n".join(lines)
        + "\n\n"
        + Table(
            title="Error of the peak of allocated memory", columns=columns, rows=tuple(cells)
        ).to_markdown()
        + "\n"
        + "\n".join([*not_reported(NOT_REPORTED), ""])
    )


def main() -> None:
    """Predict, compare, write."""
    parser = argparse.ArgumentParser(description="The textbook estimate beside a trace.")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="these configurations alone"
    )
    parser.add_argument("--out", type=Path, help="another folder to write into")
    options = parser.parse_args()
    document = read_json(latest_result("nvidia-h200-virtual", "accuracy.json.gz"))
    rows = []
    for config in CONFIGS:
        if (
            is_plain(config)
            and config.name in document["configs"]
            and (not options.only or config.name in options.only)
        ):
            print(config.name, file=sys.stderr, flush=True)
            rows.append(row(config, document["configs"][config.name]))
    about = {
        "measured": f"{DEVICE}, virtual, PyTorch {document['environment']['torch']}, "
        f"{document['environment']['date']}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "memcallback": __version__,
        "date": today(),
        "command": command(),
    }
    out = options.out or results_folder("cpu")
    out.mkdir(parents=True, exist_ok=True)
    (out / "law.json").write_text(
        json.dumps({"environment": about, "rows": [asdict(one) for one in rows]}, indent=1) + "\n"
    )
    (out / "law.md").write_text(to_markdown(about, rows))
    print(to_markdown(about, rows))


if __name__ == "__main__":
    main()
