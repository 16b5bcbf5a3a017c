"""What a CUDA device takes besides tensors: context, workspaces, segments.

The workspaces are those of cuBLAS and cuBLASLt, the segments those of the first allocations. For a
Hopper GPU also how many clusters of multiprocessors run at once.

    python benchmarks/device_facts.py --out FILE

Each figure is taken in a process of its own. Used memory is the device's own figure
(`cudaMemGetInfo`), so others on it would be seen too: run it alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from accuracy import environment, in_processes_of_their_own
from torch import distributed, nn
from torch.nn import functional


def used_bytes() -> int:
    """Of the device, by anybody."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def context(loading: str) -> dict[str, int]:
    """Used once PyTorch has a context, and after the first kernels of each kind.

    Args:
        loading: `LAZY`, the default, loads a kernel when it first runs; `EAGER` all at once.
    """
    os.environ["CUDA_MODULE_LOADING"] = loading
    found = {"used before, by the driver": _used_by_driver()}

    def after(name: str) -> None:
        torch.cuda.synchronize()
        found[f"after {name}"] = used_bytes() - torch.cuda.memory_reserved()

    torch.zeros(1, device="cuda")
    after("the first tensor")
    values = torch.ones(512, 512, device="cuda", requires_grad=True)
    functional.gelu(values * 2).sum().backward()
    after("elementwise kernels")
    (values @ values).sum().backward()
    after("a matrix product")
    (values.bfloat16() @ values.bfloat16()).sum().backward()
    after("a matrix product in bfloat16")
    images = torch.ones(8, 64, 32, 32, device="cuda")
    layer = nn.Conv2d(64, 64, 3, padding=1).cuda()
    layer(images).sum().backward()
    after("a convolution")
    with torch.autocast("cuda", torch.bfloat16):
        layer(images).float().sum().backward()
    after("a convolution in bfloat16 mixed precision")
    query = torch.ones(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    functional.scaled_dot_product_attention(query, query, query).float().sum().backward()
    after("attention")
    nn.LSTM(64, 64).cuda()(torch.ones(8, 8, 64, device="cuda"))[0].sum().backward()
    after("an LSTM")
    torch.optim.AdamW(layer.parameters()).step()
    after("AdamW")
    torch.linalg.svd(values.detach()[:64, :64])
    after("a singular value decomposition")
    torch.compile(lambda x: (x.sin() * 2).sum(-1))(values.detach())
    after("a compiled function")
    if distributed.is_nccl_available():
        distributed.init_process_group(
            "nccl", init_method="tcp://127.0.0.1:29511", rank=0, world_size=1
        )
        distributed.all_reduce(torch.ones(1 << 20, device="cuda"))
        after("NCCL with one rank")
        distributed.destroy_process_group()
    return found


def _used_by_driver() -> int:
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


class _Launch(ctypes.Structure):
    """`CUlaunchConfig` of the driver."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z")),
        *((name, ctypes.c_uint) for name in ("block_x", "block_y", "block_z", "shared_bytes")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class _ClusterSize(ctypes.Structure):
    """A `CUlaunchAttribute` with the size of a cluster."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_uint * 16),
    )


_EMPTY_KERNEL = b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k() { ret; }\n\0"
#: So that a block has a multiprocessor for itself.
_SHARED_BYTES, _THREADS = 200 * 1024, 384
_DYNAMIC_SHARED_SIZE, _NON_PORTABLE_CLUSTER_SIZE, _CLUSTER_DIMENSION = 8, 14, 4


def active_clusters() -> dict[str, int]:
    """Blocks of a cluster -> clusters that run at once; empty if it is no Hopper GPU.

    The driver's `cuOccupancyMaxActiveClusters`, for a kernel with 200 KiB of shared memory.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        return {}
    torch.zeros(1, device="cuda")  # makes the context
    driver, module, kernel = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()

    def call(name: str, *arguments: object) -> None:
        status = getattr(driver, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: error {status}")

    call("cuModuleLoadData", ctypes.byref(module), _EMPTY_KERNEL)
    call("cuModuleGetFunction", ctypes.byref(kernel), module, b"k")
    call("cuFuncSetAttribute", kernel, _DYNAMIC_SHARED_SIZE, _SHARED_BYTES)
    call("cuFuncSetAttribute", kernel, _NON_PORTABLE_CLUSTER_SIZE, 1)
    found = {}
    for size in range(1, 17):
        attribute = _ClusterSize(_CLUSTER_DIMENSION, b"", (ctypes.c_uint * 16)(size, 1, 1))
        where = ctypes.cast(ctypes.pointer(attribute), ctypes.c_void_p)
        launch = _Launch(size * 64, 1, 1, _THREADS, 1, 1, _SHARED_BYTES, None, where, 1)
        number = ctypes.c_int()
        call("cuOccupancyMaxActiveClusters", ctypes.byref(number), kernel, ctypes.byref(launch))
        found[str(size)] = number.value
    return found


def main() -> int:
    """Write them."""
    parser = argparse.ArgumentParser(description="What a CUDA device takes besides tensors.")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    works: dict[str, Callable[[], object]] = {
        "environment": environment,
        "context_bytes": partial(context, "LAZY"),
        "context_bytes_eager": partial(context, "EAGER"),
        "workspace_bytes": workspaces,
        "first_segments_bytes": first_segments,
        "active_clusters": active_clusters,
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
