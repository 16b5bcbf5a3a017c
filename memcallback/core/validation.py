"""Argument checks."""

from __future__ import annotations

import operator
from numbers import Real


def whole_number(name: str, value: object, hint: str, *, least: int = 1) -> int:
    """A whole number, which may be NumPy's."""
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
    return number


def above_0(name: str, value: object, hint: str) -> None:
    """See that a number is above 0."""
    if not _number(name, value, hint) > 0:
        raise ValueError(f"{name} must be above 0, got {value}. {hint}")


def share(name: str, value: object, hint: str) -> None:
    """See that a number is at least 0 and below 1."""
    if not 0 <= _number(name, value, hint) < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value}. {hint}")


def _number(name: str, value: object, hint: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}. {hint}")
    return float(value)


def described(value: object) -> str:
    """What was given, in a few words: a text or a number as it is, of anything else its kind."""
    if value is None or isinstance(value, (str, bytes, int, float)):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else kind_of(value)


def kind_of(value: object) -> str:
    """Of what type a value is."""
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"


#: The shortest sequence length of which others can be told: four are traced.
MIN_SEQUENCE_LENGTH = 4
