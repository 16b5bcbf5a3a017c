"""What is told of hand-made steps and readings, and what is not."""

import random

import pytest

from memcallback.core.step_memory import DeviceMemory, MemoryStats, PhaseMemory, StepMemory
from memcallback.core.types import Kind, Phase
from memcallback.core.units import GiB, MiB
from memcallback.diagnose.health.findings import Health, Sign
from memcallback.diagnose.health.growth import LASTING_STEPS, Growth, Progress, Trend, is_leak

CAPACITY = 24 * GiB


def step(
    index,
    *,
    retries=0,
    allocated=10 * GiB,
    reserved=11 * GiB,
    split=0,
    is_warm_up=False,
    batch_size=64,
):
    end = MemoryStats(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        inactive_split_bytes=split,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
    )
    window = PhaseMemory(
        phase=Phase.OPTIMIZER_STEP,
        covers=(Phase.OPTIMIZER_STEP,),
        start=end,
        end=end,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        num_alloc_retries=retries,
    )
    return StepMemory(
        kind=Kind.MEASURED,
        source="CUDA caching allocator",
        device_name="a card",
        windows=(window,),
        index=index,
        batch_size=batch_size,
        is_warm_up=is_warm_up,
    )


def reading(*, used=12 * GiB, reserved=11 * GiB, others=0):
    return DeviceMemory(
        capacity_bytes=CAPACITY,
        used_bytes=used,
        reserved_bytes=reserved,
        other_processes_bytes=others,
    )


def told(steps_and_readings, **options):
    health = Health(0.05, **options)
    found = []
    for one in steps_and_readings:
        found += health.on_step(one) if isinstance(one, StepMemory) else health.on_reading(one)
    return found


# Retries.


def test_retries_in_three_of_fifty_steps_are_told_once_with_a_batch_size():
    found = told([step(i, retries=i % 10 == 0) for i in range(200)], suggestion=lambda: 48)
    assert [one.sign for one in found] == [Sign.RETRIES]
    assert "tried again 3 times in 3 of the last 21 steps" in str(found[0])
    assert "48 samples need no retry" in str(found[0])
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in str(found[0])


def test_a_retry_now_and_then_is_not_told_nor_those_of_the_warm_up():
    assert told([step(i, retries=i % 30 == 0) for i in range(300)]) == []
    assert told([step(i, retries=5, is_warm_up=True) for i in range(100)]) == []


def test_the_setting_that_is_on_already_is_not_recommended():
    (found,) = told([step(i, retries=1) for i in range(3)], is_expandable=True)
    assert "Segments are expandable already." in str(found)


# A device that is nearly full.


@pytest.mark.parametrize(("reserved", "is_told"), [(21 * GiB, False), (22 * GiB, True)])
def test_less_than_the_headroom_is_told(reserved, is_told):
    # 1 GiB is used outside; 5 % are 1.2 GiB.
    found = told(
        [
            step(3, allocated=reserved - GiB, reserved=reserved),
            reading(used=reserved + GiB, reserved=reserved),
        ]
    )
    assert [one.sign for one in found] == [Sign.HEADROOM] * is_told
    if is_told:
        assert "At the peak of step 4, 1024.00 MiB of 24.00 GiB (4.2 %) are left" in str(found[0])
        assert "5 % should stay free" in str(found[0])


def test_what_is_reserved_and_split_on_a_full_device_is_told_with_the_setting():
    found = told(
        [
            step(3, allocated=15 * GiB, reserved=22 * GiB, split=6 * GiB),
            reading(used=23 * GiB, reserved=22 * GiB),
        ]
    )
    assert [one.sign for one in found] == [Sign.RESERVED]
    assert (
        "7.00 GiB of 24.00 GiB are reserved but unallocated, 86 % of it in gaps between tensors"
        in str(found[0])
    )
    assert "expandable_segments:True" in str(found[0])


