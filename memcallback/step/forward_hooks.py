"""Calls functions around the forward passes of modules, of which a compiler must see nothing.

Dynamo compiles the hooks of a module together with what it finds in it, and compiles again when
they change. So while it compiles, the hooks are taken away: what was compiled without hooks does
not look for any (`torch._dynamo.config.skip_nnmodule_hook_guards`, PyTorch 2.6 to 2.13).

`Module.compile()` compiles a module's own hooks, so they would never run. There, a wrapper around
the compiled code takes their place. Dynamo sees through it, by the attributes of what it wraps.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from memcallback.core.torch_private import compilation_callbacks
from memcallback.step.hooks import Hook, is_error_in_module

#: Attributes of a wrapper: what it wraps, and what it calls.
_WRAPPED, _CALLED = "_memcallback_wrapped", "_memcallback_called"


class ForwardHooks:
    """Calls `before(module, args, kwargs)` and `after(module, args, output)` around forward passes.

    After an error `output` is None. `remove` ends it; `remove_hooks` calls that when it is safe.
    """

    def __init__(self, module: nn.Module, before: Hook, after: Hook) -> None:
        self._module = weakref.ref(module)
        self._pair = before, after
        self._handles: list[Any] = []
        #: The wrapper around code that `Module.compile()` made.
        self._wrapper: Any = None
        if is_compiled_in_place(module):
            self._wrap(module)
        else:
            self.register()
            _hidden_from_compiler.add(self)

    def register(self) -> None:
        """Register the hooks, before and behind all others."""
        module = self._module()
        if module is not None and not self._handles:
            before, after = self._pair
            self._handles = [
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                module.register_forward_hook(after, always_call=True),
            ]

    def unregister(self) -> None:
        """Take the hooks away."""
        while self._handles:
            self._handles.pop().remove()

    def remove(self) -> None:
        """Call the functions no more."""
        _hidden_from_compiler.discard(self)
        self.unregister()
        if self._wrapper is not None:
            self._unwrap()

    def _wrap(self, module: nn.Module) -> None:
        call = vars(module)["_compiled_call_impl"]
        if not hasattr(call, _CALLED):
            call = vars(module)["_compiled_call_impl"] = _wrapper_of(module, call)
        self._wrapper = call
        getattr(call, _CALLED).insert(0, self._pair)

    def _unwrap(self) -> None:
        wrapper, self._wrapper = self._wrapper, None
        called: list[Any] = getattr(wrapper, _CALLED)
        called.remove(self._pair)
        module = self._module()
        # Somebody else may have compiled the module again, or put a wrapper around ours.
        if module is not None and not called and _compiled_call_impl(module) is wrapper:
            vars(module)["_compiled_call_impl"] = getattr(wrapper, _WRAPPED)


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

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        pairs, module = tuple(called), reference()
        for before, _ in pairs:
            before(module, args, kwargs)
        try:
            output = compiled(*args, **kwargs)
        except Exception:
            for _, after in reversed(pairs):
                after(module, args, None)
            raise
        for _, after in reversed(pairs):
            after(module, args, output)
        return output

    setattr(call, _WRAPPED, compiled)
    setattr(call, _CALLED, called)
    return call


class _HiddenFromCompiler:
    """Hooks that are not there while Dynamo compiles."""

    def __init__(self) -> None:
        # In the order of their registration, each module's as deep as others around it.
        self._hooks: dict[ForwardHooks, None] = {}
        self._depth = 0
        self._is_listening = False

    def add(self, hooks: ForwardHooks) -> None:
        self._hooks[hooks] = None
        # Without it nothing is compiled; every optimizer imports it.
        if not self._is_listening and "torch._dynamo" in sys.modules:
            self._is_listening = True
            compilation_callbacks.register_start_callback(self._compilation_begins)
            compilation_callbacks.register_end_callback(self._compilation_ends)

    def discard(self, hooks: ForwardHooks) -> None:
        self._hooks.pop(hooks, None)
        if not self._hooks and self._is_listening:
            self._is_listening, self._depth = False, 0
            # `torch._dynamo.reset()` forgets all of them.
            for callbacks, callback in (
                (compilation_callbacks.start_callbacks, self._compilation_begins),
                (compilation_callbacks.end_callbacks, self._compilation_ends),
            ):
                if callback in callbacks:
                    callbacks.remove(callback)

    def _compilation_begins(self, *_: object) -> None:
        self._depth += 1
        if self._depth == 1 and not is_error_in_module():
            for hooks in tuple(self._hooks):
                hooks.unregister()

    def _compilation_ends(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            for hooks in tuple(self._hooks):
                hooks.register()


_hidden_from_compiler = _HiddenFromCompiler()
