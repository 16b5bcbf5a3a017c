"""What a step would need if its model were spread over several ranks: rows of `what_if`."""

from itertools import pairwise

import pytest
import torch
from needs import needs_ranks
from torch import nn
from tried_savings import only

import memcallback as mc

WIDTH, NUM_LAYERS, WORLD_SIZE = 256, 4, 8
PARAMETER_BYTES = 4 * WIDTH * WIDTH * NUM_LAYERS


def step():
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(NUM_LAYERS))
    )
    return mc.TrainingStep(model, torch.zeros(16, WIDTH), optimizer=torch.optim.Adam)


@pytest.fixture(scope="module")
def rows():
    with only():
        plan = mc.what_if(step(), device="NVIDIA L4", ranks=WORLD_SIZE)
    return {row.saving: row for row in plan.tried if row.kind == "ranks"}


@needs_ranks
def test_there_is_a_row_for_each_usual_way(rows):
    assert list(rows) == [
        "ddp on 8, gradient_as_bucket_view=True",
        "fsdp2 on 8",
        "fsdp2 on 8, reshard_after_forward=False",
        "fsdp2 on 2 x 4",
    ]
    assert not any(row.problem for row in rows.values())


@needs_ranks
def test_a_sequential_model_can_be_a_pipeline():
    with only():
        plan = mc.what_if(step(), device="NVIDIA L4", ranks=2)
    row = next(row for row in plan.tried if row.saving.startswith("pipeline"))
    assert (row.saving, row.batch_size, row.problem) == ("pipeline on 2, n_microbatches=2", 8, "")
    jobs = [mc.Ranks(2, "pipeline", rank=rank, n_microbatches=2) for rank in range(2)]
    stages = [
        mc.predict(step().varied(ranks=job), device="NVIDIA L4", batch_size=8) for job in jobs
    ]
    assert (
        row.peak_allocated_bytes
        == max(stages, key=lambda stage: stage.peak_reserved_bytes).peak_allocated_bytes
    )
    assert (
        row.largest_batch_size
        == mc.suggest_batch_size(
            step().varied(ranks=jobs[0]), device="NVIDIA L4", multiple_of=1
        ).batch_size
    )
    # What a stage computes is a part of the whole.
    assert row.extra_compute_pct == pytest.approx(0)
    assert row.changes == "changes nothing: all ranks share one batch"


class OtherwiseInLargeBatches(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu() if len(x) > 8 else super().forward(x)


@needs_ranks
def test_what_fits_one_stage_alone_is_not_told_where_another_is_unknown():
    model = nn.Sequential(OtherwiseInLargeBatches(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    step = mc.TrainingStep(model, torch.zeros(16, WIDTH), optimizer=torch.optim.SGD)
    jobs = [mc.Ranks(2, "pipeline", n_microbatches=2)]
    with only():
        plan = mc.what_if(step, device="NVIDIA L4", ranks=jobs)
    (row,) = (row for row in plan.tried if row.kind == "ranks")
    assert not row.problem
    assert row.largest_batch_size is None


def of_ranks(ranks):
    sizes = [WIDTH, 4 * WIDTH, WIDTH, WIDTH]
    model = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes)))
    batch = torch.zeros(64, WIDTH)
    return mc.TrainingStep(model, batch, optimizer=torch.optim.SGD, ranks=ranks)


def mixed(plan):
    return next(row for row in plan.tried if row.saving == "bf16-mixed")


@needs_ranks
def test_of_a_pipeline_as_it_is_the_stage_that_needs_most_counts():
    def uneven(model, number, num_stages):
        return model[:2] if number == 0 else model[2:]

    first, last = (
        of_ranks(mc.Ranks(2, "pipeline", rank=rank, n_microbatches=2, split=uneven))
        for rank in range(2)
    )
    with only("bf16-mixed"):
        plan = mc.what_if(last, device="NVIDIA L4")
    assert plan.current.peak_bytes == mc.predict(first, device="NVIDIA L4").peak_reserved_bytes
    assert plan.current.peak_bytes > mc.predict(last, device="NVIDIA L4").peak_reserved_bytes
    assert mixed(plan).extra_compute_pct == pytest.approx(0)


