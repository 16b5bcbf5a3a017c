"""BatchSizes: how large a batch is that is traced, and one of another size in between."""

from __future__ import annotations

from dataclasses import dataclass

from memcallback.step.copies.resizing import has_samples
from memcallback.step.training_step import TrainingStep


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of a batch.

    Attributes:
        batch_size: Samples in it.
        length: Length of its sequences; None if unknown.
    """

    batch_size: int
    length: int | None

    def other(self, step: TrainingStep) -> BatchSizes:
        """Those of the batch that comes in between; the same if none does.

        It is always the smaller one, at whatever sizes a step is traced.
        """
        size, length = step.other_batch_size, step.other_sequence_length
        own = step.batch_size.batch_size
        if own is None or not has_samples(step.batch, own):
            size = None
        return BatchSizes(
            _in_between(size, self.batch_size),
            None if self.length is None else _in_between(length, self.length),
        )

    def unlike(self, other: BatchSizes) -> str:
        """What is different of another batch, in words."""
        parts = []
        if other.batch_size != self.batch_size:
            samples = "sample" if other.batch_size == 1 else "samples"
            parts.append(f"of {other.batch_size:,} {samples}")
        if other.length != self.length:
            parts.append(f"with sequences of length {other.length:,}")
        return " ".join(parts)


def _in_between(size: int | None, own: int) -> int:
    """A smaller size than one's own; 1, which PyTorch treats apart, only if that is asked for."""
    if size is None or own - 1 < min(size, 2):
        return own
    return min(size, own - 1)
