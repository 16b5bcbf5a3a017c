"""What commands share when they run: ask about a step, errors in one line, show the answer."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TypeVar

from memcallback.commands.arguments import resolved
from memcallback.prediction.progress import ProgressLine
from memcallback.step.importer import UsageError, load_step, one_line

_Answer = TypeVar("_Answer")
#: Of the JSON that commands print: one more where a key changes its meaning or goes.
SCHEMA_VERSION = 1


def ask(
    arguments: argparse.Namespace,
    function: Callable[..., _Answer],
    *,
    unit: str = "traces",
    **options: Any,
) -> _Answer:
    """What a function of the package answers for the step and the device on the command line."""
    with ProgressLine(unit) as line:
        line.say("loading PyTorch")
        from memcallback.devices.local import resolve

        step = load_step(arguments.target)
        device = arguments.device
        if isinstance(device, str):
            device = resolved(device, resolve)
        with errors_in_one_line(f"{arguments.target} cannot be predicted"):
            return function(step, device=device, progress=line, **options)


@contextmanager
def errors_in_one_line(failure: str, hint: str = "") -> Iterator[None]:
    """Run user code on fake tensors: what it prints goes to stderr, its error becomes ours."""
    import logging

    # PyTorch logs the traceback of an operator that fails on fakes; ours is one line.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:  # user code can fail in any way
        raise UsageError(f"{failure}: {one_line(error)}.{hint}") from error


@contextmanager
def errors_of_output(path: str) -> Iterator[None]:
    """Write the file that `--output` names: where that fails, say what to name."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"--output {path!r} cannot be written: {error.strerror or error}. "
            "Name a file in an existing folder."
        ) from error


def show(result: Any, *, is_json: bool) -> None:
    """Print a result as text or JSON."""
    from memcallback.core.document import for_console

    print(json_text(result.to_dict()) if is_json else for_console(str(result)))


def json_text(data: dict[str, Any], indent: int | None = 2) -> str:
    """Data as JSON, after the versions of its schema, of this package and of PyTorch."""
    return json.dumps({**versions(), **data}, indent=indent)


def versions() -> dict[str, Any]:
    """Version of the schema of JSON, of this package, and of PyTorch, which is not imported."""
    from importlib.metadata import PackageNotFoundError, version

    from memcallback import __version__

    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = None
    return {
        "schema_version": SCHEMA_VERSION,
        "memcallback_version": __version__,
        "torch_version": torch_version,
    }
