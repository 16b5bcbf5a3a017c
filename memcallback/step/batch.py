"""The batch of a step: infer how many samples it has, and check the sizes that a user gives."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler

from memcallback.core.errors import warn_and_go_on
from memcallback.core.interruptions import raise_if_meant
from memcallback.core.tensors import children, tensors_in, walk
from memcallback.core.validation import MIN_SEQUENCE_LENGTH, kind_of, whole_number
from memcallback.step.sample_lists import MOST_OBJECTS, SampleList, sample_list

#: The hint of every error about a batch size.
INFERRED = "Leave it out to have it inferred from the batch."


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """How many samples a batch has.

    Attributes:
        batch_size: The number; None if no tensor in the batch has a first dimension.
        is_ambiguous: Whether the batch may as well have another number of samples.
    """

    batch_size: int | None
    is_ambiguous: bool = False

    @property
    def doubt(self) -> str:
        """What to say of an ambiguous one, as a sentence."""
        return (
            "The tensors and lists of the batch allow several batch sizes; "
            f"{self.batch_size}, the likeliest, was taken."
        )


def infer_batch_size(batch: object) -> BatchSize:
    """Infer it from the batch's own `batch_size` or `num_graphs`, or from its tensors and lists.

    Each tensor votes for its first dimension. A list with an item for each sample (images, targets)
    votes for its length, and its tensors do not vote. If a list may be one of samples or of parts,
    the other votes decide.
    """
    for name in ("batch_size", "num_graphs"):
        own = _attribute(batch, name)
        if isinstance(own, torch.Size):
            own = own[0] if own else None
        if not isinstance(own, torch.Tensor):  # reading one on a device would wait for the device
            with suppress(TypeError, ValueError):
                return BatchSize(batch_size=whole_number(name, own, ""))
    tensors, lists = _parts(batch)
    votes = Counter(tensor.size(0) for tensor in tensors if tensor.ndim > 0)
    votes.update(values.length for values in lists if values.is_sure)
    known, is_guess = set(votes), False
    for values in lists:
        if values.is_sure or values.first is None:
            continue
        is_new = values.length not in known and values.first not in known and values.is_likely
        votes[values.length if values.length in known or is_new else values.first] += 1
        is_guess |= is_new
    if not votes:
        return BatchSize(batch_size=None)
    return BatchSize(batch_size=votes.most_common(1)[0][0], is_ambiguous=is_guess or len(votes) > 1)


def last_batch_size(loader: Any, batch_size: int | None) -> int | None:
    """Samples in the last batch of an epoch, if it is smaller and not the only one.

    `batch_size` is what the model sees: with pairs several samples for each of the loader's own.
    Only PyTorch's own batches of a sampler with a length are known.
    """
    try:
        batches = getattr(loader, "batch_sampler", None)
        if type(batches) is not BatchSampler or batches.drop_last or batch_size is None:
            return None
        num_whole, rest = divmod(len(batches.sampler), batches.batch_size)  # type: ignore[arg-type]
        times, is_uneven = divmod(batch_size, batches.batch_size)
    except Exception as error:  # a stream, or the user's code
        raise_if_meant(error)
        return None
    return rest * times if rest and times and num_whole and not is_uneven else None


def outline(batch: object) -> str:
    """The kind of a batch and the shapes of its first tensors."""
    shapes = [
        str(tuple(tensor.shape)) for tensor in islice(tensors_in(batch, most=MOST_OBJECTS), 3)
    ]
    return f"{kind_of(batch)} with tensors of {', '.join(shapes)}" if shapes else kind_of(batch)


def _parts(batch: object) -> tuple[list[torch.Tensor], list[SampleList]]:
    """A batch's tensors, and its lists that may be of samples; not the tensors in these."""
    lists = []

    def inner(value: object) -> list[object] | None:
        found = sample_list(value, is_inside=value is not batch)
        if found is None:
            return children(value)
        lists.append(found)
        return None

    objects = islice(walk([batch], inner), MOST_OBJECTS)
    tensors = [value for value in objects if isinstance(value, torch.Tensor)]
    return tensors, lists


def _attribute(batch: object, name: str) -> object:
    try:
        return getattr(batch, name, None)
    except Exception as error:  # a property of a user's batch can fail in any way
        raise_if_meant(error)
        return None


def warn_of_batch(batch: object, batch_size: int | None, name: str) -> None:
    """Warn where the batch size is not given and cannot be inferred, or is a guess."""
    if batch_size is not None:
        return
    inferred = infer_batch_size(batch)
    if inferred.batch_size is None:
        warn_and_go_on(
            f"The batch size cannot be inferred from a batch of type {type(batch).__name__}: no "
            "tensor in it has a first dimension. Memory is recorded, but not predicted, and no "
            f"batch size is suggested. Give it: {name}(batch_size=32)."
        )
    elif inferred.is_ambiguous:
        warn_and_go_on(f"{inferred.doubt} If that is wrong, give it: {name}(batch_size=32).")


def check_sequence_length(sequence_length: object, batch: object) -> int:
    """Check that a sequence length is long enough and is the size of a dimension in the batch."""
    hint = "Give the length of the batch's sequences, or leave it out."
    length = whole_number(
        "sequence_length",
        sequence_length,
        f"To predict other lengths, shorter sequences are traced too. {hint}",
        least=MIN_SEQUENCE_LENGTH,
    )
    sizes = {size for tensor in tensors_in(batch) for size in tensor.shape[1:]}
    if length not in sizes:
        known = (
            f"Those sizes are {', '.join(map(str, sorted(sizes)))}."
            if sizes
            else "There is no such dimension."
        )
        raise ValueError(
            f"sequence_length {length} must be the size of a dimension of the batch's tensors, "
            f"other than the first. {known} {hint}"
        )
    return length
