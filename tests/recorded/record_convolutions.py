"""Record what convolutions take from CUDA's caching allocator, and cuDNN's workspaces.

    PYTHONPATH=.:tests python tests/recorded/record_convolutions.py

The workspaces are what cuDNN answers without a device. All goes into tests/recorded/convolutions/.
Needs a CUDA device, real or virtual; tests/cuda/test_convolution.py reads those of
tests/convolution_cases.py's CARDS. README.md beside this script tells the format.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import torch
from convolution_cases import CARDS, CASES, key, once, truth

from memcallback.cuda.convolution import cudnn, workspace
from memcallback.cuda.convolution.call import Convolution
from memcallback.cuda.op_call import OpCall
from memcallback.cuda.rules import kernel_of
from memcallback.devices.local import resolve

OUT = Path(__file__).parent / "convolutions"


def main() -> None:
    """Record this device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    name = torch.cuda.get_device_name()
    card = CARDS.get(name) or resolve("cuda")
    ask, workspaces = workspace.workspace_bytes, {}

    def asked(convolution: Convolution, input_shape: Any, device: Any) -> int | None:
        answer = ask(convolution, input_shape, device)
        workspaces[key(convolution, input_shape)] = answer
        return answer

    workspace.workspace_bytes = asked
    cases = {}
    for case in CASES:
        try:
            steps, strides = truth(case)
        except RuntimeError:
            continue  # PyTorch finds no engine
        cases[str(case)] = [once(steps), strides]
        op, args = case.call("meta")
        kernel_of(OpCall(op, args, {}, card))
    meta = {"device": name, "torch": torch.__version__, "cudnn": cudnn.version()}
    text = json.dumps(
        {"meta": meta, "cases": cases, "workspaces": workspaces}, separators=(",", ":")
    )
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name.replace(' ', '-')}.json.gz"
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{path}: {len(cases)} of {len(CASES)} cases, {len(workspaces)} workspaces")


if __name__ == "__main__":
    main()
