"""AddedMemoryCallback: the `MemoryCallback` that MEMCALLBACK=1 adds."""

from __future__ import annotations

from typing import Any

from memcallback.integrations.lightning.callback import MemoryCallback


class AddedMemoryCallback(MemoryCallback):
    """Leaves nothing in checkpoints: Lightning warns where they are loaded without it."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}
