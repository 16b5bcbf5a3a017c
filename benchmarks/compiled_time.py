"""How long the prediction of a compiled step takes, beside what torch.compile takes to write code.

    python benchmarks/compiled_time.py [--rounds 3]           # on a CUDA device, real or virtual

GPT-2 of 124 million parameters under bf16 autocast, forward and backward pass. Each run is a
process of its own with an empty cache of Inductor; the two take turns. What torch.compile takes to
reach its generated code is what PyTorch's own clocks say: all compilation, less the time in which
the generated module is loaded, which compiles its Triton kernels. The prediction's time is that of
the call, with all that it starts.

The result goes to `benchmarks/results/<device>-<date>/` as JSON and Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from compiled_cases import CASES
from machine import command, driver, not_reported, processor, results_folder, today
from torch.utils._pytree import tree_map_only

import memcallback as mc

NAME = "gpt2, bf16"
#: Clocks of torch._dynamo.utils: what compiles, and what of it comes after the code is written.
COMPILE = ("_compile.compile_inner", "backward._backward_impl")
LOAD = "PyCodeCache.load_by_key_path"
NOT_REPORTED = ("Imports, and building the model.", "Compilation of Triton kernels.")


def compile_s() -> float:
    """Seconds until the code of the forward and the backward pass is written."""
    from torch._dynamo.utils import compilation_time_metrics

    case = CASES[NAME]
    model = case.model().cuda()
    batch = tree_map_only(torch.Tensor, torch.Tensor.cuda, case.batch())
    with torch.autocast("cuda", torch.bfloat16):
        loss = case.loss(case.compiled(model), batch)
    loss.backward()
    spent = sum(sum(compilation_time_metrics[name]) for name in COMPILE)
    return float(spent - sum(compilation_time_metrics[LOAD]))


def predict_s() -> float:
    """Seconds that the prediction takes."""
    step = CASES[NAME].step()
    start = time.perf_counter()
    prediction = mc.predict(step, device=torch.cuda.get_device_name())
    seconds = time.perf_counter() - start
    assert any(caveat.startswith("Compiled code is") for caveat in prediction.caveats)
    return seconds


def in_new_process(what: str) -> float:
    """The seconds that one of the two takes."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, "--do", what],
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            check=True,
        )
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Time both in turns, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--do", choices=("compile", "predict"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.do:
        print(compile_s() if given.do == "compile" else predict_s())
        return
    rounds = [
        {what: in_new_process(what) for what in ("compile", "predict")} for _ in range(given.rounds)
    ]
    ratio = statistics.median(one["predict"] / one["compile"] for one in rounds)
    device = torch.cuda.get_device_name()
    about = {
        "device": device,
        "driver": driver(),
        "processor": processor(),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "date": today(),
        "command": command(),
    }
    folder = results_folder(device)
    folder.mkdir(parents=True, exist_ok=True)
    content = {**about, "name": NAME, "ratio": ratio, "rounds": rounds}
    (folder / "compiled_time.json").write_text(json.dumps(content, indent=1) + "\n")
    lines = [
        "# How long the prediction of a compiled step takes",
        "",
        f"The prediction takes {ratio:.2f} times as long as torch.compile takes to write its code "
        f"(median of {len(rounds)} rounds). Step: {NAME}, forward and backward pass, empty cache.",
        "",
        *(f"- {key}: {value}" for key, value in about.items()),
        "",
        "| round | torch.compile, to its code | prediction |",
        "|---:|---:|---:|",
        *(
            f"| {number} | {one['compile']:.1f} s | {one['predict']:.1f} s |"
            for number, one in enumerate(rounds, 1)
        ),
        *not_reported(NOT_REPORTED),
    ]
    (folder / "compiled_time.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
