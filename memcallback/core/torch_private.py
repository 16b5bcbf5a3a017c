"""The private parts of PyTorch that are used outside `trace/patches` and `step/fake_world`.

Each is looked up here, once.

A part that this PyTorch lacks is replaced: by its fallback, where recording can do without it, or
by a stand-in. A stand-in can be imported, subclassed and used in `isinstance` (which is False);
calling it or reading an attribute raises a `MissingPartError` that names it and what it costs. So
a PyTorch that dropped a part changes no import and no training: predictions say why they fail.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from memcallback.core.errors import MissingPartError

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch._prims_common import suggest_memory_format as suggest_memory_format
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException as DataDependentOutputException,
    )
    from torch._subclasses.fake_tensor import (
        DynamicOutputShapeException as DynamicOutputShapeException,
    )
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import (
        UnsupportedOperatorException as UnsupportedOperatorException,
    )
    from torch.utils._mode_utils import no_dispatch as no_dispatch
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import (
        is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
    )
    from torch.utils._pytree import keystr as keystr
    from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
    from torch.utils._pytree import tree_iter as tree_iter
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_map_only as tree_map_only

    DisableTorchFunction: Any
    DisableTorchFunctionSubclass: Any
    BelowAutograd: Any
    CompositeImplicitAutograd: Any
    Meta: Any
    decompositions: Any
    SavedTensor: Any
    compilation_callbacks: Any
    compilation_counters: Any
    dynamo_config: Any
    skip_code: Any
    module_call: Any
    c10d_bindings: Any
    current_autograd_node: Callable[[], Any]
    next_sequence_nr: Callable[[], int]


class _Part(NamedTuple):
    module: str
    name: str
    needed_for: str
    #: What recording uses instead; without one, using the part raises.
    fallback: Any = None

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


def _is_wrapper(tensor: object) -> bool:
    """PyTorch's `is_traceable_wrapper_subclass`, by the methods that it looks for."""
    return isinstance(tensor, torch.Tensor) and all(
        hasattr(type(tensor), name) for name in ("__tensor_flatten__", "__tensor_unflatten__")
    )


