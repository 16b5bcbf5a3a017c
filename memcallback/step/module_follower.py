"""Follows which module is running, forward and backward, through hooks.

Module hooks follow the forward pass. For the backward pass, autograd numbers its nodes in the order
of their creation, so a node's number shows which module created it in its forward pass. The first
node of each stretch of such nodes gets a hook that runs before it. Module hooks for the backward
pass are not used: PyTorch adds nodes of its own to the graph for them, and forbids in-place
operations.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memcallback.core.interruptions import raise_if_meant
from memcallback.core.module_table import ModuleInfo
from memcallback.core.tensors import tensors_in
from memcallback.core.torch_private import current_autograd_node, next_sequence_nr, sequence_nr
from memcallback.core.visible import visible_name
from memcallback.step.copies.compiled import is_compiled
from memcallback.step.forward_hooks import PassingHooks, is_compiled_in_place
from memcallback.step.hooks import Hook, remove_hooks
from memcallback.step.model import unwrapping

T = TypeVar("T")


class SequenceLog(Generic[T]):
    """A value that changes while one thread creates autograd nodes, by the nodes' numbers."""

    def __init__(self, initial: T, *, limit: int | None = None) -> None:
        """Keep at most `limit` changes: older nodes get the initial value again."""
        self._starts, self._values = [0], [initial]
        self._limit = limit

    def add(self, value: T) -> None:
        """Set the value for the nodes that are created from now on."""
        number: int = next_sequence_nr()
        if number == self._starts[-1]:
            self._values[-1] = value
        else:
            self._starts.append(number)
            self._values.append(value)
        if self._limit is not None and len(self._starts) > self._limit:
            del self._starts[1 : self._limit // 2], self._values[1 : self._limit // 2]

    def at(self, number: int) -> T:
        """The value when the node of that number was created."""
        return self._values[self.stretch(number)]

    def stretch(self, number: int) -> int:
        """Number the stretches of nodes between two changes, from 0."""
        return bisect_right(self._starts, number) - 1


def module_infos(models: Sequence[nn.Module]) -> tuple[ModuleInfo, ...]:
    """Name, kind and own parameter bytes of each module; several models get a common root.

    A parameter shared by several modules counts at the first.
    """
    seen: set[int] = set()
    infos = [ModuleInfo("", "", 0)] if len(models) != 1 else []
    for name, module, _ in _named_modules(models):
        own = [
            parameter for parameter in module.parameters(recurse=False) if id(parameter) not in seen
        ]
        seen.update(map(id, own))
        num_bytes = sum(
            parameter.numel() * parameter.element_size()
            for parameter in own
            if not is_lazy(parameter)  # of no size yet
        )
        infos.append(ModuleInfo(name, type(module).__name__, num_bytes))
    return tuple(infos)


class ModuleFollower:
    """Calls back when other modules begin to run, from `begin` to `end`.

    `at_change` gets the names of the running modules, the outermost first, and whether the backward
    pass runs. After an error of its own the follower calls `at_error` and stops following. It holds
    no tensor and no node, and at the end no hook. With `keeps_fused` it follows no modules whose
    operators PyTorch fuses only where they have no hooks: others would compute other numbers.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        at_change: Callable[[tuple[str, ...], bool], None],
        at_error: Callable[[Exception], None],
        *,
        keeps_fused: bool,
    ) -> None:
        self._models = models
        self._keeps_fused = keeps_fused
        self._at_change = at_change
        self._at_error = at_error
        self._is_following = False
        self._forward_thread = 0
        self._handles: list[Any] = []
        #: The modules in whose forward pass we are.
        self._stack: list[str] = []
        #: What `at_change` was called with last; None at the beginning of a phase.
        self._current: tuple[tuple[str, ...], bool] | None = None
        #: The modules of the running autograd node.
        self._node_path: tuple[str, ...] = ()
        #: By thread, each of which numbers its own nodes.
        self._nodes: dict[int, _Nodes] = {}
        self.notes: tuple[str, ...] = ()

    def begin(self, called: nn.Module | None = None) -> None:
        """Register the hooks; a model whose call has begun is running."""
        remove_hooks()
        self._is_following, self._forward_thread = True, threading.get_ident()
        compiled: list[str] = []
        with_hooks: list[str] = []
        for name, module in self._hookable(compiled):
            if PassingHooks.are_possible(module):
                enter, leave = partial(self._enter, name), partial(self._leave, name)
                self._handles.append(PassingHooks(module, self._hook(enter), self._hook(leave)))
                if module is called:  # its call sees of our hooks only the one at its end
                    self._stack.append(name)
            else:
                with_hooks.append(name)
        self._nodes_here().paths.add(tuple(self._stack))
        self.notes = tuple(
            f"{text} cannot be shown: {_listed(names)}."
            for text, names in (
                ("The submodules of these compiled modules", compiled),
                ("Beside compiled code, these modules with hooks of their own", with_hooks),
            )
            if names
        )

    def begin_phase(self) -> tuple[str, ...]:
        """Report the next module even if it is the one that ran last; those that run now."""
        self._current, self._node_path = None, ()
        return tuple(self._stack)

    def end(self) -> None:
        """Remove all hooks, and let the models go."""
        self._is_following = False
        self._models = ()
        remove_hooks(self._handles)
        self._handles, self._stack, self._nodes, self._current = [], [], {}, None

    def module_at(self, number: int) -> str:
        """The innermost module that runs forward, else that created this thread's node."""
        path = self._stack or self._nodes_here().paths.at(number)
        return path[-1] if path else ""

    def _enter(self, name: str, *_: object) -> None:
        if self._is_own_forward():
            self._stack.append(name)
            self._forward_changes()

    def _leave(self, name: str, module: nn.Module, args: object, output: object) -> None:
        if not self._is_own_forward() or name not in self._stack:
            return
        while self._stack.pop() != name:
            pass  # a module that an exception left without its hook
        self._forward_changes()
        if not self._stack:
            nodes = self._nodes_here()
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    hook = self._hook(partial(self._reach_output, nodes))
                    self._handles.append(tensor.grad_fn.register_prehook(hook))

    def _reach_output(self, nodes: _Nodes, *_: object) -> None:
        """Hook the nodes that are still to run when autograd reaches an output of the model."""
        if self._is_following:
            root = current_autograd_node()
            for node, path in nodes.first_of_stretches(root):
                hook = self._hook(partial(self._reach_modules, path))
                self._handles.append(node.register_prehook(hook))
                if node is root:
                    self._reach_modules(path)

    def _reach_modules(self, path: tuple[str, ...], *_: object) -> None:
        if self._is_following:
            self._node_path = path
            self._change(path, is_backward=True)

    def _hook(self, function: Callable[..., None]) -> Hook:
        """A hook whose errors end the following, and not the training."""

        def guarded(*args: Any) -> None:
            try:
                function(*args)
            except Exception as error:  # ours: no code of the user's runs in a hook of this kind
                self._is_following = False
                raise_if_meant(error)
                self._at_error(error)

        return Hook(guarded)

    def _is_own_forward(self) -> bool:
        """Whether this thread runs the training's forward pass, or one inside a backward pass.

        Replicas of a module (`DataParallel`) run in threads of their own.
        """
        return self._is_following and (
            threading.get_ident() == self._forward_thread or _is_in_backward()
        )

    def _forward_changes(self) -> None:
        path, is_backward = tuple(self._stack), _is_in_backward()
        self._nodes_here().paths.add(path)
        # After a forward pass inside a node of the backward pass (checkpointing) the node goes on.
        self._change(path or (self._node_path if is_backward else ()), is_backward=is_backward)

    def _change(self, path: tuple[str, ...], *, is_backward: bool) -> None:
        if self._current != (path, is_backward):
            self._current = path, is_backward
            self._at_change(path, is_backward)

    def _nodes_here(self) -> _Nodes:
        thread = threading.get_ident()
        if thread not in self._nodes:
            self._nodes[thread] = _Nodes()
        return self._nodes[thread]

    def _hookable(self, compiled: list[str]) -> Iterator[tuple[str, nn.Module]]:
        """The modules whose hooks run: a compiled one as a whole, and nothing inside it."""
        inside: tuple[str, ...] = ()
        for name, module, called in _named_modules(self._models):
            if name.startswith(inside):
                continue
            if self._keeps_fused and _may_be_fused(module):
                inside = (*inside, f"{name}." if name else "")
                continue
            is_unseen = _cannot_be_followed(module)
            if (
                is_unseen
                or is_compiled(module)
                or is_compiled_in_place(module)
                or any(type(outer).__name__ == "OptimizedModule" for outer in unwrapping(called))
            ):
                compiled.append(name)
                inside = (*inside, f"{name}." if name else "")
            if not is_unseen:
                yield name, called


class _Nodes:
    """The autograd nodes that one thread created, and the modules that ran meanwhile."""

    def __init__(self) -> None:
        self.paths: SequenceLog[tuple[str, ...]] = SequenceLog(())
        self._seen: set[int] = set()

    def first_of_stretches(self, root: Any) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """Of the unseen nodes that run after one, the first of each stretch, with its modules.

        Autograd runs the younger node first.
        """
        first: dict[int, tuple[int, Any]] = {}
        pending = [root]
        while pending:
            node = pending.pop()
            number = sequence_nr(node)
            if number in self._seen:
                continue
            self._seen.add(number)
            stretch = self.paths.stretch(number)
            if stretch not in first or number > first[stretch][0]:
                first[stretch] = number, node
            # Nodes that accumulate a parameter's gradient run right after the node that computed
            # it, and lead nowhere.
            pending += [
                following
                for following, _ in node.next_functions
                if following is not None and following.next_functions
            ]
        for number, node in first.values():
            yield node, self.paths.at(number)


def _named_modules(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """FQN, module and the outermost wrapper that is called in its place, each module once.

    The names in several models begin with the model's number.
    """
    for number, outer in enumerate(models):
        *_, model = unwrapping(outer)
        for name, module in model.named_modules(prefix=str(number) if len(models) > 1 else ""):
            yield visible_name(name), module, outer if module is model else module


def _listed(names: list[str]) -> str:
    listed = ", ".join(repr(name) if name else "the root module" for name in names[:3])
    return f"{listed} and more" if len(names) > 3 else listed


def _cannot_be_followed(module: nn.Module) -> bool:
    """Whether a module is TorchScript, or a compiled LightningModule.

    Of the latter the Trainer calls compiled steps, and not the module.
    """
    has_compiled_steps = vars(module).get("_compiler_ctx") is not None
    return isinstance(module, torch.jit.ScriptModule) or has_compiled_steps


def _may_be_fused(module: nn.Module) -> bool:
    return isinstance(module, nn.TransformerEncoderLayer) and not module.training


def _is_in_backward() -> bool:
    return current_autograd_node() is not None
