"""Measure on one machine, predict on another: what a device is lent for is short.

A benchmark writes what it measured with `measure_all`, a case after the other, so that what there
is stays if time runs out. Where there is no device, it reads that with `Measured.read`, predicts
the same cases, and sets both side by side.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from machine import RESULTS, command, driver, kind, processor, today

#: A line that names an exception.
_ERROR = re.compile(r"^[\w.]*\w*(?:Error|Exception|Unsupported|Failed)\b.*", re.MULTILINE)


@dataclass(frozen=True)
class Measured:
    """What a benchmark measured on a device.

    Attributes:
        about: Device, driver, processor, versions, date and command, of the measuring.
        cases: Case -> its figures, or `{"error": text}`.
    """

    about: dict[str, str]
    cases: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Read what `measure_all` wrote."""
        content = json.loads(path.read_text())
        return cls(content["about"], content["cases"])

    def write(self, path: Path) -> None:
        """Write it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"about": self.about, "cases": self.cases}
        path.write_text(json.dumps(content, indent=1) + "\n")

    @property
    def device(self) -> str:
        """PyTorch's name of the device."""
        return self.about["device"]

    @property
    def folder(self) -> Path:
        """Where the result goes that compares it with predictions."""
        return RESULTS / f"{self.about['kind']}-{self.about['date']}"

    def told(self) -> dict[str, str]:
        """What a page says of where its figures come from."""
        names = ("device", "driver", "processor", "versions", "date", "command")
        here = f"Python {platform.python_version()}, torch {version('torch')}, {today()}"
        told = {name: self.about[name] for name in names}
        return told | {"predicted by": f"{here}, without a device: {command()}"}


def measure_all(
    names: Iterable[str],
    measure: Callable[[str], Any],
    path: Path,
    *,
    device: str,
    libraries: Iterable[str] = (),
    jobs: int = 1,
) -> None:
    """Measure each case, `jobs` at a time, and write what there is after each.

    Args:
        names: The cases.
        measure: From a case to its figures; starts a process of its own. A `RuntimeError` of it is
            what the file says of the case.
        path: The file.
        device: PyTorch's name of the device.
        libraries: Distributions whose versions the page names, beside Python and torch.
        jobs: How many cases at a time.
    """
    versions = ", ".join(f"{one} {version(one)}" for one in ("torch", *libraries))
    about = {
        "device": device,
        "kind": kind(device),
        "driver": driver(),
        "processor": processor(),
        "versions": f"Python {platform.python_version()}, {versions}",
        "date": today(),
        "command": command(),
    }
    began, found = time.perf_counter(), dict[str, Any]()
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(measure, name): name for name in names}
        for done in as_completed(running):
            name = running[done]
            try:
                found[name] = done.result()
            except RuntimeError as problem:
                found[name] = {"error": str(problem)}
            in_order = {one: found[one] for one in running.values() if one in found}
            Measured(about, in_order).write(path)
            said = found[name].get("error", "") if isinstance(found[name], dict) else ""
            print(f"{time.perf_counter() - began:6.0f} s  {name}  {said}", flush=True)


def in_new_process(script: str, *arguments: str, env: dict[str, str] | None = None) -> Any:
    """What a script prints as its last line, as JSON, from a process of its own.

    Raises:
        RuntimeError: If it failed, with the line that says why.
    """
    done = subprocess.run(
        [sys.executable, script, *arguments], env=env, capture_output=True, text=True, check=False
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        errors = _ERROR.findall(done.stderr)
        raise RuntimeError((errors or done.stderr.strip().splitlines() or ["no result"])[-1])
    try:
        return json.loads(lines[-1])
    except json.JSONDecodeError:
        raise RuntimeError(f"no result, but {lines[-1][:100]!r}") from None