_TRACE = "predictions"
_MODULES = "memory by module"
_COMPILED_MODULES = "recording compiled modules"
_MODES = "predictions in a `with torch.device(...)` block or under another mode"
_CPU = "memory of a CPU"
_PROFILER = "torch.autograd.profiler"
_FAKES = "torch._subclasses.fake_tensor"
_TREES = "torch.utils._pytree"
PARTS = {
    "FakeTensor": _Part(_FAKES, "FakeTensor", _TRACE),
    "FakeTensorMode": _Part(_FAKES, "FakeTensorMode", _TRACE),
    "DataDependentOutputException": _Part(_FAKES, "DataDependentOutputException", _TRACE),
    "DynamicOutputShapeException": _Part(_FAKES, "DynamicOutputShapeException", _TRACE),
    "UnsupportedOperatorException": _Part(_FAKES, "UnsupportedOperatorException", _TRACE),
    "OpOverload": _Part("torch._ops", "OpOverload", _TRACE),
    "suggest_memory_format": _Part("torch._prims_common", "suggest_memory_format", _TRACE),
    "BatchNormBase": _Part("torch.nn.modules.batchnorm", "_NormBase", "checkpointing"),
    "LossBase": _Part("torch.nn.modules.loss", "_Loss", _TRACE),
    "no_dispatch": _Part("torch.utils._mode_utils", "no_dispatch", _TRACE),
    "TorchDispatchMode": _Part(
        "torch.utils._python_dispatch", "TorchDispatchMode", "TensorDiff and predictions"
    ),
    "is_traceable_wrapper_subclass": _Part(
        "torch.utils._python_dispatch", "is_traceable_wrapper_subclass", _TRACE, _is_wrapper
    ),
    "keystr": _Part(_TREES, "keystr", "out-of-memory reports"),
    "tree_flatten_with_path": _Part(_TREES, "tree_flatten_with_path", "out-of-memory reports"),
    "tree_iter": _Part(_TREES, "tree_iter", _TRACE),
    "tree_leaves": _Part(_TREES, "tree_leaves", "predictions and fit_batch_size"),
    "tree_map": _Part(_TREES, "tree_map", "fit_batch_size"),
    "tree_map_only": _Part(_TREES, "tree_map_only", _TRACE),
    "DisableTorchFunction": _Part("torch._C", "DisableTorchFunction", _TRACE),
    "DisableTorchFunctionSubclass": _Part(
        "torch._C", "DisableTorchFunctionSubclass", "predictions and leak warnings"
    ),
    "BelowAutograd": _Part("torch._C", "_AutoDispatchBelowADInplaceOrView", _TRACE),
    "CompositeImplicitAutograd": _Part("torch._C.DispatchKey", "CompositeImplicitAutograd", _TRACE),
    "Meta": _Part("torch._C.DispatchKey", "Meta", _TRACE),
    "decompositions": _Part("torch._decomp", "global_decomposition_table", _TRACE),
    "has_kernel": _Part("torch._C", "_dispatch_has_kernel_for_dispatch_key", _TRACE),
    "SavedTensor": _Part(
        "torch._C._autograd", "SavedTensor", "saved tensors in TensorDiff", object
    ),
    "enable_record_function": _Part(
        "torch._C._autograd", "_enable_record_function", _TRACE, lambda is_on: None
    ),
    "next_sequence_nr": _Part("torch._C._autograd", "_get_sequence_nr", _MODULES),
    "current_autograd_node": _Part("torch._C", "_current_autograd_node", _MODULES),
    "compilation_callbacks": _Part(
        "torch._dynamo.callback",
        "callback_handler",
        _COMPILED_MODULES,
        SimpleNamespace(start_callbacks=[], end_callbacks=[]),
    ),
    "compilation_counters": _Part(
        "torch._dynamo.utils",
        "counters",
        _COMPILED_MODULES,
        SimpleNamespace(get=lambda name: None),
    ),
    "dynamo_config": _Part("torch._dynamo", "config", _COMPILED_MODULES, SimpleNamespace()),
    "skip_code": _Part(
        "torch._dynamo.eval_frame", "skip_code", _COMPILED_MODULES, lambda code: None
    ),
    "has_any_global_hook": _Part(
        "torch.nn.modules.module", "_has_any_global_hook", _COMPILED_MODULES, lambda: False
    ),
    "create_script_module": _Part(
        "torch.jit._recursive",
        "create_script_module",
        "torch.jit.script of a watched module",
        lambda *_: None,
    ),
    "module_call": _Part("torch.nn.Module", "_call_impl", "finding the steps of a loop"),
    "is_memory_history_on": _Part(
        "torch._C", "_cuda_isHistoryEnabled", "allocator histories of out-of-memory errors"
    ),
    "attach_oom_observer": _Part(
        "torch._C",
        "_cuda_attach_out_of_memory_observer",
        "allocator states of out-of-memory errors",
        lambda observer: None,
    ),
    "c10d_bindings": _Part("torch._C", "_distributed_c10d", _TRACE),
    "resolve_process_group": _Part(
        "torch.distributed.distributed_c10d", "_resolve_process_group", _TRACE
    ),
    "is_mkldnn_on": _Part("torch._C", "_get_mkldnn_enabled", "layers()"),
    "set_mkldnn": _Part("torch._C", "_set_mkldnn_enabled", "layers()"),
    "nested_int": _Part("torch._C", "_get_nested_int", _TRACE),
    "attention_priorities": _Part("torch._C", "_get_sdp_priority_order", _TRACE),
    "use_count": _Part("torch._C", "_storage_Use_Count", _TRACE),
    "is_profiler_on": _Part("torch.autograd", "_profiler_enabled", _CPU),
    "prepare_profiler": _Part(_PROFILER, "_prepare_profiler", _CPU),
    "enable_profiler": _Part(_PROFILER, "_enable_profiler", _CPU),
    "disable_profiler": _Part(_PROFILER, "_disable_profiler", _CPU),
    "enable_legacy_profiler": _Part(
        "torch.autograd.profiler_legacy", "_enable_profiler_legacy", _CPU, lambda config: None
    ),
    "drop_profiler": _Part(
        "torch.autograd", "_disable_profiler_legacy", _CPU, lambda options: None
    ),
    "DisableOptions": _Part(
        "torch._C._autograd", "_ProfilerDisableOptions", _CPU, lambda cleans_up, consolidates: None
    ),
    "RecordScope": _Part("torch._C._profiler", "RecordScope", _CPU),
    "is_zero_tensor": _Part("torch", "_is_zerotensor", _TRACE),
    "disable_dispatch_modes": _Part(
        "torch.utils._python_dispatch", "_disable_current_modes", _MODES
    ),
    "num_dispatch_modes": _Part("torch._C", "_len_torch_dispatch_stack", _TRACE, lambda: 0),
    "num_function_modes": _Part("torch._C", "_len_torch_function_stack", _TRACE, lambda: 0),
    "pop_function_mode": _Part("torch._C", "_pop_torch_function_stack", _MODES),
    "push_function_mode": _Part("torch._C", "_push_on_torch_function_stack", _MODES),
    "DeviceContext": _Part("torch.utils._device", "DeviceContext", _MODES),
    "record_memory_history": _Part(
        "torch.cuda.memory", "_record_memory_history", "allocator histories"
    ),
    "memory_snapshot": _Part("torch.cuda.memory", "_snapshot", "allocator histories"),
}


