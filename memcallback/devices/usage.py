"""Per-device table of processes (`memcallback devices`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from memcallback.core.document import UNKNOWN, Document, Printable, Table
from memcallback.core.units import MiB, format_bytes
from memcallback.devices.nvml import (
    asked,
    chip_state,
    handle_of,
    initialised,
    reason_of,
    used_bytes,
)

#: What a driver keeps of a device that nobody uses is below this; more without a process is that of
#: processes that are not shown.
_IDLE_BYTES = 1024 * MiB
_LONGEST_COMMAND = 60
_DEVICE_COLUMNS = (
    "device",
    "name",
    "used",
    "capacity",
    "share",
    "utilisation",
    "temperature",
    "power",
)
_PROCESS_COLUMNS = ("device", "process", "user", "used", "command")


@dataclass(frozen=True, kw_only=True)
class DeviceProcess:
    """A process that computes on a device.

    Attributes:
        pid: Its number, as the driver knows it.
        user: Whose it is; None if it is not visible from here (another container, no permission).
        command: Its command line; None likewise.
        used_bytes: What it has of the device's memory; None if the driver does not tell.
    """

    pid: int
    user: str | None
    command: str | None
    used_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """A device, or a slice of one, at this moment. What the driver does not tell is None.

    Attributes:
        index: Its number in the driver's order, which `CUDA_VISIBLE_DEVICES` does not change; of a
            MIG slice that of the device and its own, as 0.1.
        name: The name.
        uuid: Its UUID.
        capacity_bytes: Its memory.
        used_bytes: What is used of it, without what the driver keeps for itself.
        utilisation_pct: The share of the last moments in which a kernel ran, 0 to 100.
        temperature_celsius: The temperature of the chip.
        power_watts: What it draws.
        processes: The processes that compute on it, by memory; None if they cannot be listed.
        notes: What is particular, one sentence each.
    """

    index: str
    name: str
    uuid: str | None
    capacity_bytes: int | None
    used_bytes: int | None
    utilisation_pct: int | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    processes: tuple[DeviceProcess, ...] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DeviceStates(Printable):
    """All devices that are seen.

    Attributes:
        devices: In the driver's order.
        unavailable: What cannot be seen, and why; None if nothing is missing.
    """

    devices: tuple[DeviceState, ...]
    unavailable: str | None = None

    def document(self) -> Document:
        """The devices, their processes, and notes on them."""
        if not self.devices:
            return Document(f"No device is seen. {self.unavailable or 'The driver has none.'}")
        devices = Table(
            title="Devices of this machine",
            columns=_DEVICE_COLUMNS,
            rows=tuple(map(_device_row, self.devices)),
            left_columns=frozenset({"name"}),
        )
        processes = Table(
            title="Processes",
            columns=_PROCESS_COLUMNS,
            rows=tuple(
                _process_row(device, process)
                for device in self.devices
                for process in device.processes or ()
            ),
            left_columns=frozenset({"user", "command"}),
        )
        return Document(
            devices,
            *([processes] if processes.rows else []),
            *(f"Device {device.index}: {note}" for device in self.devices for note in device.notes),
            *([self.unavailable] if self.unavailable else []),
        )

    def to_dict(self) -> dict[str, Any]:
        """Data that json writes, the unit in every key."""
        return asdict(self)


def device_states() -> DeviceStates:
    """Ask for all devices; nothing is raised for want of a driver."""
    try:
        nvml = initialised()
        numbers = range(nvml.nvmlDeviceGetCount())
    except Exception as error:  # whatever is wrong with a driver
        return _seen_by_torch(f"NVML is not available: {reason_of(error).rstrip('.')}.")
    return DeviceStates(
        devices=tuple(state for index in numbers for state in _states_at(nvml, index))
    )


def _states_at(nvml: Any, index: int) -> list[DeviceState]:
    """A device and its slices; of one that is lost, that it is."""
    try:
        return _states(nvml, nvml.nvmlDeviceGetHandleByIndex(index), index)
    except Exception as error:  # one that has fallen off the bus, among others that work
        note = f"does not answer: {reason_of(error)}."
        return [
            DeviceState(
                index=str(index),
                name=UNKNOWN,
                uuid=None,
                capacity_bytes=None,
                used_bytes=None,
                notes=(note,),
            )
        ]


def processes_on(uuid: str) -> tuple[DeviceProcess, ...]:
    """The processes that NVML shows on one device; none where it does not answer. No other device
    is asked for anything.
    """
    try:
        nvml = initialised()
        return _processes(nvml, handle_of(nvml, uuid))
    except Exception:  # whatever is wrong with a driver
        return ()


def _states(nvml: Any, handle: Any, index: int) -> list[DeviceState]:
    """A device, and its slices if it is divided."""
    mig = asked(lambda: nvml.nvmlDeviceGetMigMode(handle))
    if mig is None or not mig[0]:
        return [_state(nvml, handle, str(index))]
    numbers = range(asked(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0)
    found = [
        (number, asked(partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)))
        for number in numbers
    ]
    slices = [
        _state(nvml, one, f"{index}.{number}", (f"a MIG slice of device {index}.",))
        for number, one in found
        if one is not None
    ]
    note = f"divided into {len(slices)} MIG slice{'' if len(slices) == 1 else 's'}, which have the processes."
    return [_state(nvml, handle, str(index), (note,)), *slices]


def _state(nvml: Any, handle: Any, index: str, notes: tuple[str, ...] = ()) -> DeviceState:
    used = asked(lambda: used_bytes(nvml, handle))
    processes = asked(lambda: _processes(nvml, handle))
    if processes is None:
        notes += ("its processes cannot be listed.",)
    elif not processes and not notes and used is not None and used > _IDLE_BYTES:
        notes += (
            f"{format_bytes(used)} are used and no process is listed: those of other containers are hidden from this one.",
        )
    return DeviceState(
        index=index,
        name=asked(lambda: _text(nvml.nvmlDeviceGetName(handle))) or UNKNOWN,
        uuid=asked(lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
        capacity_bytes=asked(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)),
        used_bytes=used,
        processes=processes,
        notes=notes,
        **asdict(chip_state(nvml, handle)),
    )


def _processes(nvml: Any, handle: Any) -> tuple[DeviceProcess, ...]:
    import psutil

    found = []
    for listed in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
        user, command = None, None
        try:
            process = psutil.Process(listed.pid)
            user, command = process.username(), " ".join(process.cmdline()) or process.name()
        except psutil.Error:
            pass  # of another container or user, or just gone
        found.append(
            DeviceProcess(
                pid=listed.pid, user=user, command=command, used_bytes=listed.usedGpuMemory
            )
        )
    return tuple(sorted(found, key=lambda one: -(one.used_bytes or 0)))


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _seen_by_torch(why: str) -> DeviceStates:
    import torch

    if not torch.cuda.is_available():
        return DeviceStates(devices=(), unavailable=f"{why} PyTorch sees no CUDA device.")
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        uuid = f"GPU-{properties.uuid}"
        devices.append(
            DeviceState(
                index=str(index),
                name=properties.name,
                uuid=uuid,
                capacity_bytes=total,
                used_bytes=total - free,
            )
        )
    return DeviceStates(
        devices=tuple(devices),
        unavailable=f"{why} These are the devices that PyTorch sees, without their processes.",
    )


def _device_row(device: DeviceState) -> tuple[str, ...]:
    used, capacity = device.used_bytes, device.capacity_bytes
    return (
        device.index,
        device.name,
        _bytes(used),
        _bytes(capacity),
        f"{100 * used / capacity:.1f} %" if used is not None and capacity else "",
        UNKNOWN if device.utilisation_pct is None else f"{device.utilisation_pct} %",
        UNKNOWN if device.temperature_celsius is None else f"{device.temperature_celsius} °C",
        UNKNOWN if device.power_watts is None else f"{device.power_watts:.0f} W",
    )


def _process_row(device: DeviceState, process: DeviceProcess) -> tuple[str, ...]:
    command = process.command or "not visible from here"
    command = (
        command if len(command) <= _LONGEST_COMMAND else f"{command[: _LONGEST_COMMAND - 3]}..."
    )
    return (
        device.index,
        str(process.pid),
        process.user or UNKNOWN,
        _bytes(process.used_bytes),
        command,
    )


def _bytes(num_bytes: int | None) -> str:
    return UNKNOWN if num_bytes is None else format_bytes(num_bytes)
