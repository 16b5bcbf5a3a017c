"""The hooks by which a LightningModule or its DataModule brings a batch to the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memcallback.core.tensors import walk
from memcallback.step.copies.functions import attributes_with_own_containers, contents_of

TRANSFER, AFTER_TRANSFER = "transfer_batch_to_device", "on_after_batch_transfer"


def owner_of_hook(module: Any, datamodule: Any, name: str) -> Any:
    """The one of both that overrides a hook; None if none does. The DataModule comes first."""
    # As lightning/pytorch/trainer/connectors/data_connector.py, _DataHookSelector.get_instance.
    owners = (owner for owner in (datamodule, module) if owner is not None)
    return next((owner for owner in owners if _overrides(owner, name)), None)


def has_batch_hooks(module: Any, datamodule: Any) -> bool:
    """Whether a hook of the user's brings batches to the device, or changes them there."""
    return any(
        owner_of_hook(module, datamodule, name) is not None for name in (TRANSFER, AFTER_TRANSFER)
    )


def _overrides(owner: Any, name: str) -> bool:
    """Whether an object has a hook that is not Lightning's own."""
    own = (vars(kind)[name] for kind in type(owner).__mro__ if name in vars(kind))
    function = vars(owner).get(name) or next(own, None)
    return function is not None and function not in (
        vars(kind).get(name) for kind in type(owner).__mro__ if kind.__name__ == "DataHooks"
    )


def parts_with_tensors(datamodule: Any) -> dict[str, Any]:
    """The attributes of a DataModule that hold modules or tensors; none of None."""
    return (
        {}
        if datamodule is None
        else {
            name: value
            for name, value in vars(datamodule).items()
            if any(
                isinstance(one, (torch.nn.Module, torch.Tensor))
                for one in walk([value], contents_of)
            )
        }
    )


def stand_in(datamodule: Any, parts: Mapping[str, Any]) -> Any:
    """What replaces a DataModule where its hooks run: with other parts, and no Trainer.

    It has containers of its own, which hooks may write to; what else is in them is shared.
    """
    copy = object.__new__(type(datamodule))
    own = attributes_with_own_containers(datamodule)
    vars(copy).update({**own, **parts, "trainer": None})
    return copy
