import mmap
import threading

import pytest
import torch
from torch import nn

from memcallback.core.control_groups import GroupMemory
from memcallback.core.errors import MemoryWarning
from memcallback.core.types import Category
from memcallback.core.units import KiB, MiB
from memcallback.devices.memory import cpu_memory, resident_bytes
from memcallback.devices.meters import CpuMeter
from memcallback.step.holdings import holdings

CPU = torch.device("cpu")


@pytest.fixture
def read():
    """Two boundaries around an action, with what a model and its optimizer hold; gives the second
    reading.
    """

    def between(action, model=None, optimizers=()):
        meter = CpuMeter()
        held = lambda: holdings([model or nn.Identity()], optimizers, None, CPU)  # noqa: E731
        meter.begin()
        meter.read(held())
        kept = action()
        meter.read(held())
        stats = meter.end()
        assert len(stats) == 2
        del kept
        return stats

    return between


def test_bytes_alive_are_those_allocated_and_not_released(read):
    start, end = read(lambda: [torch.empty(1000), torch.empty(MiB, dtype=torch.uint8)])
    assert end.allocated_bytes - start.allocated_bytes == 4000 + MiB


def test_what_came_and_went_is_in_the_peak_alone(read):
    def action():
        torch.empty(5 * MiB, dtype=torch.uint8)
        return torch.empty(MiB, dtype=torch.uint8)

    start, end = read(action)
    assert end.allocated_bytes - start.allocated_bytes == MiB
    assert end.peak_allocated_bytes - start.allocated_bytes == 5 * MiB


def test_what_the_model_holds_counts_from_the_start(read):
    model = nn.Linear(100, 100, bias=False)
    start, _ = read(lambda: None, model)
    assert start.allocated_bytes == 40_000
    assert start.by_category[Category.PARAMETER] == 40_000
    assert start.rest_bytes == 0


def test_gradients_older_than_the_step_count_until_they_are_cleared(read):
    model = nn.Linear(100, 100, bias=False)
    model(torch.ones(1, 100)).sum().backward()
    start, end = read(model.zero_grad, model)
    assert start.allocated_bytes == 80_000
    assert end.allocated_bytes == 40_000


def test_a_gradient_that_takes_the_place_of_a_cleared_one_counts_once(read):
    model = nn.Linear(100, 100, bias=False)
    batch = torch.ones(1, 100)
    model(batch).sum().backward()

    def action():
        model.zero_grad()
        model(batch).sum().backward()

    start, end = read(action, model)
    assert start.allocated_bytes == end.allocated_bytes == 80_000


def test_an_address_that_another_thread_released_counts_once_when_it_is_used_again(read):
    size = 64 * KiB
    seen = []

    def action():
        for _ in range(100):
            box = [torch.empty(size, dtype=torch.uint8)]
            seen.append(box[0].data_ptr())
            thread = threading.Thread(target=box.clear)
            thread.start()
            thread.join()

    start, end = read(action)
    # The profile of this thread does not see a release in another.
    assert end.allocated_bytes - start.allocated_bytes == len(set(seen)) * size
    assert len(set(seen)) < 100


def test_boundaries_agree_with_the_sizes_of_the_tensors_that_live(read):
    model = nn.Sequential(nn.Linear(50, 70), nn.ReLU(), nn.Linear(70, 30))
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.ones(16, 50)
    model(batch).sum().backward()
    optimizer.step()

    def action():
        optimizer.zero_grad()
        return model(batch)

    _, end = read(action, model, [optimizer])
    parameters = sum(p.numel() for p in model.parameters()) * 4
    steps = 4 * 4
    # Kept for the backward pass: the ReLU's output (the linear layer's own is released) and the
    # result.
    assert end.allocated_bytes == 3 * parameters + steps + (16 * 70 + 16 * 30) * 4


def test_while_somebody_else_profiles_only_the_resident_size_is_read(read):
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profile as profiler, pytest.warns(MemoryWarning, match="A profile of PyTorch is running"):
        start, end = read(lambda: torch.ones(1000))
    assert start.allocated_bytes is None
    assert end.allocated_bytes is None
    assert end.resident_bytes > 0
    assert any(event.key == "aten::ones" for event in profiler.key_averages())


def test_without_a_model_only_the_resident_size_is_read():
    meter = CpuMeter()
    meter.begin()
    meter.read(None)
    (stats,) = meter.end()
    assert stats.allocated_bytes is None
    assert stats.resident_bytes > MiB


def test_the_resident_peak_belongs_to_its_own_phase():
    meter = CpuMeter()
    meter.begin()
    meter.read(None)
    # A mapping of its own: what malloc hands out may be memory that was freed before and is
    # resident still.
    with mmap.mmap(-1, 64 * MiB) as touched:
        for page in range(0, 64 * MiB, mmap.PAGESIZE):
            touched[page] = 1
    meter.read(None)
    meter.read(None)
    _, with_it, after = meter.end()
    if with_it.peak_resident_bytes is None:
        pytest.skip("no /proc/self/clear_refs here")
    assert with_it.peak_resident_bytes - after.peak_resident_bytes > 32 * MiB


def test_the_profiler_is_left_as_it_was_found():
    meter = CpuMeter()
    meter.begin()
    assert torch.autograd._profiler_enabled()
    meter.end()
    assert not torch.autograd._profiler_enabled()


def test_the_machines_memory_has_a_capacity_and_this_process_is_within_it():
    memory = cpu_memory()
    resident, peak = resident_bytes()
    assert 0 < resident <= memory.capacity_bytes
    assert peak >= resident - MiB
    assert memory.used_bytes > 0


@pytest.mark.parametrize("used_bytes", [10 * MiB, 3000 * MiB])
def test_of_a_container_with_a_limit_capacity_and_use_are_its_own(monkeypatch, used_bytes):
    group = GroupMemory(limit_bytes=2000 * MiB, used_bytes=used_bytes)
    monkeypatch.setattr("memcallback.devices.memory.group_memory", lambda: group)
    memory = cpu_memory()
    assert memory.capacity_bytes == 2000 * MiB
    assert memory.used_bytes == min(used_bytes, 2000 * MiB)
    assert memory.other_processes_bytes <= memory.used_bytes
