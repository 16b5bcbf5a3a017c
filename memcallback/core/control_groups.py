"""group_memory(): the limit that a container's control groups put on this process's memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_ROOT = Path("/")


class GroupMemory(NamedTuple):
    """The memory of a control group; what the kernel can take back at once is not used."""

    limit_bytes: int
    used_bytes: int

    @property
    def left_bytes(self) -> int:
        """What is left of the limit."""
        return max(0, self.limit_bytes - self.used_bytes)


class _Files(NamedTuple):
    """Where a version of control groups has its sizes; pages of files count as used there."""

    folder: str
    limit: str
    used: str
    file_pages: str


_VERSION_1 = _Files(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)
_VERSION_2 = _Files("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def group_memory() -> GroupMemory | None:
    """The group with the smallest limit, of this process's and those around it; None without."""
    try:
        lines = (_ROOT / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    groups: list[GroupMemory] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            groups.extend(_with_limit(_VERSION_2, path))
        elif "memory" in controllers.split(","):
            groups.extend(_with_limit(_VERSION_1, path))
    return min(groups, default=None)


def _with_limit(files: _Files, path: str) -> Iterator[GroupMemory]:
    """A group and those around it, as far as they have a limit."""
    top = _ROOT / files.folder
    inner = PurePosixPath(path.lstrip("/"))
    # Where the kernel names a path that is not here, a container sees its own group as the top.
    parts = {inner, *inner.parents, PurePosixPath()}
    for folder in (top / part for part in parts if ".." not in part.parts):
        with suppress(OSError, ValueError):  # ValueError: no limit
            limit_bytes = int((folder / files.limit).read_text())
            used_bytes = int((folder / files.used).read_text())
            stat = (folder / "memory.stat").read_text()
            found = re.search(rf"^{files.file_pages} (\d+)$", stat, re.MULTILINE)
            file_bytes = int(found[1]) if found else 0
            yield GroupMemory(limit_bytes, max(0, used_bytes - file_bytes))
