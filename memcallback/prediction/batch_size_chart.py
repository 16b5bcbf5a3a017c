"""batch_size_chart(): the peak over batch sizes, by replays."""

from __future__ import annotations

from memcallback.page.charts import Line, LineChart, Mark
from memcallback.prediction.search import BatchReplays

#: Points of the curve: it bends little.
_NUM_POINTS = 8
#: How far the curve goes beyond the largest that fits.
_BEYOND = 1.3


def batch_size_chart(
    replays: BatchReplays, batch_size: int, largest: int | None
) -> LineChart | None:
    """The peak to a little above the largest that fits; None if other batch sizes are unknown."""
    if not replays.trace.is_any_batch_size_known:
        return None
    end = max(2, batch_size, round(_BEYOND * largest) if largest else 2 * batch_size)
    sizes = {max(1, end * number // _NUM_POINTS) for number in range(_NUM_POINTS + 1)}
    sizes |= {batch_size, *([largest] if largest else [])}
    known = sorted(filter(replays.trace.is_in_range, sizes))
    points = [(size, replays.peak_bytes(size)) for size in known]
    if len(points) < 2:
        return None
    peaks = dict(points)
    marks = [Mark(name="now", x=batch_size, num_bytes=peaks[batch_size], kind="now")]
    if largest and largest in peaks and largest != batch_size:
        marks.append(Mark(name="largest", x=largest, num_bytes=peaks[largest], kind="good"))
    return LineChart(
        lines=[Line(name="peak", points=points, kind="allocated")],
        x_name="samples per batch",
        marks=marks,
        capacity_bytes=replays.device.allocator_capacity_bytes,
    )
