"""What transformers asks of a batch's values before it makes an attention mask, answered while a step is traced."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from memcallback.events import Category
from memcallback.own_thread import in_this_thread
from memcallback.trace_mode import TraceMode

#: Where transformers looks whether a row of tokens has several sequences, and the function that looks.
_MASKING, _LOOKS = "transformers.masking_utils", "find_packed_sequence_indices"


@contextmanager
def one_sequence_a_row(mode: TraceMode) -> Iterator[None]:
    """Let transformers find one sequence in each row where a batch has no positions: of fakes it assumes several, and makes a mask.

    Args:
        mode: The mode of the fakes; its ledger knows which tensors are of the batch.
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

    with mock.patch.object(masking, _LOOKS, in_this_thread(masking, _LOOKS, look)):
        yield
