"""Command line: predict, suggest, what-if, layers, export, devices.

For each command one function adds its arguments and one runs it. The second imports what it needs,
PyTorch too, so `--help` and wrong arguments are answered at once.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from time import sleep
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from memcallback.core.validation import DEFAULT_HEADROOM, DEFAULT_MULTIPLE, MIN_SEQUENCE_LENGTH
from memcallback.core.visible import visible
from memcallback.step.importer import TARGET_HELP, UsageError, load_model, load_step, one_line

if TYPE_CHECKING:
    import torch

    from memcallback.devices.catalogue import Device
    from memcallback.prediction.prediction import Prediction

_Answer = TypeVar("_Answer")
_INPUT = re.compile(r"(\d+(?:,\d+)*)(?::([a-z]+\d*))?")
_CARD_HELP = "a card by name, in full or in short, or the size of any card's memory, such as 24GiB"
#: Moves to the top of a console and clears the rest.
_CLEAR = "\x1b[H\x1b[J"
_LONGEST_WATCH_S = 86400.0
#: The card of an exported history, where none is named: only the workspaces in it and where memory
#: runs out depend on it.
_DEFAULT_DEVICE = "NVIDIA A100-SXM4-80GB"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 2 is the exit code of everything that a user can mend."""
    try:
        arguments = _parser().parse_args(argv)
        arguments.command(arguments)
    except UsageError as error:
        message = visible(" ".join(str(error).split()))
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
    for add in (_add_predict, _add_suggest, _add_what_if, _add_layers, _add_export, _add_devices):
        add(commands)
    return parser


def _add_predict(commands: Any) -> None:
    parser = commands.add_parser(
        "predict",
        help="the memory of a training step on any card, without a GPU",
        description="Predict the memory of a training step, allocated and reserved, phase by "
        "phase. No GPU is needed.",
    )
    _add_step(parser)
    _add_size_of_batch(parser)
    _add_device(parser)
    _add_json(parser)
    parser.set_defaults(command=_run_predict)


def _run_predict(arguments: argparse.Namespace) -> None:
    _show(_predict(arguments), is_json=arguments.json)


def _predict(arguments: argparse.Namespace) -> Prediction:
    from memcallback.prediction.predict import predict

    return _ask(
        arguments,
        predict,
        batch_size=arguments.batch_size,
        sequence_length=arguments.sequence_length,
    )


def _add_suggest(commands: Any) -> None:
    parser = commands.add_parser(
        "suggest",
        help="the largest batch size that fits on any card, without a GPU",
        description="Suggest the largest batch size whose predicted reserved peak, with headroom, "
        "stays within a card. No GPU is needed.",
    )
    _add_step(parser)
    _add_device(parser)
    _add_headroom(parser)
    _add_number(
        parser,
        "--multiple-of",
        "the batch size is to be a multiple of N, if so many samples fit; "
        f"{DEFAULT_MULTIPLE} by default",
        default=DEFAULT_MULTIPLE,
    )
    _add_number(parser, "--max-batch-size", "it is at most N")
    _add_number(parser, "--dataset-size", "samples in the dataset")
    _add_number(parser, "--world-size", "how many ranks train; the batch size is that of one")
    parser.add_argument(
        "--sequence-lengths",
        metavar="N,N",
        type=_sequence_lengths,
        help="a batch size for sequences of each of these lengths; the suggestion is for the "
        "longest",
    )
    _add_number(
        parser,
        "--effective-batch-size",
        "say too how to have exactly N samples between two updates",
    )
    _add_json(parser)
    parser.set_defaults(command=_run_suggest)


def _run_suggest(arguments: argparse.Namespace) -> None:
    from memcallback.batch_size.suggest import suggest_batch_size

    names = ("headroom", "multiple_of", "max_batch_size", "dataset_size", "world_size")
    options = {name: getattr(arguments, name) for name in (*names, "sequence_lengths")}
    advice = _ask(arguments, suggest_batch_size, **options)
    plan = None
    if arguments.effective_batch_size is not None:
        try:
            plan = advice.accumulate_for(arguments.effective_batch_size)
        except ValueError as error:
            raise UsageError(str(error)) from error
    if arguments.json:
        from dataclasses import asdict

        accumulation = None if plan is None else asdict(plan)
        print(json.dumps({**advice.to_dict(), "accumulation": accumulation}, indent=2))
        return
    _show(advice, is_json=False)
    if plan is not None:
        ranks = f" on each of {plan.world_size} ranks" if plan.world_size > 1 else ""
        print(
            f"For {arguments.effective_batch_size} samples between two updates: "
            f"batch size {plan.batch_size}, accumulate {plan.accumulate}{ranks}."
        )


