"""Infer the batch size of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from memcallback.core.tensors import tensors_in
from memcallback.core.validation import whole_number

#: What to give for a batch size.
INFERRED = "Leave it out to have it inferred from the batch."


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """How many samples a batch has.

    Attributes:
        batch_size: The number, None if no tensor in the batch has a first dimension.
        is_ambiguous: Whether the tensors' first dimensions differ; then the number is the most
            frequent of them.
    """

    batch_size: int | None
    is_ambiguous: bool = False


def infer_batch_size(batch: object) -> BatchSize:
    """How many samples a batch has: its own `batch_size` or `num_graphs` if it has one, else the
    tensors' first dimension.

    A batch of lists that have an item for each sample (images of different sizes) has as many
    samples as these have items.
    """
    for name in ("batch_size", "num_graphs"):
        own = _attribute(batch, name)
        if isinstance(own, torch.Size):
            own = own[0] if own else None
        if not isinstance(own, torch.Tensor):  # on a device, reading it would wait for the device
            with suppress(TypeError, ValueError):
                return BatchSize(batch_size=whole_number(name, own, ""))
    tensors = list(tensors_in(batch))
    sizes = Counter(tensor.size(0) for tensor in tensors if tensor.ndim > 0)
    num_items = _items_in_lists(batch)
    if num_items is not None and (len(sizes) > 1 or any(tensor.ndim == 0 for tensor in tensors)):
        return BatchSize(batch_size=num_items)
    if not sizes:
        return BatchSize(batch_size=None)
    return BatchSize(batch_size=sizes.most_common(1)[0][0], is_ambiguous=len(sizes) > 1)


def _items_in_lists(batch: object) -> int | None:
    """The length of the lists and tuples in a batch that has all its tensors in such, all of one
    length; None for another batch.
    """
    values = (
        batch.values()
        if isinstance(batch, Mapping)
        else batch
        if isinstance(batch, (list, tuple))
        else ()
    )
    filled = [value for value in values if next(tensors_in(value), None) is not None]
    lengths = {len(value) if isinstance(value, (list, tuple)) else None for value in filled}
    return next(iter(lengths)) if len(lengths) == 1 else None


def _attribute(batch: object, name: str) -> object:
    try:
        return getattr(batch, name, None)
    except Exception:  # a property of a user's batch can fail in any way
        return None
