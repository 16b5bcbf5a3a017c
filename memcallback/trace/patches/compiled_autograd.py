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


def compiled_autograd_patches(
    mode: TraceMode, graphs: Callable[[], GraphTree], compiles: Callable[[Any], bool]
) -> Iterator[Patch]:
    """Turn it on where PyTorch does, and capture on the fakes of a trace.

    `compiles` tells whether a trace compiles what a context of `torch.compile` does.
    """
    module: Any = import_module("torch._dynamo.compiled_autograd")
    eval_frame: Any = import_module("torch._dynamo.eval_frame")
    enable = module._enable

    @contextmanager
    def enable_in_trace(compiler: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with ExitStack() as stack:
            if compiles(compiler):
                trees()  # imported now: PyTorch would import it as for a build for CUDA
                # A trace's stance is force_eager, in which this would do nothing.
                default = eval_frame.DynamoStance("default")
                with patched([(eval_frame, "_stance", default)]):
                    stack.enter_context(enable(compiler, *args, **kwargs))
            yield

    class Capture(module.AutogradCompilerInstance):  # type: ignore[misc]
        """Writes down a backward pass; nothing of that is recorded."""

        def begin_capture(self, *args: Any, **kwargs: Any) -> Any:
            self.stack.enter_context(compiling(mode, graphs()))
            # C++ closes the stack after an error too, but leaves the context entered.
            self.stack.callback(self._leave_context)
            return super().begin_capture(*args, **kwargs)

        def _leave_context(self) -> None:
            if (context := getattr(self, "compile_context", None)) is not None:
                context.__exit__(None, None, None)

        def validate_outputs(self, fn: Any, outputs: Any, args: Any, metadata: Any) -> Any:
            """C++ compares devices. Fakes on the card are on meta for it."""
            args = tree_map_only(torch.device, lambda device: _META, args)
            return super().validate_outputs(fn, outputs, args, metadata)

    yield module, "_enable", enable_in_trace
    yield module, "AutogradCompilerInstance", Capture
