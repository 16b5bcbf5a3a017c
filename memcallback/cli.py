"""Command line: predict, suggest, what-if, layers, export, devices."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from time import sleep
from typing import TYPE_CHECKING, Any

from memcallback.core.document import for_console
from memcallback.core.validation import MIN_SEQUENCE_LENGTH
from memcallback.devices.catalogue import Device, find_device, names_local_device
from memcallback.step.importer import TARGET_HELP, UsageError, load_model, load_step, said

if TYPE_CHECKING:
    import torch

    from memcallback.prediction.prediction import Prediction


_INPUT = re.compile(r"(\d+(?:,\d+)*)(?::([a-z]+\d*))?")
_STEP = "package.module:make_step"
_STEP_HELP = (
    f"{TARGET_HELP}: a function that returns a TrainingStep, or a LightningModule with its data"
)
_CARD_HELP = "a card by name, in full or in short, or the size of any card's memory, such as 24GiB"
#: Moves to the top of a console and clears what is below.
_CLEAR = "\x1b[H\x1b[J"
_LONGEST_WATCH_S = 86400.0
_DEVICE_HELP = f"{_CARD_HELP}; cpu; or a device of this machine, such as cuda:0"
#: The card of an exported history, where none is named: only the workspaces in it and where memory
#: runs out depend on it.
_DEFAULT_DEVICE = "NVIDIA A100-SXM4-80GB"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], None] = arguments.command
    try:
        command(arguments)
    except UsageError as error:
        print(f"memcallback: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="memcallback",
        description="See where device memory goes while a PyTorch model trains, and what fits.",
    )
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    for add in _COMMANDS:
        add(commands)
    return parser


def _add_layers(commands: Any) -> None:
    parser = commands.add_parser(
        "layers",
        help="a model's layers: parameters, output shape and size, multiply-adds, FLOPs, memory read and written",
        description="Tabulate the layers of a model without running it.",
    )
    parser.add_argument(
        "target",
        metavar="package.module:make_model",
        help=f"{TARGET_HELP}: a function that returns a model, or a model",
    )
    parser.add_argument(
        "--input",
        metavar="1,3,224,224",
        action="append",
        required=True,
        help="size of an input, in whole numbers; for another dtype than the model's add it, as in 1,128:int64; repeat for more inputs",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON, with the unit in every key"
    )
    parser.set_defaults(command=_run_layers)


def _add_predict(commands: Any) -> None:
    parser = commands.add_parser(
        "predict",
        help="the memory of a training step on a card that need not be there",
        description="Predict the memory of a training step, allocated and reserved, phase by phase. No GPU is needed.",
    )
    _add_step_arguments(parser)
    parser.add_argument("--device", metavar="NAME", required=True, help=_DEVICE_HELP)
    parser.add_argument(
        "--json", action="store_true", help="print JSON, with the unit in every key"
    )
    parser.set_defaults(command=_run_predict)


def _add_suggest(commands: Any) -> None:
    parser = commands.add_parser(
        "suggest",
        help="the largest batch size that fits on a card that need not be there",
        description="Suggest the largest batch size whose predicted reserved peak, with headroom, stays within a card. No GPU is needed.",
    )
    parser.add_argument("target", metavar=_STEP, help=_STEP_HELP)
    parser.add_argument("--device", metavar="NAME", required=True, help=_DEVICE_HELP)
    _add_headroom(parser)
    parser.add_argument(
        "--multiple-of",
        metavar="N",
        help="the batch size is to be a multiple of N, if so many samples fit; 8 by default",
    )
    parser.add_argument("--max-batch-size", metavar="N", help="it is at most N")
    parser.add_argument("--dataset-size", metavar="N", help="samples in the dataset")
    parser.add_argument(
        "--world-size", metavar="N", help="how many ranks train; the batch size is that of one"
    )
    parser.add_argument(
        "--sequence-lengths",
        metavar="N,N",
        help="a batch size for sequences of each of these lengths; the suggestion is for the longest",
    )
    parser.add_argument(
        "--effective-batch-size",
        metavar="N",
        help="say too how to have exactly N samples between two updates",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON, with the unit in every key"
    )
    parser.set_defaults(command=_run_suggest)


def _add_what_if(commands: Any) -> None:
    parser = commands.add_parser(
        "what-if",
        help="what each saving of memory would buy and cost",
        description="Predict a training step with each saving of memory, alone and together. No GPU is needed.",
    )
    parser.add_argument("target", metavar=_STEP, help=_STEP_HELP)
    parser.add_argument(
        "--batch-size",
        metavar="N",
        help="samples between two updates; by default as many as the step's own batch has",
    )
    parser.add_argument("--device", metavar="NAME", required=True, help=_DEVICE_HELP)
    _add_headroom(parser)
    parser.add_argument(
        "--world-size",
        metavar="N",
        help="try N ranks too: DistributedDataParallel, FSDP2, HSDP, tensor parallel, a pipeline",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON, with the unit in every key"
    )
    parser.set_defaults(command=_run_what_if)


def _add_devices(commands: Any) -> None:
    parser = commands.add_parser(
        "devices",
        help="who uses which device of this machine, and how much",
        description="Show every device of this machine: memory, utilisation, temperature, power, and the processes on it.",
    )
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        const="2",
        help="show them again and again, every 2 seconds or so many, until interrupted",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON, with the unit in every key; with --watch one line each time",
    )
    parser.set_defaults(command=_run_devices)


def _add_headroom(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--headroom",
        metavar="PERCENT",
        default="5",
        help="percent of the card to keep free; 5 by default",
    )


def _add_export(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="a predicted step as a snapshot for PyTorch's memory_viz",
        description="Write a predicted step as a memory snapshot, which https://pytorch.org/memory_viz and torch.cuda._memory_viz open.",
    )
    _add_step_arguments(parser)
    parser.add_argument(
        "--device",
        metavar="NAME",
        default=_DEFAULT_DEVICE,
        help=f"{_CARD_HELP}; {_DEFAULT_DEVICE} by default",
    )
    parser.add_argument(
        "-o", "--output", metavar="step.pickle", required=True, help="the file to write"
    )
    parser.set_defaults(command=_run_export)


def _add_step_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar=_STEP, help=_STEP_HELP)
    parser.add_argument(
        "--batch-size",
        metavar="N",
        help="samples in the batch; by default as many as the step's own batch has",
    )
    parser.add_argument(
        "--sequence-length",
        metavar="N",
        help="length of the batch's sequences; by default as long as the step says",
    )


#: Each adds one sub-command, which sets `command` to the function that runs it.
_COMMANDS: tuple[Callable[[Any], None], ...] = (
    _add_predict,
    _add_suggest,
    _add_what_if,
    _add_layers,
    _add_export,
    _add_devices,
)


def _show(result: Any, *, is_json: bool) -> None:
    print(json.dumps(result.to_dict(), indent=2) if is_json else for_console(str(result)))


def _run_predict(arguments: argparse.Namespace) -> None:
    prediction = _predict(arguments)
    _show(prediction, is_json=arguments.json)


def _run_suggest(arguments: argparse.Namespace) -> None:
    names = ("multiple_of", "max_batch_size", "dataset_size", "world_size", "effective_batch_size")
    given = {
        name: _parse_number(
            getattr(arguments, name), f"--{name.replace('_', '-')}", "number of samples"
        )
        for name in names
    }
    effective = given.pop("effective_batch_size")
    options: dict[str, Any] = {name: number for name, number in given.items() if number is not None}
    if arguments.sequence_lengths is not None:
        lengths = arguments.sequence_lengths.split(",")
        options["sequence_lengths"] = [
            _parse_number(length.strip(), "--sequence-lengths", "length of a sequence")
            for length in lengths
        ]
    advice = _ask(
        arguments,
        "batch_size.suggest",
        "suggest_batch_size",
        headroom=_parse_headroom(arguments.headroom),
        **options,
    )
    accumulation = None
    if effective is not None:
        try:
            accumulation = advice.accumulate_for(effective)
        except ValueError as error:
            raise UsageError(str(error)) from error
    if arguments.json:
        print(
            json.dumps(
                {
                    **advice.to_dict(),
                    "accumulation": None if accumulation is None else asdict(accumulation),
                },
                indent=2,
            )
        )
        return
    _show(advice, is_json=False)
    if accumulation is not None:
        ranks = (
            f" on each of {accumulation.world_size} ranks" if accumulation.world_size > 1 else ""
        )
        print(
            f"For {effective} samples between two updates: batch size {accumulation.batch_size}, accumulate {accumulation.accumulate}{ranks}."
        )


def _run_what_if(arguments: argparse.Namespace) -> None:
    batch_size = _parse_number(arguments.batch_size, "--batch-size", "number of samples")
    headroom = _parse_headroom(arguments.headroom)
    world_size = _parse_number(arguments.world_size, "--world-size", "number of ranks")
    ranks = {} if world_size is None else {"ranks": world_size}
    plan = _ask(
        arguments,
        "savings.what_if",
        "what_if",
        of="savings",
        headroom=headroom,
        batch_size=batch_size,
        **ranks,
    )
    _show(plan, is_json=arguments.json)


def _parse_headroom(text: str) -> float:
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent < 100:
        raise UsageError(
            f"--headroom {text!r} is no percentage from 0 to below 100. Write a number, such as --headroom 5."
        )
    return percent / 100


def _run_devices(arguments: argparse.Namespace) -> None:
    seconds = None if arguments.watch is None else _parse_seconds(arguments.watch)
    device_states = importlib.import_module("memcallback.devices.usage").device_states
    if seconds is None:
        states = device_states()
        _show(states, is_json=arguments.json)
        return
    with suppress(KeyboardInterrupt):
        while True:
            states = device_states()
            print(
                json.dumps(states.to_dict())
                if arguments.json
                else f"{_CLEAR}{for_console(states.to_text())}",
                flush=True,
            )
            sleep(seconds)


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < _LONGEST_WATCH_S:
        raise UsageError(
            f"--watch {text!r} is no number of seconds above 0. Write one, such as --watch 5."
        )
    return seconds


def _run_export(arguments: argparse.Namespace) -> None:
    prediction = _predict(arguments)
    from memcallback.prediction.memory_viz import dump_snapshot

    try:
        dump_snapshot(prediction, arguments.output)
    except OSError as error:
        raise UsageError(
            f"--output {arguments.output!r} cannot be written: {error.strerror}. Name a file in a folder that is there."
        ) from error
    except ValueError as error:
        raise UsageError(f"--device {arguments.device!r} cannot be exported: {error}") from error
    print(
        f"Wrote {arguments.output}. Open it at https://pytorch.org/memory_viz, or: "
        f"python -m torch.cuda._memory_viz trace_plot {arguments.output} -o step.html"
    )


def _predict(arguments: argparse.Namespace) -> Prediction:
    batch_size = _parse_number(arguments.batch_size, "--batch-size", "number of samples")
    sequence_length = _parse_number(
        arguments.sequence_length,
        "--sequence-length",
        "length of a sequence",
        least=MIN_SEQUENCE_LENGTH,
    )
    prediction: Prediction = _ask(
        arguments,
        "prediction.predict",
        "predict",
        batch_size=batch_size,
        sequence_length=sequence_length,
    )
    return prediction


def _ask(
    arguments: argparse.Namespace, module: str, function: str, *, of: str = "traces", **options: Any
) -> Any:
    """What a function of the package says of the step and device on the command line."""
    # What is wrong with a name is said at once; a device of this machine is asked once the step has
    # loaded PyTorch.
    device: str | Device = (
        arguments.device
        if names_local_device(arguments.device)
        else _parse_device(arguments.device, find_device)
    )
    step = load_step(arguments.target)
    if isinstance(device, str):
        device = _parse_device(
            arguments.device, importlib.import_module("memcallback.devices.local").resolve
        )
    # PyTorch logs the traceback of an operator that fails on fakes; the error below says it in one
    # line.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    tracing = importlib.import_module("memcallback.prediction.predict")
    progress = tracing.how_far(lambda part: print(f"memcallback: {part}", file=sys.stderr), of)
    try:
        with redirect_stdout(sys.stderr):
            return getattr(importlib.import_module(f"memcallback.{module}"), function)(
                step, device=device, progress=progress, **options
            )
    except (Exception, SystemExit) as error:  # user code on fakes can fail in any way
        raise UsageError(f"{arguments.target} cannot be predicted: {said(error)}.") from error


def _parse_number(text: str | None, option: str, what: str, *, least: int = 1) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise UsageError(
            f"{option} {text!r} is no {what}. Write a whole number from {least} on, such as {option} 32."
        )
    return int(text)


def _parse_device(text: str, find: Callable[[str], Device]) -> Device:
    try:
        return find(text)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"--device {error}") from error


def _run_layers(arguments: argparse.Namespace) -> None:
    sizes = [_parse_input(text) for text in arguments.input]
    model = load_model(arguments.target)
    from memcallback.prediction.textbook.shape_pass import input_dtype, layers

    inputs = [_meta_tensor(size, dtype_name, input_dtype(model)) for size, dtype_name in sizes]
    # PyTorch logs the traceback of an operator that fails on fakes; the error below says it in one
    # line.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        with redirect_stdout(sys.stderr):
            table = layers(model, *inputs)
    except (Exception, SystemExit) as error:
        given = " ".join(f"--input {text}" for text in arguments.input)
        raise UsageError(
            f"{arguments.target} with {given} failed: {said(error)}. Check that the model takes inputs of these sizes."
        ) from error
    _show(table, is_json=arguments.json)


def _parse_input(text: str) -> tuple[tuple[int, ...], str | None]:
    match = _INPUT.fullmatch(text.replace(" ", ""))
    if match is None:
        raise UsageError(
            f"--input {text!r} is not a size. Write whole numbers with commas between them, such as --input 1,3,224,224, "
            "or with a dtype --input 1,128:int64."
        )
    return tuple(map(int, match[1].split(","))), match[2]


def _meta_tensor(
    size: tuple[int, ...], dtype_name: str | None, default: torch.dtype
) -> torch.Tensor:
    import torch

    dtype = getattr(torch, dtype_name, None) if dtype_name else default
    if not isinstance(dtype, torch.dtype):
        raise UsageError(
            f"--input with dtype {dtype_name!r}: torch has no such dtype. Write one such as float32, bfloat16 or int64."
        )
    return torch.empty(size, dtype=dtype, device="meta")
