"""Arguments that several commands take, and how their values are read.

argparse lets a UsageError pass, so that `main` writes it in one line.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from memcallback.core.units import parse_bytes
from memcallback.core.validation import DEFAULT_HEADROOM, MAX_BATCH_SIZE, MIN_SEQUENCE_LENGTH
from memcallback.step.importer import TARGET_HELP, UsageError

if TYPE_CHECKING:
    from memcallback.devices.catalogue import Device

CARD_HELP = "a card by name, in full or in short, or the size of any card's memory, such as 24GiB"

#: The largest job that is planned for.
MOST_RANKS = 10**6
#: The largest of other numbers.
_MOST = 10**12
#: So many digits of a number that is too large are shown.
_NUM_DIGITS = 30

#: How a function looks that commands about a step are given.
EXAMPLE = """\
example:
  mymodel.py
    import torch
    from memcallback import TrainingStep

    def make_step():
        model, batch = torch.nn.Linear(1024, 10), torch.zeros(64, 1024)
        return TrainingStep(
            model,
            batch,
            loss=lambda model, batch: model(batch).square().mean(),
            optimizer=torch.optim.AdamW,
        )

  memcallback predict mymodel:make_step --device 24GiB
"""


def add_step(parser: argparse.ArgumentParser, *, is_inference_allowed: bool = True) -> None:
    """The step: `package.module:make_step`."""
    inference = " or an InferenceStep" if is_inference_allowed else ""
    parser.add_argument(
        "target",
        metavar="package.module:make_step",
        help=f"{TARGET_HELP}. The object is a function that returns a TrainingStep{inference}, or "
        "a LightningModule that has a train_dataloader. memcallback --help has an example.",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """`--device`: a card, a CPU, or a device of this machine."""
    parser.add_argument(
        "--device",
        metavar="NAME",
        type=device,
        required=True,
        help=f"{CARD_HELP}; cpu; or a device of this machine, such as cuda:0",
    )


def add_size_of_batch(parser: argparse.ArgumentParser) -> None:
    """`--batch-size` and `--sequence-length`."""
    add_number(
        parser,
        "--batch-size",
        "samples in the batch; by default as many as the step's own batch has",
        most=MAX_BATCH_SIZE,
    )
    add_number(
        parser,
        "--sequence-length",
        "length of the batch's sequences; by default as long as the step says",
        meaning="length of a sequence",
        least=MIN_SEQUENCE_LENGTH,
        most=MAX_BATCH_SIZE,
    )


def add_headroom(parser: argparse.ArgumentParser) -> None:
    """`--headroom`, as a fraction."""
    percent = f"{100 * DEFAULT_HEADROOM:g}"
    parser.add_argument(
        "--headroom",
        metavar="PERCENT",
        type=_headroom,
        default=percent,
        help=f"percent of the card to keep free; {percent} by default",
    )


def add_json(parser: argparse.ArgumentParser, more: str = "") -> None:
    """`--json`."""
    parser.add_argument(
        "--json", action="store_true", help=f"print JSON, with the unit in every key{more}"
    )


def add_number(
    parser: argparse.ArgumentParser,
    option: str,
    help: str,
    *,
    meaning: str = "number of samples",
    least: int = 1,
    most: int = _MOST,
    default: int | None = None,
) -> None:
    """An option whose value is a whole number."""
    parser.add_argument(
        option,
        metavar="N",
        type=lambda text: _number(text, option, meaning, least=least, most=most),
        default=default,
        help=help,
    )


def _number(text: str, option: str, meaning: str, *, least: int = 1, most: int) -> int:
    if is_above(text, most):
        shown = text if len(text) <= _NUM_DIGITS else f"{text[:_NUM_DIGITS]}..."
        raise UsageError(
            f"{option} {shown} is too large for a {meaning}. "
            f"Write a whole number of at most {most:,}, such as {option} 32."
        )
    if not text.isdecimal() or int(text) < least:
        raise UsageError(
            f"{option} {text!r} is not a {meaning}. "
            f"Write a whole number of at least {least}, such as {option} 32."
        )
    return int(text)


def is_above(text: str, most: int) -> bool:
    """Whether a text is a whole number above another; Python reads only so many digits."""
    digits = text.lstrip("0")
    return text.isdecimal() and (len(digits) > len(str(most)) or int(digits or "0") > most)


def sequence_lengths(text: str) -> list[int]:
    """Lengths with commas between them."""
    return [
        _number(length.strip(), "--sequence-lengths", "length of a sequence", most=MAX_BATCH_SIZE)
        for length in text.split(",")
    ]


def max_peak(text: str) -> int:
    """A `--max-peak` in bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"--max-peak {error}") from None


def number_in(text: str) -> float:
    """The number that a text is; NaN, which is in no range, if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _headroom(text: str) -> float:
    return percentage(text, "--headroom", "5")


def percentage(text: str, option: str, example: str) -> float:
    """The fraction that a percentage is, such as 0.05 of `5%`."""
    percent = number_in(text.removesuffix("%"))
    if not 0 <= percent < 100:
        raise UsageError(
            f"{option} {text!r} is not a percentage from 0 to below 100. "
            f"Write a number, such as {option} {example}."
        )
    return percent / 100


def device(text: str) -> Device | str:
    """The card that is meant; a device of this machine stays a name until PyTorch is there."""
    from memcallback.devices.catalogue import find_device, names_local_device

    return text if names_local_device(text) else resolved(text, find_device)


def resolved(text: str, resolve: Callable[[str], Device]) -> Device:
    """The device that `resolve` finds for a `--device`."""
    try:
        return resolve(text)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"--device {error}") from error
