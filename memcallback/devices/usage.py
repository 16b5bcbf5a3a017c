"""The devices of this machine and their processes, now: `memcallback devices`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from memcallback.core.document import UNKNOWN, Document, Printable, Table
from memcallback.core.units import MiB, format_bytes
from memcallback.devices.nvml import (
    chip_state,
    handle_of,
    has_device_file,
    initialised,
    query,
    reason_of,
    used_bytes,
)

#: A driver keeps less than this of an idle device. More, with no process listed, belongs to hidden
#: processes.
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
        user: Its owner; None if hidden (another container, no permission).
        command: Its command line; None if hidden.
        used_bytes: The device memory it uses; None if the driver does not report it.
    """

    pid: int
    user: str | None
    command: str | None
    used_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """A device, or a MIG slice of one, now. Values that the driver does not report are None.

    Attributes:
        index: Its number in the driver's order, which `CUDA_VISIBLE_DEVICES` does not change; for a
            MIG slice the device's and its own, such as 0.1.
        name: The name.
        uuid: Its UUID.
        capacity_bytes: All its memory.
        used_bytes: Used memory, without the driver's own.
        utilisation_pct: The recent share of time in which a kernel ran, 0 to 100.
        temperature_celsius: The temperature of the chip.
        power_watts: The power draw.
        processes: The processes that compute on it, largest first; None if they cannot be listed.
        notes: Notes on it, one sentence each.
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
    """All devices of this machine that are visible.

    Attributes:
        devices: In the driver's order.
        unavailable: What is missing, and why; None if nothing is.
    """

    devices: tuple[DeviceState, ...]
    unavailable: str | None = None

    def document(self) -> Document:
        """The devices, their processes, and notes on them."""
        if not self.devices:
            return Document(f"No device found. {self.unavailable or 'The driver has none.'}")
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
        """Data for JSON; every key names its unit."""
        return asdict(self)


def device_states() -> DeviceStates:
    """Read all devices. Without a driver the result says so; nothing is raised."""
    try:
        nvml = initialised()
        numbers = range(nvml.nvmlDeviceGetCount())
    except Exception as error:  # drivers fail in many ways
        return _devices_of_torch(f"NVML is not available: {reason_of(error).rstrip('.')}.")
    return DeviceStates(
        devices=tuple(state for index in numbers for state in _states_at(nvml, index))
    )


def _states_at(nvml: Any, index: int) -> list[DeviceState]:
    """A device and its slices; a lost one is listed with the reason."""
    try:
        return _states(nvml, nvml.nvmlDeviceGetHandleByIndex(index), index)
    except Exception as error:  # a device can fall off the bus while others work
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
    """The processes on one device; none if NVML fails. Other devices are not queried."""
    try:
        nvml = initialised()
        return _processes(nvml, handle_of(nvml, uuid))
    except Exception:  # drivers fail in many ways
        return ()


def _states(nvml: Any, handle: Any, index: int) -> list[DeviceState]:
    """A device, and its slices if it is divided."""
    mig = query(lambda: nvml.nvmlDeviceGetMigMode(handle))
    if mig is None or not mig[0]:
        return [_state(nvml, handle, str(index))]
    numbers = range(query(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0)
    handles = [
        (number, query(partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)))
        for number in numbers
    ]
    slices = [
        _state(nvml, mig_handle, f"{index}.{number}", (f"a MIG slice of device {index}.",))
        for number, mig_handle in handles
        if mig_handle is not None
    ]
    note = (
        f"divided into {len(slices)} MIG slice{'' if len(slices) == 1 else 's'}, which run the "
        "processes."
    )
    return [_state(nvml, handle, str(index), (note,)), *slices]


def _state(nvml: Any, handle: Any, index: str, notes: tuple[str, ...] = ()) -> DeviceState:
    used = query(lambda: used_bytes(nvml, handle))
    processes = query(lambda: _processes(nvml, handle))
    if processes is None:
        notes += ("its processes cannot be listed.",)
    elif not processes and not notes and used is not None and used > _IDLE_BYTES:
        notes += (
            f"{format_bytes(used)} in use, but no process listed: processes of other containers "
            "are hidden from this one.",
        )
    return DeviceState(
        index=index,
        name=query(lambda: _text(nvml.nvmlDeviceGetName(handle))) or UNKNOWN,
        uuid=query(lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
        capacity_bytes=query(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)),
        used_bytes=used,
        processes=processes,
        notes=notes,
        **asdict(chip_state(nvml, handle)),
    )


def _processes(nvml: Any, handle: Any) -> tuple[DeviceProcess, ...]:
    import psutil

    processes = []
    for listed in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
        user, command = None, None
        try:
            process = psutil.Process(listed.pid)
            user, command = process.username(), " ".join(process.cmdline()) or process.name()
        except psutil.Error:
            pass  # it belongs to another container or user, or has just ended
        processes.append(
            DeviceProcess(
                pid=listed.pid, user=user, command=command, used_bytes=listed.usedGpuMemory
            )
        )
    return tuple(sorted(processes, key=lambda process: -(process.used_bytes or 0)))


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _devices_of_torch(reason: str) -> DeviceStates:
    if not has_device_file():  # PyTorch is seconds to import
        return DeviceStates(devices=(), unavailable=f"{reason} This machine has no GPU driver.")
    import torch

    if not torch.cuda.is_available():
        return DeviceStates(devices=(), unavailable=f"{reason} PyTorch finds no CUDA device.")
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
        unavailable=f"{reason} PyTorch reports the devices, but not their processes.",
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
    command = process.command or "hidden"
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
