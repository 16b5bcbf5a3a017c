"""Memory layouts: contiguous and channels_last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

#: Bytes per element, by the dtype's name in torch.
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Layout:
    """A tensor without its data.

    Attributes:
        shape: (batch, channels, *spatial), or a weight's.
        strides: In elements.
        dtype: As torch names it, such as float32.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @classmethod
    def dense(cls, shape: Sequence[int], dtype: str, *, channels_last: bool = False) -> Layout:
        """A tensor without gaps, as `torch.empty(..., memory_format=...)` makes it."""
        strides, step = [0] * len(shape), 1
        for dimension in _order(len(shape), channels_last):
            strides[dimension] = step
            step *= max(shape[dimension], 1)
        return cls(tuple(shape), tuple(strides), dtype)

    @property
    def size_bytes(self) -> int:
        """What a copy without gaps takes."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def is_contiguous(self, *, channels_last: bool) -> bool:
        """`Tensor.is_contiguous(memory_format=...)`: no gaps, in this order; a dimension of size 1
        has no say.
        """
        if prod(self.shape) == 0 and not channels_last:
            return True
        step = 1
        for dimension in _order(len(self.shape), channels_last):
            if self.shape[dimension] != 1:
                if self.strides[dimension] != step:
                    return False
                step *= self.shape[dimension]
        return True

    @property
    def is_channels_last(self) -> bool:
        """`Tensor::suggest_memory_format`: `is_channels_last_strides_2d_s4` and `_3d_s5` in
        c10/core/MemoryFormat.h.
        """
        if len(self.shape) not in (4, 5) or self.strides[1] == 0:
            return False
        least = 0
        for dimension in _order(len(self.shape), True):
            size, stride = self.shape[dimension], self.strides[dimension]
            if size == 0 or stride < least or (dimension == 0 and least == self.strides[1]):
                return False
            least = stride * max(size, 1)
        return True

    def unsqueezed(self) -> Layout:
        """(N, C, L) as (N, C, 1, L): `Tensor.unsqueeze(2)`."""
        step = self.shape[2] * self.strides[2]
        return Layout(
            (*self.shape[:2], 1, self.shape[2]),
            (*self.strides[:2], step, self.strides[2]),
            self.dtype,
        )

    def squeezed(self) -> Layout:
        """(N, C, 1, L) as (N, C, L)."""
        return Layout(
            (*self.shape[:2], *self.shape[3:]), (*self.strides[:2], *self.strides[3:]), self.dtype
        )


def _order(dimensions: int, channels_last: bool) -> list[int]:
    """Dimensions from the fastest to the slowest."""
    backwards = list(range(dimensions - 1, -1, -1))
    return [1, *backwards[:-2], 0] if channels_last else backwards
