"""Command line: finds the command and runs it; errors that a user can mend end in one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from memcallback.commands.machine import add_devices
from memcallback.commands.model import add_layers
from memcallback.commands.report import add_report
from memcallback.commands.step import add_export, add_predict, add_suggest, add_what_if
from memcallback.core.code_lines import own_traceback
from memcallback.core.visible import visible
from memcallback.step.importer import UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 2 is the exit code of everything that a user can mend."""
    try:
        arguments = _parser().parse_args(argv)
        arguments.command(arguments)
    except UsageError as error:
        message = visible(" ".join(str(error).split()))
        if error.__cause__ is not None:
            print(visible(own_traceback(error.__cause__)), end="", file=sys.stderr)
        print(f"memcallback: error: {message}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(
            f"memcallback: error: {error}. Install it: pip install {error.name}.", file=sys.stderr
        )
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="memcallback",
        description="See where device memory goes while a PyTorch model trains, and what fits.",
    )
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    for add in (
        add_predict,
        add_suggest,
        add_what_if,
        add_report,
        add_layers,
        add_export,
        add_devices,
    ):
        add(commands)
    return parser
