"""Argument checks, and words for what a user passed."""

from __future__ import annotations

import operator
from collections.abc import Callable
from numbers import Real
from typing import Any, get_args

#: The fraction of a device's memory that a suggested batch size leaves free.
DEFAULT_HEADROOM = 0.05
#: Tensor cores work on tiles whose sides are multiples of 8 (NVIDIA, Matrix Multiplication
#: Background User's Guide).
DEFAULT_MULTIPLE = 8
#: The shortest sequence length that can be varied: four lengths are traced.
MIN_SEQUENCE_LENGTH = 4
#: No larger batch and no longer sequence is predicted; PyTorch could not count the elements of much
#: larger ones.
MAX_BATCH_SIZE = 1 << 31


def whole_number(
    name: str, value: object, hint: str, *, least: int = 1, most: int | None = None
) -> int:
    """A whole number as an int; NumPy's are accepted."""
    # NumPy and PyTorch have a True of their own, which some of their versions let pass for 1.
    is_true_or_false = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    try:
        number = None if is_true_or_false else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be a whole number, got {value!r}. {hint}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}. {hint}")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most:,}, got {number:,}. {hint}")
    return number


def above_0(name: str, value: object, hint: str) -> None:
    """Check that a number is above 0."""
    if not _number(name, value, hint) > 0:
        raise ValueError(f"{name} must be above 0, got {value}. {hint}")


def share(name: str, value: object, hint: str) -> None:
    """Check that a number is at least 0 and below 1."""
    if not 0 <= _number(name, value, hint) < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value}. {hint}")


def _number(name: str, value: object, hint: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}. {hint}")
    return float(value)


def one_of(name: str, value: str, kind: Any) -> Any:
    """A value, if a `Literal` has it."""
    if value not in get_args(kind):
        raise ValueError(
            f"{name} {value!r} is not known. Use one of {', '.join(map(repr, get_args(kind)))}."
        )
    return value


def true_or_false(name: str, value: object) -> bool:
    """A value, if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {described(value)}.")
    return value


def cannot_take(function: Callable[..., Any], num_arguments: int) -> str | None:
    """Why a function cannot be called with so many arguments; None if it can, or is unknown."""
    import inspect  # here, because the command line's help does without it

    try:
        # The wrapper's own signature: it may pass more arguments on to what it wraps.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*(None,) * num_arguments)
    except TypeError as error:
        return str(error)
    return None


def described(value: object) -> str:
    """A value in a few words: text and numbers as they are, anything else by its type."""
    if value is None or isinstance(value, (str, bytes, int, float)):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else kind_of(value)


def kind_of(value: object) -> str:
    """A value's type with its article, such as `a Linear`."""
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"


def name_of(function: object) -> str:
    """The name of a function or class; of another callable the name of its class."""
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) else type(function).__name__
