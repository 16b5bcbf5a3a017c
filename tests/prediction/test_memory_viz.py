"""What PyTorch's own memory_viz makes of an exported prediction."""

import inspect
import pickle
import subprocess
import sys
from collections import Counter

import pytest
from hand_made import batch_trace, prediction

from memcallback.core.units import MiB
from memcallback.devices.catalogue import find_device
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.memory_viz import dump_snapshot, snapshot
from memcallback.prediction.prediction import Prediction


def pages(address, size):
    """The numbers of the pages of 2 MiB that a range has a part in; segments begin and end with a
    page.
    """
    return set(range(address // (2 * MiB), (address + size - 1) // (2 * MiB) + 1))


def walked(entries):
    """Allocated (as asked for), reserved, and their peaks, as the entries tell them."""
    allocated = reserved = peak_reserved = 0
    alive, mapped = {}, set()
    for entry in entries:
        action, address, size = entry["action"], entry["addr"], entry["size"]
        if action == "alloc":
            assert address not in alive
            assert pages(address, size) <= mapped
            alive[address] = size
            allocated += size
        elif action == "free_requested":
            allocated -= alive.pop(address)
        elif action in ("segment_alloc", "segment_map"):
            mapped |= pages(address, size)
            reserved += size
        elif action == "segment_free":
            mapped -= pages(address, size)
            reserved -= size
        peak_reserved = max(peak_reserved, reserved)
    return allocated, peak_reserved


def test_the_history_adds_up_to_the_prediction():
    predicted = prediction(16)
    exported = snapshot(predicted)
    allocated, peak_reserved = walked(exported["device_traces"][0])
    last = predicted.step.windows[-1].end
    assert peak_reserved == predicted.peak_reserved_bytes
    assert allocated == last.requested_bytes - 16 * 1000
    assert sum(segment["total_size"] for segment in exported["segments"]) == last.reserved_bytes
    for segment in exported["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]


def test_an_allocation_has_operator_module_phase_and_step_from_the_inside_out():
    entries = snapshot(prediction(4))["device_traces"][0]
    found = next(
        entry for entry in reversed(entries) if entry["frames"][0]["name"] == "aten::addmm"
    )
    assert [(frame["filename"], frame["name"]) for frame in found["frames"]] == [
        ("activation", "aten::addmm"),
        ("module", "net.linear"),
        ("module", "net"),
        ("phase", "forward"),
        ("step", "step 2"),
    ]
    assert entries[0]["frames"][-1]["name"] == "before the first step"


def test_the_phases_are_annotated_as_in_a_recorded_history():
    exported = snapshot(prediction(4))
    annotations, entries = exported["external_annotations"], exported["device_traces"][0]
    assert [(one["name"], one["stage"]) for one in annotations] == [
        (f"step {step}: {phase}", stage)
        for step in (1, 2)
        for phase in ("forward", "backward", "optimizer step")
        for stage in ("START", "END")
    ]
    times = [entry["time_us"] for entry in entries]
    assert times == sorted(set(times))
    for start, end in zip(annotations[::2], annotations[1::2], strict=True):
        inside = [
            entry
            for entry in entries
            if entry["action"] == "alloc" and start["time_us"] < entry["time_us"] < end["time_us"]
        ]
        _, _, phase = start["name"].partition(": ")
        phases = {frame["name"] for one in inside for frame in one["frames"][-2:-1]}
        assert phases <= {phase.replace(" ", "_")}
    assert {one["device"] for one in annotations} == {0}


def test_where_memory_runs_out_the_history_ends_with_it():
    predicted = prediction(64, device=512 * MiB + 64 * MiB)
    entries = snapshot(predicted)["device_traces"][0]
    assert not predicted.fits
    assert entries[-1]["action"] == "oom"
    assert entries[-1]["device_free"] == 64 * MiB - sum(
        {"segment_alloc": 1, "segment_free": -1}.get(entry["action"], 0) * entry["size"]
        for entry in entries
    )


def test_a_retry_gives_segments_back_before_it_takes_one():
    predicted = prediction(20, device=512 * MiB + 66 * MiB)
    smallest = next(
        size
        for size in range(20, 40)
        if predicted.at(size).step.num_alloc_retries or not predicted.at(size).fits
    )
    actions = Counter(
        entry["action"] for entry in snapshot(predicted.at(smallest))["device_traces"][0]
    )
    assert actions["segment_free"] >= 1 or actions["oom"] == 1


def test_expandable_segments_are_mapped():
    settings = AllocatorSettings(expandable_segments=True)
    predicted = Prediction.of(batch_trace(), find_device("T4"), batch_size=16, settings=settings)
    exported = snapshot(predicted)
    actions = Counter(entry["action"] for entry in exported["device_traces"][0])
    assert "segment_alloc" not in actions
    assert walked(exported["device_traces"][0])[1] == predicted.peak_reserved_bytes
    assert all(segment["is_expandable"] for segment in exported["segments"])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "step.pickle"
    dump_snapshot(prediction(16), path)
    return path


def test_memory_viz_reads_it_with_all_its_functions(file):
    viz = pytest.importorskip("torch.cuda._memory_viz")
    data = pickle.loads(file.read_bytes())
    assert "total_reserved: 58.0MiB" in viz.segsum(data)
    text = viz.trace(data)
    assert "cudaMalloc(" in text
    assert "16.0MiB" in text
    lines = viz.memory(data, format_flamegraph=str)
    assert (
        "stream_0;active_allocated;step:0:before the first "
        "step;module:0:net;module:0:net.linear;parameter:0:an allocation" in lines
    )
    assert viz.segments(data, format_flamegraph=str)
    assert "Allocator State History" in viz.segment_plot(data)
    assert "Active Memory Timeline" in viz.trace_plot(data)
    assert "Active Cached Memory Timeline" in viz.trace_plot(data, plot_segments=True)


def test_memory_viz_leaves_out_what_was_freed(file):
    viz = pytest.importorskip("torch.cuda._memory_viz")
    if "filter_freed" not in inspect.signature(viz.trace_plot).parameters:
        pytest.skip("this PyTorch's memory_viz shows all")
    assert viz.trace_plot(pickle.loads(file.read_bytes()), filter_freed=True)


@pytest.mark.parametrize(
    "command", [["stats"], ["trace_plot", "-o", "out.html"]], ids=["stats", "trace_plot"]
)
def test_the_commands_of_memory_viz_read_it(command, file):
    pytest.importorskip("torch")
    name, *options = command
    done = subprocess.run(
        [sys.executable, "-m", "torch.cuda._memory_viz", name, str(file), *options],
        cwd=file.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "total_reserved: 58.0MiB" in done.stdout
        if name == "stats"
        else (file.parent / "out.html").stat().st_size > 1000
    )
