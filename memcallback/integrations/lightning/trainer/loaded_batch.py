"""LoadedBatch: what a Trainer's loader gave, before the user's hooks bring it to the device."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict
from collections.abc import Callable
from typing import Any

import torch

from memcallback.core.interruptions import PassOver
from memcallback.core.tensors import tensors_in
from memcallback.step.lightning_batch import has_batch_hooks

_NAME = "batch_to_device"


class LoadedBatch:
    """Sees the batches of a Trainer whose module or DataModule brings them to the device itself.

    The callback's own hooks get a batch afterwards. Only those of the sanity check and the first
    one of the training are seen; without such hooks none is.
    """

    def __init__(self) -> None:
        self._strategy: Any = None
        self._own: _Seen | None = None
        self._before: Any = None

    def watch(self, trainer: Any, pl_module: Any) -> None:
        """See the batches from now on."""
        strategy = trainer.strategy
        if self._strategy is not None or not has_batch_hooks(pl_module, trainer.datamodule):
            return
        self._strategy, self._own = strategy, _Seen(getattr(strategy, _NAME))
        self._before = vars(strategy).get(_NAME)
        vars(strategy)[_NAME] = self._own

    def take(self) -> Any:
        """The last batch that came; None if none was seen, or if hooks may have changed it."""
        return None if self._own is None else self._own.take()

    def end(self) -> None:
        """See no further batches."""
        attributes = {} if self._strategy is None else vars(self._strategy)
        # What others have put there since then calls ours, which only passes batches on from now.
        if attributes.get(_NAME, self) is self._own:
            if self._before is None:
                del attributes[_NAME]
            else:
                attributes[_NAME] = self._before
        if self._own is not None:
            self._own.end()
        self._strategy = self._own = self._before = None


class _Seen:
    """Replaces `batch_to_device` of a strategy; a copy of it, or pickled, is the function itself.

    Processes that load data may get the whole Trainer in their arguments.
    """

    def __init__(self, bring: Callable[..., Any]) -> None:
        self._bring, self._is_watching = bring, True
        self._last: Any = None

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_watching:
            self._last = None
            with PassOver():  # a container of the user's can refuse to be read
                self._last = _same_tensors(batch)
        return self._bring(batch, *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any, ...]]:
        return _itself, (self._bring,)

    def take(self) -> Any:
        batch, self._last = self._last, None
        return batch

    def end(self) -> None:
        self._is_watching, self._last = False, None


def _itself(function: Any) -> Any:
    return function


class _Unknown(Exception):
    """A container that hooks may change in place, and that nobody knows how to copy."""


def _same_tensors(part: Any) -> Any:
    """A copy of a batch's containers, which hooks may change, with the same tensors."""

    def checked(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) and next(tensors_in(leaf), None) is not None:
            raise _Unknown
        return leaf

    return rebuilt(part, checked)


def rebuilt(part: Any, made_of: Callable[[Any], Any]) -> Any:
    """A batch in new containers, with what a function makes of each other object in it."""
    if type(part) in (dict, OrderedDict):
        return type(part)((name, rebuilt(one, made_of)) for name, one in part.items())
    if type(part) in (list, tuple):
        return type(part)(rebuilt(one, made_of) for one in part)
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*(rebuilt(one, made_of) for one in part))
    if isinstance(part, UserDict):  # such as a tokenizer's BatchEncoding
        copied = copy.copy(part)
        copied.data = rebuilt(part.data, made_of)
        return copied
    return made_of(part)
