"""The values that a fake tensor is known to have, kept with it as a small tensor on the host."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from memcallback.core.tensors import tensors_in
from memcallback.core.torch_private import (
    DisableTorchFunction,
    FakeTensor,
    no_dispatch,
    storage_id,
)
from memcallback.isolation.child import is_in_child
from memcallback.step.sample_lists import MOST_OBJECTS

#: Values of larger tensors are not kept; of whole numbers and truth values, such as the masks of a
#: large batch, more than of others, with which a program computes more.
_MAX_NUMBERS, _MAX_WHOLE = 1 << 16, 1 << 20
_ATTRIBUTE = "_memcallback_values"
#: What was read from a device, by the user's tensor.
_read = WeakIdKeyDictionary()


def set_values(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Let a fake have the values of a tensor on the host, which nobody else may change."""
    if fake.constant is None:  # type: ignore[attr-defined]
        setattr(fake, _ATTRIBUTE, (real, storage_id(fake.untyped_storage())))


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a tensor, on the host; None if they are not known."""
    if not isinstance(tensor, FakeTensor):
        return tensor if is_small_on_host(tensor) else None
    if tensor.constant is not None:
        return tensor.constant
    real, number = getattr(tensor, _ATTRIBUTE, (None, None))
    # The program may have given the tensor other data.
    if real is None or number != storage_id(tensor.untyped_storage()):
        return None
    return real  # type: ignore[no-any-return]


def read_from_device(batch: object) -> None:
    """Read the whole numbers and truth values of a batch on a device while the device can be read.

    A process of its own cannot, in which a step is traced.
    """
    if is_in_child():
        return
    for tensor in tensors_in(batch, most=MOST_OBJECTS):
        if tensor.device.type == "cuda" and not tensor.is_floating_point() and _is_small(tensor):
            with suppress(RuntimeError):  # of a device in trouble, which the training will tell of
                _read[tensor] = tensor.detach().cpu()


def remember_values(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Let a fake have the values of a user's tensor, if they are at hand, few, and not trained."""
    if real.requires_grad or isinstance(real, nn.Parameter):
        return
    on_host = real if is_small_on_host(real) else _read.get(real)
    if on_host is not None:
        with DisableTorchFunction(), no_dispatch(), torch.no_grad():
            set_values(fake, on_host.detach().clone())


def resized_values(fake: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
    """A fake's values in another shape: samples repeat from the first, sequences at their end."""
    real = values_of(fake)
    if real is None or not is_few(prod(shape), fake.dtype):
        return None
    with DisableTorchFunction(), no_dispatch():
        for dim, size in enumerate(shape):
            if size != real.shape[dim]:
                if not real.shape[dim]:
                    return None
                index = torch.arange(size)
                last = real.shape[dim]
                index = index % last if dim == 0 else index.clamp(max=last - 1)
                real = real.index_select(dim, index)
        return real.clone()


def is_few(num_values: int, dtype: torch.dtype) -> bool:
    """Whether so many values of a tensor are kept."""
    is_whole = not dtype.is_floating_point and not dtype.is_complex
    return num_values <= (_MAX_WHOLE if is_whole else _MAX_NUMBERS)


def is_small_on_host(tensor: torch.Tensor) -> bool:
    """Whether values of a real tensor are at hand and few."""
    return tensor.device.type == "cpu" and _is_small(tensor)


def _is_small(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
        and tensor.layout is torch.strided
        and is_few(tensor.numel(), tensor.dtype)
    )
