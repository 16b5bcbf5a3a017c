"""Draws what was measured on real GPUs against what is predicted.

docs/images/real-gpus.png has what others measured, docs/images/our-gpus.png our own measurements.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from accuracy_cudnn import GROUPS, group_of, peak_bytes  # noqa: E402

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


#: A group of `accuracy_cudnn.py` -> its label in the picture, and its colour.
OF_CUDNN = dict(
    zip(
        GROUPS,
        (
            ("PyTorch alone", "#0072B2"),
            ("with convolutions", "#D55E00"),
            ("with LSTM or GRU of cuDNN", "#009E73"),
        ),
        strict=True,
    )
)
#: Errors below are drawn in proportion, larger ones by their logarithm.
PROPORTIONAL_PCT = 0.1


def main() -> None:
    """Draw the newest results."""
    draw_others()
    draw_own()


def measured_here(folder: Path) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """Each step: what cuDNN takes memory for, and measured and predicted peaks by kind."""

    def read(name: str) -> Any:
        return json.loads(gzip.decompress((folder / name).read_bytes()))

    configs, answers = read("accuracy.json.gz")["configs"], read("predicted.json.gz")["answers"]
    for name, answer in answers.items():
        both = configs[name]["windows"][-1], answer["result"]["steps"]
        yield (
            group_of(answer["result"]["caveats"]),
            {
                kind: (peak_bytes(both[0], kind), peak_bytes(both[1], kind))
                for kind in ("allocated", "reserved")
            },
        )
    programs = folder / "programs.json"
    for row in json.loads(programs.read_text())["rows"] if programs.exists() else ():
        if "phases" in row:
            yield (
                group_of(row["caveats"]),
                {
                    kind: tuple(
                        max(phase[f"{which}{kind}_bytes"] for phase in row["phases"])
                        for which in ("", "predicted_")
                    )
                    for kind in ("allocated", "reserved")
                },
            )


def draw_own() -> None:
    """How far predictions are off on the cards that we had, by the size of the step."""
    rows = [
        row
        for predicted in (ROOT / "benchmarks" / "results").glob("nvidia-h?00-*/predicted.json.gz")
        if "virtual" not in predicted.parent.name
        for row in measured_here(predicted.parent)
    ]
    figure = Figure(figsize=(9, 5), layout="constrained")
    for axes, kind in zip(
        figure.subplots(1, 2, sharey=True), ("allocated", "reserved"), strict=True
    ):
        for group, (name, colour) in reversed(OF_CUDNN.items()):
            points = [
                (real / 2**30, 100 * (predicted / real - 1))
                for one, peaks in rows
                if one == group
                for real, predicted in [peaks[kind]]
            ]
            exact = sum(error == 0 for _, error in points)
            label = f"{name}: {exact} of {len(points)} exact"
            axes.scatter(*zip(*points, strict=True), s=18, color=colour, label=label, zorder=3)
        axes.set_yscale("symlog", linthresh=PROPORTIONAL_PCT)
        axes.set(xscale="log", xlabel="measured, GiB", title=f"Peak {kind}", ylim=(-100, 100))
        axes.set_yticks([-50, -10, -1, -0.1, 0, 0.1, 1, 10, 50])
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value:+g} %" if value else "exact")
        )
        axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
        axes.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
        place = {"loc": "upper left", "bbox_to_anchor": (0, -0.16), "reverse": True}
        axes.legend(frameon=False, fontsize="small", **place)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("predicted is off by")
    figure.savefig(ROOT / "docs" / "images" / "our-gpus.png", dpi=110)


def draw_others() -> None:
    """Predicted against measured, one colour for each source."""
    (file,) = (ROOT / "benchmarks" / "results").glob("real-gpus-*/real_gpus.json")
    rows = [
        row
        for row in json.loads(file.read_text())["rows"]
        if "error" in row and "operator" not in row  # single operators are small
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
