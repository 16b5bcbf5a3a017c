"""LoadedBatch: what a Trainer's loader gave, before the user's hooks bring it to the device."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from memcallback.step.lightning_batch import has_batch_hooks

_NAME = "batch_to_device"


class LoadedBatch:
    """Sees the batches of a Trainer whose module or DataModule brings them to the device itself.

    The callback's own hooks get a batch afterwards. Only those of the sanity check and the first
    one of the training are seen; without such hooks none is.
    """

    def __init__(self) -> None:
        self._strategy: Any = None
        self._own: Any = None
        self._before: Any = None
        self._last: Any = None

    def watch(self, trainer: Any, pl_module: Any) -> None:
        """See the batches from now on."""
        strategy = trainer.strategy
        if self._strategy is not None or not has_batch_hooks(pl_module, trainer.datamodule):
            return
        bring = getattr(strategy, _NAME)

        def batch_to_device(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if self._strategy is not None:
                with suppress(Exception):  # a container of the user's can refuse to be read
                    self._last = _same_tensors(batch)
            return bring(batch, *args, **kwargs)

        self._strategy, self._own = strategy, batch_to_device
        self._before = vars(strategy).get(_NAME)
        vars(strategy)[_NAME] = batch_to_device

    def take(self) -> Any:
        """The last batch that came; None if none was seen."""
        batch, self._last = self._last, None
        return batch

    def end(self) -> None:
        """See no further batches."""
        attributes = {} if self._strategy is None else vars(self._strategy)
        # What others have put there since then calls ours, which only passes batches on from now.
        if attributes.get(_NAME, self) is self._own:
            if self._before is None:
                del attributes[_NAME]
            else:
                attributes[_NAME] = self._before
        self._strategy = self._own = self._before = self._last = None


def _same_tensors(part: Any) -> Any:
    """A copy of a batch's containers, which hooks may change, with the same tensors."""
    if type(part) is dict:
        return {name: _same_tensors(one) for name, one in part.items()}
    if type(part) in (list, tuple):
        return type(part)(map(_same_tensors, part))
    return part
