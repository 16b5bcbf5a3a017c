"""A fake process group of any size in one process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d

#: The dicts in which torch.distributed keeps the process groups that there are
#: (`distributed_c10d._World`).
_DICTS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
#: C++ knows process groups by name, counted up from 0 in all of the process: ours are far above.
_FIRST_NAMES = count(1 << 20, 1 << 10)


@contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Let this thread be one rank of a job, until the end of the context; process groups that are
    there already are untouched.

    Collectives of the group return at once, and what they were to fill stays as it was (PyTorch's
    own `fake` backend). The thread may make further groups and device meshes inside.
    """
    # This registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    own, real_rank = _World(), dist.get_rank() if dist.is_initialized() else -1
    excepthook, init_method = sys.excepthook, c10d._default_pg_init_method
    with mock.patch.object(c10d, "_world", _WorldByThread(own, c10d._world)), _generator_restored():
        try:
            dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
            yield
        finally:
            # `destroy_process_group` would take the names of all process groups away, the user's
            # too.
            for name in own.pg_names.values():
                _distributed_c10d._unregister_process_group(name)
            sys.excepthook, c10d._default_pg_init_method = excepthook, init_method
            _distributed_c10d._set_global_rank(real_rank)


class _World(c10d._World):
    """Process groups apart from those of the process, which the base class reads from the module."""

    def __init__(self) -> None:
        super().__init__()
        vars(self).update({name: {} for name in _DICTS}, group_count=next(_FIRST_NAMES))


def _own(name: str) -> property:
    return property(
        lambda world: vars(world)[name], lambda world, value: vars(world).update({name: value})
    )


for _name in (*_DICTS, "group_count"):
    setattr(_World, _name, _own(_name))


class _WorldByThread:
    """What torch.distributed knows: for one thread its own process groups, for all others those of
    the process.
    """

    def __init__(self, own: c10d._World, of_process: c10d._World) -> None:
        vars(self).update(_own=own, _of_process=of_process, _thread=threading.get_ident())

    def _here(self) -> c10d._World:
        mine = vars(self)
        found: c10d._World = (
            mine["_own"] if threading.get_ident() == mine["_thread"] else mine["_of_process"]
        )
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._here(), name, value)


@contextmanager
def _generator_restored() -> Iterator[None]:
    """DTensor makes itself a generator of random numbers, one for the process, when it first needs
    it.
    """
    from torch.distributed.tensor import _random

    before, _random._rng_tracker = _random._rng_tracker, None
    try:
        yield
    finally:
        _random._rng_tracker = before
