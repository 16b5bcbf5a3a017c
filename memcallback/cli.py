"""Command line: finds the command and runs it; errors that a user can mend end in one line."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches

from memcallback.commands.answer import versions
from memcallback.commands.arguments import EXAMPLE
from memcallback.commands.diff import add_diff
from memcallback.commands.machine import add_devices
from memcallback.commands.model import add_layers
from memcallback.commands.report import add_report
from memcallback.commands.run import add_run
from memcallback.commands.step import add_export, add_predict, add_suggest, add_what_if
from memcallback.core.code_lines import own_traceback
from memcallback.core.visible import visible
from memcallback.step.importer import UsageError

#: By name, what adds each command with its arguments.
_COMMANDS = {
    "predict": add_predict,
    "suggest": add_suggest,
    "what-if": add_what_if,
    "report": add_report,
    "diff": add_diff,
    "layers": add_layers,
    "export": add_export,
    "run": add_run,
    "devices": add_devices,
}


#: What a shell has for a program that SIGPIPE (13) ends: 1 would be a check that failed.
_READER_GONE = 128 + 13


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; exit code 1 is of a check that failed, 2 of what a user can mend.

    Ctrl-C ends the process as it ends a program in C, without a traceback.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    if not words:
        parser.print_help(sys.stderr)
        return 2
    try:
        _check_command(words[0])
        arguments = parser.parse_args(words)
        code: int | None = arguments.command(arguments)
        if words[0] != "run":  # whose program ends as Python would end it
            with suppress(ValueError, AttributeError):  # there is no stdout
                sys.stdout.flush()
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
    except BrokenPipeError:  # the reader, such as `head`, has read enough
        _discard_output()
        return _READER_GONE
    except OSError as error:
        # What writes to stdout names no file; the program of `run` ends as with Python.
        if error.filename is not None or words[0] == "run":
            raise
        _discard_output()
        print(
            f"memcallback: error: the answer cannot be written: {error.strerror}. Free some space, "
            "or write it elsewhere.",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        if words[0] == "run":
            raise
        print("memcallback: interrupted", file=sys.stderr)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    return code or 0


def _discard_output() -> None:
    """Have Python write nothing more to stdout at its end, where it would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_command(word: str) -> None:
    """Refuse a command that there is not, and name the one that was meant."""
    if word.startswith("-") or word in _COMMANDS:
        return
    near = get_close_matches(word.replace("_", "-"), _COMMANDS, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(_COMMANDS)}."
    raise UsageError(f"there is no command {word!r}. {hint}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="memcallback",
        description="See where device memory goes while a PyTorch model trains, and what fits.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show versions and exit")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    for add in _COMMANDS.values():
        add(commands)
    return parser


class _ShowVersion(argparse.Action):
    """Prints the versions when it is met, so that nothing is read for them otherwise."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        known = versions()
        print(
            f"memcallback {known['memcallback_version']}, "
            f"PyTorch {known['torch_version'] or 'not installed'}"
        )
        parser.exit()
