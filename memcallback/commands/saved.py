"""Read a prediction that `predict --json` wrote."""

from __future__ import annotations

import json
from typing import Any

from memcallback.commands.answer import SCHEMA_VERSION
from memcallback.step.importer import UsageError

#: Keys that are compared; those of other commands' answers lack some.
_KEYS = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "largest_batch_size",
    "fits",
    "steps",
    "at_peak_by_category_bytes",
    "at_peak_by_module_bytes",
    "at_peak_by_line",
    "device_name",
    "batch_size",
    "sequence_length",
    "torch_version",
    "memcallback_version",
)
_WRITE = "Write it: memcallback predict train:make_step --device 24GiB --json > base.json"


def saved_prediction(path: str) -> dict[str, Any]:
    """The prediction in a file, as data, with its path under `path`."""
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except OSError as error:
        raise UsageError(f"{path!r} cannot be read: {error.strerror or error}. {_WRITE}") from None
    except ValueError as error:
        raise UsageError(f"{path!r} is not JSON: {error}. {_WRITE}") from None
    if not isinstance(data, dict) or "schema_version" not in data:
        raise UsageError(f"{path!r} was not written by memcallback. {_WRITE}")
    if data["schema_version"] != SCHEMA_VERSION:
        raise UsageError(
            f"{path!r} has schema_version {data['schema_version']}, and this memcallback reads "
            f"{SCHEMA_VERSION}. {_WRITE}"
        )
    if missing := [key for key in _KEYS if key not in data]:
        raise UsageError(
            f"{path!r} lacks {missing[0]}: another command, or an older memcallback, wrote it. "
            f"{_WRITE}"
        )
    return {**data, "path": path}
