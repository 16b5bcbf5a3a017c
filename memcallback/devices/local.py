"""resolve(): from whatever a user names to a device; and the CUDA devices of this machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from memcallback.core.errors import PredictionError
from memcallback.core.step_memory import DeviceMemory
from memcallback.core.torch_private import has_cuda_context
from memcallback.devices.catalogue import (
    CATALOGUE,
    Device,
    DeviceSpec,
    find_device,
    names_local_device,
)
from memcallback.devices.memory import device_memory, limit_bytes, usable_bytes


def resolve(
    device: str | int | torch.device | Device | None, *, needs_capacity: bool = False
) -> Device:
    """A device to predict for: a card, a size, a CPU, by default this machine's CUDA device."""
    if isinstance(device, str) and names_local_device(device):
        device = torch.device(device.strip().lower())
    if device is None or (isinstance(device, torch.device) and device.type != "cpu"):
        return _local_device(device)
    spec = find_device("cpu" if isinstance(device, torch.device) else device)
    if needs_capacity and spec.capacity_bytes is None:
        raise ValueError(
            f"{str(device)!r} has no known memory size. Give a card or a size, such as '24GiB', or "
            "leave device out for the device that trains."
        )
    return spec


class LocalMemory(NamedTuple):
    """What is used of a device of this machine, and whether this process has a context there."""

    device: DeviceMemory
    has_context: bool


def local_memory(device: Device) -> LocalMemory | None:
    """What is used of a device of this machine now; None for other devices."""
    if not isinstance(device, DeviceSpec) or device.local_index is None:
        return None
    memory = device_memory(torch.device("cuda", device.local_index))
    # Afterwards: without NVML, reading it opens the context.
    has_context = torch.cuda.is_initialized() and has_cuda_context(device.local_index)
    return LocalMemory(memory, has_context)


class OutsideMemory(NamedTuple):
    """Memory of a local device that this process's allocator cannot have.

    Attributes:
        expected_bytes: What is used outside of it, with a CUDA context and NCCL as assumed.
        most_bytes: As much with the largest context and NCCL that were seen, if the context is not
            open yet; None if it is, and its size was measured.
    """

    expected_bytes: int
    most_bytes: int | None


def outside_memory(device: Device, memory: LocalMemory | None) -> OutsideMemory | None:
    """What of a local device is used outside of this process's allocator; None for others."""
    if not isinstance(device, DeviceSpec) or memory is None:
        return None
    used, others = memory.device.non_pytorch_bytes or 0, memory.device.other_processes_bytes
    if memory.has_context:
        # NCCL may not be open yet.
        return OutsideMemory(max(used, (others or 0) + device.outside_bytes), None)
    # Without a context of its own, all that is used is used by others.
    others = used if others is None else others
    expected_bytes = others + device.outside_bytes
    # A limit of the allocator leaves the rest of the device to a larger context.
    beside_bytes = (memory.device.capacity_bytes or 0) - (device.capacity_bytes or 0)
    most_bytes = others + device.most_outside_bytes - max(0, beside_bytes)
    return OutsideMemory(expected_bytes, max(expected_bytes, most_bytes))


def _local_device(device: torch.device | None) -> DeviceSpec:
    """This machine's CUDA device; if the program has limited its allocator, with that capacity."""
    if (device is None or device.type == "cuda") and not torch.cuda.is_available():
        problem = (
            "device is missing, and this machine has no CUDA device to predict for."
            if device is None
            else f"{str(device)!r} names a CUDA device of this machine, and this machine has none."
        )
        raise ValueError(
            f"{problem} Give the name of a card, such as 'NVIDIA A100-SXM4-80GB', a size of "
            "memory, such as '24GiB', or 'cpu'."
        )
    device = torch.device("cuda") if device is None else device
    if device.type != "cuda" or torch.version.hip is not None:
        kind = "cuda (ROCm)" if device.type == "cuda" else device.type
        raise PredictionError(
            f"Cannot predict for a device of type {kind}: only CUDA devices and CPUs are known. "
            "Name a card, or 'cpu'."
        )
    if device.index is not None and device.index >= (num_devices := torch.cuda.device_count()):
        known = "'cuda:0'" if num_devices == 1 else f"'cuda:0' to 'cuda:{num_devices - 1}'"
        raise ValueError(
            f"{str(device)!r} is not on this machine, whose CUDA devices are {known}. Give one of "
            "these, or name a card."
        )
    spec = replace(_spec(torch.cuda.get_device_properties(device)), local_index=_index_of(device))
    if limit_bytes(device) is None:
        return spec
    outside = outside_memory(spec, local_memory(spec))
    outside_bytes = outside.expected_bytes if outside else 0
    capacity_bytes = usable_bytes(device, spec.capacity_bytes, outside_bytes)
    assert capacity_bytes is not None
    return replace(spec, capacity_bytes=capacity_bytes)


def _index_of(device: torch.device) -> int:
    if device.index is not None:
        return device.index
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0


def _spec(properties: Any) -> DeviceSpec:
    """The catalogue's card of this name, or the closest older one with this device's properties."""
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
            f"{properties.name} is not in the catalogue: its clock rates and its number of "
            f"resident thread blocks are assumed to be those of {like.name}.",
        ),
    )


def default_device(modules: Iterable[torch.nn.Module]) -> torch.device:
    """The device of the first parameter off `meta`, else the current accelerator, else the CPU."""
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
