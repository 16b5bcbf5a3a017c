"""What a CUDA device takes besides tensors: context, workspaces, segments.

The workspaces are those of cuBLAS and cuBLASLt, the segments those of the first allocations.

    python benchmarks/device_facts.py --out FILE

Each figure is taken in a process of its own. Used memory is the device's own figure
(`cudaMemGetInfo`), so others on it would be seen too: run it alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accuracy import environment, in_processes_of_their_own


def used_bytes() -> int:
    """Of the device, by anybody."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def context() -> dict[str, int]:
    """Used once PyTorch has a context, and after the first kernel of each kind."""
    free_before = _free_by_driver()
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    found = {
        "used before, by the driver": free_before,
        "after the first tensor": used_bytes() - torch.cuda.memory_reserved(),
    }
    values, half = (
        torch.ones(256, 256, device="cuda"),
        torch.ones(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16),
    )
    works: dict[str, Callable[[], Any]] = {
        "after elementwise kernels": lambda: torch.nn.functional.gelu(values * 2 + 1),
        "after a matrix product": lambda: values @ values,
        "after a convolution": lambda: torch.nn.functional.conv2d(
            values.view(4, 16, 32, 32), torch.ones(16, 16, 3, 3, device="cuda")
        ),
        "after attention": lambda: torch.nn.functional.scaled_dot_product_attention(
            half, half, half
        ),
    }
    for name, work in works.items():
        work()
        torch.cuda.synchronize()
        found[name] = used_bytes() - torch.cuda.memory_reserved()
    return found


def _free_by_driver() -> int:
    """Used before there is a context; -1 where NVML is not there."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
    except Exception:  # of a kind that differs between versions
        return -1


def workspaces() -> dict[str, int]:
    """Bytes that stay allocated after the first matrix product of each kind, in their order."""
    found = {}
    left, right = torch.ones(512, 512, device="cuda"), torch.ones(512, 512, device="cuda")
    bias = torch.ones(512, device="cuda")
    half_left, half_right, half_bias = left.bfloat16(), right.bfloat16(), bias.bfloat16()
    works: dict[str, Callable[[], torch.Tensor]] = {
        "product, float32": lambda: left @ right,
        "product with bias, float32": lambda: torch.addmm(bias, left, right),
        "product, bfloat16": lambda: half_left @ half_right,
        "product with bias, bfloat16": lambda: torch.addmm(half_bias, half_left, half_right),
        "batch of products": lambda: torch.bmm(left.view(4, 256, 256), right.view(4, 256, 256)),
    }
    for name, work in works.items():
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        found[name] = torch.cuda.memory_allocated() - before
    return found


def first_segments() -> dict[str, int]:
    """Reserved after one allocation alone, by its bytes."""
    found = {}
    for size_bytes in (1, 1 << 20, (1 << 20) + 1, 10 << 20, (10 << 20) + 1):
        torch.cuda.empty_cache()
        block = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
        found[str(size_bytes)] = torch.cuda.memory_reserved()
        del block
    return found


def main() -> int:
    """Write them."""
    parser = argparse.ArgumentParser(description="What a CUDA device takes besides tensors.")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    works = {
        "environment": environment,
        "context_bytes": context,
        "workspace_bytes": workspaces,
        "first_segments_bytes": first_segments,
    }
    answers = dict(in_processes_of_their_own(works))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(
        json.dumps({name: answers[name].get("result", answers[name]) for name in works}, indent=1)
        + "\n"
    )
    print(options.out.read_text())
    return 1 if any("error" in answer for answer in answers.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
