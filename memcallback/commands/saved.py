"""Read a prediction that `predict --json` wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from memcallback.commands.answer import SCHEMA_VERSION
from memcallback.core.types import Phase
from memcallback.step.importer import UsageError


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_number_or_null(value: object) -> bool:
    return value is None or _is_number(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_sizes(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _are_lines(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(line, dict)
        and all(isinstance(line.get(key), str) for key in ("file", "function", "text"))
        and all(_is_number(line.get(key)) for key in ("line", "num_bytes"))
        for line in value
    )


def _are_steps(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_step, value))


def _is_step(value: object) -> bool:
    windows = value.get("windows") if isinstance(value, dict) else None
    return isinstance(windows, list) and all(
        isinstance(window, dict)
        and window.get("phase") in _PHASES
        and _is_number(window.get("peak_allocated_bytes"))
        for window in windows
    )


_PHASES = [phase.value for phase in Phase]
_NUMBER = ("a whole number of at least 0 and below 2**63", _is_number)
_NUMBER_OR_NULL = (f"{_NUMBER[0]}, or null", _is_number_or_null)
_TEXT = ("a text", _is_text)
_SIZES = ("an object of whole numbers", _are_sizes)
#: Keys that are compared, with what their values are; those of other commands' answers lack some.
_VALUES: dict[str, tuple[str, Callable[[object], bool]]] = {
    "peak_allocated_bytes": _NUMBER,
    "peak_reserved_bytes": _NUMBER_OR_NULL,
    "largest_batch_size": _NUMBER_OR_NULL,
    "fits": ("true, false or null", lambda value: value is None or isinstance(value, bool)),
    "steps": (
        "a list of steps, at least one, each with windows that have a phase and "
        "peak_allocated_bytes",
        _are_steps,
    ),
    "at_peak_by_category_bytes": _SIZES,
    "at_peak_by_module_bytes": _SIZES,
    "at_peak_by_line": (
        "a list of lines, each with file, function, text, line and num_bytes",
        _are_lines,
    ),
    "device_name": _TEXT,
    "batch_size": _NUMBER,
    "sequence_length": _NUMBER_OR_NULL,
    "torch_version": ("a text or null", lambda value: value is None or _is_text(value)),
    "memcallback_version": _TEXT,
}
#: So many characters of a wrong value are shown.
_NUM_SHOWN = 40
_WRITE = "Write it: memcallback predict train:make_step --device 24GiB --json > base.json"


def saved_prediction(path: str) -> dict[str, Any]:
    """The prediction in a file, as data, with its path under `path`."""
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except OSError as error:
        raise UsageError(f"{path!r} cannot be read: {error.strerror or error}. {_WRITE}") from None
    except (ValueError, RecursionError) as error:  # the latter of lists in lists in lists
        raise UsageError(f"{path!r} is not JSON: {error}. {_WRITE}") from None
    if not isinstance(data, dict) or "schema_version" not in data:
        raise UsageError(f"{path!r} was not written by memcallback. {_WRITE}")
    version = data["schema_version"]
    if not _is_number(version) or version != SCHEMA_VERSION:
        raise UsageError(
            f"{path!r} has schema_version {_shown(version)}, and this memcallback reads "
            f"{SCHEMA_VERSION}. {_WRITE}"
        )
    if missing := [key for key in _VALUES if key not in data]:
        raise UsageError(
            f"{path!r} lacks {missing[0]}: another command, or an older memcallback, wrote it. "
            f"{_WRITE}"
        )
    for key, (rule, is_right) in _VALUES.items():
        if not is_right(data[key]):
            raise UsageError(
                f"{path!r} has {_shown(data[key])} as {key}, which must be {rule}: it was damaged "
                f"or changed. {_WRITE}"
            )
    return {**data, "path": path}


def _shown(value: object) -> str:
    """A value of JSON in a sentence, cut where it is long."""
    if value and isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= _NUM_SHOWN else f"{text[:_NUM_SHOWN]}..."
