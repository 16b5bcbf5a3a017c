"""Compiled code in a trace: compiled for the card, or run as it would without compilation."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from importlib import import_module
from typing import Any

import torch
from torch import nn

import memcallback
from memcallback.core.interruptions import ENDS, raise_if_meant
from memcallback.core.tensors import torch_version
from memcallback.core.types import Phase
from memcallback.step.training_step import TrainingStep
from memcallback.trace.batch_sizes import BatchSizes
from memcallback.trace.dispatch.mode import TraceMode
from memcallback.trace.patches.patching import Patch

_FLEX_ATTENTION = "torch.nn.attention.flex_attention"
_OWN = os.path.dirname(memcallback.__file__) + os.sep
_OPTIMIZERS = os.path.dirname(torch.optim.__file__) + os.sep
#: The figures: benchmarks/compiled_as_eager.py, 2026-11-27.
_AS_EAGER = (
    "Compiled code ran as it would without compilation: {}. Compiled, it mostly needs less. Of 161 "
    "measured steps one reserved 86 % more than this (its convolutions took other algorithms on an "
    "H100). The others reserved at most 7 % more, or 17 % with CUDA graphs."
)
#: The figures: benchmarks/compiled.py on a virtual H200 and A100, 2026-11-25, on an H100 and, for
#: steps that are tuned or change their size, on a virtual H200, 2026-11-26; of other kinds, on a
#: virtual H200 and A100, 2026-11-27.
_COMPILED = (
    "Compiled code is predicted from what Inductor of PyTorch {} generates for the card. The "
    "values are for a training that finds this code in Inductor's cache. In 171 measured "
    "steps, a training that had to compile reserved at most 202 MiB more in its first step than "
    "one that found the code, and at most 200 MiB more afterwards. Of 48 steps on a real H100 and "
    "H200, 32 reserved within 3 % of the prediction, the others 11 % less to 22 % more, and one "
    "with convolutions 90 % more."
)
#: The figures: benchmarks/compiled.py on a virtual H200, 2026-11-26, and
#: benchmarks/compiled_sizes.py on virtual cards, 2026-11-27.
_ONE_SIZE = (
    "All batches are assumed to have the same size. For a batch of another size, such as a smaller "
    "last one, PyTorch compiles again, with dynamic shapes: measured trainings then reserved at "
    "most 10 % more than predicted. TrainingStep(other_batch_size=...) predicts such a training."
)
_OTHER_SIZE = (
    "The values are for the updates after one with a batch {}, as at the end of an epoch, for "
    "which PyTorch compiles again if it has to. Before, an update can need less or more. Other "
    "sizes of the batches are assumed not to change."
)
_CUDA_GRAPHS = (
    "CUDA graphs (mode='reduce-overhead', 'max-autotune') warm up in the first update, are "
    "recorded in the second and replayed from the third on. A steady step then counts less as "
    "allocated, because the memory of its graphs is only reserved: compare reserved memory."
)
#: The figures: benchmarks/compiled.py on a virtual H200, where the choice is random, 2026-11-26
#: and 2026-11-27.
_NOT_TUNED = (
    "mode='max-autotune' chooses kernels of matrix products by measuring. Here they are those of "
    "cuBLAS. Three trainings with kernels chosen at random reserved 6 % less to 19 % more."
)
#: Seen on a virtual H200 (tests/trace/test_whole_update_cuda.py).
_LEFT_BY_RECORDING = (
    "In the update after the recording, gradients that the recording left are still allocated. "
    "They are missing in the prediction of that update; what it reserves is not changed by them."
)
_COMPILED_AUTOGRAD = (
    "Compiled autograd is on. The backward pass is predicted as without it, which is right unless "
    "compiled code calls backward(). If your loop compiles a function of the whole update, say so: "
    "TrainingStep(compile_update=torch.compile)."
)
_IN_COMPILED_AUTOGRAD = (
    "The program is in a context of compiled autograd. The backward pass is predicted as without "
    "it, but in the calling thread."
)
#: The oldest PyTorch in which compiling was compared with a device.
_OLDEST_TORCH = (2, 11)
#: The function around a compiled one, and its name in PyTorch 2.6.
_WRAPPERS = ("compile_wrapper", "_fn")
#: The most characters of an error's text that are quoted.
_MAX_CHARACTERS = 160


class CompiledCode:
    """The compiled code of one trace.

    Attributes:
        compiles: Whether it is compiled for the card.
        has_whole_update: Whether a function of the whole update is compiled.
        has_compiled: Whether anything was compiled for the card.
        has_compiled_passes: Whether that was more than the update of an optimizer.
        has_graphs: Whether any of it runs in CUDA graphs.
        other_batch: What is different of a batch that comes in between, in words; else "".
        is_noted: Whether it was said that some code was not.
    """

    def __init__(self, mode: TraceMode, training: TrainingStep | None, *, compiles: bool) -> None:
        self._mode = mode
        self.has_whole_update = training is not None and training.compile_update is not None
        #: Whether the prediction would differ if compiled code called `backward()`.
        self._lacks_compiled_autograd = (
            training is not None and not self.has_whole_update and _has_compiled_autograd()
        )
        if training is not None and _is_in_compiled_autograd():
            mode.assumed[_IN_COMPILED_AUTOGRAD] = None
        is_known = torch_version() >= _OLDEST_TORCH
        self.compiles = compiles and is_known and mode.spec is not None
        self.has_compiled = self.has_compiled_passes = self.is_noted = False
        self._graphs: Any = None
        self.other_batch = ""

    @property
    def has_no_operators(self) -> bool:
        """Whether compiled code ran, and Dynamo has found no operator in it."""
        was_called = self._graphs is not None
        return was_called and self._graphs.num_compiled == 0 and not self.is_noted

    def patches(self) -> Iterator[Patch]:
        """Notice calls of what is compiled. Without `compiles`, PyTorch runs it as it is."""
        # What the program has compiled already. Where PyTorch lacks this, nothing is said.
        eval_frame = sys.modules.get("torch._dynamo.eval_frame")
        original = getattr(eval_frame, "_callback_from_stance", None)
        if original is not None:
            if self.compiles and "torch._inductor.compile_fx" in sys.modules:
                torch.compiler.reset()  # else what other traces compiled makes this one dynamic
            yield eval_frame, "_callback_from_stance", partial(self._callback, original)
            if self.compiles:
                # Imported here, as it imports a part of PyTorch's compiler.
                from memcallback.trace.patches.random_state import random_state_patches

                yield from random_state_patches()
            if self.compiles and self.has_whole_update:
                from memcallback.trace.patches.compiled_autograd import compiled_autograd_patches

                yield from compiled_autograd_patches(
                    self._mode, self._tree, _compiles_with_inductor
                )
        # What it compiles in the step, as torchao's optimizers do.
        yield torch, "compile", self._noting(torch.compile)

    @property
    def has_graphs(self) -> bool:
        return self._graphs is not None and self._graphs.is_open

    def end_training(self) -> None:
        """Forward passes come now, which are no part of an update."""
        self.has_whole_update = False

    def say_other_batch(self, own: BatchSizes, other: BatchSizes) -> None:
        """Say that a batch of another size comes in between."""
        self.other_batch = own.unlike(other)
        self._mode.assumed.pop(_ONE_SIZE, None)
        self._mode.assumed[_OTHER_SIZE.format(self.other_batch)] = None

    def note(self, name: str) -> None:
        """Say that some code was not compiled."""
        self.is_noted = True
        self._mode.assumed[_AS_EAGER.format(name)] = None

    def _callback(self, original: Callable[[Any], Any], callback: Any) -> Any:
        """What Dynamo calls with each frame of compiled code."""
        caller = sys._getframe(2)  # beyond what keeps a patch in this thread
        if caller.f_code.co_name not in _WRAPPERS or not callable(callback):
            return original(callback)
        function = caller.f_locals.get("fn")
        if _is_predicted_compiled(function) or _is_own(function):
            return original(callback)
        config = _config_of(callback) if self.compiles else None
        if config is None:
            self.note(_name_of(function))
            return original(callback)
        self._note_options(config)
        return self._compiler(callback, _name_of(function))

    def _note_options(self, config: dict[str, Any]) -> None:
        defaults: Any = import_module("torch._inductor.config")
        if config.get("triton.cudagraphs", defaults.triton.cudagraphs):
            self._mode.assumed[_CUDA_GRAPHS] = None
            if self.has_whole_update:
                self._mode.assumed[_LEFT_BY_RECORDING] = None
        if config.get("max_autotune", defaults.max_autotune):
            self._mode.assumed[_NOT_TUNED] = None

    def _compiler(self, callback: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A callback that compiles a frame for the card; what cannot be runs as it is."""
        # Imported here, as it imports PyTorch's compiler.
        from memcallback.trace.patches.inductor import compiling, skip_all

        skip = skip_all()
        graphs = self._tree()

        def compile_frame(frame: Any, *args: Any, **kwargs: Any) -> Any:
            if frame.f_code.co_filename.startswith(_OWN):
                return skip
            num_before = graphs.num_compiled
            try:
                with compiling(self._mode, graphs):
                    compiled = callback(frame, *args, **kwargs)
            except ENDS as error:  # a compiler can fail in any way
                raise_if_meant(error)
                self.note(f"{name} (compiling it failed with {_reason(error)})")
                return skip
            if compiled.guarded_code is None:
                return compiled  # there was nothing to compile
            self.has_compiled = True
            if graphs.num_compiled == num_before:
                return compiled  # Python around what Dynamo cannot follow
            in_update = self._mode.ledger.phase is Phase.OPTIMIZER_STEP
            # Of optimizers in hooks of the backward pass too.
            if not in_update and not frame.f_code.co_filename.startswith(_OPTIMIZERS):
                self.has_compiled_passes = True
                if not self.other_batch:
                    self._mode.assumed[_ONE_SIZE] = None
            self._mode.assumed[_COMPILED.format(torch.__version__)] = None
            if self._lacks_compiled_autograd:
                self._mode.assumed[_COMPILED_AUTOGRAD] = None
            return compiled

        # What tells the code that one backend has compiled from that of another.
        compile_frame._torchdynamo_orig_backend = callback  # type: ignore[attr-defined]
        return compile_frame

    def _tree(self) -> Any:
        """The CUDA graphs of the trace."""
        # Imported here, as it imports PyTorch's compiler.
        from memcallback.trace.patches.cuda_graphs import GraphTree

        self._graphs = self._graphs or GraphTree(self._mode, lambda: self.has_whole_update)
        return self._graphs

    def _noting(self, compile_: Callable[..., Any]) -> Callable[..., Any]:
        def compile_and_note(model: Any = None, **options: Any) -> Any:
            if model is None:
                return partial(compile_and_note, **options)
            compiled = compile_(model, **options)
            if isinstance(model, nn.Module) or self.compiles:
                return compiled

            @wraps(compiled)
            def run(*args: Any, **kwargs: Any) -> Any:
                if not (_is_predicted_compiled(model) or _is_own(model)):
                    self.note(_name_of(model))
                return compiled(*args, **kwargs)

            return run

        return compile_and_note


