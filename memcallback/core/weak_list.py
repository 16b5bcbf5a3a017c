"""WeakList: objects in order, as long as they live elsewhere."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


class WeakList(Generic[_T]):
    """Objects in the order in which they were added; it keeps none of them alive.

    One whose class allows no weak references is kept.
    """

    def __init__(self, items: Iterable[_T] = ()) -> None:
        self._references: list[Callable[[], _T | None]] = []
        for item in items:
            self.append(item)

    def append(self, item: _T) -> None:
        """Add an object."""
        try:
            self._references.append(weakref.ref(item))
        except TypeError:
            self._references.append(lambda: item)

    def __iter__(self) -> Iterator[_T]:
        for reference in self._references:
            if (item := reference()) is not None:
                yield item
