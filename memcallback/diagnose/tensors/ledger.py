"""TensorLedger: a dispatch mode that records which operator and line created each storage."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memcallback.core.code_lines import CodeLine, line_of
from memcallback.core.interruptions import PassOver
from memcallback.core.tensors import is_on, parts_of
from memcallback.core.torch_private import (
    TorchDispatchMode,
    current_autograd_node,
    schema_of,
    sequence_nr,
    storage_id,
)
from memcallback.core.visible import visible_name
from memcallback.step.forward_hooks import PassingHooks
from memcallback.step.hooks import Hook
from memcallback.step.module_follower import SequenceLog

#: Changes of the running module to remember: more than a step has.
_MAX_CHANGES = 200_000
#: The module of autograd nodes that are older than that.
_FORGOTTEN = "<forgotten>"


@dataclass(frozen=True, kw_only=True)
class Creation:
    """How a storage was created. It holds no tensor.

    Attributes:
        reference: A weak reference to the storage.
        shape: The shape of the tensor it was created for.
        dtype: The dtype of that tensor, such as `float32`.
        operator: The operator, such as `aten::relu`.
        module: The running module, or in a backward pass the one that created the autograd node;
            None if unknown.
        at: The line of the user's program; None if none is on the stack.
    """

    reference: weakref.ref[torch.UntypedStorage]
    shape: tuple[int, ...]
    dtype: str
    operator: str
    module: str | None
    at: CodeLine | None


class TensorLedger(TorchDispatchMode):
    """Sees every operator of this thread and of the backward passes that it starts.

    Under a dispatch mode PyTorch does less in place and computes a few derivatives by other
    formulas, so memory between two points and the last bits of results can differ.
    """

    # Higher order operators are passed on like any other.
    supports_higher_order_operators = True

    def __init__(self, device: torch.device, models: Iterable[torch.nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._models = list(models)
        self._thread = threading.get_ident()
        self._creations: dict[int, Creation] = {}
        self._modules = _Modules()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as without this mode, which sees its remaining operators only."""
        return True

    @property
    def creations(self) -> Mapping[int, Creation]:
        """The recorded storages that are still alive, by identity."""
        return {
            key: creation
            for key, creation in list(self._creations.items())
            if creation.reference() is not None
        }

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record the storages created inside."""
        with ExitStack() as hooks:
            for model in self._models:
                self._modules.follow(model, hooks)
            self._models = []
            with self:
                yield

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator, and record the storages it created."""
        outputs = func(*args, **(kwargs or {}))
        with PassOver():  # our errors must not reach the training
            self._record(func, outputs)
        return outputs

    def _record(self, func: Any, outputs: object) -> None:
        source: tuple[str, str | None, CodeLine | None] | None = None
        for tensor in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            for part in parts_of(tensor) if isinstance(tensor, torch.Tensor) else ():
                storage = part.untyped_storage()
                known = self._creations.get(storage_id(storage))
                is_known = known is not None and known.reference() is storage
                if is_known or not is_on(storage.device, self._device) or not storage.nbytes():
                    continue
                if source is None:
                    source = _name_of(func), self._modules.running(), self._line()
                self._follow(part, storage, *source)

    def _follow(
        self,
        part: torch.Tensor,
        storage: torch.UntypedStorage,
        operator: str,
        module: str | None,
        at: CodeLine | None,
    ) -> None:
        key, creations = storage_id(storage), self._creations
        reference = weakref.ref(storage, lambda gone: _forget(creations, key, gone))
        dtype = str(part.dtype).removeprefix("torch.")
        creations[key] = Creation(
            reference=reference,
            shape=tuple(part.shape),
            dtype=dtype,
            operator=operator,
            module=module,
            at=at,
        )

    def _line(self) -> CodeLine | None:
        """The running line of the user's program; in an autograd thread, the line that waits."""
        # Not this frame: it would hold itself in a cycle, which would keep the operator's outputs
        # alive until Python collects it.
        frames = [sys._getframe(1)]
        if (
            threading.get_ident() != self._thread
            and (waiting := sys._current_frames().get(self._thread)) is not None
        ):
            frames.append(waiting)
        return next((line for frame in frames if (line := line_of(frame)) is not None), None)


def _forget(
    creations: dict[int, Creation], key: int, gone: weakref.ref[torch.UntypedStorage]
) -> None:
    creation = creations.get(key)
    if creation is not None and creation.reference is gone:
        del creations[key]


def _name_of(func: Any) -> str:
    return str(schema_of(func).name) if hasattr(func, "_schema") else str(func)


class _Modules:
    """Tracks the running module of each thread, and who created the running autograd node."""

    def __init__(self) -> None:
        self._stacks: dict[int, list[str]] = {}
        #: By thread, since each thread numbers its own nodes.
        self._logs: dict[int, SequenceLog[str | None]] = {}

    def follow(self, model: torch.nn.Module, hooks: ExitStack) -> None:
        for name, module in model.named_modules():
            with suppress(RuntimeError):  # TorchScript modules accept no such hooks
                enter = Hook(partial(self._enter, visible_name(name)))
                hooks.callback(PassingHooks(module, enter, Hook(self._leave)).remove)

    def running(self) -> str | None:
        """The name of the current module; None if unknown."""
        running = self._stacks.get(threading.get_ident())
        if running:
            return running[-1]
        node: Any = current_autograd_node()
        if node is None:
            return None
        modules = {log.at(sequence_nr(node)) for log in self._logs.values()} - {_FORGOTTEN}
        return modules.pop() if len(modules) == 1 else None

    def _enter(self, name: str, *_: object) -> None:
        self._stacks.setdefault(threading.get_ident(), []).append(name)
        self._change()

    def _leave(self, *_: object) -> None:
        running = self._stacks.get(threading.get_ident())
        if running:  # empty for a module that was entered before the hooks were added
            running.pop()
        self._change()

    def _change(self) -> None:
        thread = threading.get_ident()
        if thread not in self._logs:
            self._logs[thread] = SequenceLog(_FORGOTTEN, limit=_MAX_CHANGES)
        running = self._stacks.get(thread)
        self._logs[thread].add(running[-1] if running else None)
