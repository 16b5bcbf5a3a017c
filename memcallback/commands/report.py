"""The command that writes the page of a step: report."""

from __future__ import annotations

import argparse
from typing import Any

from memcallback.commands.arguments import add_device, add_size_of_batch, add_step
from memcallback.commands.step import predicted
from memcallback.core.files import write_file
from memcallback.step.importer import UsageError


def add_report(commands: Any) -> None:
    """Add `report` with its arguments."""
    parser = commands.add_parser(
        "report",
        help="a predicted step as a page of charts, in one file",
        description="Write a predicted step as an HTML page: what is in memory from allocation to "
        "allocation and at the peak, and the peak over batch sizes. The page is one file and needs "
        "no network.",
    )
    add_step(parser)
    add_size_of_batch(parser)
    add_device(parser)
    parser.add_argument(
        "-o", "--output", metavar="report.html", required=True, help="the file to write"
    )
    parser.set_defaults(command=_run_report)


def _run_report(arguments: argparse.Namespace) -> None:
    prediction = predicted(arguments)
    page = prediction.page(arguments.target)
    try:
        write_file(arguments.output, page.html())
    except OSError as error:
        raise UsageError(
            f"--output {arguments.output!r} cannot be written: {error.strerror or error}. "
            "Name a file in an existing folder."
        ) from error
    print(f"{page.verdict[0]} Wrote {arguments.output}.")
