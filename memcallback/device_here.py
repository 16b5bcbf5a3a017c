"""`device_here`: the CUDA device of this machine as a `DeviceSpec`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from memcallback.devices import CATALOGUE, DeviceSpec
from memcallback.steps import PredictionError


def device_here(device: torch.device | None = None) -> DeviceSpec:
    """A CUDA device of this machine: its own capacity, with the catalogue's other figures where its name is known.

    Args:
        device: The device; by default the current CUDA device.

    Raises:
        ValueError: If none was given and there is no CUDA device.
        PredictionError: If the device is of another kind.
    """
    if device is None and not torch.cuda.is_available():
        raise ValueError(
            "device is missing, and there is no CUDA device here to predict for. Name a card, such as device='NVIDIA A100-SXM4-80GB', a size "
            "of memory, such as device='24GiB', or device='cpu'."
        )
    device = torch.device("cuda") if device is None else device
    if device.type != "cuda" or torch.version.hip is not None:
        kind = "cuda (ROCm)" if device.type == "cuda" else device.type
        raise PredictionError(f"What a device of type {kind} allocates is not known, only what CUDA devices and CPUs do.")
    return _spec(torch.cuda.get_device_properties(device))


def _spec(properties: Any) -> DeviceSpec:
    for card in CATALOGUE:
        if card.name == properties.name:
            return replace(card, capacity_bytes=properties.total_memory)
    capability = (properties.major, properties.minor)
    older = [card for card in CATALOGUE if card.compute_capability <= capability]
    like = max(older or CATALOGUE, key=lambda card: card.compute_capability)
    return replace(
        like,
        name=properties.name,
        capacity_bytes=properties.total_memory,
        compute_capability=capability,
        num_multiprocessors=properties.multi_processor_count,
        shared_memory_per_block_bytes=properties.shared_memory_per_block,
        shared_memory_per_block_optin_bytes=properties.shared_memory_per_block_optin,
        max_threads_per_multiprocessor=properties.max_threads_per_multi_processor,
        l2_cache_bytes=properties.L2_cache_size,
        caveats=(f"{properties.name} is not in the catalogue: its clocks and resident blocks were taken to be those of {like.name}.",),
    )
