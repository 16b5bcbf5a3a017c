"""On what a benchmark ran."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from datetime import datetime, timezone
from pathlib import Path


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


def results_folder(device: str) -> Path:
    """Where the results of today go, of a device such as `cpu` or `nvidia-a100`."""
    return Path(__file__).parent / "results" / f"{device}-{today()}"
