"""Draws what others measured on real GPUs against what is predicted: docs/images/real-gpus.png."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
#: The start of a source -> its name and colour (Okabe and Ito's, which colour-blind people tell).
SOURCES = {
    "huggingface.co": ("optimum-benchmark", "#0072B2"),
    "xMem": ("xMem", "#D55E00"),
    "itu-rad": ("GPUMemNet", "#009E73"),
    "huggingface/transformers": ("Hugging Face's guide", "#CC79A7"),
    "github": ("ColossalAI", "#E69F00"),
    "zhuang-group": ("Mesa", "#56B4E9"),
    "huggingface/peft": ("PEFT", "#000000"),
}


def main() -> None:
    """Draw the newest result."""
    newest = max((ROOT / "benchmarks" / "results").glob("real-gpus-*/real_gpus.json"))
    rows = [
        row
        for row in json.loads(newest.read_text())["rows"]
        if "error" in row and "operator" not in row  # single operators are exact, and small
    ]
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    axes = figure.subplots()
    for start, (name, colour) in SOURCES.items():
        points = [
            (row["value"] / 2**30, row["predicted"] / 2**30)
            for row in rows
            if row["source"].startswith(start)
        ]
        if points:
            axes.scatter(*zip(*points, strict=True), s=22, color=colour, label=name, zorder=3)
    sizes = [row["value"] / 2**30 for row in rows]
    ends = [min(sizes) / 1.3, max(sizes) * 1.3]
    axes.plot(ends, ends, color="#888888", linewidth=1, zorder=1)
    axes.set(xscale="log", yscale="log", xlabel="measured, GiB", ylabel="predicted, GiB")
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs" / "images" / "real-gpus.png", dpi=110)


if __name__ == "__main__":
    main()