def _has_compiled_autograd() -> bool:
    """Whether the program has asked for it by the setting."""
    if "torch._dynamo" not in sys.modules:
        return False
    config: Any = import_module("torch._dynamo.config")
    return bool(config.compiled_autograd)


def _is_in_compiled_autograd() -> bool:
    state = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(state, "compiled_autograd_enabled", False))


def outside_of_compiled_autograd() -> AbstractContextManager[Any]:
    """Leave a context of the program's own, which would capture the fakes of a trace."""
    if not _is_in_compiled_autograd():
        return nullcontext()
    outside: AbstractContextManager[Any] = import_module(
        "torch._dynamo.compiled_autograd"
    )._disable()
    return outside


def _is_predicted_compiled(function: Any) -> bool:
    """Whether a trace has a rule for compiled calls of a function: it has for flex_attention."""
    return getattr(function, "__module__", None) == _FLEX_ATTENTION


def _is_own(function: Any) -> bool:
    """Whether memcallback defines a function: PyTorch compiles none of these."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_OWN)


def _compiles_with_inductor(context: Any) -> bool:
    """Whether a context of `torch.compile` is one that a trace compiles for the card."""
    return _config_of(getattr(context, "callback", None)) is not None


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _reason(error: BaseException) -> str:
    """What went wrong in a compiler, in one line."""
    error = getattr(error, "inner_exception", error)
    text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {text[:_MAX_CHARACTERS]}"


def _config_of(callback: Any) -> dict[str, Any] | None:
    """The options of Inductor that a callback compiles with; None for another compiler."""
    while (inner := getattr(callback, "_torchdynamo_orig_backend", None)) is not None:
        callback = inner
    is_inductor = getattr(callback, "compiler_name", None) == "inductor"
    return dict(callback.config) if is_inductor else None
