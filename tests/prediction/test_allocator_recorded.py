"""The simulated allocator does what real ones did: histories recorded on real and on virtual
devices, replayed to the byte.

Public histories of real GPUs lie beside the checkout, where they are there at all; they hold
addresses, not block sizes, so what is compared is every address handed out, every segment, the
reserved bytes after every event, and the blocks that are left. Histories of tests/recorded also
hold what the allocator itself reported after every allocation and most frees.
"""

from pathlib import Path

import pytest
from allocator_history import Replay, load

HERE = Path(__file__).parents[1]
PUBLIC = HERE.parent.parent / "shared" / "traces"
#: Steady steps of which benchmarks/real_gpus.py compares the predictions.
PUBLISHED = HERE.parent.parent / "shared" / "published" / "histories"
RECORDED = sorted((HERE / "recorded" / "allocator").glob("*.json.gz"))
#: Of 30 steady steps, the warm-up before them and a larger one after.
LONG = sorted((HERE / "recorded" / "allocator_long").glob("*.json.gz"))
#: The same 32 steps on a real H100, whose driver chose the addresses of the segments.
REAL = sorted((HERE / "recorded" / "allocator_h100").glob("*.json.gz"))
#: As PyTorch names a figure, and as the simulation does.
FIGURES = {
    "allocated_bytes": "allocated_bytes",
    "active_bytes": "active_bytes",
    "inactive_split_bytes": "inactive_split_bytes",
    "requested_bytes": "requested_bytes",
    "reserved_bytes": "reserved_bytes",
    "segment": "num_segments",
}

#: File and number of events: all of them agree.
PUBLIC_EVENTS = {
    "from-empty": 97,
    "training-152-segments": 10_307,
    "transformer-forward-289-segments": 4_657,
    "transformer-forward-mixed-with-empty-cache": 6_765,
    "transformer-step-with-empty-cache": 19_770,
    "transformer-training-step": 22_332,
}


def replayed(path):
    """A history put to the simulation, with nothing that differs."""
    history = load(path)
    replay = Replay(history)
    agreement = replay.run()
    assert agreement.differences == []
    codes = [event[0] for event in history["events"]]
    assert agreement.compared["address"] == codes.count("a")
    assert agreement.compared["reserved"] == sum(codes.count(code) for code in "arfO")
    left = {block.address: block.size_bytes for block in replay.blocks.values()}
    assert left == {address: size_bytes for address, _, size_bytes in history["final_blocks"]}
    return history, replay


@pytest.mark.parametrize("name", PUBLIC_EVENTS)
def test_a_public_history_of_a_real_gpu_is_replayed_to_the_byte(name):
    if not PUBLIC.is_dir():
        pytest.skip(f"the recorded public histories are not at {PUBLIC}")
    history, replay = replayed(PUBLIC / f"{name}.trace.json.gz")
    meta, allocator = history["meta"], replay.allocator
    assert len(history["events"]) == PUBLIC_EVENTS[name]
    assert (allocator.reserved_bytes, allocator.stats().peak_reserved_bytes) == (
        meta["final_reserved"],
        meta["peak_reserved"],
    )
    assert allocator.allocated_bytes == allocator.active_bytes == meta["final_allocated"]


@pytest.mark.parametrize(
    "name",
    [
        "aimetrics_memory_2.7b_train_seq128",
        "aimetrics_memory_2.7b_train_seq128_bf16",
        "linyun_xl_ctx128_full_step_bf16",
        "linyun_xl_ctx128_full_step_none",
        "linyun_xl_ctx512_full_step_bf16",
        "linyun_xl_ctx512_full_step_none",
    ],
)
def test_a_published_step_of_a_real_gpu_is_replayed_to_the_byte(name):
    if not PUBLISHED.is_dir():
        pytest.skip(f"the published histories are not at {PUBLISHED}")
    history, replay = replayed(PUBLISHED / f"{name}.json.gz")
    assert replay.allocator.allocated_bytes == history["meta"]["final_allocated"]
    assert replay.allocator.stats().peak_reserved_bytes == history["meta"]["peak_reserved"]


def test_histories_are_recorded_for_every_model_precision_and_setting():
    assert len(RECORDED) == 3 * 2 * 4 + 4
    assert sum(path.stat().st_size for path in RECORDED) < 300 * 1024
    assert len(LONG) == 2 * 2 * 4 + 4
    assert sum(path.stat().st_size for path in LONG) < 200 * 1024
    # Expandable segments in too little memory need a device that is small itself.
    assert len(REAL) == len(RECORDED) - 1
    metas = [load(path)["meta"] for path in REAL]
    assert {meta["device"] for meta in metas} == {"NVIDIA H100 80GB HBM3"}


@pytest.mark.parametrize(
    "path",
    RECORDED + LONG + REAL,
    ids=lambda path: f"{path.parent.name}-{path.name.removesuffix('.json.gz')}",
)
def test_a_recorded_history_is_replayed_to_the_byte(path):
    history, replay = replayed(path)
    meta, allocator = history["meta"], replay.allocator
    assert replay.agreement.compared["allocated and reserved"] == len(history["figures"])
    stats = allocator.stats()
    peaks = replay.peaks | {
        "allocated_bytes": stats.peak_allocated_bytes,
        "reserved_bytes": stats.peak_reserved_bytes,
    }
    for recorded, simulated in FIGURES.items():
        assert getattr(allocator, simulated) == meta["final"][f"{recorded}.current"], recorded
        assert peaks[simulated] == meta["final"][f"{recorded}.peak"], recorded
    assert allocator.num_alloc_retries == meta["final"]["num_alloc_retries"]
    assert allocator.num_ooms == meta["final"]["num_ooms"]
    assert list(allocator.settings.roundup_power2_divisions) == meta["roundup_power2_divisions"]


@pytest.mark.parametrize("setting", ["default", "expandable", "max-split", "roundup"])
def test_histories_of_a_small_device_have_retries_and_refusals(setting):
    meta = load(HERE / "recorded" / "allocator" / f"mixed-uint8-{setting}.json.gz")["meta"]
    assert meta["final"]["num_alloc_retries"] > meta["final"]["num_ooms"] > 0
