"""Files that are whole or not there: whoever reads one never has a part of it."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file beside its place and move it there once it is on the disk; its folder is made if need be.

    A process that is killed meanwhile leaves the place as it was. Of several that write at once the last one stays, whole.

    Args:
        path: Where to.
        content: Text, written as UTF-8, or bytes.

    Raises:
        OSError: If it cannot be written; nothing is left behind then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with beside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
