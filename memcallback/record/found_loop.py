"""FoundLoop: finds the training loop of a program that knows nothing of us, and records it."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from memcallback.core import torch_private
from memcallback.core.errors import fail_safe
from memcallback.record.memory_log import MemoryLog
from memcallback.record.recorder import MemoryRecorder
from memcallback.record.watch import Watch
from memcallback.step.copies.optimizers import with_owned
from memcallback.step.forward_hooks import is_compiled_in_place
from memcallback.step.hooks import Hook, remove_hooks

#: Lightning's loops have `MemoryCallback`, by MEMCALLBACK=1; what they call is part of a module.
_LIGHTNING = ("lightning.pytorch.loops.", "pytorch_lightning.loops.")
#: What runs a step on fake tensors, in this process or in one of its own.
_PREDICTS = ("memcallback.trace.", "memcallback.prediction.")
#: Searches for optimizers, each through all objects, that may find none until one makes an update.
_MOST_SEARCHES = 20


class _LogOnStderr(MemoryLog):
    """Leaves stdout to the program."""

    @staticmethod
    def _print(text: str) -> None:
        if sys.stderr is not None:  # `print` would take stdout
            print(text, file=sys.stderr, flush=True)


class _FoundRecorder(MemoryRecorder):
    """Leaves it to the program how long its model and optimizers live: it did not give them."""

    _keeps_alive = False


class FoundLoop:
    """Waits for a module that trains, records it until it is closed, and explains errors.

    A module trains if it is called in training mode and with gradients, and an optimizer has some
    of its parameters. The first such module is recorded with all optimizers of it. From the first
    optimizer on until then there is a hook for all modules, afterwards only those of
    `MemoryRecorder.watch`. A module that `Module.compile()` compiled does not run such hooks: the
    first update finds it.

    `log_dir` is as for `MemoryLog`; None for no files. `is_lightning` says whether a Trainer of
    Lightning called a module, which is left to its callback.
    """

    def __init__(self, log_dir: str | None = None) -> None:
        self._log_dir = log_dir
        self._is_broken = False
        self._recorder: MemoryRecorder | None = None
        self._log: MemoryLog | None = None
        self.is_lightning = False
        #: Optimizers that made an update, and modules that none trained when they were called.
        self._updated: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._idle: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._num_searches = 0
        self._finds_calls = False
        self._hooks: list[Any] = [
            _OptimizerHook(self._find_calls),
            register_optimizer_step_post_hook(Hook(self._update_ends)),
        ]

    @property
    def has_begun(self) -> bool:
        """Whether a module that trains was found."""
        return self._recorder is not None

    def failed(self, error: BaseException) -> None:
        """Explain the error that ends the program, if memory ran out, and end the recording."""
        try:
            if not self._is_broken:
                (self._recorder or MemoryRecorder()).failed(error)
        finally:  # also after Ctrl-C in the report
            if self._log is not None:
                self._log.__exit__(type(error), error, error.__traceback__)
            self.close()

    def close(self) -> None:
        """Say what was recorded, and end the recording."""
        self._release()
        if self._log is not None:
            self._log.close()
        if self._recorder is not None:
            self._recorder.close()

    def _release(self) -> None:
        hooks, self._hooks = self._hooks, []
        remove_hooks(hooks)

    @fail_safe
    def _find_calls(self) -> None:
        """Look at all modules that are called, again if need be, since there is an optimizer."""
        self._idle.clear()
        self._num_searches = 0
        # Not earlier: `torch.export` in strict mode fails with any hook for all modules.
        if self._hooks and not self._finds_calls:
            self._finds_calls = True
            self._hooks.append(_ModuleHook(self._forward_begins))

    def _ignore_calls(self) -> None:
        """Look at no module that is called, until there is another optimizer."""
        self._finds_calls = False
        found = [hook for hook in self._hooks if isinstance(hook, _ModuleHook)]
        self._hooks = [hook for hook in self._hooks if hook not in found]
        remove_hooks(found)

    def _forward_begins(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        # torch.compile traces this hook too, and is not to trace more of it.
        if not torch.compiler.is_compiling() and module.training and torch.is_grad_enabled():
            self._look_at(module, args)

    @fail_safe
    def _look_at(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        is_over = self._recorder is not None or self._num_searches >= _MOST_SEARCHES
        if is_over or module in self._idle or _is_inside(_PREDICTS):
            return
        self.is_lightning = self.is_lightning or _is_inside(_LIGHTNING)
        optimizers = [] if self.is_lightning else _optimizers_of(module)
        if not optimizers:
            self._num_searches += 1
            self._idle.update(module.modules())
            if self.is_lightning or self._num_searches >= _MOST_SEARCHES:
                self._ignore_calls()
            return
        # The hooks of this call are chosen already, so the new ones see only its end.
        self._record(module, optimizers).forward_has_begun(module, args)

    def _record(self, module: torch.nn.Module, optimizers: list[Optimizer]) -> Watch:
        self._release()
        self._recorder = _FoundRecorder(module, optimizers)
        self._log = _LogOnStderr(self._recorder, log_dir=self._log_dir)
        return self._recorder.watch()

    @fail_safe
    def _update_ends(self, optimizer: Optimizer, *_: object) -> None:
        """An optimizer that we may not have seen being made, such as a copy of another one."""
        if self._recorder is not None or optimizer in self._updated:
            return
        self._updated.add(optimizer)
        self._find_calls()
        if not _is_inside(_PREDICTS + _LIGHTNING):
            module = _compiled_module_of(optimizer)
            if module is not None:
                self._record(module, _optimizers_of(module))


class _OptimizerHook:
    """Calls a function after each optimizer is made, until it is removed."""

    def __init__(self, function: Callable[[], object]) -> None:
        original = self._original = Optimizer.__init__

        @functools.wraps(original)
        def init(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            function()

        self._ours = init
        Optimizer.__init__ = init  # type: ignore[method-assign]

    def remove(self) -> None:
        """Put PyTorch's own method back, unless somebody else has replaced ours."""
        if Optimizer.__init__ is self._ours:
            Optimizer.__init__ = self._original  # type: ignore[method-assign]


