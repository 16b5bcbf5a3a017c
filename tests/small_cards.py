"""Cards of a known architecture, with as little memory as a test needs."""

from dataclasses import replace

from memcallback.devices.catalogue import DeviceSpec, find_device


def card_of(size_bytes: int, like: str = "A100") -> DeviceSpec:
    """A card of a size with the architecture of a known one."""
    return replace(find_device(like), capacity_bytes=size_bytes, caveats=())
