"""Records the state that an optimizer makes while its compiled update is compiled.

Dynamo does not trace `_init_group`: it calls it, so the state comes into being as the first update
is compiled (torch/_dynamo/variables/optimizer.py). It stays, as that of any other optimizer does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

from memcallback.trace.dispatch.mode import TraceMode
from memcallback.trace.patches.patching import Patch

_INIT = "_init_group"


def optimizer_patches(mode: TraceMode) -> Iterator[Patch]:
    """Let Dynamo's calls of `_init_group` run in the trace."""
    module: Any = import_module("torch._dynamo.variables.optimizer")
    variable, call = module.OptimizerVariable, module.OptimizerVariable.call_method

    @wraps(call)
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name != _INIT or not hasattr(self.value, _INIT):
            return call(self, tx, name, args, kwargs)
        with _recorded(self.value, mode):
            return call(self, tx, name, args, kwargs)

    yield variable, "call_method", call_method
    # What is static matters to CUDA graphs alone, which a build for a CPU cannot import.
    yield module, "_is_static_for_cudagraphs", lambda tensor: True


@contextmanager
def _recorded(optimizer: Any, mode: TraceMode) -> Iterator[None]:
    """Give one optimizer an `_init_group` that records what it allocates."""
    init, attributes = getattr(optimizer, _INIT), vars(optimizer)
    before = {name: attributes[name] for name in (_INIT,) if name in attributes}

    def init_group(*args: Any, **kwargs: Any) -> Any:
        # Compiled optimizers count their updates on the device.
        with mode.recorded_on_device():
            return init(*args, **kwargs)

    attributes[_INIT] = init_group
    try:
        yield
    finally:
        del attributes[_INIT]
        attributes.update(before)