class _ModuleHook:
    """A hook for all modules, of which `torch.compile` does not warn, until it is removed."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._handle = register_module_forward_pre_hook(Hook(function))
        self._replaced = torch_private.replaced("has_any_global_hook", self._of_others)
        self._replaced.__enter__()

    def _of_others(self, has_any: Callable[[], bool]) -> Callable[[], bool]:
        def has_any_of_others() -> bool:
            hooks = self._handle.hooks_dict_ref() or {}
            ours = hooks.pop(self._handle.id, None)
            try:
                return has_any()
            finally:
                if ours is not None:
                    hooks[self._handle.id] = ours

        return has_any_of_others

    def remove(self) -> None:
        """Take the hook away."""
        self._handle.remove()
        self._replaced.__exit__(None, None, None)


def _optimizers_of(module: torch.nn.Module) -> list[Optimizer]:
    """The optimizers that have parameters of a module; those inside of wrappers, not these."""
    parameters = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    # By its type: `isinstance` would ask proxies of other libraries for theirs.
    found = [
        candidate
        for candidate in (gc.get_objects() if parameters else ())
        if issubclass(type(candidate), Optimizer)
        and "param_groups" in vars(candidate)
        and any(
            id(one) in parameters for group in candidate.param_groups for one in group["params"]
        )
    ]
    # One that another optimizer owns makes its updates as a part of the owner's.
    owned = {id(inner) for one in found for inner in with_owned(one)[1:]}
    return [one for one in found if id(one) not in owned]


def _compiled_module_of(optimizer: Optimizer) -> torch.nn.Module | None:
    """The module that was compiled in place and has all parameters of an optimizer, if any."""
    parameters = {id(one) for group in optimizer.param_groups for one in group["params"]}
    for candidate in gc.get_objects():
        if (
            issubclass(type(candidate), torch.nn.Module)
            and is_compiled_in_place(candidate)
            and candidate.training
            and parameters <= set(map(id, candidate.parameters()))
        ):
            found: torch.nn.Module = candidate
            return found
    return None


def _is_inside(modules: tuple[str, ...]) -> bool:
    """Whether one of some modules is running, by the beginnings of their names."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(modules):
            return True
        frame = frame.f_back
    return False
