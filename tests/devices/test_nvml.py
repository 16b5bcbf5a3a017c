"""NVML and CUDA in the hands of a stand-in: every way in which a driver can refuse."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from memcallback.core.units import GiB
from memcallback.devices import nvml
from memcallback.devices.memory import cuda_memory

UUID = "8a3f2c9e-0000-1111-2222-333344445555"


class NVMLError(Exception):
    pass


class NVMLError_FunctionNotFound(NVMLError):
    pass


class NVMLError_NoPermission(NVMLError):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class Driver:
    """A pynvml with one device."""

    nvmlMemory_v2 = 2
    NVML_TEMPERATURE_GPU = 0
    NVMLError_FunctionNotFound = NVMLError_FunctionNotFound

    def __init__(self, processes=(), *, init_error=None, list_error=None, only_first_version=False):
        self.processes, self.init_error, self.list_error, self.only_first_version = (
            processes,
            init_error,
            list_error,
            only_first_version,
        )
        self.asked_for = None

    def nvmlInit(self):
        if self.init_error:
            raise self.init_error

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.asked_for = uuid
        return "handle"

    def nvmlDeviceGetMemoryInfo(self, handle, version=1):
        if version == 2 and self.only_first_version:
            raise NVMLError_FunctionNotFound("Function Not Found")
        return SimpleNamespace(used=10 * GiB)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=87)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        if self.list_error:
            raise self.list_error
        return 54

    def nvmlDeviceGetPowerUsage(self, handle):
        return 412_500

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        if self.list_error:
            raise self.list_error
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes]


@pytest.fixture
def read(monkeypatch):
    def with_driver(driver):
        nvml.initialised.cache_clear()
        monkeypatch.setitem(sys.modules, "pynvml", driver)
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda _: SimpleNamespace(uuid=UUID, total_memory=24 * GiB),
        )
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20 * GiB, 24 * GiB))
        return cuda_memory(torch.device("cuda", 0))

    yield with_driver
    nvml.initialised.cache_clear()


def test_the_shares_of_this_process_and_of_others_are_told_apart(read):
    driver = Driver([(os.getpid(), 6 * GiB), (1, 3 * GiB), (2, GiB)])
    memory = read(driver)
    assert driver.asked_for == f"GPU-{UUID}"
    assert (memory.capacity_bytes, memory.used_bytes) == (24 * GiB, 10 * GiB)
    assert (memory.this_process_bytes, memory.other_processes_bytes) == (6 * GiB, 4 * GiB)
    assert memory.unavailable is None


def test_without_pynvml_the_cuda_driver_tells_what_it_can(read):
    memory = read(None)
    assert (memory.capacity_bytes, memory.used_bytes) == (24 * GiB, 4 * GiB)
    assert memory.this_process_bytes is None
    assert (
        "NVML is not available: the module pynvml is missing (pip install nvidia-ml-py)"
        in memory.unavailable
    )


def test_without_a_driver_the_reason_is_said(read):
    memory = read(Driver(init_error=NVMLError_LibraryNotFound("NVML Shared Library Not Found")))
    assert memory.used_bytes == 4 * GiB
    assert "NVML Shared Library Not Found" in memory.unavailable


def test_without_permission_only_the_split_by_process_is_missing(read):
    memory = read(Driver(list_error=NVMLError_NoPermission("Insufficient Permissions")))
    assert memory.used_bytes == 10 * GiB
    assert memory.this_process_bytes is None
    assert memory.other_processes_bytes is None
    assert "memory by process is unknown" in memory.unavailable
    assert "Insufficient Permissions" in memory.unavailable


def test_in_a_container_that_hides_processes_the_shares_are_unknown(read):
    memory = read(Driver([(999999, 6 * GiB)]))
    assert memory.this_process_bytes is None
    assert memory.other_processes_bytes is None
    assert "not in NVML's list" in memory.unavailable


def test_a_process_without_a_figure_makes_the_others_unknown_and_not_zero(read):
    memory = read(Driver([(os.getpid(), 6 * GiB), (1, None)]))
    assert memory.this_process_bytes == 6 * GiB
    assert memory.other_processes_bytes is None


def test_an_old_driver_gives_the_first_version_of_its_figure(read):
    assert read(Driver([(os.getpid(), GiB)], only_first_version=True)).used_bytes == 10 * GiB


def test_the_chip_is_told_too_and_what_is_refused_is_none(read):
    memory = read(Driver([(os.getpid(), GiB)]))
    assert (memory.utilisation_pct, memory.temperature_celsius, memory.power_watts) == (
        87,
        54,
        412.5,
    )
    memory = read(
        Driver([(os.getpid(), GiB)], list_error=NVMLError_NoPermission("Insufficient Permissions"))
    )
    assert (memory.utilisation_pct, memory.temperature_celsius, memory.power_watts) == (
        87,
        None,
        412.5,
    )
    assert memory.used_bytes == 10 * GiB
