"""One batch size for all ranks of a job: ranks on different devices, and pipeline stages."""

import pytest
import torch
from needs import needs_ranks
from torch import nn

import memcallback as mc

WIDTH = 1024


def network(num_layers=2):
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(num_layers))
    )


def step(ranks=None, model=None):
    return mc.TrainingStep(
        model or network(), torch.zeros(16, WIDTH), optimizer=torch.optim.SGD, ranks=ranks
    )


def suggested(device, ranks=None, **options):
    return mc.suggest_batch_size(step(ranks), device=device, multiple_of=1, **options)


@needs_ranks
def test_ranks_with_unlike_devices_have_the_batch_size_of_the_smallest():
    ddp = mc.Ranks(3)
    alone = {device: suggested(device, ddp).batch_size for device in ("4GiB", "6GiB")}
    assert alone["4GiB"] < alone["6GiB"]
    advice = suggested(["6GiB", "4GiB", "6GiB"], ddp)
    assert advice.batch_size == alone["4GiB"]
    assert advice.global_batch_size == 3 * alone["4GiB"]
    assert [(one.ranks, one.batch_size) for one in advice.by_rank] == [
        ((0, 2), alone["6GiB"]),
        ((1,), alone["4GiB"]),
    ]
    assert "Ranks 0, 2 on" in advice.to_text()
    assert [row["ranks"] for row in advice.to_dict()["by_rank"]] == [[0, 2], [1]]


@needs_ranks
def test_devices_that_are_alike_are_one_kind():
    assert suggested(["4GiB"] * 2, mc.Ranks(2)).by_rank == ()
    without_ranks = suggested(["4GiB", "8GiB"])
    assert without_ranks.bounds.world_size == 2
    assert without_ranks.batch_size == suggested("4GiB", world_size=2).batch_size


@needs_ranks
def test_ranks_that_only_their_number_describes_leave_room_for_nccl():
    described, counted = suggested("4GiB", mc.Ranks(8)), suggested("4GiB", world_size=8)
    assert counted.budget_bytes == described.budget_bytes < suggested("4GiB").budget_bytes
    assert counted.batch_size == pytest.approx(described.batch_size, rel=0.02)
    assert any("the CUDA context and NCCL are counted" in part for part in counted.leaves_out)


def uneven(model, number, num_stages):
    """Three quarters of the layers on the first rank."""
    return model[:3] if number == 0 else model[3:]


@needs_ranks
def test_a_microbatch_is_as_large_as_fits_on_every_stage():
    def job(rank=0):
        return mc.Ranks(2, "pipeline", rank=rank, n_microbatches=4, split=uneven)

    advice = mc.suggest_batch_size(step(job(), network(4)), device="4GiB", multiple_of=1)
    by_rank = {one.ranks: one.batch_size for one in advice.by_rank}
    assert set(by_rank) == {(0,), (1,)}
    assert advice.batch_size == min(by_rank.values()) < max(by_rank.values())
    # It is that of a microbatch, at which all ranks are together.
    assert advice.global_batch_size == 4 * advice.batch_size
    assert "4 microbatches of that size" in advice.to_text()
    with pytest.raises(ValueError, match="in a pipeline"):
        advice.accumulate_for(1024)
    from_the_other = mc.suggest_batch_size(
        step(job(rank=1), network(4)), device="4GiB", multiple_of=1
    )
    assert from_the_other.batch_size == advice.batch_size


@needs_ranks
def test_a_microbatch_is_a_part_of_the_dataset():
    ranks = mc.Ranks(2, "pipeline", n_microbatches=4)
    advice = mc.suggest_batch_size(step(ranks), device="8GiB", multiple_of=1, dataset_size=1000)
    assert (advice.batch_size, advice.global_batch_size) == (250, 1000)


def scheduled(model, mesh):
    """A schedule of one's own, with three quarters of the layers on the first rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    number = mesh.get_local_rank()
    stage = PipelineStage(
        uneven(model, number, 2), number, 2, torch.device(mesh.device_type), group=mesh.get_group()
    )
    return Schedule1F1B(stage, 4, loss_fn=lambda output, target: output.sum() + 0 * target.sum())


def run(schedule, batch):
    schedule.step(
        *([batch] if schedule._stage.is_first else []),
        target=batch if schedule._stage.is_last else None,
    )


@needs_ranks
def test_a_function_that_makes_a_pipeline_is_looked_at_on_every_rank():
    own = mc.TrainingStep(
        network(4),
        torch.zeros(16, WIDTH),
        loss=run,
        optimizer=torch.optim.SGD,
        ranks=mc.Ranks(2, scheduled, rank=1),
    )
    advice = mc.suggest_batch_size(own, device="4GiB", multiple_of=1)
    assert [one.ranks for one in advice.by_rank] == [(0,), (1,)]
    assert advice.batch_size == min(one.batch_size for one in advice.by_rank)
    assert advice.global_batch_size == 4 * advice.batch_size


class Tokens(nn.Module):
    """Memory for each token."""

    def forward(self, x):
        return torch.exp(torch.exp(x)).mean(1)


@needs_ranks
def test_for_every_length_all_stages_fit():
    def stage(model, number, num_stages):
        return model[number]

    model = nn.Sequential(
        nn.Sequential(nn.Linear(8, 8), Tokens()),
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 40_000)),
    )
    ranks = mc.Ranks(2, "pipeline", n_microbatches=2, split=stage)
    long = mc.TrainingStep(
        model, torch.zeros(4, 128, 8), optimizer=torch.optim.SGD, sequence_length=128, ranks=ranks
    )
    advice = mc.suggest_batch_size(long, device="4GiB", multiple_of=1, sequence_lengths=[16, 128])
    assert set(advice.by_sequence_length) == {16, 128}
    for rank in range(2):
        prediction = mc.predict(long.of_rank(rank), device="4GiB")
        for length, batch_size in advice.by_sequence_length.items():
            peak_bytes = prediction.at(batch_size, sequence_length=length).peak_reserved_bytes
            assert peak_bytes <= advice.budget_bytes, (rank, length)


@needs_ranks
def test_ranks_with_tensor_parallel_layers_share_a_batch():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    plan = {"0.0": ColwiseParallel(), "1.0": RowwiseParallel()}
    advice = suggested("4GiB", mc.Ranks(4, "tensor_parallel", plan=plan))
    assert advice.global_batch_size == advice.batch_size


def test_what_does_not_go_together_is_refused():
    with pytest.raises(
        ValueError, match=r"list of 2 devices, and must have one for each of the 3 ranks"
    ):
        suggested(["4GiB", "8GiB"], mc.Ranks(3))
    with pytest.raises(ValueError, match=r"list of 0 devices, and must have at least one"):
        suggested([])
    with pytest.raises(ValueError, match=r"world_size must be at least 1, got 0"):
        suggested("4GiB", world_size=0)
    with pytest.raises(ValueError, match=r"world_size is 5, but 2 ranks"):
        suggested(["4GiB", "8GiB"], world_size=5)
    measured = mc.predict(step(), device="4GiB").step
    with pytest.raises(
        ValueError, match=r"measured=... is of one rank, but there are 2 kinds of ranks"
    ):
        suggested(["4GiB", "8GiB"], measured=measured)
