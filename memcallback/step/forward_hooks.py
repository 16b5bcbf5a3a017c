"""Calls functions around the forward passes of modules, of which a compiler must see nothing.

Dynamo compiles the hooks of a module together with what it finds in it, and compiles again when
they change. It does not look for hooks where it found none at all
(`torch._dynamo.config.skip_nnmodule_hook_guards`, PyTorch 2.6 to 2.13). So while it compiles, hooks
that come and go are taken away. A module that has hooks of others too gets none of them as soon as
anything is compiled.

`Module.compile()` compiles a module's own hooks, so they would never run. There, a wrapper around
the compiled code takes their place. Dynamo sees through it, by the attributes of what it wraps.

`torch.jit.script` would compile the hooks of a module too, and cannot. While it runs, all hooks are
taken away.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress
from itertools import count
from operator import attrgetter
from typing import Any

from torch import nn
from torch.compiler import disable

from memcallback.core import torch_private
from memcallback.core.interruptions import PassOver
from memcallback.step.hooks import Hook, is_error_in_module

#: Attributes of a wrapper: what it wraps, and what it calls.
_WRAPPED, _CALLED = "_memcallback_wrapped", "_memcallback_called"
#: Where a module keeps hooks for which Dynamo may look.
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_numbers = count()


class ForwardHooks:
    """Calls `before(module, args, kwargs)` and `after(module, args, output)` around forward passes.

    After an error `output` is None. `remove` ends it; `remove_hooks` calls that when it is safe.
    """

    def __init__(self, module: nn.Module, before: Hook, after: Hook) -> None:
        self.number = next(_numbers)
        self._module = weakref.ref(module)
        self._pair = before, after
        self._handles: list[Any] = []
        self._is_removed = False
        #: The wrapper around code that `Module.compile()` made.
        self._wrapper: weakref.ref[Any] | None = None
        if is_compiled_in_place(module):
            self._wrap(module)
        else:
            self.register()
            _scripting.hide(self)

    def register(self) -> None:
        """Register the hooks, before and behind all others."""
        module = self._module()
        if module is None or self._handles or self._is_removed:
            return
        before, after = self._pair
        handles = self._handles
        handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(after, always_call=True))

    def are_registered_in(self, modules: Collection[object]) -> bool:
        """Whether one of some modules has them now."""
        return bool(self._handles) and self._module() in modules

    def unregister(self) -> None:
        """Take the hooks away."""
        while self._handles:
            self._handles.pop().remove()

    def remove(self) -> None:
        """Call the functions no more."""
        self._is_removed = True
        self.unregister()
        self._unwrap()
        _scripting.forget(self)

    def _wrap(self, module: nn.Module) -> None:
        call = vars(module)["_compiled_call_impl"]
        if not hasattr(call, _CALLED):
            call = vars(module)["_compiled_call_impl"] = _wrapper_of(module, call)
        self._wrapper = weakref.ref(call)
        getattr(call, _CALLED).insert(0, self._pair)

    def _unwrap(self) -> None:
        wrapper = None if self._wrapper is None else self._wrapper()
        if wrapper is None:
            return
        self._wrapper = None
        called: list[Any] = getattr(wrapper, _CALLED)
        called.remove(self._pair)
        module = self._module()
        # Somebody else may have compiled the module again, or put a wrapper around ours.
        if module is not None and not called and _compiled_call_impl(module) is wrapper:
            vars(module)["_compiled_call_impl"] = getattr(wrapper, _WRAPPED)


class PassingHooks(ForwardHooks):
    """Hooks that come and go during a training, and are not there while Dynamo compiles."""

    def __init__(self, module: nn.Module, before: Hook, after: Hook) -> None:
        before.comes_and_goes = after.comes_and_goes = True
        super().__init__(module, before, after)
        if self._handles:
            _compilations.hide(self)

    def remove(self) -> None:
        """Call the functions no more."""
        super().remove()
        _compilations.forget(self)

    def step_aside(self) -> None:
        """Take the hooks away for a compilation, or for good if that would notice their return."""
        module = self._module()
        if module is not None and (_checks_hooks() or _has_others(module)):
            self._is_removed = True
        self.unregister()

    @staticmethod
    def are_possible(module: nn.Module) -> bool:
        """Whether no compiled code would notice that they come and go."""
        return (
            is_compiled_in_place(module)
            or not _compilations.have_been()
            or not (_checks_hooks() or _has_others(module))
        )


def _has_others(module: nn.Module) -> bool:
    """Whether a module has hooks that stay while Dynamo compiles."""
    return any(
        not (isinstance(hook, Hook) and hook.comes_and_goes)
        for name in _HOOKS
        for hook in getattr(module, name).values()
    )


def _checks_hooks() -> bool:
    """Whether Dynamo looks for hooks where it found none."""
    return not getattr(torch_private.dynamo_config, "skip_nnmodule_hook_guards", True)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `Module.compile()` has compiled a module."""
    return _compiled_call_impl(module) is not None


