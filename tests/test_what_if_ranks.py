"""What a step would need if its model were spread over several ranks: rows of `what_if`."""

import pytest
import torch
from torch import nn

import memcallback as mc

WIDTH, NUM_LAYERS, WORLD_SIZE = 256, 4, 8
PARAMETER_BYTES = 4 * WIDTH * WIDTH * NUM_LAYERS


def step():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(NUM_LAYERS)))
    return mc.TrainingStep(model, torch.zeros(16, WIDTH), optimizer=torch.optim.Adam)


@pytest.fixture(scope="module")
def rows():
    plan = mc.what_if(step(), device="NVIDIA L4", ranks=WORLD_SIZE)
    return {row.saving: row for row in plan.tried if row.kind == "ranks"}


def test_there_is_a_row_for_each_usual_way(rows):
    assert list(rows) == [
        "ddp on 8, gradient_as_bucket_view=True",
        "fsdp2 on 8",
        "fsdp2 on 8, reshard_after_forward=False",
        "fsdp2 on 2 x 4",
    ]
    assert not any(row.problem for row in rows.values())


def test_a_row_is_the_prediction_of_a_rank(rows):
    row = rows["fsdp2 on 8"]
    prediction = mc.predict(step().varied(ranks=mc.Ranks(WORLD_SIZE, "fsdp2")), device="NVIDIA L4")
    assert (row.peak_allocated_bytes, row.peak_reserved_bytes) == (prediction.peak_allocated_bytes, prediction.peak_reserved_bytes)
    assert (
        row.largest_batch_size
        == mc.suggest_batch_size(step().varied(ranks=mc.Ranks(WORLD_SIZE, "fsdp2")), device="NVIDIA L4", multiple_of=1).batch_size
    )


@pytest.mark.parametrize(
    ("saving", "sent"),
    [
        # Gradients are reduced and given to all: twice what is sent to scatter or to gather them.
        ("ddp on 8, gradient_as_bucket_view=True", 2 * 7 / 8),
        # Parameters are gathered for the forward pass and again for the backward pass, gradients are scattered.
        ("fsdp2 on 8", 3 * 7 / 8),
        ("fsdp2 on 8, reshard_after_forward=False", 2 * 7 / 8),
        # The same within four, and a quarter of the gradients is summed over two.
        ("fsdp2 on 2 x 4", 3 * 3 / 4 + 2 * 1 / 2 / 4),
    ],
)
def test_what_is_sent_is_that_of_rings(rows, saving, sent):
    assert rows[saving].sent_bytes == sent * PARAMETER_BYTES


def test_jobs_of_ones_own_are_tried_too():
    jobs = [mc.Ranks(2, bucket_cap_mb=1), mc.Ranks(16, "fsdp2")]
    plan = mc.what_if(step(), device="24GiB", ranks=jobs)
    ddp, fsdp2 = (row for row in plan.tried if row.kind == "ranks")
    assert (ddp.saving, fsdp2.saving) == ("ddp on 2, bucket_cap_mb=1", "fsdp2 on 16")
    assert fsdp2.line == "memcallback.Ranks(16, 'fsdp2').parallelize(model, 'cuda')"
    assert plan.to_table().columns[-1] == "sent"
    assert {row["saving"]: row["sent_bytes"] for row in plan.to_dict()["savings"]}["fsdp2 on 16"] == int(3 * 15 / 16 * PARAMETER_BYTES)


def test_on_one_device_nothing_is_sent_and_no_column_says_so():
    plan = mc.what_if(step(), device="24GiB")
    assert "sent" not in plan.to_table().columns


@pytest.mark.parametrize("ranks", [1, 0, -3])
def test_fewer_than_two_ranks_are_refused(ranks):
    with pytest.raises(ValueError, match=rf"ranks must be at least 2, got {ranks}"):
        mc.what_if(step(), device="24GiB", ranks=ranks)


def test_a_job_is_written_as_it_can_be_pasted():
    assert repr(mc.Ranks(64, "fsdp2")) == "Ranks(64, 'fsdp2')"
    assert (
        repr(mc.Ranks(4, rank=3, mesh={"a": 2, "b": 2}, bucket_cap_mb=4))
        == "Ranks(4, 'ddp', rank=3, mesh={'a': 2, 'b': 2}, bucket_cap_mb=4)"
    )
