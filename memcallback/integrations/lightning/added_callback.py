"""AddedMemoryCallback: the `MemoryCallback` that MEMCALLBACK=1 adds."""

from __future__ import annotations

from typing import Any

from memcallback.integrations.lightning.callback import MemoryCallback


class AddedMemoryCallback(MemoryCallback):
    """Leaves nothing in checkpoints: Lightning warns where they are loaded without it.

    It leaves the Trainer if the module brings a `MemoryCallback` of its own.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make way for a callback that came with the module (`configure_callbacks`)."""
        others = [callback for callback in trainer.callbacks if callback is not self]
        if any(isinstance(callback, MemoryCallback) for callback in others):
            # A new list: Lightning goes through the one that there is.
            trainer.callbacks = others
        else:
            super().setup(trainer, pl_module, stage)

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}
