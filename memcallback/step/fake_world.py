"""A fake process group of any size in one process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, cast

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d

#: The dicts of process groups of torch.distributed (`distributed_c10d._World`).
_DICTS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
#: C++ knows process groups by name, counted up from 0 in all of the process: ours are far above.
_FIRST_NAMES = count(1 << 20, 1 << 10)


@contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Let this thread be one rank of a job; process groups of the process stay untouched.

    Collectives return at once and leave their outputs as they were (PyTorch's `fake` backend). The
    thread may create further groups and device meshes inside.
    """
    # This registers the backend.
    from torch.distributed.tensor import _random
    from torch.testing._internal.distributed.fake_pg import FakeStore

    own, world = _World(), c10d._world
    real_rank = dist.get_rank() if dist.is_initialized() else -1
    excepthook, init_method = sys.excepthook, c10d._default_pg_init_method
    # DTensor keeps one random number generator for the process, created at its first use.
    rng_tracker = _random._rng_tracker
    try:
        c10d._world = cast("c10d._World", _WorldByThread(own, world))
        _random._rng_tracker = None
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        yield
    finally:
        # `destroy_process_group` would remove the names of all process groups, the user's too.
        for name in own.pg_names.values():
            _distributed_c10d._unregister_process_group(name)
        sys.excepthook, c10d._default_pg_init_method = excepthook, init_method
        _distributed_c10d._set_global_rank(real_rank)
        _random._rng_tracker = rng_tracker
        c10d._world = world


def is_rank() -> bool:
    """Whether this thread is a rank of such a job now."""
    return isinstance(c10d._world, _WorldByThread) and c10d._world.is_here()


class _World(c10d._World):
    """Process groups of its own; the base class would read those of the process."""

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
    """The state of torch.distributed: for one thread its own, for all others the process's."""

    def __init__(self, own: c10d._World, of_process: c10d._World) -> None:
        vars(self).update(_own=own, _of_process=of_process, _thread=threading.get_ident())

    def is_here(self) -> bool:
        """Whether it is this thread that has a state of its own."""
        return bool(threading.get_ident() == vars(self)["_thread"])

    def _here(self) -> c10d._World:
        world: c10d._World = vars(self)["_own" if self.is_here() else "_of_process"]
        return world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._here(), name, value)
