"""Stand-ins for running iterators: trials use them, so that the iterators are not used up.

Python cannot wind an iterator back, but those of lists, ranges and itertools can be made again
where they are. A generator or a data loader's iterator cannot. The stand-in of one of
these raises as soon as something is asked of it, so nothing is taken.
"""

from __future__ import annotations

import functools
import io
import types
import warnings
from typing import Any

from memcallback.core.code_lines import line_here
from memcallback.integrations.lightning.fit.user_code import is_users_class

_METHODS = (types.MethodWrapperType, types.BuiltinMethodType)
#: Iterators that Python can make again, with others inside them.
MADE_AGAIN = ("builtins", "itertools", "collections", "_collections")


class Refusals:
    """What the trials wanted from iterators that cannot be wound back; each is a sentence."""

    def __init__(self) -> None:
        self._first: ValueError | None = None

    def check(self) -> None:
        """Raise the first refusal again, which the step may have caught."""
        if self._first is not None:
            raise self._first

    def refuse(self, label: str, what: str) -> ValueError:
        """The error for something that is about to be taken."""
        line = line_here()
        error = ValueError(
            f"The step takes items from {label}, {what}{f', at {line}' if line else ''}. Python "
            "cannot wind that iterator back after a trial, so training would miss the items that a "
            "trial takes. Therefore the search stopped before it took any. "
            "Write an iterator class that keeps its position in an attribute, which is restored; "
            "give a second loader to the Trainer (CombinedLoader); or leave out fit_batch_size, "
            "and set the size that memcallback.suggest_batch_size gives."
        )
        self._first = self._first or error
        return error


class StandIn:
    """Stands in for an iterator that cannot be wound back, and raises as soon as it is used."""

    def __init__(self, label: str, what: str, refusals: Refusals) -> None:
        self._label, self._what, self._refusals = label, what, refusals

    def __iter__(self) -> StandIn:
        return self

    def __next__(self) -> Any:
        raise self._refusals.refuse(self._label, self._what)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # In place of a method of the iterator's.
        raise self._refusals.refuse(self._label, self._what)

    def __getattr__(self, name: str) -> Any:
        # No refusal: PyTorch and Lightning only look for some names.
        raise AttributeError(
            f"{self._label}, {self._what}, cannot be wound back after a trial, so its {name} is "
            "not available in a trial."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        return self


def is_used_up(obj: object) -> bool:
    """Whether an object is a running iterator, or may hold one that only a stand-in can save.

    Objects of the user's classes are restored by what they hold, files by their position.
    """
    if isinstance(obj, tuple):
        return any(map(is_used_up, obj))
    if isinstance(obj, functools.partial):
        return any(map(is_used_up, (obj.func, *obj.args, *obj.keywords.values())))
    if isinstance(obj, _METHODS):
        return is_used_up(getattr(obj, "__self__", None))
    kind = type(obj)
    if not hasattr(kind, "__next__") or issubclass(kind, StandIn):
        return False
    if issubclass(kind, io.IOBase):
        return is_read(obj) and position_in(obj) is None
    if isinstance(obj, types.GeneratorType):
        return obj.gi_frame is not None
    # A database's cursor is an iterator too, and its rows are not ours to save.
    return not hasattr(kind, "execute") and not is_users_class(kind)


def is_read(file: Any) -> bool:
    """Whether an open file is only read."""
    return not file.closed and file.readable() and not file.writable()


def position_in(file: Any) -> int | None:
    """Where a file is read next; None for a pipe, and inside a loop over its lines."""
    try:
        return int(file.tell()) if file.seekable() else None
    except OSError:
        return None


class StandIns:
    """Makes the stand-ins of one trial, one for each iterator."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._made: dict[int, Any] = {}

    def of(self, obj: Any, label: str) -> Any:
        """The object's stand-in; the object itself if a trial does not use it up."""
        if not is_used_up(obj):
            return obj
        if id(obj) not in self._made:
            self._made[id(obj)] = self._make(obj, label)
        return self._made[id(obj)]

    def _make(self, obj: Any, label: str) -> Any:
        if isinstance(obj, tuple):
            items = [self.of(item, label) for item in obj]
            return type(obj)(*items) if hasattr(obj, "_fields") else tuple(items)
        if isinstance(obj, functools.partial):
            arguments = [self.of(argument, label) for argument in obj.args]
            keywords = {name: self.of(value, label) for name, value in obj.keywords.items()}
            return functools.partial(self.of(obj.func, label), *arguments, **keywords)
        if isinstance(obj, _METHODS):
            owner = self.of(obj.__self__, label)
            return owner if isinstance(owner, StandIn) else getattr(owner, obj.__name__)
        if type(obj).__module__ in MADE_AGAIN:
            try:
                return self._made_again(obj, label)
            except TypeError:  # a generator, or another iterator without a state that can be read
                pass
        return StandIn(label, _what(obj), self._refusals)

    def _made_again(self, obj: Any, label: str) -> Any:
        with warnings.catch_warnings():
            # Python 3.12 and 3.13 warn that itertools will lose this in 3.14.
            warnings.simplefilter("ignore", DeprecationWarning)
            make, arguments, *states = obj.__reduce__()
            made = make(*(self.of(argument, label) for argument in arguments))
            if states and states[0] is not None:
                made.__setstate__(self._state(states[0], label))
        return made

    def _state(self, state: Any, label: str) -> Any:
        if not isinstance(state, tuple):
            return state
        # `cycle` keeps what it has seen in a list, and adds to it.
        return tuple([*part] if type(part) is list else self.of(part, label) for part in state)


def _what(obj: Any) -> str:
    if isinstance(obj, types.GeneratorType):
        code = obj.gi_code
        file = code.co_filename.rpartition("/")[2]
        return f"a generator made by {code.co_name}() of {file}:{code.co_firstlineno}"
    return f"a {type(obj).__module__}.{type(obj).__qualname__}"