def compiled_call(module: nn.Module) -> Any:
    """What `Module.compile()` made of a module, without our wrapper; None if it was not called."""
    call = _compiled_call_impl(module)
    return getattr(call, _WRAPPED, call)


def _compiled_call_impl(module: nn.Module) -> Any:
    return vars(module).get("_compiled_call_impl")


def _wrapper_of(module: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    reference, called = weakref.ref(module), list[tuple[Hook, Hook]]()

    def call(*args: Any, **kwargs: Any) -> Any:
        module = reference()
        for before, _ in tuple(called):
            before(module, args, kwargs)
        try:
            output = compiled(*args, **kwargs)
        except Exception:
            for _, after in reversed(tuple(called)):
                after(module, args, None)
            raise
        for _, after in reversed(tuple(called)):  # also of hooks that a hook before has added
            after(module, args, output)
        return output

    # Within other compiled code Dynamo would compile this, and with it the module, in its own way.
    torch_private.skip_code(call.__code__)
    functools.update_wrapper(call, compiled)
    setattr(call, _WRAPPED, compiled)
    setattr(call, _CALLED, called)
    return call


class _Compilations:
    """Takes hooks away while Dynamo compiles."""

    def __init__(self) -> None:
        # Weak: the module has the hooks, and these have us, as long as they are needed.
        self._hooks: weakref.WeakSet[PassingHooks] = weakref.WeakSet()
        #: What was taken away, while Dynamo compiles.
        self._hidden: list[PassingHooks] = []
        self._has_begun = False
        #: What Dynamo calls at the start and at the end of a compilation.
        self._called: tuple[Callable[..., None], ...] = ()

    def have_been(self) -> bool:
        """Whether Dynamo has compiled anything."""
        if "torch._dynamo" not in sys.modules:
            return False
        return self._has_begun or bool(torch_private.compilation_counters.get("frames"))

    def hide(self, hooks: PassingHooks) -> None:
        """Take hooks away whenever Dynamo compiles."""
        self._hooks.add(hooks)
        # Nothing compiles without it; making an optimizer imports it.
        if "torch._dynamo" in sys.modules:
            # Within other compiled code Dynamo would compile these as well, while it holds the lock
            # that it needs for that.
            self._called = self._called or (disable(self._begin), disable(self._end))
            callbacks = torch_private.compilation_callbacks
            # `torch._dynamo.reset()` empties these lists.
            if self._called[0] not in callbacks.start_callbacks:
                callbacks.start_callbacks.append(self._called[0])
                callbacks.end_callbacks.append(self._called[1])

    def forget(self, hooks: PassingHooks) -> None:
        """Hooks are removed; after the last ones, nothing of ours is called."""
        self._hooks.discard(hooks)
        if self._hooks or "torch._dynamo" not in sys.modules:
            return
        self._hidden = []
        callbacks = torch_private.compilation_callbacks
        if not self._called:
            return
        lists = callbacks.start_callbacks, callbacks.end_callbacks
        for called, own in zip(lists, self._called, strict=True):
            with suppress(ValueError):
                called.remove(own)

    def _begin(self, *_: object) -> None:
        self._has_begun = True
        if self._hidden or is_error_in_module():
            return
        self._hidden = sorted(self._hooks, key=lambda hooks: hooks.number)
        for hooks in self._hidden:
            # An error would be the training's, and Dynamo would count its compilations wrong.
            with PassOver():
                hooks.step_aside()

    def _end(self, *_: object) -> None:
        hidden, self._hidden = self._hidden, []
        for hooks in hidden:
            with PassOver():
                hooks.register()


_compilations = _Compilations()


class _Scripting:
    """Takes the hooks of a module and of all in it away while `torch.jit.script` compiles it."""

    def __init__(self) -> None:
        #: By number; threads add to it while others read.
        self._hooks: weakref.WeakValueDictionary[int, ForwardHooks] = weakref.WeakValueDictionary()
        #: Our function in the place of PyTorch's, as long as there are hooks.
        self._replaced: AbstractContextManager[None] | None = None

    def hide(self, hooks: ForwardHooks) -> None:
        """Take hooks away whenever a module is compiled."""
        self._hooks[hooks.number] = hooks
        if self._replaced is None:
            self._replaced = torch_private.replaced("create_script_module", self._without_hooks)
            self._replaced.__enter__()

    def forget(self, hooks: ForwardHooks) -> None:
        """Hooks are removed; after the last ones, PyTorch's function is in its place again."""
        self._hooks.pop(hooks.number, None)
        if not self._hooks and self._replaced is not None:
            replaced, self._replaced = self._replaced, None
            replaced.__exit__(None, None, None)

    def _without_hooks(self, create: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(create)
        def create_without_hooks(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            inside = set(module.modules())
            found = [reference() for reference in self._hooks.valuerefs()]
            registered = [hooks for hooks in found if hooks and hooks.are_registered_in(inside)]
            if is_error_in_module():
                registered = []
            for hooks in registered:
                hooks.unregister()
            try:
                return create(module, *args, **kwargs)
            finally:
                for hooks in sorted(registered, key=attrgetter("number")):
                    hooks.register()

        return create_without_hooks


_scripting = _Scripting()
