"""by_class(): computes a value once for each class, and lets classes go."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import ref

T = TypeVar("T")


def by_class(function: Callable[[type], T]) -> Callable[[type], T]:
    """Keep a function's value for each class that it was called with, as long as the class lives.

    `functools.cache` would keep the class too, and a class that a function makes can hold a whole
    model, in a closure. The value must not refer to the class.
    """
    # By a class's identity: a `WeakKeyDictionary` runs Python code for each look-up.
    values: dict[int, tuple[T, ref[type]]] = {}

    @wraps(function)
    def value_of(kind: type) -> T:
        number = id(kind)
        kept = values.get(number)
        if kept is None:
            forget = ref(kind, lambda _: values.pop(number, None))
            kept = values[number] = function(kind), forget
        return kept[0]

    return value_of
