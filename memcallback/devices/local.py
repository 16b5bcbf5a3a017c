"""The GPU in this machine as a DeviceSpec; the default device of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from memcallback.core.errors import PredictionError
from memcallback.devices.catalogue import CATALOGUE, Device, DeviceSpec, find_device, is_cuda_here
from memcallback.devices.memory import device_memory, limit_bytes, usable_bytes


def any_device(device: str | int | torch.device | Device | None) -> Device:
    """The device that a person means, be it of this machine or not."""
    if is_cuda_here(device):
        device = torch.device(str(device).strip().lower())
    if device is None or (isinstance(device, torch.device) and device.type != "cpu"):
        return device_here(device)
    return find_device("cpu" if isinstance(device, torch.device) else device)


def target_device(device: str | int | torch.device | Device) -> Device:
    """The device that a person plans for."""
    spec = any_device(device)
    if spec.capacity_bytes is None:
        raise ValueError(
            f"{str(device)!r} does not say how much memory to plan for. Give a card or a size, such as '24GiB', or leave it out for the device "
            "that trains."
        )
    return spec


def torch_device(device: object) -> torch.device | None:
    """The CUDA device of this machine that `any_device` takes something for; None if it takes it
    for another one.
    """
    if device is None:
        return torch.device("cuda")
    if is_cuda_here(device):
        device = torch.device(str(device).strip().lower())
    return device if isinstance(device, torch.device) and device.type == "cuda" else None


def outside_bytes(device: object, spec: Device) -> int | None:
    """What is used of a device of this machine, or is about to be, by others than this process's
    allocator.
    """
    here = torch_device(device)
    if here is None:
        return None
    memory = device_memory(here)
    return max(
        memory.non_pytorch_bytes or 0, (memory.other_processes_bytes or 0) + spec.outside_bytes
    )


def device_here(device: torch.device | None = None) -> DeviceSpec:
    """A CUDA device of this machine: its own capacity, with the catalogue's other figures where its
    name is known.

    Where the program has bounded its allocator (`torch.cuda.set_per_process_memory_fraction`), the
    capacity is that and what is used of the device outside of the allocator at this moment.
    """
    if (device is None or device.type == "cuda") and not torch.cuda.is_available():
        missing = "device is missing, and there is no CUDA device here to predict for."
        raise ValueError(
            f"{missing if device is None else f'{str(device)!r} is a CUDA device of this machine, and there is none.'} Name a card, such as "
            "device='NVIDIA A100-SXM4-80GB', a size of memory, such as device='24GiB', or device='cpu'."
        )
    device = torch.device("cuda") if device is None else device
    if device.type != "cuda" or torch.version.hip is not None:
        kind = "cuda (ROCm)" if device.type == "cuda" else device.type
        raise PredictionError(
            f"What a device of type {kind} allocates is not known, only what CUDA devices and CPUs do. Name a card, or 'cpu'."
        )
    if device.index is not None and device.index >= (num_devices := torch.cuda.device_count()):
        known = "'cuda:0'" if num_devices == 1 else f"'cuda:0' to 'cuda:{num_devices - 1}'"
        raise ValueError(
            f"{str(device)!r} is not here: this machine's CUDA devices are {known}. Give one of these, or name a card."
        )
    spec = _spec(torch.cuda.get_device_properties(device))
    if limit_bytes(device) is None:
        return spec
    capacity_bytes = usable_bytes(device, spec.capacity_bytes, outside_bytes(device, spec) or 0)
    assert capacity_bytes is not None
    return replace(spec, capacity_bytes=capacity_bytes)


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
        caveats=(
            f"{properties.name} is not in the catalogue: its clocks and resident blocks were taken to be those of {like.name}.",
        ),
    )


def default_device(modules: Iterable[torch.nn.Module]) -> torch.device:
    """The device of the first parameter that has one; without parameters the current accelerator,
    else the CPU.
    """
    for module in modules:
        for parameter in module.parameters():
            if parameter.device.type != "meta":
                return parameter.device
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    return (
        torch.device(accelerator.type, torch.accelerator.current_device_index())
        if accelerator
        else torch.device("cpu")
    )
