"""torch.random, Module._apply, Tensor.numpy and transformers' mask check on fakes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memcallback.core.types import Category
from memcallback.trace.dispatch.mode import TraceMode
from memcallback.trace.patches.patching import thread_local_patch

if TYPE_CHECKING:
    import numpy


@contextmanager
def fakes_as_real(assumed: dict[str, None]) -> Iterator[None]:
    """Let modules of fakes be moved, fakes be read as NumPy arrays of zeros, and generators of
    random numbers stay as they are.

    All of it is for this thread alone: other threads may be drawing random numbers meanwhile. Enter
    it outside of any fake mode.
    """
    state_bytes = torch.get_rng_state().numel()
    answers: dict[str, Callable[..., Any]] = {
        "get_rng_state": lambda: torch.empty(state_bytes, dtype=torch.uint8),
        "set_rng_state": lambda new_state: None,
        "manual_seed": lambda seed: torch.default_generator,
        "seed": lambda: torch.default_generator.initial_seed(),
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            for module in (torch, torch.random):
                stack.enter_context(
                    mock.patch.object(module, name, thread_local_patch(module, name, answer))
                )
        stack.enter_context(
            mock.patch.object(nn.Module, "_apply", thread_local_patch(nn.Module, "_apply", _apply))
        )
        stack.enter_context(
            mock.patch.object(
                FakeTensor, "numpy", thread_local_patch(FakeTensor, "numpy", _numpy(assumed))
            )
        )
        yield


def _apply(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """`nn.Module._apply` as it is for tensors that are not fake: the data of a parameter are put in
    its place; a DTensor is exchanged.
    """
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
                        kept = (
                            nn.Parameter(applied, tensor.requires_grad)
                            if tensor is parameter
                            else applied
                        )
                        torch.utils.swap_tensors(tensor, kept)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module


def _numpy(assumed: dict[str, None]) -> Callable[..., numpy.ndarray[Any, Any]]:
    def zeros(tensor: torch.Tensor, *, force: bool = False) -> numpy.ndarray[Any, Any]:
        import numpy

        if tensor.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
            )
        assumed["Tensor.numpy reads values: zeros stood for them"] = None
        return numpy.zeros(tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))

    return zeros


#: Where transformers looks whether a row of tokens has several sequences, and the function that
#: looks.
_MASKING, _LOOKS = "transformers.masking_utils", "find_packed_sequence_indices"


@contextmanager
def one_sequence_a_row(mode: TraceMode) -> Iterator[None]:
    """Let transformers find one sequence in each row where a batch has no positions: of fakes it
    assumes several, and makes a mask.
    """
    masking = sys.modules.get(_MASKING)
    if not hasattr(masking, _LOOKS):
        yield
        return
    original = getattr(masking, _LOOKS)

    def look(position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        with torch._C.DisableTorchFunction():
            entry = mode.ledger.find(position_ids)
        is_given = entry is not None and entry.category is Category.INPUT
        indices: torch.Tensor | None = original(position_ids, *args, **kwargs) if is_given else None
        return indices

    with mock.patch.object(masking, _LOOKS, thread_local_patch(masking, _LOOKS, look)):
        yield