def _add_what_if(commands: Any) -> None:
    parser = commands.add_parser(
        "what-if",
        help="what each saving of memory would buy and cost",
        description="Predict a training step with each saving of memory, alone and together. "
        "No GPU is needed.",
    )
    _add_step(parser)
    _add_number(
        parser,
        "--batch-size",
        "samples between two updates; by default as many as the step's own batch has",
    )
    _add_device(parser)
    _add_headroom(parser)
    _add_number(
        parser,
        "--world-size",
        "try N ranks too: DistributedDataParallel, FSDP2, HSDP, tensor parallel, a pipeline",
        meaning="number of ranks",
    )
    _add_json(parser)
    parser.set_defaults(command=_run_what_if)


def _run_what_if(arguments: argparse.Namespace) -> None:
    from memcallback.savings.what_if import what_if

    table = _ask(
        arguments,
        what_if,
        unit="savings",
        headroom=arguments.headroom,
        batch_size=arguments.batch_size,
        ranks=arguments.world_size or (),
    )
    _show(table, is_json=arguments.json)


def _add_layers(commands: Any) -> None:
    parser = commands.add_parser(
        "layers",
        help="a model's layers: parameters, output shape and size, multiply-adds, FLOPs, "
        "memory read and written",
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
        type=_input,
        required=True,
        help="size of an input, in whole numbers; for another dtype than the model's add it, "
        "as in 1,128:int64; repeat for more inputs",
    )
    _add_json(parser)
    parser.set_defaults(command=_run_layers)


def _run_layers(arguments: argparse.Namespace) -> None:
    from memcallback.prediction.textbook.shape_pass import input_dtype, layers

    model = load_model(arguments.target)
    inputs = [_meta_tensor(given, input_dtype(model)) for given in arguments.input]
    with_inputs = " ".join(f"--input {given.text}" for given in arguments.input)
    with _errors_in_one_line(
        f"{arguments.target} with {with_inputs} failed",
        " Check that the model takes inputs of these sizes.",
    ):
        table = layers(model, *inputs)
    _show(table, is_json=arguments.json)


def _add_export(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="a predicted step as a snapshot for PyTorch's memory_viz",
        description="Write a predicted step as a memory snapshot, which "
        "https://pytorch.org/memory_viz and torch.cuda._memory_viz open.",
    )
    _add_step(parser)
    _add_size_of_batch(parser)
    parser.add_argument(
        "--device",
        metavar="NAME",
        type=_device,
        default=_DEFAULT_DEVICE,
        help=f"{_CARD_HELP}; {_DEFAULT_DEVICE} by default",
    )
    parser.add_argument(
        "-o", "--output", metavar="step.pickle", required=True, help="the file to write"
    )
    parser.set_defaults(command=_run_export)


def _run_export(arguments: argparse.Namespace) -> None:
    from memcallback.prediction.memory_viz import dump_snapshot

    prediction = _predict(arguments)
    try:
        dump_snapshot(prediction, arguments.output)
    except OSError as error:
        raise UsageError(
            f"--output {arguments.output!r} cannot be written: {error.strerror or error}. "
            "Name a file in an existing folder."
        ) from error
    except ValueError as error:
        raise UsageError(
            f"--device {prediction.device_name!r} cannot be exported: {error}"
        ) from error
    print(
        f"Wrote {arguments.output}. Open it at https://pytorch.org/memory_viz, or: "
        f"python -m torch.cuda._memory_viz trace_plot {arguments.output} -o step.html"
    )


def _add_devices(commands: Any) -> None:
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
        help="show them again and again, every 2 seconds or so many, until interrupted",
    )
    _add_json(parser, "; with --watch one line each time")
    parser.set_defaults(command=_run_devices)


def _run_devices(arguments: argparse.Namespace) -> None:
    from memcallback.core.document import for_console
    from memcallback.devices.usage import device_states

    if arguments.watch is None:
        _show(device_states(), is_json=arguments.json)
        return
    with suppress(KeyboardInterrupt):
        while True:
            states = device_states()
            if arguments.json:
                print(json.dumps(states.to_dict()), flush=True)
            else:
                print(f"{_CLEAR}{for_console(states.to_text())}", flush=True)
            sleep(arguments.watch)


# Arguments that several commands take.


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="package.module:make_step",
        help=f"{TARGET_HELP}: a function that returns a TrainingStep, or a LightningModule with "
        "its data",
    )


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        metavar="NAME",
        type=_device,
        required=True,
        help=f"{_CARD_HELP}; cpu; or a device of this machine, such as cuda:0",
    )


