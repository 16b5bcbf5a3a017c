"""Follow which module is running, forward and backward, through hooks.

A forward pass is followed by hooks on the modules. For the backward pass, each node of autograd has
the number at which it was made: it belongs to the module whose forward pass was running then. The
first node of each such stretch gets a hook that comes before it runs. Module hooks for the backward
pass are not used: PyTorch puts nodes of its own into the graph for them, and forbids in-place
operations.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from memcallback.core.module_table import ModuleInfo
from memcallback.core.tensors import tensors_in
from memcallback.step.hooks import Hook, take_back

#: Modules that stand around the model: it is in their attribute of this name, and has its own
#: names.
_AROUND = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
}


def _named_modules(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """All modules with their FQNs, each once, and what is called in their place: what stands around
    a model has no name of its own.

    Of several models the names begin with the model's number.
    """
    for number, outer in enumerate(models):
        *_, model = _around(outer)
        for name, module in model.named_modules(prefix=str(number) if len(models) > 1 else ""):
            yield name, module, outer if module is model else module


def module_infos(models: Sequence[nn.Module]) -> tuple[ModuleInfo, ...]:
    """What is known of the modules before they run, a root for several models included; a parameter
    of several modules counts at the first.
    """
    seen: set[int] = set()
    infos = [ModuleInfo("", "", 0)] if len(models) != 1 else []
    for name, module, _ in _named_modules(models):
        own = [
            parameter for parameter in module.parameters(recurse=False) if id(parameter) not in seen
        ]
        seen.update(map(id, own))
        infos.append(
            ModuleInfo(
                name,
                type(module).__name__,
                sum(parameter.numel() * parameter.element_size() for parameter in own),
            )
        )
    return tuple(infos)


class ModuleFollower:
    """Says when other modules begin to run, from `begin` to `end`.

    Whatever it holds is gone at the end, its hooks too; in between it holds no tensor and no node.
    An error of its own ends the following and is told of, and nothing else.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        at_change: Callable[[tuple[str, ...], bool], None],
        at_error: Callable[[Exception], None],
    ) -> None:
        self._models = models
        self._at_change = at_change
        self._at_error = at_error
        self._is_following = False
        self._forward_thread = 0
        self._handles: list[Any] = []
        self._stack: list[str] = []
        #: What runs now; None at the beginning of a phase.
        self._now: tuple[tuple[str, ...], bool] | None = None
        #: The modules of the node of autograd that runs.
        self._of_node: tuple[str, ...] = ()
        self._stretches: dict[int, _Stretches] = {}
        self.notes: tuple[str, ...] = ()

    def begin(self) -> None:
        """Follow from here on."""
        take_back()
        self._is_following, self._forward_thread = True, threading.get_ident()
        compiled: list[str] = []
        for name, module in self._hookable(compiled):
            self._handles.append(
                module.register_forward_pre_hook(
                    self._hook(partial(self._enters, name)), prepend=True
                )
            )
            self._handles.append(
                module.register_forward_hook(
                    self._hook(partial(self._leaves, name)), always_call=True
                )
            )
        if compiled:
            names = ", ".join(repr(name) if name else "the root module" for name in compiled[:3])
            self.notes = (
                f"What is inside a compiled module is not told apart: {names}{' and more' if len(compiled) > 3 else ''}.",
            )

    def begin_phase(self) -> None:
        """A phase begins, and no module runs; inside a module's forward pass it goes on."""
        self._now, self._of_node = None, ()

    def end(self) -> None:
        """Take back all hooks."""
        self._is_following = False
        take_back(self._handles)
        self._handles, self._stack, self._stretches, self._now = [], [], {}, None

    def _enters(self, name: str, *_: object) -> None:
        """A module's forward pass begins."""
        if self._is_mine():
            self._stack.append(name)
            self._forward_changes()

    def _leaves(self, name: str, module: nn.Module, args: object, output: object) -> None:
        """A module's forward pass is over, with what it returned; None if it failed."""
        if not self._is_mine() or name not in self._stack:
            return
        while self._stack.pop() != name:
            pass  # a module whose hook an exception kept from being called
        self._forward_changes()
        if not self._stack:
            self._await(output)

    def _arrives(self, path: tuple[str, ...], *_: object) -> None:
        """The backward pass comes to nodes of these modules."""
        if self._is_following:
            self._of_node = path
            self._change(path, is_backward=True)

    def _reached(self, stretches: _Stretches, *_: object) -> None:
        """The backward pass comes to what the outermost module returned: the nodes beyond it are
        those still to run.
        """
        if self._is_following:
            root = torch._C._current_autograd_node()
            for node, path in stretches.first_nodes(root):
                self._handles.append(
                    node.register_prehook(self._hook(partial(self._arrives, path)))
                )
                if node is root:
                    self._arrives(path)

    def _hook(self, function: Callable[..., None]) -> Hook:
        """A hook in which an error of ours ends the following, and not the training."""

        def guarded(*args: Any) -> None:
            try:
                function(*args)
            except Exception as error:
                self._is_following = False
                self._at_error(error)

        return Hook(guarded)

    def _is_mine(self) -> bool:
        """Whether this is the training's own forward pass, or one inside its backward pass; a
        replica of a module runs in a thread of its own.
        """
        return self._is_following and (
            threading.get_ident() == self._forward_thread or _is_in_backward()
        )

    def _forward_changes(self) -> None:
        path, is_backward = tuple(self._stack), _is_in_backward()
        self._stretches_here().add(path)
        # A forward pass inside a node of the backward pass (checkpointing) is over: the node goes
        # on.
        self._change(path or (self._of_node if is_backward else ()), is_backward=is_backward)

    def _change(self, path: tuple[str, ...], *, is_backward: bool) -> None:
        if self._now != (path, is_backward):
            self._now = path, is_backward
            self._at_change(path, is_backward)

    def _stretches_here(self) -> _Stretches:
        thread = threading.get_ident()
        if thread not in self._stretches:
            self._stretches[thread] = _Stretches()
        return self._stretches[thread]

    def _await(self, output: object) -> None:
        stretches = self._stretches_here()
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                self._handles.append(
                    tensor.grad_fn.register_prehook(self._hook(partial(self._reached, stretches)))
                )

    def _hookable(self, compiled: list[str]) -> Iterator[tuple[str, nn.Module]]:
        """The modules whose hooks run; of a compiled one what is called in its place, and nothing
        inside.
        """
        inside: tuple[str, ...] = ()
        for name, module, called in _named_modules(self._models):
            if name.startswith(inside):
                continue
            is_inside = _is_compiled_with_hooks(module)
            if is_inside or any(type(one).__name__ == "OptimizedModule" for one in _around(called)):
                compiled.append(name)
                inside = (*inside, f"{name}." if name else "")
            if not is_inside:
                yield name, called


