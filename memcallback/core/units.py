"""Format and parse byte sizes."""

from __future__ import annotations

import operator
import re

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
_UNITS = {
    "": 1,
    "b": 1,
    "byte": 1,
    "bytes": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": 1 << 40,
}
_SIZE = re.compile(r"\s*(-?)\s*((?:\d{1,3}(?:,\d{3})+|\d+(?:_\d+)*)(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def format_bytes(num_bytes: int) -> str:
    """Write a number of bytes as PyTorch's out-of-memory message does, to compare the two by eye.

    The steps between units are those of `format_size` in PyTorch's
    c10/cuda/CUDACachingAllocator.cpp: a unit is used only for sizes above it, so 2**30 bytes are
    `1024.00 MiB`, not `1.00 GiB`.

    Args:
        num_bytes: Any integer; a negative one, such as a difference, gets a minus sign.

    Returns:
        Text such as `23.52 GiB`, `123.75 MiB` or `512 bytes`.

    Examples:
        >>> format_bytes(129761280)
        '123.75 MiB'
    """
    sign, size = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    if size <= KiB:
        return f"{sign}{size} bytes"
    for unit, name in ((KiB, "KiB"), (MiB, "MiB")):
        if size <= unit * 1024:
            return f"{sign}{size / unit:.2f} {name}"
    return f"{sign}{size / GiB:.2f} GiB"


def brief_bytes(num_bytes: int) -> str:
    """A size with three significant digits, such as `13.0 GiB`, for what is read at a glance."""
    sign, size = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    if size < 1000:
        return f"{sign}{size} bytes"
    units = ((KiB, "KiB"), (MiB, "MiB"), (GiB, "GiB"))
    unit, name = next((pair for pair in units if size < 999.5 * pair[0]), units[-1])
    number = size / unit
    num_digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{sign}{number:,.{num_digits}f} {name}"


def parse_bytes(text: str | int) -> int:
    """Read a size such as `24GiB`, `24 GB`, `512 MiB`, `1_000` or 1000 as bytes.

    Units are not guessed: MB is 10**6 bytes, MiB is 2**20. Upper and lower case are alike. A comma
    separates thousands, as in `1,000 MB`; a fraction has a point, as in `1.5GiB`.

    Args:
        text: A size with or without a unit; an integer is bytes already.

    Returns:
        The whole number of bytes, at least 0; a fraction of a byte is cut off.

    Raises:
        ValueError: If the text is not a size, or negative.
        TypeError: If it is neither text nor a whole number.
    """
    if not isinstance(text, str):
        num_bytes = _whole(text)
        if num_bytes < 0:
            raise ValueError(_negative(num_bytes))
        return num_bytes
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[3].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(
            f"{text!r} is not a size. Write a number and a unit of B, KB, MB, GB, TB, KiB, MiB, "
            "GiB or TiB, such as '24GiB'."
            + (" A comma separates thousands; a fraction has a point." if "," in text else "")
        )
    if match[1]:
        raise ValueError(_negative(text))
    number = match[2].replace(",", "").replace("_", "")
    return int(number) * unit if number.isdigit() else int(float(number) * unit)


def _whole(value: object) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise TypeError(
        f"A size must be text or a whole number of bytes, got {value!r}. Give a size with its "
        "unit, such as '24GiB'."
    )


def _negative(size: str | int) -> str:
    return (
        f"{size!r} is not a size: a size cannot be negative. Give a number of bytes such as "
        "25769803776, or '24GiB'."
    )


def round_up(num_bytes: int, multiple_bytes: int) -> int:
    """Round up to a multiple."""
    if multiple_bytes < 1:
        raise ValueError(f"multiple_bytes must be at least 1, got {multiple_bytes}.")
    return -(-num_bytes // multiple_bytes) * multiple_bytes


def round_down_to_power_of_2(number: int) -> int:
    """The largest power of two that is at most a number; 1 for a number below 1."""
    return 1 << (number.bit_length() - 1) if number > 0 else 1
