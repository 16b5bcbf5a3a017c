"""The command about a model: layers."""

from __future__ import annotations

import argparse
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from memcallback.commands.answer import errors_in_one_line, show
from memcallback.commands.arguments import add_json, is_above
from memcallback.step.importer import TARGET_HELP, UsageError, load_model

if TYPE_CHECKING:
    import torch

#: PyTorch cannot count the elements of much larger outputs.
_MOST_ELEMENTS = 10**15
_INPUT = re.compile(r"(\d+(?:,\d+)*)(?::([a-z]+\d*))?")


def add_layers(commands: Any) -> None:
    """Add `layers` with its arguments."""
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
        help="size of an input, in whole numbers; add its dtype if that is not the model's, as in "
        "1,128:int64; repeat the option for more inputs",
    )
    add_json(parser)
    parser.set_defaults(command=_run_layers)


def _run_layers(arguments: argparse.Namespace) -> None:
    from memcallback.prediction.textbook.shape_pass import input_dtype, layers

    model = load_model(arguments.target)
    inputs = [_meta_tensor(given, input_dtype(model)) for given in arguments.input]
    with_inputs = " ".join(f"--input {given.text}" for given in arguments.input)
    with errors_in_one_line(
        f"{arguments.target} with {with_inputs} failed",
        " Check that the model takes inputs of these sizes.",
    ):
        table = layers(model, *inputs)
    show(table, is_json=arguments.json)


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
    numbers = match[1].split(",")
    is_too_large = any(is_above(number, _MOST_ELEMENTS) for number in numbers)
    size = () if is_too_large else tuple(map(int, numbers))
    if is_too_large or math.prod(size) > _MOST_ELEMENTS:
        raise UsageError(
            f"--input {text!r} has more than {_MOST_ELEMENTS:,} elements. "
            "Write smaller numbers, such as --input 1,3,224,224."
        )
    return _Input(text, size, match[2])


def _meta_tensor(spec: _Input, default: torch.dtype) -> torch.Tensor:
    import torch

    dtype = getattr(torch, spec.dtype, None) if spec.dtype else default
    if not isinstance(dtype, torch.dtype):
        raise UsageError(
            f"--input with dtype {spec.dtype!r}: torch has no such dtype. "
            "Write one such as float32, bfloat16 or int64."
        )
    return torch.empty(spec.size, dtype=dtype, device="meta")
