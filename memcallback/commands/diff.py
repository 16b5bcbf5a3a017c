"""The command that compares two predictions: diff."""

from __future__ import annotations

import argparse
from typing import Any

from memcallback.commands.answer import show
from memcallback.commands.arguments import add_json
from memcallback.commands.saved import saved_prediction


def add_diff(commands: Any) -> None:
    """Add `diff` with its arguments."""
    parser = commands.add_parser(
        "diff",
        help="what changed between two predictions, by phase, module and line of code",
        description="Compare two predictions that predict --json wrote: by phase, and what is live "
        "at the peak by category, module and line of code. PyTorch is not needed.",
    )
    for name, which in (("old", "before"), ("new", "after")):
        parser.add_argument(
            name,
            metavar=f"{name}.json",
            type=saved_prediction,
            help=f"the prediction {which} the change",
        )
    add_json(parser)
    parser.set_defaults(command=_run_diff)


def _run_diff(arguments: argparse.Namespace) -> None:
    from memcallback.prediction.prediction_diff import PredictionDiff

    show(PredictionDiff(arguments.old, arguments.new), is_json=arguments.json)
