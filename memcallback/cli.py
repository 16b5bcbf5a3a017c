"""The command line. Each sub-command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

_INPUT = re.compile(r"(\d+(?:,\d+)*)(?::([a-z]+\d*))?")
_TARGET_HELP = "an importable module, a colon and a name in it"


class _UsageError(Exception):
    """What the person at the command line can mend; becomes one line on stderr."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments; those of the process by default.

    Returns:
        The exit code: 0, or 2 after an error, of which one line on stderr gives the value, the rule and the way out.
    """
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], None] = arguments.command
    try:
        command(arguments)
    except _UsageError as error:
        print(f"memcallback: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="memcallback", description="See where device memory goes while a PyTorch model trains, and what fits."
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
    parser.add_argument("target", metavar="package.module:make_model", help=f"{_TARGET_HELP}: a function that returns a model, or a model")
    parser.add_argument(
        "--input",
        metavar="1,3,224,224",
        action="append",
        required=True,
        help="size of an input, in whole numbers; for another dtype than the model's add it, as in 1,128:int64; repeat for more inputs",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with the unit in every key")
    parser.set_defaults(command=_run_layers)


#: Each adds one sub-command, which sets `command` to the function that runs it.
_COMMANDS: tuple[Callable[[Any], None], ...] = (_add_layers,)


def _run_layers(arguments: argparse.Namespace) -> None:
    sizes = [_parse_input(text) for text in arguments.input]
    model = _load_model(arguments.target)
    from memcallback.shape_pass import input_dtype, layers

    inputs = [_meta_tensor(size, dtype_name, input_dtype(model)) for size, dtype_name in sizes]
    # PyTorch logs the traceback of an operator that fails on fakes; the error below says it in one line.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        table = layers(model, *inputs)
    except Exception as error:
        given = " ".join(f"--input {text}" for text in arguments.input)
        raise _UsageError(
            f"{arguments.target} with {given} failed: {type(error).__name__}: {error} Check that the model takes inputs of these sizes."
        ) from error
    print(json.dumps(table.to_dict(), indent=2) if arguments.json else table.to_table().to_text(), end="\n" if arguments.json else "")


def _parse_input(text: str) -> tuple[tuple[int, ...], str | None]:
    match = _INPUT.fullmatch(text.replace(" ", ""))
    if match is None:
        raise _UsageError(
            f"--input {text!r} is not a size. Write whole numbers with commas between them, such as --input 1,3,224,224, "
            "or with a dtype --input 1,128:int64."
        )
    return tuple(map(int, match[1].split(","))), match[2]


def _meta_tensor(size: tuple[int, ...], dtype_name: str | None, default: torch.dtype) -> torch.Tensor:
    import torch

    dtype = getattr(torch, dtype_name, None) if dtype_name else default
    if not isinstance(dtype, torch.dtype):
        raise _UsageError(f"--input with dtype {dtype_name!r}: torch has no such dtype. Write one such as float32, bfloat16 or int64.")
    return torch.empty(size, dtype=dtype, device="meta")


def _load_model(target: str) -> nn.Module:
    from torch import nn

    value = _load(target)
    if callable(value) and not isinstance(value, nn.Module):
        try:
            value = value()
        except Exception as error:
            raise _UsageError(
                f"{target} failed: {type(error).__name__}: {error}. It is called without arguments and must return a torch.nn.Module."
            ) from error
    if not isinstance(value, nn.Module):
        raise _UsageError(
            f"{target} gives a {type(value).__name__}, not a torch.nn.Module. "
            "Name a model, a class of models that needs no arguments, or a function that returns a model."
        )
    return value


def _load(target: str) -> Any:
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise _UsageError(f"{target!r} names nothing to load. Write {_TARGET_HELP}, such as package.module:make_model.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _UsageError(
            f"No module named {error.name!r}, on importing {module_name!r}. Run memcallback in the folder that has it, or install it."
        ) from error
    except Exception as error:
        raise _UsageError(
            f"Importing {module_name!r} failed: {type(error).__name__}: {error}. It must import without running a training."
        ) from error
    for part in name.split("."):
        if not hasattr(value, part):
            raise _UsageError(f"{module_name!r} has no attribute {name!r}. Name a function, class or model that is defined there.")
        value = getattr(value, part)
    return value
