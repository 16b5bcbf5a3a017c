"""bounds_of(): what the training set bounds: no batch has more samples."""

from __future__ import annotations

from typing import Any

from memcallback.batch_size.advice import DEFAULT_BOUNDS, BatchSizeBounds


def bounds_of(loader: Any, num_ranks: int) -> BatchSizeBounds:
    """The bounds by a data loader's dataset; none if its length is unknown."""
    try:
        return BatchSizeBounds(dataset_size=len(loader.dataset), world_size=num_ranks)
    except Exception:  # several loaders, a stream, fewer samples than ranks, or the user's own code
        return DEFAULT_BOUNDS
