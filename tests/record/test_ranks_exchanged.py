"""Jobs of several ranks: what rank zero shows of them all, and that nobody waits, whatever happens
to another.
"""

import json

import pytest
import torch
from event_files import curves_of
from needs import needs_fsdp2
from rank_jobs import Job, run

from memcallback import Category, Phase
from memcallback.record.rank_exchange import RankExchange

GiB = 2**30
PHASES = ("forward", "backward", "optimizer step")


def own_points(training, interval, num_steps):
    """The largest step of each interval, as the rank itself recorded it; what is left at the end is
    in the last.
    """
    steps, points, last = training["steps"], {}, 0
    for number in range(1, num_steps + 1):
        # The first steady step is a point too.
        if number in (2, num_steps) or number % interval == 0:
            since = [step for step in steps[last:number] if not step.is_warm_up]
            points[number], last = (
                max(since, key=lambda step: (step.peak_allocated_bytes, step.index)),
                number,
            )
    return points


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    ranks = run(
        Job(
            num_steps=7, predicts=True, batch_sizes={0: 8, 1: 24}, capacities={0: "2GiB", 1: "1GiB"}
        ),
        folder,
    )
    return [rank.found[0] for rank in ranks], [rank.output for rank in ranks], folder / "logs"


def curves(folder):
    (run_folder,) = folder.glob("version_*")
    return curves_of(run_folder)


