"""Sequence lengths in a data loader's batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral

from memcallback.core.tensors import tensors_in
from memcallback.core.validation import described
from memcallback.step.copies.generators import generator_state
from memcallback.step.copies.modes import untouched_globals
from memcallback.step.step import Step

#: Most buckets into which lengths are sorted; nobody reads more batch sizes.
_NUM_BUCKETS = 8


def sequence_lengths_of(source: Iterable[object], step: Step) -> tuple[tuple[int, ...], bool]:
    """How long sequences can be: the numbers themselves, or those of a data loader's batches.

    The sequences of a batch are as long as its tensors are where those of the step's own batch are
    as long as its `sequence_length` (dimensions but the first); of several the longest counts. The
    batches are read once; random number generators stay as they are.
    """
    if not isinstance(source, Iterable):
        raise TypeError(
            f"sequence_lengths must be lengths or a data loader, got {described(source)}. Give one "
            "length as [512]."
        )
    numbers, lengths = set[int](), set[int]()
    with untouched_globals(), _untouched_generators(source):
        for item in source:
            if isinstance(item, Integral):
                numbers.add(int(item))
            else:
                lengths.add(_length_of(item, step))
    if not numbers | lengths:
        raise ValueError(
            "sequence_lengths is empty. Give the lengths of the samples, or leave it out."
        )
    return tuple(sorted(numbers | lengths)), bool(lengths)


@contextmanager
def _untouched_generators(loader: object) -> Iterator[None]:
    """Give back the generators of a data loader, its dataset and its samplers as they were."""
    values = (value for holder in _holders(loader) for value in _attributes(holder).values())
    restores = [restore for value in values if (restore := generator_state(value)) is not None]
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _holders(loader: object) -> list[object]:
    """A data loader, its dataset and its samplers, also those inside of others."""
    holders = [loader]
    for holder in holders:  # it grows
        parts = map(_attributes(holder).get, ("sampler", "batch_sampler", "dataset"))
        holders += [
            part
            for part in parts
            if part is not None and not any(part is other for other in holders)
        ]
    return holders


def _attributes(holder: object) -> dict[str, object]:
    return getattr(holder, "__dict__", {})


def _length_of(batch: object, step: Step) -> int:
    if step.sequence_length is None:
        raise ValueError(
            f"sequence_lengths has batches ({described(batch)}), and the step does not say how "
            "long its own sequences are. Give the step sequence_length=..."
        )
    own, shapes = ([tensor.shape for tensor in tensors_in(nest)] for nest in (step.batch, batch))
    if [len(shape) for shape in shapes] != [len(shape) for shape in own]:
        raise ValueError(
            f"A batch of sequence_lengths has tensors of shapes {_text(shapes)}, and that of the "
            f"step {_text(own)}: there must be as many tensors, each with as many dimensions. "
            "Give batches like the step's own, or the lengths as numbers."
        )
    pairs = (
        (size, other)
        for own_shape, shape in zip(own, shapes, strict=True)
        for size, other in zip(own_shape[1:], shape[1:], strict=True)
    )
    return max(other for size, other in pairs if size == step.sequence_length)


def buckets(lengths: Iterable[int], step: int) -> tuple[int, ...]:
    """The upper ends of at most eight buckets, none of them empty; the longest length is last."""
    lengths = sorted(lengths)
    longest = lengths[-1]
    width = -(-longest // _NUM_BUCKETS // step) * step
    return tuple(sorted({longest - (longest - length) // width * width for length in lengths}))


def _text(shapes: Iterable[tuple[int, ...]]) -> str:
    return ", ".join(str(tuple(shape)) for shape in shapes) or "none"
