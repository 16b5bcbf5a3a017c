"""The command about this machine: devices."""

from __future__ import annotations

import argparse
from contextlib import suppress
from time import sleep
from typing import Any

from memcallback.commands.answer import json_text, show
from memcallback.commands.arguments import add_json, number_in
from memcallback.step.importer import UsageError

#: Moves to the top of a console and clears the rest.
_CLEAR = "\x1b[H\x1b[J"
_LONGEST_WATCH_S = 86400.0


def add_devices(commands: Any) -> None:
    """Add `devices` with its arguments."""
    parser = commands.add_parser(
        "devices",
        help="who uses which device of this machine, and how much",
        description="Show every device of this machine: memory, utilisation, temperature, power, "
        "and the processes on it.",
    )
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        const="2",
        type=_seconds,
        help="refresh every SECONDS (2 by default) until interrupted",
    )
    add_json(parser, "; with --watch one line each time")
    parser.set_defaults(command=_run_devices)


def _run_devices(arguments: argparse.Namespace) -> None:
    from memcallback.core.document import for_console
    from memcallback.devices.usage import device_states

    if arguments.watch is None:
        show(device_states(), is_json=arguments.json)
        return
    with suppress(KeyboardInterrupt):
        while True:
            states = device_states()
            if arguments.json:
                print(json_text(states.to_dict(), indent=None), flush=True)
            else:
                print(f"{_CLEAR}{for_console(states.to_text())}", flush=True)
            sleep(arguments.watch)


def _seconds(text: str) -> float:
    seconds = number_in(text)
    if not 0 < seconds < _LONGEST_WATCH_S:
        raise UsageError(
            f"--watch {text!r} is not a number of seconds above 0 and below {_LONGEST_WATCH_S:g}. "
            "Write one, such as --watch 5."
        )
    return seconds
