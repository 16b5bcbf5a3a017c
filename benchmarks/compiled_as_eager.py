"""What compiled steps need beside what is predicted where the trace does not compile them.

    python benchmarks/compiled_as_eager.py RESULT.json ...

Each RESULT.json was written by `compiled.py`. Its steps are predicted again as they would run
without compilation, which is what a prediction falls back to where it cannot compile; that is
compared with what `compiled.py` measured. No device is needed.

The result goes to `benchmarks/results/compiled-as-eager-<date>/` as JSON and Markdown.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from compiled_cases import CASES
from machine import RESULTS, not_reported, today
from two_machines import in_new_process

import memcallback as mc

Row = dict[str, dict[str, int]]
#: In names of steps that have it: a trace has a rule for it, which is that of the compiled one.
HAS_RULE = "flex attention"


def as_eager(name: str, device: str) -> dict[str, int]:
    """What is predicted of a step as it would run without compilation."""
    step = CASES[name].step()
    prediction = mc.predict(step, device=device, isolate=False)
    assert any("without compilation" in caveat for caveat in prediction.caveats), name
    assert prediction.peak_reserved_bytes is not None
    return {
        "allocated": prediction.peak_allocated_bytes,
        "reserved": prediction.peak_reserved_bytes,
    }


def share(row: Row, what: str) -> float:
    """What was measured of compiled code, as a share of what is predicted without compilation."""
    return row["measured"][what] / row["predicted"][what]


def main() -> None:
    """Predict the steps of all results, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("results", nargs="+", type=Path, help="files of compiled.py")
    parser.add_argument("--do", nargs=2, metavar=("NAME", "DEVICE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.do:
        print(json.dumps(as_eager(*given.do)))
        return
    folder = RESULTS / f"compiled-as-eager-{today()}"
    rows = earlier(folder)
    about = {
        "versions": f"Python {sys.version.split()[0]}, torch {torch.__version__}",
        "date": today(),
        "command": "python benchmarks/compiled_as_eager.py "
        + " ".join(str(Path(*path.resolve().parts[-2:])) for path in given.results),
    }
    for path in given.results:
        result = json.loads(path.read_text())
        of_device = rows.setdefault(f"{result['device']}, {result['driver']}", {})
        for name, row in result["steps"].items():
            if name not in CASES or name in of_device or HAS_RULE in name:
                continue
            predicted = in_new_process(__file__, str(path), "--do", name, result["device"])
            of_device[name] = {"measured": row["warm"], "predicted": predicted}
            print(name, of_device[name], flush=True)
            write(folder, about, rows)


def earlier(folder: Path) -> dict[str, dict[str, Row]]:
    """The rows of the same day."""
    path = folder / "compiled_as_eager.json"
    if not path.exists():
        return {}
    rows: dict[str, dict[str, Row]] = json.loads(path.read_text())["devices"]
    return rows


def write(folder: Path, about: dict[str, str], rows: dict[str, dict[str, Row]]) -> None:
    """Write the result; after each step, as all of them take a while."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compiled_as_eager.json").write_text(
        json.dumps({**about, "devices": rows}, indent=1) + "\n"
    )
    lines = ["# Compiled steps, predicted as without compilation", ""]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    lines += [
        "",
        "Bytes, peak allocated / reserved. Compiled: measured in the last update of a process that "
        "found its code in Inductor's cache. Share: compiled, of what is predicted.",
    ]
    for device, of_device in rows.items():
        lines += ["", f"## {device}", "", summary(of_device), ""]
        lines += ["| step | predicted | compiled | share |", "|:---|---:|---:|---:|"]
        for name, row in of_device.items():
            predicted, compiled = (
                f"{row[kind]['allocated']:,} / {row[kind]['reserved']:,}"
                for kind in ("predicted", "measured")
            )
            shares = " / ".join(
                f"{100 * share(row, what):.0f} %" for what in ("allocated", "reserved")
            )
            lines.append(f"| {name} | {predicted} | {compiled} | {shares} |")
    lines += not_reported(
        [
            "What a process needs that compiles (`compiled.py` says it).",
            "Steps with flex_attention: a trace predicts that as compiled in any case.",
        ]
    )
    (folder / "compiled_as_eager.md").write_text("\n".join(lines) + "\n")


def summary(rows: dict[str, Row]) -> str:
    """Between which shares the steps are, with CUDA graphs and without."""
    sentences = []
    for kind, has_graphs in (("without CUDA graphs", False), ("with CUDA graphs", True)):
        of_kind = [row for name, row in rows.items() if ("graphs" in name) is has_graphs]
        if not of_kind:
            continue
        between = []
        for what in ("allocated", "reserved"):
            shares = [share(row, what) for row in of_kind]
            more = sum(one > 1 for one in shares)
            between.append(
                f"{what} {100 * min(shares):.0f} to {100 * max(shares):.0f} % "
                f"(more than predicted in {more})"
            )
        sentences.append(f"{len(of_kind)} steps {kind}: {', '.join(between)}.")
    return " ".join(sentences)


if __name__ == "__main__":
    main()