def test_a_cache_is_told_only_where_others_need_the_device():
    full = step(3, allocated=10 * GiB, reserved=20 * GiB, split=GiB)
    assert told([full, reading(used=23 * GiB + GiB // 2, reserved=20 * GiB)]) == []
    found = told([full, reading(used=23 * GiB + GiB // 2, reserved=20 * GiB, others=3 * GiB)])
    assert [one.sign for one in found] == [Sign.RESERVED]
    assert "torch.cuda.empty_cache()" in str(found[0])


def test_a_cache_on_a_device_with_room_is_healthy():
    assert (
        told(
            [
                step(3, allocated=2 * GiB, reserved=20 * GiB, split=15 * GiB),
                reading(used=21 * GiB, reserved=20 * GiB),
            ]
        )
        == []
    )


def test_a_bound_of_the_allocator_is_the_capacity():
    health = Health(0.05)
    health.on_step(step(3, allocated=GiB, reserved=GiB))
    assert [one.sign for one in health.on_reading(reading(), limit_bytes=GiB)] == [Sign.HEADROOM]


# Others.


def test_another_process_is_told_once_it_has_taken_more_than_the_headroom_twice():
    after = [reading(others=others * GiB) for others in (2, 4, 4, 4)]
    found = told([one for number, other in enumerate(after) for one in (step(number), other)])
    assert [one.sign for one in found] == [Sign.OTHER_PROCESS]
    assert "Other processes have taken 2.00 GiB of 24.00 GiB" in str(found[0])
    assert "memcallback devices" in str(found[0])


def test_a_process_that_was_there_or_comes_for_a_moment_is_not_told():
    for others in ((6, 6, 6, 6), (0, 4, 0, 4), (4, 0, 0, 0)):
        assert (
            told(
                [
                    one
                    for number, size in enumerate(others)
                    for one in (step(number), reading(others=size * GiB))
                ]
            )
            == []
        )


def test_where_processes_are_hidden_libraries_of_ones_own_are_not_taken_for_another():
    def readings(*outside):
        return [
            one
            for number, size in enumerate(outside)
            for one in (step(number), reading(used=int(11 * GiB + size * GiB), others=None))
        ]

    assert told(readings(0.5, 1.5, 2, 2, 2)) == []
    (found,) = told(readings(0.5, 1.5, 6, 6))
    assert "Another process or a library" in str(found)


# Growth.


def series(figures, *, count=None, epoch_steps=None, readings_per_window=10):
    growth = Growth(readings_per_window)
    for number, figure in enumerate(figures):
        growth.add(
            number,
            figure,
            number if count is None else count(number),
            epoch=None if epoch_steps is None else number // epoch_steps,
        )
    return growth.rise


def test_one_allocation_more_in_each_step_is_seen_from_forty_steps_on_whatever_the_batches():
    noise = random.Random(0)
    sizes = [noise.randrange(GiB) for _ in range(40)]
    assert series(sizes[:39]) is None
    rise = series(sizes)
    assert (rise.first_step, rise.last_step, rise.num_steps) == (0, 39, 40)


def test_bytes_that_go_up_and_down_are_no_rise_in_thousands_of_steps():
    noise = random.Random(0)
    rises = 0
    growth = Growth(10)
    for number in range(5000):
        closed = growth.add(number, noise.randrange(1000) * MiB, 7)
        rises += closed and growth.rise is not None
    assert rises == 0


def test_what_grows_without_becoming_more_is_seen_too():
    assert series([number * MiB for number in range(60)], count=lambda _: 7).grown_bytes == 50 * MiB
    assert series(list(range(60)), count=lambda _: 7) is None


@pytest.mark.parametrize("num_steps", [100, 500, 3000])
def test_a_buffer_that_is_full_is_no_rise(num_steps):
    figures = [min(number, 50) * MiB for number in range(num_steps)]
    assert series(figures, count=lambda number: min(number, 50)) is None


def test_a_tensor_in_a_hundred_steps_is_seen_in_time():
    rise = series([GiB] * 3000, count=lambda number: number // 100)
    assert rise.num_steps > 1000


def test_a_list_that_is_emptied_at_the_end_of_an_epoch_never_lasts():
    growth, lasting = Growth(10), []
    for number in range(2000):
        if (
            growth.add(number, GiB, number % 250, epoch=number // 250)
            and (rise := growth.rise) is not None
        ):
            left = 249 - number % 250
            progress = Progress(epoch=number // 250, steps_left_in_epoch=left, steps_left=10_000)
            lasting.append(
                is_leak(rise, progress, keeps_graph=True, bytes_per_step=512, free_bytes=GiB)
            )
    assert lasting
    assert not any(lasting)


def rise_of(num_steps=300, num_epochs=None, is_rising_in_epoch=True):
    return Trend(
        first_step=1,
        last_step=num_steps,
        grown_bytes=MiB,
        num_epochs=num_epochs,
        is_rising_in_epoch=is_rising_in_epoch,
    )


@pytest.mark.parametrize(
    ("rise", "progress", "keeps_graph", "bytes_per_step", "expected"),
    [
        # Without epochs 200 steps decide for a graph; other tensors have to fill the device.
        (rise_of(LASTING_STEPS), Progress(), True, 512, True),
        (rise_of(LASTING_STEPS - 1), Progress(), True, 512, False),
        (rise_of(300), Progress(), False, 512, False),
        (rise_of(300), Progress(), False, 2 * MiB, True),
        # With epochs, the end of one; this far a dataset may be cached.
        (
            rise_of(300, 1),
            Progress(epoch=0, steps_left_in_epoch=100, steps_left=1000),
            True,
            512,
            False,
        ),
        (
            rise_of(300, 1),
            Progress(epoch=0, steps_left_in_epoch=100, steps_left=1000),
            False,
            2 * MiB,
            False,
        ),
        (
            rise_of(300, 2),
            Progress(epoch=1, steps_left_in_epoch=100, steps_left=1000),
            True,
            512,
            True,
        ),
        (
            rise_of(300, 2, False),
            Progress(epoch=1, steps_left_in_epoch=100, steps_left=1000),
            True,
            512,
            False,
        ),
        (
            rise_of(300, 2),
            Progress(epoch=1, steps_left_in_epoch=100, steps_left=1000),
            False,
            512,
            False,
        ),
        (
            rise_of(300, 2),
            Progress(epoch=1, steps_left_in_epoch=100, steps_left=1000),
            False,
            2 * MiB,
            True,
        ),
        # A device that is full before the epoch ends is told of at once.
        (
            rise_of(60, 1),
            Progress(epoch=0, steps_left_in_epoch=1000, steps_left=9000),
            False,
            2 * MiB,
            True,
        ),
    ],
)
def test_when_a_rise_is_told(rise, progress, keeps_graph, bytes_per_step, expected):
    assert (
        is_leak(
            rise, progress, keeps_graph=keeps_graph, bytes_per_step=bytes_per_step, free_bytes=GiB
        )
        is expected
    )
