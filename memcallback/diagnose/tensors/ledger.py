"""Dispatch mode that records where each storage was created."""

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
from torch.utils._python_dispatch import TorchDispatchMode

from memcallback.core.code_lines import CodeLine, line_of
from memcallback.core.tensors import is_on, parts_of
from memcallback.step.hooks import Hook
from memcallback.step.module_follower import SequenceLog

#: How many changes of the running module are remembered: more than there are in a step.
_MAX_CHANGES = 200_000
#: In place of a module for autograd nodes that are older than that.
_FORGOTTEN = "<forgotten>"


@dataclass(frozen=True, kw_only=True)
class Made:
    """How a storage was made. It holds no tensor.

    Attributes:
        reference: The storage, for as long as it is there.
        shape: Of the tensor that it was made for.
        dtype: Of that tensor, such as `float32`.
        operator: What made it, such as `aten::relu`.
        module: The module that was running, or in a backward pass the one whose forward pass made
            the autograd node; None if not known.
        at: The line of the user's program; None if there is none on the stack.
    """

    reference: weakref.ref[torch.UntypedStorage]
    shape: tuple[int, ...]
    dtype: str
    operator: str
    module: str | None
    at: CodeLine | None


class TensorLedger(TorchDispatchMode):
    """Sees every operator of this thread and of the backward passes that it starts.

    Under a dispatch mode PyTorch writes less in place and takes other formulas for a few
    derivatives: memory between two points, and the last bits of results, can differ from those
    without.
    """

    # Calls of higher order operators come through here like any other, as calls that are passed on.
    supports_higher_order_operators = True

    def __init__(self, device: torch.device, models: Iterable[torch.nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._models = list(models)
        self._thread = threading.get_ident()
        self._made: dict[int, Made] = {}
        self._modules = _Modules()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """PyTorch asks whether compiled code shall run as it would without this mode, which then
        sees what is left of its operators.
        """
        return True

    @property
    def made(self) -> Mapping[int, Made]:
        """The storages that were made and are still there, by their identity."""
        return {key: made for key, made in list(self._made.items()) if made.reference() is not None}

    @contextmanager
    def on(self) -> Iterator[None]:
        """Write down what is made inside."""
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
        """Run an operator, and write down the storages that it made."""
        outputs = func(*args, **(kwargs or {}))
        with suppress(Exception):  # an error of ours is none of the training's
            self._write_down(func, outputs)
        return outputs

    def _write_down(self, func: Any, outputs: object) -> None:
        made_by: tuple[str, str | None, CodeLine | None] | None = None
        for tensor in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            for part in parts_of(tensor) if isinstance(tensor, torch.Tensor) else ():
                storage = part.untyped_storage()
                known = self._made.get(storage._cdata)
                is_known = known is not None and known.reference() is storage
                if is_known or not is_on(storage.device, self._device) or not storage.nbytes():
                    continue
                if made_by is None:
                    made_by = _name_of(func), self._modules.running(), self._line()
                self._follow(part, storage, *made_by)

    def _follow(
        self,
        part: torch.Tensor,
        storage: torch.UntypedStorage,
        operator: str,
        module: str | None,
        at: CodeLine | None,
    ) -> None:
        key, made = storage._cdata, self._made
        reference = weakref.ref(storage, lambda gone: _forget(made, key, gone))
        dtype = str(part.dtype).removeprefix("torch.")
        made[key] = Made(
            reference=reference,
            shape=tuple(part.shape),
            dtype=dtype,
            operator=operator,
            module=module,
            at=at,
        )

    def _line(self) -> CodeLine | None:
        """The line of the user's program that runs; in a thread of autograd's, the one that waits
        for it.
        """
        # With this function's own frame there would be a cycle, which keeps what the operator made
        # alive until it is collected.
        frames = [sys._getframe(1)]
        if (
            threading.get_ident() != self._thread
            and (waiting := sys._current_frames().get(self._thread)) is not None
        ):
            frames.append(waiting)
        return next((line for frame in frames if (line := line_of(frame)) is not None), None)


def _forget(made: dict[int, Made], key: int, gone: weakref.ref[torch.UntypedStorage]) -> None:
    known = made.get(key)
    if known is not None and known.reference is gone:
        del made[key]


def _name_of(func: Any) -> str:
    return str(func._schema.name) if hasattr(func, "_schema") else str(func)


class _Modules:
    """Which module runs, in each thread; in a backward pass, which one made the autograd node that
    runs.
    """

    def __init__(self) -> None:
        self._stacks: dict[int, list[str]] = {}
        #: By thread, each of which numbers its nodes by itself.
        self._logs: dict[int, SequenceLog[str | None]] = {}

    def follow(self, model: torch.nn.Module, hooks: ExitStack) -> None:
        for name, module in model.named_modules():
            with suppress(RuntimeError):  # a compiled module of TorchScript takes no such hooks
                hooks.callback(
                    module.register_forward_hook(Hook(self._leave), always_call=True).remove
                )
                hooks.callback(
                    module.register_forward_pre_hook(
                        Hook(partial(self._enter, name)), prepend=True
                    ).remove
                )

    def running(self) -> str | None:
        """The name of the module; None if none is known."""
        running = self._stacks.get(threading.get_ident())
        if running:
            return running[-1]
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return None
        found = {log.at(node._sequence_nr()) for log in self._logs.values()} - {_FORGOTTEN}
        return found.pop() if len(found) == 1 else None

    def _enter(self, name: str, *_: object) -> None:
        self._stacks.setdefault(threading.get_ident(), []).append(name)
        self._change()

    def _leave(self, *_: object) -> None:
        running = self._stacks.get(threading.get_ident())
        if running:  # else a module that was entered before this was on
            running.pop()
        self._change()

    def _change(self) -> None:
        thread = threading.get_ident()
        if thread not in self._logs:
            self._logs[thread] = SequenceLog(_FORGOTTEN, limit=_MAX_CHANGES)
        running = self._stacks.get(thread)
        self._logs[thread].add(running[-1] if running else None)
