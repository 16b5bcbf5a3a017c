"""The command that writes the page of a step: report."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memcallback.commands.answer import ask, errors_of_output
from memcallback.commands.arguments import add_device, add_size_of_batch, add_step
from memcallback.commands.step import predicted
from memcallback.core.files import write_file
from memcallback.core.types import Stage
from memcallback.savings.plan_page import plan_sections, way_out
from memcallback.step.importer import UsageError

if TYPE_CHECKING:
    from memcallback.prediction.prediction import Prediction
    from memcallback.savings.plan import Plan


def add_report(commands: Any) -> None:
    """Add `report` with its arguments."""
    parser = commands.add_parser(
        "report",
        help="a predicted step as a page of charts, in one file",
        description="Write a predicted step as an HTML page: a timeline of memory, what is in "
        "memory at the peak, and the peak over batch sizes. The page is one file and needs no "
        "network.",
    )
    add_step(parser)
    add_size_of_batch(parser)
    add_device(parser)
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="also show what savings would buy; this traces the step again for each saving",
    )
    parser.add_argument(
        "-o", "--output", metavar="report.html", required=True, help="the file to write"
    )
    parser.set_defaults(command=_run_report)


def _predicted_with_plan(arguments: argparse.Namespace) -> tuple[Prediction, Plan]:
    from memcallback.savings.what_if import predict_with_plan

    return ask(arguments, predict_with_plan, unit="predictions", batch_size=arguments.batch_size)


def _advice(prediction: Prediction, plan: Plan | None) -> tuple[str, ...]:
    """What to change where a step does not fit."""
    advice = way_out(prediction.largest_batch_size, plan.shown if plan else ())
    if plan or prediction.step.stage is not Stage.TRAINING:  # savings are for training alone
        return advice
    return (*advice, "With --what-if this page shows what savings would buy.")


def _run_report(arguments: argparse.Namespace) -> None:
    if arguments.what_if and arguments.sequence_length is not None:
        raise UsageError(
            f"--what-if uses the step's own sequence length, not {arguments.sequence_length}. "
            "Leave out one of the two, or give the step a batch of that length."
        )
    if arguments.what_if:
        prediction, plan = _predicted_with_plan(arguments)
    else:
        prediction, plan = predicted(arguments), None
    page = prediction.page(arguments.target, more=list(plan_sections(plan)))
    if not prediction.fits:
        page = replace(
            page, verdict=(page.verdict[0], *_advice(prediction, plan), *page.verdict[1:])
        )
    with errors_of_output(arguments.output):
        write_file(arguments.output, page.html())
    print(f"{page.verdict[0]} Wrote {arguments.output}.")
