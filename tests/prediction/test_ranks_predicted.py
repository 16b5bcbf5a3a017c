"""Jobs of several ranks, of which one is traced in this process: what it holds, and what is left of
it. On devices: test_ranks_predicted_cuda.py.
"""

import gc
import sys
import threading
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from needs import needs_ranks
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import memcallback as mc
from memcallback.core.allocation_trace import Alloc, StepStart
from memcallback.core.tensors import storage_bytes
from memcallback.step.fake_world import fake_world
from memcallback.trace.dispatch.ledger import Ledger

WIDTH = 256
MATRIX_BYTES = 4 * WIDTH * WIDTH
BATCH_BYTES = 8 * WIDTH * 4


def network(num_layers=4):
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(num_layers))
    )


def step(ranks=None, *, model=None, batch_size=8, optimizer=torch.optim.SGD, **options):
    return mc.TrainingStep(
        model or network(),
        torch.zeros(batch_size, WIDTH),
        optimizer=optimizer,
        ranks=ranks,
        **options,
    )


def windows(ranks=None, **options):
    """The forward and the backward pass of the steady step on a CPU."""
    return mc.predict(step(ranks, **options), device="cpu").step.windows[:2]


def held(ranks=None, **options):
    """What the steady step begins with beside the batch: its gradients are cleared before."""
    forward, _ = windows(ranks, **options)
    return forward.start.allocated_bytes - BATCH_BYTES


@needs_ranks
def test_ddp_keeps_buckets_as_large_as_its_gradients():
    assert held() == 4 * MATRIX_BYTES
    assert held(mc.Ranks(4)) == 2 * 4 * MATRIX_BYTES


@needs_ranks
def test_gradients_that_lie_in_the_buckets_take_no_memory_of_their_own():
    _, own = windows(mc.Ranks(4))
    _, in_buckets = windows(mc.Ranks(4, gradient_as_bucket_view=True))
    assert own.end.allocated_bytes - in_buckets.end.allocated_bytes == 4 * MATRIX_BYTES


