import gc
import threading

import pytest
import torch
from torch import nn

from memcallback.devices import allocation_profile, other_profiles
from memcallback.devices.allocation_profile import AllocationProfile
from memcallback.devices.meters import CpuMeter
from memcallback.step.holdings import holdings

CPU = torch.device("cpu")


def steps_read(num_steps, action=lambda: None):
    """The last readings of steps that a meter has read."""
    meter, model = CpuMeter(), nn.Linear(2, 2)
    read = []
    for _ in range(num_steps):
        meter.begin()
        meter.read(holdings([model], [], None, CPU))
        action()
        meter.read(holdings([model], [], None, CPU))
        read.append(meter.end()[-1])
    return read


@pytest.fixture
def num_searches(monkeypatch):
    """How often the heap was searched, as a list that grows."""
    searched, search = [], gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *of: searched.append(1) or search(*of))
    return searched


def test_the_heap_is_searched_once_however_many_steps_are_sampled(num_searches, monkeypatch):
    monkeypatch.setattr(other_profiles, "_profiles", other_profiles._Profiles())
    steps_read(5)
    assert len(num_searches) == 1


def test_a_profile_that_is_over_is_looked_at_once(num_searches):
    steps_read(1)
    with torch.autograd.profiler.profile(use_kineto=True) as over:
        torch.ones(1)
    num_searches.clear()
    assert all(stats.allocated_bytes is not None for stats in steps_read(5))
    assert len(num_searches) == 1
    assert over.kineto_results is not None


@pytest.mark.filterwarnings("ignore:A profile of PyTorch")
def test_a_profile_that_is_prepared_is_seen_though_another_is_gone_since():
    gone = torch.autograd.profiler.profile(use_kineto=True)
    with gone:
        pass
    assert steps_read(1)[0].allocated_bytes is not None
    del gone
    profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=1),
    )
    profile.start()
    assert steps_read(1)[0].allocated_bytes is None
    profile.step()
    torch.ones(1)
    profile.stop()
    assert [event.name for event in profile.events()].count("aten::ones") == 1
    assert steps_read(1)[0].allocated_bytes is not None


def test_without_counts_of_references_the_heap_is_searched_each_time(num_searches, monkeypatch):
    monkeypatch.setattr(other_profiles, "_is_counted", lambda: False)
    monkeypatch.setattr(other_profiles, "_profiles", other_profiles._Profiles())
    steps_read(3)
    assert len(num_searches) == 3


def test_tensors_that_look_like_boundaries_leave_the_bytes_unknown():
    (stats,) = steps_read(1, lambda: torch.empty(allocation_profile._MARK_BYTES, dtype=torch.uint8))
    assert stats.allocated_bytes is None
    assert stats.resident_bytes > 0


def test_one_that_is_dropped_without_an_end_ends():
    before = torch.autograd.profiler._enable_profiler
    profile = AllocationProfile()
    assert profile.begin()
    assert torch.autograd._profiler_enabled()
    del profile
    assert not torch.autograd._profiler_enabled()
    assert torch.autograd.profiler._enable_profiler is before


def test_a_process_has_one_of_ours():
    profile = AllocationProfile()
    assert profile.begin()
    others = []
    thread = threading.Thread(target=lambda: others.append(AllocationProfile().begin()))
    thread.start()
    thread.join()
    assert others == [False]
    assert profile.end() == []


def test_operators_are_not_profiled():
    profile = AllocationProfile()
    assert profile.begin()
    kept = torch.ones(10)
    profile.mark()
    del kept
    profile.mark()
    allocated, released = profile.end()
    assert [num_bytes for _, num_bytes in allocated] == [40]
    assert [num_bytes for _, num_bytes in released] == [-40]
