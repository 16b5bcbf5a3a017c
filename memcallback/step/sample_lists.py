"""SampleList: a list in a batch that may have an item for each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from numbers import Number

import torch

from memcallback.core.tensors import children, tensors_in, walk

#: A batch may refer to its data set: no more objects than these are searched for its tensors.
MOST_OBJECTS = 10_000
#: So many items of an item tell its kind.
_MOST_INNER = 8
#: Channels of an image in colour, its first dimension.
_CHANNELS = (3, 4)
#: More tensors of three dimensions than these are images of one channel, not parts of a batch.
_MOST_PARTS = 4


@dataclass(frozen=True, kw_only=True)
class SampleList:
    """A list whose items are of one kind: samples, or parts of a batch with all its samples.

    Attributes:
        length: The number of items.
        first: The first dimension that all its tensors have; None if they differ, or have none.
        is_sure: Whether the items are samples for sure: they hold numbers or text, or tensors that
            differ in their first dimension.
        is_likely: Whether they rather are samples: records or images, and more of them than
            `first`.
    """

    length: int
    first: int | None
    is_sure: bool
    is_likely: bool

    @property
    def are_samples(self) -> bool:
        """Whether to take the items for samples where nothing else in the batch tells."""
        return self.is_sure or self.is_likely


def sample_list(values: object, *, is_inside: bool) -> SampleList | None:
    """A list as a `SampleList`; None if it cannot be one. `is_inside` of a batch, not the batch."""
    if not isinstance(values, (list, tuple)) or not _is_of_one_kind(values):
        return None
    tensors = list(tensors_in(values, most=MOST_OBJECTS))
    if not tensors:
        return None
    firsts = {tensor.size(0) for tensor in tensors if tensor.ndim > 0}
    is_sure = _is_sample(values[0])
    if len(firsts) > 1 and not is_sure:
        if not is_inside:
            return None  # parts of a batch may be of different lengths
        is_sure = True
    first = next(iter(firsts)) if len(firsts) == 1 else None
    is_image = isinstance(values[0], torch.Tensor) and values[0].ndim == 3
    is_likely = False
    if first is not None and (is_image or not isinstance(values[0], torch.Tensor)):
        is_part = is_image and first not in _CHANNELS
        is_likely = len(values) > (max(first, _MOST_PARTS) if is_part else first)
    return SampleList(length=len(values), first=first, is_sure=is_sure, is_likely=is_likely)


def _is_of_one_kind(values: Sequence[object]) -> bool:
    """Whether a list's items are of one kind, and not lists of samples themselves."""
    if type(values) not in (list, tuple) or not 0 < len(values) <= MOST_OBJECTS:
        return False  # a namedtuple has fields, not samples
    if len(set(map(_kind, values))) > 1:
        return False
    inner = [
        len(item)
        for item in values
        if isinstance(item, (list, tuple)) and len(set(map(_kind, item[:_MOST_INNER]))) == 1
    ]
    return len(values) > max(inner, default=0)


def _kind(value: object) -> object:
    """What the items of a list of samples have in common."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.ndim
    if isinstance(value, Mapping):
        return Mapping
    if isinstance(value, (list, tuple)):
        return type(value), frozenset(map(_kind, value[:_MOST_INNER]))
    return type(value)


def _is_sample(value: object) -> bool:
    """Whether a list's item is a sample for sure: no part of a batch holds such things."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    firsts = set()
    for inner in islice(walk([value], children), MOST_OBJECTS):
        if isinstance(inner, (Number, str, bytes)):
            return True
        if isinstance(inner, torch.Tensor):
            if inner.ndim == 0:
                return True
            firsts.add(inner.size(0))
    return len(firsts) > 1
