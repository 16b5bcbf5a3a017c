"""Runs `torch.inference_mode` as `torch.no_grad` while a step is traced.

Both allocate the same. But inside inference mode composite operators arrive whole, so that they
would be taken for kernels of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from memcallback.trace.patches.patching import Patch


def inference_mode_patches() -> Iterator[Patch]:
    """Let inference mode turn off gradients alone, and let code that asks see it."""
    depths = [torch.is_inference_mode_enabled()]

    class NoGrad:
        """The guard that `torch.inference_mode` enters."""

        def __init__(self, mode: bool = True) -> None:
            self._is_on = mode
            self._before: bool | None = None

        def __enter__(self) -> None:
            depths.append(self._is_on)
            self._before = torch.is_grad_enabled()
            torch.set_grad_enabled(not self._is_on)

        def __exit__(self, *exception: Any) -> None:
            if self._before is not None:
                depths.pop()
                torch.set_grad_enabled(self._before)
                self._before = None

        def __del__(self) -> None:
            # As the guard in C++ does: Dynamo enters one, and lets go of it at once.
            self.__exit__()

    def guard(mode: bool = True) -> NoGrad:
        return NoGrad(mode)

    yield torch._C, "_InferenceMode", guard
    yield torch, "is_inference_mode_enabled", lambda: depths[-1]
