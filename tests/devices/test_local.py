"""CUDA devices of this machine, as PyTorch describes them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from memcallback.core.errors import PredictionError
from memcallback.core.step_memory import DeviceMemory
from memcallback.core.units import GiB, MiB
from memcallback.devices import local
from memcallback.devices.catalogue import find_device
from memcallback.devices.local import LocalMemory, local_memory, outside_memory, resolve


def properties(**changes):
    figures = {
        "name": "NVIDIA H100 PCIe",
        "major": 9,
        "minor": 0,
        "total_memory": 79 * GiB,
        "multi_processor_count": 114,
        "shared_memory_per_block": 49_152,
        "shared_memory_per_block_optin": 232_448,
        "max_threads_per_multi_processor": 2048,
        "L2_cache_size": 50 * MiB,
    }
    return SimpleNamespace(**(figures | changes))


@pytest.fixture
def card(monkeypatch):
    """A CUDA device of this machine, as PyTorch describes it."""

    def put(**changes):
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: properties(**changes)
        )

    return put


@pytest.mark.parametrize(
    ("given", "index"),
    [("cuda", 0), ("cuda:1", 1), (torch.device("cuda"), 0), (torch.device("cuda", 1), 1)],
)
def test_a_cuda_device_is_that_of_this_machine(given, index, card):
    card(name="NVIDIA H100 PCIe")
    assert resolve(given) == resolve(torch.device("cuda", index))


def test_a_cuda_device_beyond_those_of_this_machine_is_said_so(card):
    card()
    with pytest.raises(
        ValueError,
        match=r"'cuda:2' is not on this machine, whose CUDA devices are 'cuda:0' to 'cuda:1'\.",
    ):
        resolve(torch.device("cuda", 2))


def test_pytorchs_cpu_is_a_cpu():
    assert resolve(torch.device("cpu")) == find_device("cpu")
    with pytest.raises(PredictionError, match="a device of type mps"):
        resolve(torch.device("mps"))


def test_a_card_of_the_catalogue_has_its_figures_and_the_real_capacity(card):
    card()
    here, catalogue = resolve(None), find_device("NVIDIA H100 PCIe")
    assert here.capacity_bytes == 79 * GiB
    assert here.clock_khz == catalogue.clock_khz
    assert here.caveats == ()


def test_a_card_that_the_catalogue_does_not_know_is_like_the_next_older_one_and_says_so(card):
    card(name="NVIDIA X", major=9, minor=1, multi_processor_count=99)
    here = resolve(None)
    assert (here.name, here.compute_capability, here.num_multiprocessors) == (
        "NVIDIA X",
        (9, 1),
        99,
    )
    assert here.clock_khz == find_device("H200").clock_khz
    assert here.caveats[0].startswith("NVIDIA X is not in the catalogue")
    card(name="Old", major=6, minor=1)
    assert resolve(None).compute_capability == (6, 1)


def test_a_device_that_is_neither_cuda_nor_cpu_is_refused():
    with pytest.raises(PredictionError, match="a device of type mps"):
        resolve(torch.device("mps"))


def test_rocm_is_not_cuda(card, monkeypatch):
    card()
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(PredictionError, match=r"a device of type cuda \(ROCm\)"):
        resolve(None)


def test_a_local_device_knows_what_others_use_of_it_and_another_one_does_not(card, monkeypatch):
    card()
    here = resolve("cuda:1")
    seen = []
    memory = DeviceMemory(
        capacity_bytes=79 * GiB, used_bytes=9 * GiB, reserved_bytes=GiB, other_processes_bytes=GiB
    )
    monkeypatch.setattr(local, "device_memory", lambda device: seen.append(device) or memory)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(local, "has_cuda_context", lambda index: index == 1)
    assert outside_memory(here, local_memory(here)) == (8 * GiB, None)
    assert resolve(here) is here
    assert seen == [torch.device("cuda", 1)]
    for other in ("A100", "24GiB", "cpu"):
        device = resolve(other)
        assert outside_memory(device, local_memory(device)) is None


@pytest.mark.parametrize("others", [GiB, None], ids=["by process", "whole device only"])
def test_a_context_that_is_not_open_yet_is_assumed_and_not_measured(card, others):
    card()
    here = resolve("cuda:1")
    memory = DeviceMemory(
        capacity_bytes=79 * GiB, used_bytes=GiB, reserved_bytes=0, other_processes_bytes=others
    )
    assert outside_memory(here, LocalMemory(memory, has_context=False)) == (
        GiB + here.outside_bytes,
        GiB + here.most_outside_bytes,
    )
    # Where NVML does not know processes either.
    assert outside_memory(here, LocalMemory(memory, has_context=True)) == (
        max(GiB, (others or 0) + here.outside_bytes),
        None,
    )


def test_a_limit_of_the_allocator_leaves_room_for_the_largest_context(card):
    card()
    here = resolve("cuda:1")
    memory = DeviceMemory(
        capacity_bytes=79 * GiB, used_bytes=GiB, reserved_bytes=0, other_processes_bytes=GiB
    )
    unopened = LocalMemory(memory, has_context=False)
    expected, most = GiB + here.outside_bytes, GiB + here.most_outside_bytes
    # As after torch.cuda.set_per_process_memory_fraction: the allocator may have 12 GiB.
    limited = replace(here, capacity_bytes=12 * GiB + expected)
    assert outside_memory(limited, unopened) == (expected, expected)
    # So much of it that not all of the largest context is beside the limit.
    limited = replace(here, capacity_bytes=79 * GiB - (most - expected) // 2)
    assert outside_memory(limited, unopened) == (expected, most - (most - expected) // 2)


def test_a_capacity_is_asked_for_where_it_is_needed():
    assert resolve("cpu").capacity_bytes is None
    with pytest.raises(ValueError, match=r"'cpu' has no known memory size\. Give a card or a size"):
        resolve("cpu", needs_capacity=True)
