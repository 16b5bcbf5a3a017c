"""Compares programs with and without memcallback: a runner for each, and what differs.

    python tests/untouched/runner.py LOOP DEVICE [--limit-s S] [--patience-s S] [PROGRAM ...]

prints it for these programs, or all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).parent
PROGRAMS = sorted(path.stem for path in (FOLDER / "programs").glob("*.py"))
#: What is not compared: it says what memcallback did, or how much memory there was at most.
NOT_COMPARED = ("predicted", "refused", "warned", "peak_kib", "cpu_s", "stderr")


class Runners:
    """Two processes that fork for each program: one with memcallback and one without."""

    def __init__(self, folder):
        command = [sys.executable, str(FOLDER / "run.py"), str(folder)]
        # In the default configuration.
        environment = {
            name: value for name, value in os.environ.items() if name != "MEMCALLBACK_ISOLATE"
        }
        self._processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for _ in range(2)
        ]

    def compare(self, program, loop, device, *, limit_s=120, patience_s=None):
        """What differs, as lines, and what the program left without memcallback and with it."""
        left = []
        # One after the other: both use the same folder, whose name is in what programs write.
        for process, is_watched in zip(self._processes, (False, True), strict=True):
            asked = {
                "program": program,
                "loop": loop,
                "device": device,
                "is_watched": is_watched,
                "limit_s": limit_s,
                "patience_s": patience_s,
            }
            process.stdin.write(f"{json.dumps(asked)}\n")
            process.stdin.flush()
            left.append(json.loads(process.stdout.readline()))
        alone, watched = (
            {name: value for name, value in one.items() if name not in NOT_COMPARED} for one in left
        )
        return differences(alone, watched), *left

    def close(self):
        for process in self._processes:
            process.stdin.close()
            process.wait()
            process.stdout.close()


def differences(left, right, path=""):
    """Where two digests differ, as lines."""
    if isinstance(left, dict) and isinstance(right, dict):
        return [
            line
            for key in sorted({*left, *right})
            for line in differences(
                left.get(key, "not there"), right.get(key, "not there"), f"{path}/{key}"
            )
        ]
    return [] if left == right else [f"{path}: {left} became {right}"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("loop")
    parser.add_argument("device")
    parser.add_argument("--limit-s", type=float, default=120)
    parser.add_argument("--patience-s", type=float)
    parser.add_argument("programs", nargs="*", default=PROGRAMS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runners = Runners(Path(folder) / "program")
        for program in options.programs:
            start = time.monotonic()
            found, alone, watched = runners.compare(
                program,
                options.loop,
                options.device,
                limit_s=options.limit_s,
                patience_s=options.patience_s,
            )
            print(
                f"{program}: {len(found)} differences, {time.monotonic() - start:.1f} s "
                f"({alone['cpu_s']} and {watched['cpu_s']} of a core), "
                f"predicted {watched.get('predicted')}, ended {alone['it ended']} "
                f"{alone['exit status']} {watched['it ended']} {watched['exit status']}"
            )
            for line in found[:6]:
                print(f"    {line[:250]}")
            for line in watched.get("warned", []) + watched.get("refused", []):
                print(f"    {line[:400]}")
            if alone["exit status"] or "report" in watched:
                print("    " + alone["stderr"][-600:].replace("\n", "\n    "))
        runners.close()


if __name__ == "__main__":
    main()