@needs_ranks
def test_a_saving_of_ranks_that_share_a_batch_costs_what_it_costs_one_rank():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    styles = {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel()}
    step = of_ranks(mc.Ranks(4, "tensor_parallel", plan=styles))
    with only("bf16-mixed"):
        plan = mc.what_if(step, device="NVIDIA L4")
    assert mixed(plan).extra_compute_pct == pytest.approx(0)


def test_a_batch_that_cannot_be_cut_into_microbatches_is_told():
    jobs = [mc.Ranks(2, "pipeline", n_microbatches=3)]
    with only():
        plan = mc.what_if(step(), device="NVIDIA L4", ranks=jobs)
    (row,) = (row for row in plan.tried if row.kind == "ranks")
    assert row.problem == "a batch of 16 cannot be cut into 3 parts of one size"


def llama():
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
    }
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False
    )
    return transformers.LlamaForCausalLM(config)


@needs_ranks
def test_a_model_that_says_how_has_tensor_parallel_layers():
    tokens = torch.zeros(4, 32, dtype=torch.int64)
    step = mc.TrainingStep(
        llama(),
        tokens,
        loss=lambda model, batch: model(input_ids=batch, labels=batch, use_cache=False).loss,
    )
    with only():
        plan = mc.what_if(step, device="NVIDIA L4", ranks=2)
    rows = {row.saving: row for row in plan.tried if row.kind == "ranks"}
    row = rows["tensor_parallel on 2"]
    assert not row.problem
    # All matrices are divided, none of the norms.
    alone, ddp = plan.current, rows["ddp on 2, gradient_as_bucket_view=True"]
    assert row.peak_allocated_bytes < alone.peak_allocated_bytes <= ddp.peak_allocated_bytes
    assert row.extra_compute_pct == pytest.approx(0, abs=1)
    assert row.sent_bytes > 0
    assert not [name for name in rows if name.startswith("pipeline")]


@needs_ranks
def test_a_row_is_the_prediction_of_a_rank(rows):
    row = rows["fsdp2 on 8"]
    prediction = mc.predict(step().varied(ranks=mc.Ranks(WORLD_SIZE, "fsdp2")), device="NVIDIA L4")
    assert (row.peak_allocated_bytes, row.peak_reserved_bytes) == (
        prediction.peak_allocated_bytes,
        prediction.peak_reserved_bytes,
    )
    assert (
        row.largest_batch_size
        == mc.suggest_batch_size(
            step().varied(ranks=mc.Ranks(WORLD_SIZE, "fsdp2")), device="NVIDIA L4", multiple_of=1
        ).batch_size
    )


@pytest.mark.parametrize(
    ("saving", "sent"),
    [
        # Gradients are reduced and given to all: twice what is sent to scatter or to gather them.
        ("ddp on 8, gradient_as_bucket_view=True", 2 * 7 / 8),
        # Parameters are gathered for the forward pass and again for the backward pass, gradients
        # are scattered.
        ("fsdp2 on 8", 3 * 7 / 8),
        ("fsdp2 on 8, reshard_after_forward=False", 2 * 7 / 8),
        # The same within four, and a quarter of the gradients is summed over two.
        ("fsdp2 on 2 x 4", 3 * 3 / 4 + 2 * 1 / 2 / 4),
    ],
)
@needs_ranks
def test_what_is_sent_is_that_of_rings(rows, saving, sent):
    assert rows[saving].sent_bytes == sent * PARAMETER_BYTES


@needs_ranks
def test_jobs_of_ones_own_are_tried_too():
    jobs = [mc.Ranks(2, bucket_cap_mb=1), mc.Ranks(16, "fsdp2")]
    with only():
        plan = mc.what_if(step(), device="24GiB", ranks=jobs)
    ddp, fsdp2 = (row for row in plan.tried if row.kind == "ranks")
    assert (ddp.saving, fsdp2.saving) == ("ddp on 2, bucket_cap_mb=1", "fsdp2 on 16")
    assert fsdp2.line == "memcallback.Ranks(16, 'fsdp2').parallelize(model, 'cuda')"
    assert plan.to_table().columns[-1] == "sent"
    assert {row["saving"]: row["sent_bytes"] for row in plan.to_dict()["savings"]}[
        "fsdp2 on 16"
    ] == int(3 * 15 / 16 * PARAMETER_BYTES)


def test_on_one_device_nothing_is_sent_and_no_column_says_so():
    with only("bf16-mixed"):
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
