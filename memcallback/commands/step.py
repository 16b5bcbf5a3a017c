"""The commands about a step: predict, suggest, what-if, export."""

from __future__ import annotations

import argparse
import re
import shlex
from typing import TYPE_CHECKING, Any

from memcallback.commands.answer import ask, errors_of_output, json_text, show
from memcallback.commands.arguments import (
    CARD_HELP,
    MOST_RANKS,
    add_device,
    add_headroom,
    add_json,
    add_number,
    add_size_of_batch,
    add_step,
    device,
    sequence_lengths,
)
from memcallback.commands.checks import add_checks, failed_checks, refuse_checks
from memcallback.core.types import Stage
from memcallback.core.validation import DEFAULT_MULTIPLE, MAX_BATCH_SIZE
from memcallback.step.importer import UsageError

if TYPE_CHECKING:
    from memcallback.prediction.prediction import Prediction

#: The card of an exported history, where none is named: only the workspaces in it and where memory
#: runs out depend on it.
_DEFAULT_DEVICE = "NVIDIA A100-SXM4-80GB"


def add_predict(commands: Any) -> None:
    """Add `predict` with its arguments."""
    parser = commands.add_parser(
        "predict",
        help="the memory of a training or inference step on any card, without a GPU",
        description="Predict the memory of a training or inference step, allocated and reserved, "
        "phase by phase. No GPU is needed.",
    )
    add_step(parser)
    add_size_of_batch(parser)
    add_device(parser)
    add_checks(parser)
    add_json(parser)
    parser.set_defaults(command=_run_predict)


def _run_predict(arguments: argparse.Namespace) -> int:
    refuse_checks(arguments)
    prediction = predicted(arguments)
    has_failed = failed_checks(prediction, arguments)
    show(prediction, is_json=arguments.json)
    if not prediction.fits and not arguments.json:
        print(_next_step(prediction, arguments))
    return int(has_failed)


def _next_step(prediction: Prediction, arguments: argparse.Namespace) -> str:
    """What to do where a step does not fit."""
    largest = prediction.largest_batch_size
    smaller = f"--batch-size {largest} fits. " if largest else ""
    # Savings are for training alone, and at the step's own sequence length.
    has_savings = prediction.step.stage is Stage.TRAINING and arguments.sequence_length is None
    if not has_savings:
        return f"Next: {smaller or 'try a smaller batch, or a device with more memory.'}".rstrip()
    device = arguments.device
    if not isinstance(device, str):  # a card that was given by its size is named after it
        device = re.sub(r"^a card of ([\d.]+) ", r"\1", prediction.device_name)
    command = ["memcallback", "what-if", arguments.target, "--device", device]
    if arguments.batch_size is not None:
        command += ["--batch-size", str(arguments.batch_size)]
    return f"Next: {smaller}What savings would buy: {shlex.join(command)}"


def predicted(arguments: argparse.Namespace) -> Prediction:
    """The prediction that a command's arguments ask for."""
    from memcallback.prediction.predict import predict

    return ask(
        arguments,
        predict,
        batch_size=arguments.batch_size,
        sequence_length=arguments.sequence_length,
    )


def add_suggest(commands: Any) -> None:
    """Add `suggest` with its arguments."""
    parser = commands.add_parser(
        "suggest",
        help="the largest batch size that fits on any card, without a GPU",
        description="Suggest the largest batch size that is predicted to fit a card with some of "
        "its memory kept free. No GPU is needed.",
    )
    add_step(parser)
    add_device(parser)
    add_headroom(parser)
    add_number(
        parser,
        "--multiple-of",
        f"suggest a multiple of N, if so many samples fit; {DEFAULT_MULTIPLE} by default",
        default=DEFAULT_MULTIPLE,
    )
    add_number(parser, "--max-batch-size", "upper limit of the suggestion")
    add_number(parser, "--dataset-size", "samples in the dataset")
    add_number(
        parser,
        "--world-size",
        "number of ranks; the suggestion is for each of them",
        meaning="number of ranks",
        most=MOST_RANKS,
    )
    parser.add_argument(
        "--sequence-lengths",
        metavar="N,N",
        type=sequence_lengths,
        help="a batch size for sequences of each of these lengths; the suggestion is for the "
        "longest",
    )
    add_number(
        parser,
        "--effective-batch-size",
        "also print batch size and accumulation for exactly N samples between two updates",
    )
    add_json(parser)
    parser.set_defaults(command=_run_suggest)


