"""PeakHistory: peaks over a training, in bounded memory."""

from memcallback.core.step_memory import MemoryStats, PhaseMemory, StepMemory
from memcallback.core.types import Kind, Phase
from memcallback.report.history import PeakHistory


def step(peak, *, reserved=None, is_interrupted=False):
    return StepMemory(
        kind=Kind.MEASURED,
        source="test",
        device_name="CPU",
        is_interrupted=is_interrupted,
        windows=(
            PhaseMemory(
                phase=Phase.FORWARD,
                covers=(Phase.FORWARD,),
                start=MemoryStats(),
                end=MemoryStats(),
                peak_allocated_bytes=peak,
                peak_reserved_bytes=reserved,
            ),
        ),
    )


def points(history):
    return list(history.chart(None, None).lines[0].points)


def test_each_step_is_a_point_and_what_was_cut_short_is_none():
    history = PeakHistory()
    assert history.chart(None, None) is None
    history.add(step(10), 0)
    assert history.chart(None, None) is None
    history.add(step(12), 1)
    history.add(step(99, is_interrupted=True), 2)
    history.add(step(None), 3)
    assert points(history) == [(0, 10), (1, 12)]


def test_a_long_training_keeps_its_largest_peak_in_few_points():
    history = PeakHistory()
    for number in range(100_000):
        history.add(step(1000 if number == 54_321 else 10), number)
    shown = points(history)
    assert len(shown) <= 2000
    assert shown[-1][0] == 99_999
    assert [size for _, size in shown].count(1000) == 1
    (at,) = (number for number, size in shown if size == 1000)
    assert abs(at - 54_321) <= 128


def test_reserved_and_predicted_memory_are_lines_of_their_own():
    history = PeakHistory()
    for number in range(3):
        history.add(step(10, reserved=20), number)
    names = [line.name for line in history.chart(11, 40).lines]
    assert names == ["allocated", "reserved", "predicted, allocated"]
