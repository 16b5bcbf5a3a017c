"""`memcallback devices`: NVML in the hands of a stand-in, and a machine without one."""

import io
import json
import os
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from memcallback.cli import main
from memcallback.commands import machine
from memcallback.core.units import GiB, MiB
from memcallback.devices import nvml, usage
from memcallback.devices.usage import device_states

GONE = 4_000_000  # above the largest process number


class NVMLError(Exception):
    pass


class Driver:
    """A pynvml with devices that answer what they are given, and refuse the rest."""

    nvmlMemory_v2 = 2
    NVML_TEMPERATURE_GPU = 0
    NVMLError_FunctionNotFound = NVMLError

    def __init__(self, *devices, init_error=None):
        self.devices, self.init_error = devices, init_error

    def nvmlInit(self):
        if self.init_error:
            raise self.init_error

    def nvmlDeviceGetCount(self):
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.devices[index]

    def nvmlDeviceGetMemoryInfo(self, handle, version=1):
        return SimpleNamespace(total=self.asked(handle, "total"), used=self.asked(handle, "used"))

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=used)
            for pid, used in self.asked(handle, "processes")
        ]

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=self.asked(handle, "utilisation"))

    def nvmlDeviceGetMigMode(self, handle):
        return (1 if "slices" in handle else 0, 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, number):
        return self.asked(handle, "slices")[number]

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return self.asked(handle, "temperature")

    def __getattr__(self, name):
        keys = {
            "nvmlDeviceGetName": "name",
            "nvmlDeviceGetUUID": "uuid",
            "nvmlDeviceGetPowerUsage": "power",
        }
        if name not in keys:  # Python 3.13 asks a module that it imports for its `__spec__`
            raise AttributeError(name)
        key = keys[name]
        return lambda handle: self.asked(handle, key)

    def asked(self, handle, key):
        if key not in handle:
            raise NVMLError("Not Supported")
        return handle[key]


def card(**changes):
    figures = {
        "name": "NVIDIA A100",
        "uuid": "GPU-1",
        "total": 40 * GiB,
        "used": 10 * GiB,
        "processes": [(os.getpid(), 9 * GiB)],
    }
    return {**figures, "utilisation": 87, "temperature": 61, "power": 250_400, **changes}


@pytest.fixture
def driver(monkeypatch):
    def with_devices(*devices, **options):
        nvml.initialised.cache_clear()
        monkeypatch.setitem(sys.modules, "pynvml", Driver(*devices, **options))

    yield with_devices
    nvml.initialised.cache_clear()


def test_every_device_is_shown_with_all_that_the_driver_tells(driver):
    driver(card(), card(uuid=b"GPU-2", used=300 * MiB, processes=[]))
    first, second = device_states().devices
    assert (first.index, first.name, first.uuid) == ("0", "NVIDIA A100", "GPU-1")
    assert (first.capacity_bytes, first.used_bytes) == (40 * GiB, 10 * GiB)
    assert (first.utilisation_pct, first.temperature_celsius, first.power_watts) == (87, 61, 250.4)
    assert (second.index, second.uuid, second.processes, second.notes) == ("1", "GPU-2", (), ())


def test_a_process_has_its_user_and_command_where_they_are_visible(driver):
    driver(card(processes=[(GONE, None), (os.getpid(), 9 * GiB)]))
    own, other = device_states().devices[0].processes
    here = psutil.Process()
    assert (own.pid, own.user, own.command, own.used_bytes) == (
        os.getpid(),
        here.username(),
        " ".join(here.cmdline()),
        9 * GiB,
    )
    assert (other.pid, other.user, other.command, other.used_bytes) == (GONE, None, None, None)
    text = device_states().to_text()
    assert "hidden" in text
    assert here.username() in text


def test_what_the_driver_does_not_tell_is_not_made_up(driver):
    driver({"name": "NVIDIA T4"})
    (device,) = device_states().devices
    assert device.name == "NVIDIA T4"
    assert (
        device.uuid,
        device.capacity_bytes,
        device.used_bytes,
        device.power_watts,
        device.processes,
    ) == (None, None, None, None, None)
    assert device.notes == ("its processes cannot be listed.",)
    assert "n/a" in device_states().to_text()


def test_a_container_that_hides_processes_is_told_of(driver):
    driver(card(processes=[]))
    assert device_states().devices[0].notes == (
        "10.00 GiB in use, but no process listed: processes of other containers are hidden from "
        "this one.",
    )


def test_a_mig_slice_is_shown_as_one(driver):
    slices = {
        number: card(name=f"NVIDIA A100 MIG 3g.20gb {number}", total=20 * GiB, used=GiB)
        for number in (0, 2)
    }
    driver(card(slices=slices, processes=[]))
    whole, first, second = device_states().devices
    assert whole.notes == ("divided into 2 MIG slices, which run the processes.",)
    assert [(one.index, one.capacity_bytes) for one in (first, second)] == [
        ("0.0", 20 * GiB),
        ("0.2", 20 * GiB),
    ]
    assert first.notes == ("a MIG slice of device 0.",)
    assert len(first.processes) == 1


def test_without_nvml_pytorch_tells_of_the_devices_that_it_sees(driver, monkeypatch):
    driver(init_error=NVMLError("Driver Not Loaded"))
    monkeypatch.setattr(usage, "has_device_file", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="NVIDIA L4", uuid="3")
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20 * GiB, 22 * GiB))
    states = device_states()
    (device,) = states.devices
    assert (device.name, device.used_bytes, device.processes) == ("NVIDIA L4", 2 * GiB, None)
    text = (
        "NVML is not available: NVMLError: Driver Not Loaded. PyTorch reports the devices, but "
        "not their processes."
    )
    assert states.unavailable == text
    assert text in " ".join(states.to_text().split())


def test_on_a_machine_without_devices_that_is_said(driver, monkeypatch, capsys):
    driver(init_error=NVMLError("Driver Not Loaded"))
    monkeypatch.setattr(usage, "has_device_file", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["devices"]) == 0
    text = (
        "No device found. NVML is not available: NVMLError: Driver Not Loaded. PyTorch finds no "
        "CUDA device.\n"
    )
    assert capsys.readouterr().out == text
    assert main(["devices", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"] == []


def test_as_json_every_figure_has_its_unit(driver, capsys):
    driver(card())
    assert main(["devices", "--json"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert (device["used_bytes"], device["power_watts"], device["processes"][0]["used_bytes"]) == (
        10 * GiB,
        250.4,
        9 * GiB,
    )


def test_watching_shows_them_until_it_is_interrupted(driver, monkeypatch, capsys):
    driver(card())
    waited = []

    def wait(seconds):
        waited.append(seconds)
        if len(waited) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(machine, "sleep", wait)
    assert main(["devices", "--watch", "5", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert waited == [5, 5, 5]
    assert [json.loads(line)["devices"][0]["name"] for line in lines] == ["NVIDIA A100"] * 3


@pytest.mark.parametrize("options", [[], ["--watch", "5"]])
def test_a_console_of_plain_letters_gets_question_marks(driver, monkeypatch, options):
    def interrupt(_):
        raise KeyboardInterrupt

    driver(card())
    written = io.BytesIO()
    monkeypatch.setattr(machine, "sleep", interrupt)
    monkeypatch.setattr(
        sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True)
    )
    assert main(["devices", *options]) == 0
    assert b" ?C" in written.getvalue()


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "nan"])
def test_seconds_that_are_none_are_refused(seconds, capsys):
    assert main(["devices", f"--watch={seconds}"]) == 2
    assert f"--watch {seconds!r} is not a number of seconds above 0" in capsys.readouterr().err