def _run_suggest(arguments: argparse.Namespace) -> None:
    from memcallback.batch_size.suggest import suggest_batch_size

    names = ("headroom", "multiple_of", "max_batch_size", "dataset_size", "world_size")
    options = {name: getattr(arguments, name) for name in (*names, "sequence_lengths")}
    advice = ask(arguments, suggest_batch_size, **options)
    plan = None
    if arguments.effective_batch_size is not None:
        try:
            plan = advice.accumulate_for(arguments.effective_batch_size)
        except ValueError as error:
            raise UsageError(str(error)) from error
    if arguments.json:
        from dataclasses import asdict

        accumulation = None if plan is None else asdict(plan)
        print(json_text({**advice.to_dict(), "accumulation": accumulation}))
        return
    show(advice, is_json=False)
    if plan is not None:
        ranks = f" on each of {plan.world_size} ranks" if plan.world_size > 1 else ""
        print(
            f"For {arguments.effective_batch_size:,} samples between two updates: "
            f"batch size {plan.batch_size:,}, accumulate {plan.accumulate:,} batches{ranks}."
        )


def add_what_if(commands: Any) -> None:
    """Add `what-if` with its arguments."""
    parser = commands.add_parser(
        "what-if",
        help="what each saving of memory would buy and cost",
        description="Predict a training step with each saving of memory, alone and together. "
        "No GPU is needed.",
    )
    add_step(parser, is_inference_allowed=False)
    add_number(
        parser,
        "--batch-size",
        "samples in one forward pass of the step as it is; by default as many as its batch has",
        most=MAX_BATCH_SIZE,
    )
    add_device(parser)
    add_headroom(parser)
    add_number(
        parser,
        "--world-size",
        "try N ranks too: DistributedDataParallel, FSDP2, HSDP, tensor parallel, a pipeline",
        meaning="number of ranks",
        most=MOST_RANKS,
    )
    add_json(parser)
    parser.set_defaults(command=_run_what_if)


def _run_what_if(arguments: argparse.Namespace) -> None:
    from memcallback.savings.what_if import what_if

    table = ask(
        arguments,
        what_if,
        unit="predictions",
        headroom=arguments.headroom,
        batch_size=arguments.batch_size,
        ranks=arguments.world_size or (),
    )
    show(table, is_json=arguments.json)


def add_export(commands: Any) -> None:
    """Add `export` with its arguments."""
    parser = commands.add_parser(
        "export",
        help="a predicted step as a snapshot for PyTorch's memory_viz",
        description="Write a predicted step as a memory snapshot, which "
        "https://pytorch.org/memory_viz and torch.cuda._memory_viz open.",
    )
    add_step(parser)
    add_size_of_batch(parser)
    parser.add_argument(
        "--device",
        metavar="NAME",
        type=device,
        default=_DEFAULT_DEVICE,
        help=f"{CARD_HELP}; {_DEFAULT_DEVICE} by default",
    )
    parser.add_argument(
        "-o", "--output", metavar="step.pickle", required=True, help="the file to write"
    )
    parser.set_defaults(command=_run_export)


def _run_export(arguments: argparse.Namespace) -> None:
    from memcallback.prediction.memory_viz import dump_snapshot

    prediction = predicted(arguments)
    try:
        with errors_of_output(arguments.output):
            dump_snapshot(prediction, arguments.output)
    except ValueError as error:
        raise UsageError(
            f"--device {prediction.device_name!r} cannot be exported: {error}"
        ) from error
    end = "" if prediction.fits else ", which ends where memory ran out"
    print(
        f"{prediction.verdict()[0]} Wrote {arguments.output}{end}. Open it at "
        "https://pytorch.org/memory_viz, or: "
        f"python -m torch.cuda._memory_viz trace_plot {arguments.output} -o step.html"
    )
