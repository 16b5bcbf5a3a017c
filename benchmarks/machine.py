"""On what a benchmark ran, and where its result goes."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
_virtual_device: Any = import_module("virtual_device")
is_virtual: Callable[[], bool] = _virtual_device.is_virtual
predict_as_virtual: Callable[[], None] = _virtual_device.predict_as_virtual
if is_virtual():
    predict_as_virtual()


def driver() -> str:
    """The version of NVIDIA's driver, or why it is not known."""
    if is_virtual():
        return "none (virtual device)"
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception as error:  # of a kind that differs between versions
        return f"not known ({type(error).__name__})"


def outside_pool_bytes() -> int | None:
    """What this process takes of the device beside PyTorch's pool: the context and its libraries.

    None where NVML does not tell what each process takes.
    """
    import torch

    from memcallback.devices.memory import device_memory

    used = device_memory(torch.device("cuda", 0)).this_process_bytes
    return None if used is None else used - torch.cuda.memory_reserved()


def processor() -> str:
    """The processor's name and how many of its cores this process may use."""
    with contextlib.suppress(OSError):
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        if found:
            return f"{found[1].strip()}, {len(os.sched_getaffinity(0))} cores"
    return platform.processor() or platform.machine()


def today() -> str:
    """The date."""
    return datetime.now(timezone.utc).date().isoformat()


def command() -> str:
    """How this program was called, of paths the last part."""
    program, *arguments = sys.argv
    return shlex.join(
        [
            "python",
            f"benchmarks/{Path(program).name}",
            *(Path(one).name if "/" in one else one for one in arguments),
        ]
    )


def not_reported(texts: Iterable[str]) -> list[str]:
    """The end of a page of results: what it does not tell of."""
    return ["", "Not reported:", "", *(f"- {text}" for text in texts)]


def kind(device: str) -> str:
    """The name of a device in folder names: `cpu`, `nvidia-h200`, `nvidia-h200-virtual`.

    Args:
        device: PyTorch's name of a CUDA device, or `CPU`.
    """
    return re.sub(r"\W+", "-", device.lower()) + (
        "-virtual" if is_virtual() and device.lower() != "cpu" else ""
    )


def results_folder(device: str) -> Path:
    """`benchmarks/results/<device>-<date>`, for what ran today.

    Args:
        device: As for `kind`.
    """
    return RESULTS / f"{kind(device)}-{today()}"


def latest_result(device_kind: str, file: str) -> Path:
    """The newest result of that name for a device, of those that are there.

    Args:
        device_kind: What `kind` gave on that machine.
        file: The file's name.

    Raises:
        FileNotFoundError: If there is none.
    """
    found = sorted(RESULTS.glob(f"{device_kind}-[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]/{file}"))
    if not found:
        raise FileNotFoundError(f"no {file} in {RESULTS}/{device_kind}-<date>")
    return found[-1]