class _Stretches:
    """Which modules ran while which nodes of autograd were made in one thread: nodes are numbered
    on in the order of their making.
    """

    def __init__(self) -> None:
        self._starts = [0]
        self._paths: list[tuple[str, ...]] = [()]
        self._seen: set[int] = set()

    def add(self, path: tuple[str, ...]) -> None:
        """From here on these modules run."""
        number = torch._C._autograd._get_sequence_nr()
        if number == self._starts[-1]:
            self._paths[-1] = path
        else:
            self._starts.append(number)
            self._paths.append(path)

    def first_nodes(self, root: Any) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """Of all nodes not seen before that run after one, those that run first in their stretch:
        autograd runs the younger node first.
        """
        first: dict[int, tuple[int, Any]] = {}
        pending = [root]
        while pending:
            node = pending.pop()
            number = node._sequence_nr()
            if number in self._seen:
                continue
            self._seen.add(number)
            stretch = bisect.bisect_right(self._starts, number) - 1
            if stretch not in first or number > first[stretch][0]:
                first[stretch] = number, node
            # Nodes that add up a parameter's gradient run right after the node that gave it, and
            # lead nowhere.
            pending += [
                following
                for following, _ in node.next_functions
                if following is not None and following.next_functions
            ]
        for stretch, (_, node) in first.items():
            yield node, self._paths[stretch]


def _around(module: nn.Module) -> Iterator[nn.Module]:
    """A module and those that it only stands around."""
    yield module
    while type(module).__name__ in _AROUND:
        module = getattr(module, _AROUND[type(module).__name__])
        yield module


def _is_compiled_with_hooks(module: nn.Module) -> bool:
    """Whether a module's call is compiled together with its hooks: `Module.compile()`, TorchScript,
    a compiled LightningModule.
    """
    own = vars(module)
    return isinstance(module, torch.jit.ScriptModule) or any(
        own.get(name) is not None for name in ("_compiled_call_impl", "_compiler_ctx")
    )


def _is_in_backward() -> bool:
    return torch._C._current_autograd_node() is not None
