"""Lets code that needs values run on fakes: random states, Module.to, NumPy, transformers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

import memcallback
from memcallback.core.errors import CompiledCodeError
from memcallback.core.torch_private import no_dispatch
from memcallback.core.types import Category
from memcallback.trace.dispatch.mode import TraceMode
from memcallback.trace.patches.patching import Patch, original_if_compiled

if TYPE_CHECKING:
    import numpy


_MASK_KEPT = (
    "A mask with padding was assumed: if it is all ones, transformers leaves it out, and the step "
    "needs less."
)
_MASK_LEFT_OUT = (
    "The mask of this batch is all ones, and transformers leaves it out: a batch with padding "
    "needs more."
)
_TO_THE_END = (
    "Text was generated up to its largest length: where all sequences end earlier, the step needs "
    "less."
)
#: What ends a sequence that transformers generates because of its tokens.
_ENDS_BY_TOKENS = ("EosTokenCriteria", "StopStringCriteria")
_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTED = os.path.join(_TORCH, "distributed", "")
_BETWEEN = (
    os.path.dirname(memcallback.__file__) + os.sep,
    *(os.path.join(_TORCH, name) for name in ("overrides.py", "_tensor.py", "utils" + os.sep)),
)


def value_patches(mode: TraceMode) -> Iterator[Patch]:
    """Leave random states alone, move modules of fakes, read fakes as NumPy arrays of zeros.

    Apply these outside of any fake mode. Other threads may be drawing random numbers meanwhile.
    """
    state_bytes = torch.get_rng_state().numel()
    for module in (torch, torch.random):
        yield module, "get_rng_state", lambda: torch.empty(state_bytes, dtype=torch.uint8)
        yield module, "set_rng_state", lambda new_state: None
        yield module, "manual_seed", lambda seed: torch.default_generator
        yield module, "seed", lambda: torch.default_generator.initial_seed()
    yield nn.Module, "_apply", _apply
    yield FakeTensor, "numpy", _numpy(mode)
    yield FakeTensor, "data_ptr", _address(torch.Tensor.data_ptr)


def _address(original: Callable[[torch.Tensor], int]) -> Callable[[torch.Tensor], int]:
    """Refuse addresses to all but PyTorch's own code, which compares them (FSDP)."""

    def data_ptr(tensor: torch.Tensor) -> int:
        frame = sys._getframe(1)
        # What is between a call and this function: our function mode, and PyTorch's for those.
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
            frame = frame.f_back
        if frame.f_code.co_filename.startswith(_DISTRIBUTED):
            return original(tensor)
        raise CompiledCodeError(
            "Tensor.data_ptr() was called, as for a C or C++ extension, but a prediction has no "
            "memory to point to"
        )

    return data_ptr


def _apply(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """`nn.Module._apply` as for real tensors: set a parameter's data, swap a DTensor."""
    for child in module.children() if recurse else ():
        child._apply(fn)
    for parameter in module._parameters.values():
        for tensor in () if parameter is None else (parameter, parameter.grad):
            if tensor is not None:
                with torch.no_grad():
                    applied = fn(tensor)
                    if not is_traceable_wrapper_subclass(applied):
                        tensor.data = applied
                    elif applied is not tensor:
                        if tensor is parameter:
                            applied = nn.Parameter(applied, tensor.requires_grad)
                        torch.utils.swap_tensors(tensor, applied)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module


def _numpy(mode: TraceMode) -> Callable[..., numpy.ndarray[Any, Any]]:
    def zeros(tensor: torch.Tensor, *, force: bool = False) -> numpy.ndarray[Any, Any]:
        import numpy

        if tensor.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. "
                "Use tensor.detach().numpy() instead."
            )
        with torch._C.DisableTorchFunction():
            values = mode.values.get(tensor)
        if values is not None:
            mode.values.num_reads += 1
            with no_dispatch():
                known: numpy.ndarray[Any, Any] = values.numpy()  # what is written there is seen
            return known
        mode.assumed["Tensor.numpy reads values: zeros were used."] = None
        return numpy.zeros(tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))

    return zeros


def transformers_patches(mode: TraceMode) -> Iterator[Patch]:
    """Let transformers read masks and positions whose values are known.

    It leaves the values of fakes alone, and keeps a mask of ones or makes one for packed sequences.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    is_tracing = getattr(masking, "is_tracing", None)
    if is_tracing is not None:

        @original_if_compiled
        def is_unknown(tensor: Any = None) -> bool:
            with torch._C.DisableTorchFunction():
                is_mask = isinstance(tensor, FakeTensor) and tensor.dim() > 1
                values = mode.values.get(tensor) if isinstance(tensor, FakeTensor) else None
            if is_mask and (values is None or bool(values.all())):
                mode.assumed[_MASK_KEPT if values is None else _MASK_LEFT_OUT] = None
            return bool(is_tracing(tensor if values is None else None))

        yield masking, "is_tracing", is_unknown
    original = getattr(masking, "find_packed_sequence_indices", None)
    if original is None:
        return

    @original_if_compiled
    def find(position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        with torch._C.DisableTorchFunction():
            entry = mode.ledger.find(position_ids)
        is_input = entry is not None and entry.category is Category.INPUT
        indices: torch.Tensor | None = original(position_ids, *args, **kwargs) if is_input else None
        return indices

    yield masking, "find_packed_sequence_indices", find


def generation_patches(mode: TraceMode) -> Iterator[Patch]:
    """Let no sequence that transformers generates end by its tokens, which are not known."""
    criteria: Any = sys.modules.get("transformers.generation.stopping_criteria")

    def goes_on(
        self: Any, input_ids: torch.Tensor, scores: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        mode.assumed[_TO_THE_END] = None
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    for name in _ENDS_BY_TOKENS:
        if hasattr(criteria, name):
            yield getattr(criteria, name), "__call__", goes_on


class NumbersRead(TorchFunctionMode):
    """Lets `torch.tensor` read fakes; on CUDA the mode that knows its devices does."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function."""
        if func is torch.tensor:
            args, kwargs = with_numbers_read(args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _dtype_of(number: object) -> torch.dtype:
    if isinstance(number, bool):
        return torch.bool
    if isinstance(number, complex):
        return torch.complex64
    return torch.int64 if isinstance(number, int) else torch.get_default_dtype()


def with_numbers_read(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `torch.tensor`: it reads tensors of one number that stand in a list."""
    dtypes: list[torch.dtype] = []

    def read(part: Any) -> Any:
        if isinstance(part, FakeTensor) and part.ndim == 0:
            dtypes.append(part.dtype)
            return part.item()
        dtypes.append(part.dtype if isinstance(part, torch.Tensor) else _dtype_of(part))
        return part

    if not args or not isinstance(args[0], (list, tuple)):
        return args, kwargs
    if not any(isinstance(part, FakeTensor) for part in tree_leaves(args[0])):
        return args, kwargs
    numbers = tree_map(read, args[0])
    if kwargs.get("dtype") is None:
        kwargs = {**kwargs, "dtype": reduce(torch.promote_types, dtypes)}
    return (numbers, *args[1:]), kwargs