def __getattr__(name: str) -> Any:
    part = PARTS.get(name)
    if part is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = _look_up(part)
    return value


def _look_up(part: _Part) -> Any:
    value: Any = torch
    try:
        for step, attribute in enumerate(part.module.split(".")[1:], start=2):
            if not hasattr(value, attribute):
                import_module(".".join(part.module.split(".")[:step]))
            value = getattr(value, attribute)
        return getattr(value, part.name)
    except (ImportError, AttributeError):
        return part.fallback or _stand_in(part)


class _Missing(type):
    """The class of all stand-ins."""


def _stand_in(part: _Part) -> type:
    def missing(*_: object, **__: object) -> NoReturn:
        raise MissingPartError(
            f"PyTorch {torch.__version__} has no {part.path} (needed for {part.needed_for}). Use a "
            "release of PyTorch that memcallback was tested with (docs/versions.md)"
        )

    kind = type("_MissingKind", (_Missing,), {"__call__": missing, "__getattr__": missing})
    stand_in: type = kind(part.name, (), {})
    return stand_in


def require(*names: str) -> None:
    """Raise a `MissingPartError` if one of these parts is missing and has no fallback."""
    for name in names:
        part = _look_up(PARTS[name])
        if isinstance(part, _Missing):
            part()


@contextmanager
def replaced(name: str, replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Put what is made of a function in its place; put the function back if nobody else has.

    A function that is missing is not replaced if it has a fallback.
    """
    part = PARTS[name]
    original = _look_up(part)
    if original is part.fallback:
        yield
        return
    require(name)
    owner, ours = sys.modules[part.module], replacement(original)
    setattr(owner, part.name, ours)
    try:
        yield
    finally:
        if getattr(owner, part.name) is ours:
            setattr(owner, part.name, original)


def is_any_profiler_on() -> bool:
    """Whether a profile runs in any thread; False if this PyTorch does not say."""
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", False))


@functools.cache
def cpu_reporter_address() -> int | None:
    """Where the object is that reports a CPU's memory to the profiler; None where none is found."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        find = ctypes.CDLL(str(library), os.RTLD_NOLOAD)["_ZN3c1025profiledCPUMemoryReporterEv"]
    except (OSError, AttributeError):  # another system, or a build of another kind
        return None
    find.restype = ctypes.c_void_p
    address: int | None = find()
    return address


def has_cuda_context(index: int) -> bool:
    """Whether this process has opened its context on a CUDA device; a build for CPUs cannot ask."""
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return torch.cuda.memory_reserved(index) > 0 if has_context is None else has_context(index)


def is_cuda_refused() -> bool:
    """Whether `refuse_cuda` was called in this process, or it is a fork of one that used CUDA."""
    return torch.cuda._is_in_bad_fork()


def is_cuda_initialized() -> bool:
    """Whether this process uses CUDA, whatever a trace has `torch.cuda.is_initialized` answer."""
    return torch.cuda._initialized


def refuse_cuda() -> None:
    """Have every use of CUDA fail in this process, a fork of one that may have used it.

    PyTorch does so in a usual fork; in another one the driver would be asked.
    """
    torch.cuda._is_in_bad_fork = lambda: True


class _NoWaitCounter:
    """In the place of `torch.monitor._WaitCounter`; counts nothing."""

    def __init__(self, key: str) -> None:
        pass

    def guard(self) -> AbstractContextManager[None]:
        """Around what would be counted."""
        return nullcontext()


def count_no_waits() -> None:
    """Let PyTorch not count what waits in this process, which was forked.

    Its counters share a lock. A thread that held it then, in a store of torch.distributed, is not
    in this process: whoever asks for the lock waits for ever.
    """
    counter = getattr(import_module("torch.monitor"), "_WaitCounter", None)
    for module in tuple(sys.modules.values()):
        if counter is not None and getattr(module, "__dict__", {}).get("_WaitCounter") is counter:
            vars(module)["_WaitCounter"] = _NoWaitCounter


def storage_id(storage: torch.UntypedStorage) -> int:
    """The number of a storage: equal for all tensors that share it, fake tensors too."""
    number: int = storage._cdata
    return number


def sequence_nr(node: Any) -> int:
    """The number that autograd gave a node when it was created; nodes are numbered in order."""
    number: int = node._sequence_nr()
    return number


def schema_of(op: Any) -> Any:
    """The schema of an operator: its qualified name, arguments and returns."""
    return op._schema


def base_of(tensor: Any) -> Any:
    """The tensor of which this one is a view; itself if it is none."""
    return tensor._base if tensor._is_view() else tensor
