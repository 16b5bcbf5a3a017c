"""Files and folders, local or at fsspec addresses: a file is written whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any


def place_of(path: str | Path) -> str:
    """A local path, or an fsspec address such as `s3://bucket/runs` as it is."""
    text = str(path)
    # Lightning gives the second form of what a user wrote as `file:///tmp/runs`.
    if text.startswith(("file:/", "local:/")):
        from fsspec.implementations.local import LocalFileSystem

        return str(LocalFileSystem._strip_protocol(text))
    return text


def is_address(place: str) -> bool:
    """Whether a place is reached by fsspec alone."""
    return "://" in place or "::" in place


def inside(folder: str, name: str) -> str:
    """The place of a name in a folder."""
    return f"{folder.rstrip('/')}/{name}" if is_address(folder) else os.path.join(folder, name)


def make_folder(folder: str) -> None:
    """Make a folder and those above it; one that is there stays."""
    if is_address(folder):
        with _reached(folder) as (system, path):
            system.makedirs(path, exist_ok=True)
    else:
        os.makedirs(folder, exist_ok=True)


def make_next_version(folder: str) -> str:
    """Make the next folder `version_N`; of several local processes each gets its own."""
    make_folder(folder)
    for number in count(max(map(_version, _names_in(folder)), default=-1) + 1):
        place = inside(folder, f"version_{number}")
        if is_address(folder):
            # Most stores have no folders, and none can make one that is surely new.
            make_folder(place)
            return place
        with suppress(FileExistsError):
            os.mkdir(place)
            return place
    raise AssertionError("count() does not end")


def write_file(target: str | Path, content: str | bytes) -> None:
    """Write a file into an existing folder; if that fails, an earlier file stays as it was.

    Of several writers the last one wins, and its file is whole.
    """
    data = content.encode() if isinstance(content, str) else content
    place = place_of(target)
    if is_address(place):
        with (
            _reached(place) as (system, path),
            system.transaction,
            system.open(path, "wb") as file,
        ):
            file.write(data)
        return
    if os.path.exists(place) and not os.path.isfile(place):
        # A pipe or a device, such as /dev/stdout, holds nothing that could be lost, and a file
        # moved to its place would be no pipe.
        Path(place).write_bytes(data)
        return
    # Through a link the file that it names is written, and the link stays.
    file_path = Path(os.path.realpath(place))
    beside = file_path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            shutil.copymode(file_path, beside)
        beside.replace(file_path)
    except BaseException as error:  # Ctrl-C too: it goes on, and nothing half written stays
        if isinstance(error, OSError) and error.filename == str(beside):
            error.filename = place  # what the caller knows
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


@contextmanager
def _reached(address: str) -> Iterator[tuple[Any, str]]:
    """The file system of an address and the path in it; what fails there is an OSError."""
    from fsspec.core import url_to_fs

    try:
        # An instance of our own: a transaction holds for all that is written through an instance,
        # checkpoints of the user's too.
        yield url_to_fs(address, skip_instance_cache=True)
    except OSError:
        raise
    except Exception as error:  # each store is a library of its own, with errors of its own
        raise OSError(f"{address!r} cannot be reached: {type(error).__name__}: {error}") from error


def _names_in(folder: str) -> list[str]:
    if not is_address(folder):
        return os.listdir(folder)
    with suppress(FileNotFoundError), _reached(folder) as (system, path):
        return [entry.rstrip("/").rpartition("/")[2] for entry in system.ls(path, detail=False)]
    return []  # a store that knows no empty folders


def _version(name: str) -> int:
    number = name.removeprefix("version_")
    return int(number) if number != name and number.isdigit() else -1
