"""Figures of several ranks, put together from what each tells when it tells it."""

import json

import pytest

from memcallback.core.types import Phase
from memcallback.core.units import GiB, MiB
from memcallback.record.rank_exchange import MAX_MESSAGE_BYTES, PATIENCE_S, RankMessage, RankPoints
from memcallback.report.rank_values import RankPoint, RankValues, Spread


def point(rank, number, peak=100 * MiB, capacity=None, **others):
    return RankPoint(
        rank=rank, number=number, peak_allocated_bytes=peak, capacity_bytes=capacity, **others
    )


def of_ranks(*points, num_ranks=None):
    return RankValues(number=1, points=points, num_ranks=num_ranks or len(points))


def test_the_range_over_the_ranks_is_of_those_that_know_a_figure():
    ranks = of_ranks(
        point(0, 1, 10, peak_reserved_bytes=40, phases={Phase.FORWARD: 7, Phase.BACKWARD: 10}),
        point(1, 1, 30, phases={Phase.FORWARD: 30}),
        point(2, 1, 21),
    )
    assert ranks.peak_allocated == Spread(10, 20, 30)
    assert ranks.peak_reserved == Spread(40, 40, 40)
    assert ranks.of_phase(Phase.FORWARD) == Spread(7, 18, 30)
    assert ranks.of_phase(Phase.OPTIMIZER_STEP) is None


def test_the_worst_rank_is_the_one_nearest_to_its_own_capacity_and_the_lowest_of_several():
    assert of_ranks(point(0, 1, 60, 100), point(1, 1, 40, 50), point(2, 1, 80, 100)).worst.rank == 1
    assert (
        of_ranks(point(0, 1, 10, 100), point(1, 1, 20, 100), point(2, 1, 20, 100)).worst.rank == 1
    )


def test_reserved_memory_is_what_counts_where_there_is_any():
    ranks = of_ranks(
        point(0, 1, 60, 100, peak_reserved_bytes=70), point(1, 1, 50, 100, peak_reserved_bytes=90)
    )
    assert (ranks.worst.rank, ranks.worst.capacity_share_pct) == (1, 90.0)


def test_without_all_capacities_the_largest_peak_is_the_worst():
    assert of_ranks(point(0, 1, 60, 61), point(1, 1, 70), point(2, 1, 70)).worst.rank == 1


def test_a_table_shows_the_range_and_the_worst_rank_beside_its_prediction():
    ranks = of_ranks(
        point(0, 1, 200 * MiB, GiB, phases={Phase.FORWARD: 100 * MiB}),
        point(
            2,
            1,
            400 * MiB,
            GiB,
            phases={Phase.FORWARD: 300 * MiB},
            predicted={Phase.FORWARD: 290 * MiB},
            place="a card of node7",
        ),
        num_ranks=3,
    )
    lines = [" ".join(line.split()) for line in ranks.to_text().splitlines()]
    assert lines[0] == "Memory over 2 of 3 ranks, step 1, measured"
    assert "forward 100.00 MiB 200.00 MiB 300.00 MiB 300.00 MiB 290.00 MiB" in lines
    assert "share of its capacity 19.5 % 29.3 % 39.1 % 39.1 %" in lines
    assert (
        "Rank 2 (a card of node7) is nearest to its capacity, 39.1 % at its peak."
        in ranks.to_text()
    )
    assert "No values for this step from rank 1" in ranks.to_markdown()


def test_a_message_has_its_points_back():
    points = (
        point(3, 7, 5, 9, phases={Phase.FORWARD: 5}, predicted={Phase.BACKWARD: 6}, place="a card"),
        point(3, 8, 6, 9, peak_reserved_bytes=8, predicted_reserved_bytes=9, place="a card"),
    )
    message = RankMessage(rank=3, points=points, has_ended=True)
    assert RankMessage.from_json(message.to_json()) == message
    assert RankMessage.from_json(RankMessage(rank=3).to_json()) == RankMessage(rank=3)


def test_a_message_has_the_last_points_and_is_below_a_kilobyte():
    phases = dict.fromkeys(Phase, 10**14)
    points = tuple(
        point(
            9999,
            10**9 + n,
            10**14,
            10**14,
            phases=phases,
            predicted=phases,
            peak_reserved_bytes=10**14,
            place="\N{SNOWMAN}" * 300,
        )
        for n in range(9)
    )
    text = RankMessage(rank=9999, points=points).to_json()
    assert len(text.encode()) <= MAX_MESSAGE_BYTES
    assert RankMessage.from_json(text).points[-1].number == 10**9 + 8
    assert json.loads(text)[0] == 9999


def told(rank, *numbers, has_ended=False):
    return RankMessage(
        rank=rank,
        points=tuple(point(rank, n, 100 * rank + n) for n in numbers),
        has_ended=has_ended,
    )


def own(points, *numbers, now_s=0.0):
    for number in numbers:
        points.take_own(point(0, number, number), now_s)


def peaks(figures):
    return {ranks.number: [p.peak_allocated_bytes for p in ranks.points] for ranks in figures}


def test_a_step_is_complete_when_every_rank_has_told_its_point():
    points = RankPoints(3)
    own(points, 10)
    points.take(told(1, 10))
    assert points.ready(0.0) == []
    points.take(told(2, 10))
    assert peaks(points.ready(0.0)) == {10: [10, 110, 210]}
    assert points.ready(0.0) == []


def test_steps_are_given_in_order_each_with_its_own_points():
    points = RankPoints(2)
    own(points, 10, 20)
    points.take(told(1, 10, 20, 30))
    points.take(told(1, 20, 30))
    assert peaks(points.ready(0.0)) == {10: [10, 110], 20: [20, 120]}


def test_of_ranks_with_other_intervals_it_is_the_last_point_before():
    points = RankPoints(2)
    own(points, 10, 20)
    points.take(told(1, 7, 14))
    assert peaks(points.ready(0.0)) == {10: [10, 107]}
    points.take(told(1, 14, 21))
    assert peaks(points.ready(0.0)) == {20: [20, 114]}


def test_a_rank_that_falls_silent_is_left_out_after_a_while_and_comes_back():
    points = RankPoints(3)
    own(points, 10)
    points.take(told(1, 10))
    assert points.ready(PATIENCE_S - 1) == []
    assert peaks(points.ready(PATIENCE_S)) == {10: [10, 110]}
    own(points, 20, now_s=20)
    points.take(told(1, 20))
    # Nothing was ever heard of rank 2, so nothing is waited for.
    assert peaks(points.ready(20)) == {20: [20, 120]}
    points.take(told(2, 20))
    own(points, 30, now_s=30)
    points.take(told(1, 30))
    assert points.ready(30) == []
    points.take(told(2, 30))
    assert peaks(points.ready(30)) == {30: [30, 130, 230]}


def test_a_rank_that_has_ended_is_not_waited_for():
    points = RankPoints(3)
    points.take(told(1, 10, has_ended=True))
    points.take(told(2, 10))
    own(points, 10, 20)
    points.take(told(2, 20))
    assert peaks(points.ready(0.0)) == {10: [10, 110, 210], 20: [20, 220]}
    assert points.running == {2}


@pytest.mark.parametrize("is_over", [False, True])
def test_rank_zero_alone_is_no_range(is_over):
    points = RankPoints(2)
    own(points, 10)
    assert points.ready(PATIENCE_S, is_over=is_over) == []


def test_at_the_end_steps_are_given_with_what_came():
    points = RankPoints(3)
    own(points, 10, 20)
    points.take(told(1, 20))
    assert peaks(points.ready(0.0, is_over=True)) == {20: [20, 120]}