@needs_ranks
@pytest.mark.parametrize(("capacity_mb", "num_buckets"), [(25, 1), (0.5, 2), (0.1, 4)])
def test_buckets_are_made_anew_in_the_second_step_each_as_large_as_it_may_be(
    capacity_mb, num_buckets
):
    prediction = mc.predict(step(mc.Ranks(2, bucket_cap_mb=capacity_mb)), device="cpu")
    made = [
        event.size_bytes
        for event in prediction.trace.traced.trace.events
        if isinstance(event, Alloc) and event.operator == "aten::empty"
    ]
    first, *anew = [size for size in made if size >= MATRIX_BYTES]
    assert first == 4 * MATRIX_BYTES
    assert anew == [4 * MATRIX_BYTES // num_buckets] * num_buckets


@needs_ranks
@pytest.mark.parametrize("world_size", [2, 8])
def test_fsdp2_holds_its_share_and_gathers_a_layer_at_a_time(world_size):
    share = 4 * MATRIX_BYTES // world_size
    forward, backward = windows(mc.Ranks(world_size, "fsdp2"))
    assert forward.start.allocated_bytes - BATCH_BYTES == pytest.approx(share, abs=64)
    # Gathered are one layer and the next, each once as it came and once as parameters.
    assert backward.peak_allocated_bytes < 2 * share + 4 * MATRIX_BYTES + 16 * BATCH_BYTES
    kept, _ = windows(mc.Ranks(world_size, "fsdp2", reshard_after_forward=False))
    assert kept.end.allocated_bytes - forward.end.allocated_bytes == 4 * MATRIX_BYTES


@needs_ranks
def test_what_cannot_be_divided_is_filled_up_on_the_last_rank():
    assert WIDTH % 3 == 1
    parts = [held(mc.Ranks(3, "fsdp2", rank=rank)) for rank in range(3)]
    assert parts == [pytest.approx(4 * (WIDTH // 3 + 1) * WIDTH * 4, abs=64)] * 3


@needs_ranks
def test_the_last_rank_does_not_fill_up_its_part_again_in_its_first_step():
    made = []
    for rank in range(3):
        prediction = mc.predict(step(mc.Ranks(3, "fsdp2", rank=rank)), device="NVIDIA H200")
        events = prediction.trace.traced.trace.events
        made.append(
            [
                event.size_bytes
                for event in events
                if isinstance(event, Alloc) and event.operator == "aten::new_zeros"
            ]
        )
    assert made[0] == made[1] == made[2]


@needs_ranks
def test_a_model_without_data_is_sharded_before_it_comes_to_the_device():
    with torch.device("meta"):
        model = network()
    prediction = mc.predict(step(mc.Ranks(4, "fsdp2"), model=model), device="NVIDIA H200")
    events = prediction.trace.traced.trace.events
    before = events[: events.index(StepStart())]
    assert (
        max(event.size_bytes for event in before if isinstance(event, Alloc)) == MATRIX_BYTES // 4
    )
    assert all(parameter.is_meta for parameter in model.parameters())


@needs_ranks
def test_tensor_parallel_layers_have_a_part_of_each_matrix():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    plan = {"0.0": ColwiseParallel(), "1.0": RowwiseParallel()}
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(2)))
    assert held(mc.Ranks(4, "tensor_parallel", plan=plan), model=model) == pytest.approx(
        2 * MATRIX_BYTES // 4, abs=64
    )


class Cached(nn.Linear):
    """A layer with a cache that is empty at first, as attention of transformers has."""

    def forward(self, x):
        return super().forward(torch.cat([torch.tensor([], dtype=x.dtype), x], -1))


@needs_ranks
def test_an_empty_tensor_that_a_layer_makes_takes_no_memory():
    def peak(kind):
        sharded = step(mc.Ranks(2, "fsdp2"), model=nn.Sequential(kind(256, 256), kind(256, 10)))
        return mc.predict(sharded, device="NVIDIA H200").peak_reserved_bytes

    assert peak(Cached) == peak(nn.Linear)


@needs_ranks
def test_dtensors_of_one_trace_say_nothing_of_those_of_the_next():
    """DTensor remembers how equal meshes spread tensors, and with that their process groups."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    plan = {"0.0": ColwiseParallel(), "1.0": RowwiseParallel()}
    prediction = mc.predict(
        step(mc.Ranks(4, "tensor_parallel", plan=plan), model=network(2)), device="cpu"
    )
    assert prediction.trace.is_any_batch_size_known, prediction.caveats


def train_in_parts(rank, world_size, folder):
    """A rank that predicts itself, and trains in a mesh that equals that of its prediction."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    ranks = mc.Ranks(
        world_size,
        "tensor_parallel",
        rank=rank,
        plan={"0.0": ColwiseParallel(), "1.0": RowwiseParallel()},
    )
    mc.predict(step(ranks, model=network(2)), device="cpu")
    torch.manual_seed(0)
    model, batch = network(2), torch.randn(8, WIDTH)
    wanted = model(batch)
    assert torch.allclose(ranks.parallelize(model, "cpu")(batch), wanted, atol=1e-6)
    dist.destroy_process_group()


@needs_ranks
def test_dtensors_of_a_trace_say_nothing_of_those_that_are_trained(tmp_path):
    torch.multiprocessing.spawn(train_in_parts, (2, str(tmp_path)), nprocs=2)


def test_an_older_pytorch_is_told(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(
        mc.PredictionError, match=r"needs PyTorch 2\.11 or later, and this is 2\.10\.1"
    ):
        mc.predict(step(mc.Ranks(2)), device="24GiB")
    with pytest.raises(
        ValueError, match=r"A pipeline needs PyTorch 2\.11 or later, and this is 2\.10\.1"
    ):
        mc.Ranks(2, "pipeline", n_microbatches=2).parallelize(network(2), "cpu")


@needs_ranks
def test_a_trace_is_forgotten_when_it_is_over():
    """DTensor keeps the meshes that it has seen."""

    def num_kept():
        mc.predict(step(mc.Ranks(4, "fsdp2")), device="24GiB")
        gc.collect()
        return sum(type(one) is Ledger for one in gc.get_objects())

    kept = [num_kept() for _ in range(5)]
    assert len(set(kept[2:])) == 1, kept  # a cache may hold the last traces, and not one more each


class Seen:
    """What a loss has seen; its variables are given back as they were."""

    places: ClassVar = []


@needs_ranks
def test_meshes_of_other_threads_are_where_they_are():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def look(model, batch):
        thread = threading.Thread(target=lambda: Seen.places.append(mesh.device_type))
        thread.start()
        thread.join()
        return model(batch).sum()

    try:
        mc.predict(step(mc.Ranks(2, "fsdp2"), loss=look), device="24GiB")
    finally:
        dist.destroy_process_group()
    assert set(Seen.places) == {"cpu"}


@needs_ranks
def test_a_function_does_what_a_strategy_has_no_name_for():
    def spread(model, mesh, *, wrap):
        assert mesh.mesh_dim_names == ("replicate", "shard")
        assert mesh.device_type == "cuda"
        assert dist.get_world_size() == 8
        assert (dist.get_rank(), mesh["shard"].get_local_rank()) == (5, 1)
        return wrap(model.to("cuda"))

    ranks = mc.Ranks(
        8,
        spread,
        rank=5,
        mesh={"replicate": 2, "shard": 4},
        wrap=nn.parallel.DistributedDataParallel,
    )
    assert mc.predict(step(ranks), device="NVIDIA H200").fits


@needs_ranks
def test_a_prediction_of_a_rank_knows_every_batch_size_and_says_whose_it_is():
    prediction = mc.predict(step(mc.Ranks(64, "fsdp2", rank=3)), device="NVIDIA H200")
    assert prediction.trace.is_any_batch_size_known
    larger = mc.predict(step(mc.Ranks(64, "fsdp2", rank=3), batch_size=40), device="NVIDIA H200")
    assert prediction.at(batch_size=40).step.windows == larger.step.windows
    assert any(text.startswith("Rank 3 of 64 under fsdp2") for text in prediction.caveats)
    assert any("NCCL is assumed to need 1.49 GiB" in text for text in prediction.caveats)


@needs_ranks
def test_a_suggestion_leaves_what_nccl_takes():
    def advised(ranks):
        return mc.suggest_batch_size(step(ranks), device="8GiB", multiple_of=1)

    alone, of_two = advised(None), advised(mc.Ranks(2))
    assert of_two.outside_bytes - alone.outside_bytes == 1_600_000_000
    assert of_two.bounds.world_size == 2
    assert of_two.global_batch_size == 2 * of_two.batch_size
    peaks = [dict(advice.curve)[advice.batch_size] for advice in (alone, of_two)]
    assert peaks[0] - peaks[1] == pytest.approx(1_600_000_000, rel=0.02)
    with pytest.raises(ValueError, match=r"world_size is 4, but 2 ranks have a batch of their own"):
        mc.suggest_batch_size(step(mc.Ranks(2)), device="8GiB", world_size=4)


@needs_ranks
def test_an_optimizer_of_the_whole_is_made_anew_for_the_shards():
    model = network()
    given = torch.optim.Adam(model.parameters(), lr=0.1)
    assert held(mc.Ranks(4, "fsdp2"), model=model, optimizer=given) == held(
        mc.Ranks(4, "fsdp2"), optimizer=torch.optim.Adam
    )
    assert not given.state


@needs_ranks
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # PyTorch's own, on its import
def test_a_sharded_optimizer_keeps_state_for_its_own_part():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def state_bytes(rank, optimizer):
        prediction = mc.predict(step(mc.Ranks(2, rank=rank), optimizer=optimizer), device="cpu")
        return prediction.step.windows[0].end.by_category[mc.Category.OPTIMIZER_STATE]

    def sharded(parameters):
        return ZeroRedundancyOptimizer(parameters, torch.optim.Adam)

    parts = [state_bytes(rank, sharded) for rank in range(2)]
    assert sum(parts) == pytest.approx(state_bytes(0, torch.optim.Adam), abs=64)
    assert min(parts) > 0


def world():
    """All that a trace must leave as it was."""
    return (
        distributed_c10d._world,
        distributed_c10d._default_pg_init_method,
        sys.excepthook,
        torch.distributed.tensor._random._rng_tracker,
        DeviceMesh.__init__,
        DeviceMesh.__dict__.get("device_type"),
        torch.UntypedStorage.resize_,
        nn.parallel.DistributedDataParallel._pre_forward,
        torch.get_rng_state().tolist(),
    )


@needs_ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_nothing_is_left_of_a_trace(strategy):
    model = network()
    before = world()
    weights = [parameter.clone() for parameter in model.parameters()]
    mc.predict(step(mc.Ranks(16, strategy), model=model), device="NVIDIA H200")
    assert world() == before
    assert not dist.is_initialized()
    assert type(model) is nn.Sequential
    assert not isinstance(model[0][0].weight, DTensor)
    assert all(torch.equal(*pair) for pair in zip(weights, model.parameters(), strict=True))


@needs_ranks
def test_a_step_that_fails_leaves_nothing_either():
    def fails(model, mesh):
        raise RuntimeError("no such plan")

    failing = step(mc.Ranks(2, fails))
    before = world()
    with pytest.raises(mc.PredictionError, match="no such plan"):
        mc.predict(failing, device="cpu")
    assert world() == before


def test_other_threads_keep_the_process_group_that_is_there(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        own, seen = dist.group.WORLD, []
        with fake_world(64, 7):
            assert (dist.get_world_size(), dist.get_rank(), dist.get_backend()) == (64, 7, "fake")
            thread = threading.Thread(
                target=lambda: seen.append(
                    (dist.get_world_size(), dist.get_backend(), dist.group.WORLD is own)
                )
            )
            thread.start()
            thread.join()
            dist.new_group([0, 7])
        assert seen == [(1, "gloo", True)]
        assert (dist.get_world_size(), dist.get_backend(), dist.group.WORLD) == (1, "gloo", own)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert dist.new_group([0]).size() == 1
    finally:
        dist.destroy_process_group()


@needs_ranks
def test_a_model_in_ddp_says_its_ranks_itself(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = network()
        wrapped = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, bucket_cap_mb=1
        )
        found = mc.TrainingStep(
            wrapped, torch.zeros(8, WIDTH), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
        )
        assert found.model is model
        assert (found.ranks.world_size, found.ranks.name, found.ranks.rank) == (1, "ddp", 0)
        assert found.ranks.options["gradient_as_bucket_view"] is True
        assert found.ranks.options["bucket_cap_mb"] == 1
        assert mc.predict(found, device="cpu").fits
    finally:
        dist.destroy_process_group()


def compiled_in_place(model):
    model.compile()
    return model


@needs_ranks
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize("way", [torch.compile, compiled_in_place])
def test_a_model_in_ddp_that_is_compiled_says_its_ranks_itself(way, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = network()
        wrapped = way(nn.parallel.DistributedDataParallel(model))
        found = mc.TrainingStep(wrapped, torch.zeros(8, WIDTH))
        assert found.model is model
        assert found.ranks.name == "ddp"
        assert repr(found.ranks).endswith("compile=torch.compile)")
        assert mc.predict(found, device="cpu").fits
        assert not model._forward_hooks
    finally:
        dist.destroy_process_group()


def test_the_parts_of_a_dtensor_are_counted_once():
    with fake_world(4, 0):
        model = mc.Ranks(4, "fsdp2").parallelize(network(), "cpu")
        assert storage_bytes(model.parameters()) == 4 * MATRIX_BYTES // 4


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((0,), {}, ValueError, "world_size must be at least 1, got 0"),
        (
            (2,),
            {"rank": 2},
            ValueError,
            r"rank must be below world_size, got rank 2 of 2. Ranks are counted from 0 to 1",
        ),
        ((8,), {"mesh": {"dp": 2, "tp": 2}}, ValueError, "has 4 places for 8 ranks"),
        (
            (2, "zero3"),
            {},
            ValueError,
            "strategy must be 'ddp', 'fsdp2', 'tensor_parallel', 'pipeline' or a function",
        ),
        (
            (2, "ddp"),
            {"reshard_after_forward": True},
            TypeError,
            "strategy 'ddp' takes no 'reshard_after_forward'. It takes "
            "batched_grad_copy|broadcast_buffers",
        ),
        ((2, "ddp"), {"compile": True}, TypeError, "compile must be a function that compiles"),
        ((2, "tensor_parallel"), {}, TypeError, "needs plan="),
        ((2.5,), {}, TypeError, "world_size"),
    ],
)
def test_wrong_arguments_are_told_with_the_way_out(arguments, options, error, text):
    with pytest.raises(error, match=text):
        mc.Ranks(*arguments, **options)


def test_what_is_no_job_is_refused():
    with pytest.raises(TypeError, match=r"ranks must be memcallback\.Ranks, got"):
        step(4)