def _add_size_of_batch(parser: argparse.ArgumentParser) -> None:
    _add_number(
        parser,
        "--batch-size",
        "samples in the batch; by default as many as the step's own batch has",
    )
    _add_number(
        parser,
        "--sequence-length",
        "length of the batch's sequences; by default as long as the step says",
        meaning="length of a sequence",
        least=MIN_SEQUENCE_LENGTH,
    )


def _add_headroom(parser: argparse.ArgumentParser) -> None:
    percent = f"{100 * DEFAULT_HEADROOM:g}"
    parser.add_argument(
        "--headroom",
        metavar="PERCENT",
        type=_headroom,
        default=percent,
        help=f"percent of the card to keep free; {percent} by default",
    )


def _add_json(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument(
        "--json", action="store_true", help=f"print JSON, with the unit in every key{more}"
    )


def _add_number(
    parser: argparse.ArgumentParser,
    option: str,
    help: str,
    *,
    meaning: str = "number of samples",
    least: int = 1,
    default: int | None = None,
) -> None:
    parser.add_argument(
        option,
        metavar="N",
        type=lambda text: _number(text, option, meaning, least=least),
        default=default,
        help=help,
    )


# Parsers of arguments. argparse lets a UsageError pass, so that `main` writes it in one line.


def _number(text: str, option: str, meaning: str, *, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise UsageError(
            f"{option} {text!r} is not a {meaning}. "
            f"Write a whole number from {least} on, such as {option} 32."
        )
    return int(text)


def _sequence_lengths(text: str) -> list[int]:
    return [
        _number(length.strip(), "--sequence-lengths", "length of a sequence")
        for length in text.split(",")
    ]


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan  # is in no range


def _headroom(text: str) -> float:
    percent = _float(text.removesuffix("%"))
    if not 0 <= percent < 100:
        raise UsageError(
            f"--headroom {text!r} is not a percentage from 0 to below 100. "
            "Write a number, such as --headroom 5."
        )
    return percent / 100


def _seconds(text: str) -> float:
    seconds = _float(text)
    if not 0 < seconds < _LONGEST_WATCH_S:
        raise UsageError(
            f"--watch {text!r} is not a number of seconds above 0. Write one, such as --watch 5."
        )
    return seconds


def _device(text: str) -> Device | str:
    """The card that is meant; a device of this machine stays a name until PyTorch is there."""
    from memcallback.devices.catalogue import find_device, names_local_device

    return text if names_local_device(text) else _resolved(text, find_device)


def _resolved(text: str, resolve: Callable[[str], Device]) -> Device:
    try:
        return resolve(text)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"--device {error}") from error


class _Input(NamedTuple):
    """An `--input`, with the name of its dtype if it has one."""

    text: str
    size: tuple[int, ...]
    dtype: str | None


def _input(text: str) -> _Input:
    match = _INPUT.fullmatch(text.replace(" ", ""))
    if match is None:
        raise UsageError(
            f"--input {text!r} is not a size. Write whole numbers with commas between them, "
            "such as --input 1,3,224,224, or with a dtype --input 1,128:int64."
        )
    return _Input(text, tuple(map(int, match[1].split(","))), match[2])


def _meta_tensor(spec: _Input, default: torch.dtype) -> torch.Tensor:
    import torch

    dtype = getattr(torch, spec.dtype, None) if spec.dtype else default
    if not isinstance(dtype, torch.dtype):
        raise UsageError(
            f"--input with dtype {spec.dtype!r}: torch has no such dtype. "
            "Write one such as float32, bfloat16 or int64."
        )
    return torch.empty(spec.size, dtype=dtype, device="meta")


# What commands share when they run.


def _ask(
    arguments: argparse.Namespace,
    function: Callable[..., _Answer],
    *,
    unit: str = "traces",
    **options: Any,
) -> _Answer:
    """What a function of the package answers for the step and the device on the command line."""
    from memcallback.devices.local import resolve
    from memcallback.prediction.apart import report_progress

    step = load_step(arguments.target)
    device = arguments.device
    if isinstance(device, str):
        device = _resolved(device, resolve)
    progress = report_progress(lambda part: print(f"memcallback: {part}", file=sys.stderr), unit)
    with _errors_in_one_line(f"{arguments.target} cannot be predicted"):
        return function(step, device=device, progress=progress, **options)


@contextmanager
def _errors_in_one_line(failure: str, hint: str = "") -> Iterator[None]:
    """Run user code on fake tensors: what it prints goes to stderr, its error becomes ours."""
    import logging

    # PyTorch logs the traceback of an operator that fails on fakes; ours is one line.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:  # user code can fail in any way
        raise UsageError(f"{failure}: {one_line(error)}.{hint}") from error


def _show(result: Any, *, is_json: bool) -> None:
    from memcallback.core.document import for_console

    print(json.dumps(result.to_dict(), indent=2) if is_json else for_console(str(result)))