def test_the_range_is_of_what_each_rank_recorded_itself(two):
    trainings, _, _ = two
    ranks = trainings[0]["report"].ranks
    assert ranks.number == 7
    assert [point.rank for point in ranks.points] == [0, 1]
    for point, training in zip(ranks.points, trainings, strict=True):
        last = own_points(training, 2, 7)[7]
        assert point.phases == {
            phase: memory.peak_allocated_bytes for phase, memory in last.phases.items()
        }
        assert point.peak_allocated_bytes == last.peak_allocated_bytes
        assert point.predicted == {
            phase: memory.peak_allocated_bytes
            for phase, memory in training["prediction"].phases.items()
        }
    low, high = sorted(point.peak_allocated_bytes for point in ranks.points)
    assert ranks.peak_allocated == (low, (low + high) // 2, high)
    assert [point.capacity_bytes for point in ranks.points] == [2 * GiB, GiB]
    assert ranks.worst.rank == 1


TAGS = {
    Phase.FORWARD: "memory_gib/peak_forward",
    Phase.BACKWARD: "memory_gib/peak_backward",
    Phase.OPTIMIZER_STEP: "memory_gib/peak_optimizer",
}


def test_the_range_over_the_ranks_and_the_worst_rank_are_curves_of_the_same_charts(two):
    trainings, _, folder = two
    points = [own_points(training, 2, 7) for training in trainings]
    found = curves(folder)
    for phase, tag in TAGS.items():
        for which, choose in (("min", min), ("max", max)):
            curve = found[f"ranks_{which}"][tag]
            assert list(curve) == [2, 4, 6, 7]
            for number, value in curve.items():
                assert value * GiB == pytest.approx(
                    choose(of[number].phases[phase].peak_allocated_bytes for of in points),
                    rel=1e-3,
                )
        low, mean, high = (found[f"ranks_{which}"][tag][7] for which in ("min", "mean", "max"))
        assert mean == pytest.approx((low + high) / 2, rel=1e-3)
        assert found["worst_rank"][tag][7] * GiB == pytest.approx(
            points[1][7].phases[phase].peak_allocated_bytes, rel=1e-3
        )
        predicted = list(found["worst_rank_predicted"][tag].values())
        assert predicted[-1] * GiB == pytest.approx(
            trainings[1]["prediction"].phases[phase].peak_allocated_bytes, rel=1e-3
        )
    assert set(found[""]["memory/worst_rank"].values()) == {1}
    assert "memory/num_ranks_missing" not in found[""]


def test_the_ranks_add_two_charts_to_those_of_one_rank(two):
    tags = {tag for values in curves(two[2]).values() for tag in values}
    assert tags == {
        *TAGS.values(),
        "memory_gib/resident",
        "memory/worst_rank",
        "memory/worst_rank_capacity_pct",
    }


def test_rank_zero_prints_for_all_and_the_others_nothing(two):
    _, outputs, _ = two
    assert outputs[0].count("memcallback │") == 1
    (line,) = [line for line in outputs[0].splitlines() if line.startswith("  ranks ")]
    assert line.startswith("  ranks        0-1: ")
    assert "worst rank 1 (" in line
    assert "Memory over 2 ranks" not in outputs[0]
    assert "emcallback" not in outputs[1]
    assert "Memory" not in outputs[1].replace("Memory block of unknown size", "")


def without_us(job, folder):
    return run(Job(**{**vars(job), "logging": ()}), folder)


def fates(ranks):
    return [
        (rank.exit_code, rank.found if isinstance(rank.found, type) else None) for rank in ranks
    ]


def test_both_ranks_have_the_same_bits_with_and_without_the_log(tmp_path):
    job = Job(predicts=True)
    with_it, without = run(job, tmp_path / "with"), without_us(job, tmp_path / "without")
    for ours, theirs in zip(with_it, without, strict=True):
        assert all(
            torch.equal(*pair)
            for pair in zip(ours.found[0]["weights"], theirs.found[0]["weights"], strict=True)
        )
        assert torch.equal(ours.found[0]["generator"], theirs.found[0]["generator"])
    assert with_it[0].found[0]["report"].ranks is not None
    assert without[0].found[0]["report"] is None


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rank", [0, 1])
def test_where_a_rank_is_killed_the_other_ends_as_without_us(tmp_path, rank, phase):
    job = Job(strike=(rank, phase, "kill"))
    ranks, without = run(job, tmp_path / "with"), without_us(job, tmp_path / "without")
    assert fates(ranks) == fates(without)
    assert ranks[rank].exit_code == -9
    if rank == 1:
        assert f"The training ended with {ranks[0].found.__name__}." in ranks[0].output
        assert "· batch 8 ·" in ranks[0].output


@pytest.mark.parametrize("rank", [0, 1])
def test_out_of_memory_on_one_rank_is_reported_there_and_the_other_ends_as_without_us(
    tmp_path, rank
):
    job = Job(strike=(rank, "backward", "oom"), predicts=True)
    ranks, without = run(job, tmp_path / "with"), without_us(job, tmp_path / "without")
    assert fates(ranks) == fates(without)
    assert ranks[rank].found is torch.OutOfMemoryError
    (report,) = (tmp_path / "with" / "logs").rglob("out_of_memory*.json")
    assert report.name == f"out_of_memory_step3_rank{rank}.json"
    assert json.loads(report.read_text())["rank"] == rank
    assert f"of step 3 (batch size 8), on rank {rank}." in ranks[rank].output
    assert "Out of memory" not in ranks[1 - rank].output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_log_on_one_rank_alone_waits_for_nobody(tmp_path, rank):
    ranks = run(Job(logging=(rank,)), tmp_path)
    assert fates(ranks) == [(0, None)] * 2
    report = ranks[rank].found[0]["report"]
    assert report.measured is not None
    assert report.ranks is None
    assert ("The memory of the other ranks is unknown: they sent no values." in report.notes) == (
        rank == 0
    )


def test_ranks_that_log_at_different_steps_are_put_together(tmp_path):
    ranks = run(Job(num_steps=8, intervals={0: 2, 1: 3}), tmp_path)
    found = curves(tmp_path / "logs")
    assert "memory/num_ranks_missing" not in found[""]
    points = [
        own_points(rank.found[0], interval, 8) for rank, interval in zip(ranks, (2, 3), strict=True)
    ]
    curve = found["ranks_max"]["memory_gib/peak_backward"]
    assert list(curve) == [2, 4, 6, 8]
    at_that_time = points[0][4], points[1][3]
    assert curve[4] * GiB == pytest.approx(
        max(point.phases[Phase.BACKWARD].peak_allocated_bytes for point in at_that_time), rel=1e-3
    )


def test_a_job_of_one_rank_has_nothing_to_put_together(tmp_path):
    (rank,) = run(Job(num_ranks=1), tmp_path)
    assert rank.exit_code == 0
    assert rank.found[0]["report"].ranks is None
    assert "ranks" not in rank.output
    assert RankExchange.of_job() is None


def test_ranks_outside_of_the_models_process_group_are_told_too(tmp_path):
    ranks = run(Job(num_ranks=3, group=(0, 2), batch_sizes={1: 64}), tmp_path)
    assert fates(ranks) == [(0, None)] * 3
    found = ranks[0].found[0]["report"].ranks
    assert [point.rank for point in found.points] == [0, 1, 2]
    assert found.worst.rank == 1


@needs_fsdp2
def test_each_rank_counts_its_part_of_a_sharded_model_and_trains_the_same_bits(tmp_path):
    job = Job(is_sharded=True)
    ranks, without = run(job, tmp_path / "with"), without_us(job, tmp_path / "without")
    for ours, theirs in zip(ranks, without, strict=True):
        assert all(
            torch.equal(*pair)
            for pair in zip(ours.found[0]["weights"], theirs.found[0]["weights"], strict=True)
        )
        held = ours.found[0]["steps"][-1].windows[-1].end.by_category
        part_bytes = sum(weights.nbytes for weights in ours.found[0]["weights"])
        assert held[Category.PARAMETER] == part_bytes == (64 * 128 + 128 + 128 * 10 + 10) * 4 // 2
        # Two moments of each, and four counters of steps.
        assert held[Category.OPTIMIZER_STATE] == 2 * part_bytes + 4 * 4
    assert len(ranks[0].found[0]["report"].ranks.points) == 2


def test_trainings_one_after_the_other_keep_their_points_apart(tmp_path):
    ranks = run(Job(trainings=2), tmp_path)
    for number in (0, 1):
        for point, rank in zip(ranks[0].found[number]["report"].ranks.points, ranks, strict=True):
            assert (
                point.peak_allocated_bytes
                == own_points(rank.found[number], 2, 6)[6].peak_allocated_bytes
            )


def test_a_store_that_does_not_answer_holds_nobody_up(tmp_path):
    ranks = run(Job(store="elsewhere", strike=(1, "forward", "stop the store")), tmp_path)
    assert fates(ranks) == [(0, None)] * 2
    assert ranks[0].found[0]["report"].measured is not None


def test_ranks_that_met_through_a_file_are_recorded_each_for_itself(tmp_path):
    ranks = run(Job(store="file"), tmp_path)
    assert fates(ranks) == [(0, None)] * 2
    assert ranks[0].found[0]["report"].ranks is None
    assert "The memory of the other ranks is unknown: the ranks have no TCPStore" in ranks[
        0
    ].output.replace("\n  ", " ")
