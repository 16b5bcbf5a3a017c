"""Lets compiled autograd capture and compile a backward pass of a trace.

PyTorch turns it on where a compiled function is called, and the C++ engine then gives the nodes of
a backward pass to Python, which writes them down as one graph and compiles that
(torch/_dynamo/compiled_autograd.py). The pass runs in the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from memcallback.trace.dispatch.mode import TraceMode
from memcallback.trace.patches.cuda_graphs import GraphTree, trees
from memcallback.trace.patches.inductor import compiling
from memcallback.trace.patches.patching import Patch, patched

_META = torch.device("meta")


def compiled_autograd_patches(mode: TraceMode, graphs: Callable[[], GraphTree]) -> Iterator[Patch]:
    """Turn it on where PyTorch does, and capture on the fakes of a trace."""
    module: Any = import_module("torch._dynamo.compiled_autograd")
    eval_frame: Any = import_module("torch._dynamo.eval_frame")
    enable = module._enable

    @contextmanager
    def enable_in_trace(*args: Any, **kwargs: Any) -> Iterator[None]:
        trees()  # which PyTorch would import as its own build has it
        with ExitStack() as stack:
            # In the stance of a trace, nothing is compiled.
            default = eval_frame.DynamoStance("default")
            with patched([(eval_frame, "_stance", default)]):
                stack.enter_context(enable(*args, **kwargs))
            yield

    class Capture(module.AutogradCompilerInstance):  # type: ignore[misc]
        """Writes down a backward pass; nothing of that is recorded."""

        def begin_capture(self, *args: Any, **kwargs: Any) -> Any:
            self.stack.enter_context(compiling(mode, graphs()))
            try:
                return super().begin_capture(*args, **kwargs)
            except BaseException:
                self.stack.close()
                raise

        def validate_outputs(self, fn: Any, outputs: Any, args: Any, metadata: Any) -> Any:
            """C++ compares devices. Fakes on the card are on meta for it."""
            args = tree_map_only(torch.device, lambda device: _META, args)
            return super().validate_outputs(fn, outputs, args, metadata)

    yield module, "_enable", enable_in_trace
    yield module, "AutogradCompilerInstance", Capture
