"""Models in stages: what each stage is predicted to hold, and that the schedule trains as the whole
model does. On devices: test_ranks_predicted_cuda.py.
"""

import json
from functools import cache

import pytest
import torch
import torch.distributed as dist
from needs import needs_ranks
from torch import nn

import memcallback as mc

pytestmark = needs_ranks

WIDTH = 256
NUM_BLOCKS, NUM_RANKS, NUM_MICROBATCHES = 6, 3, 4
#: A block keeps its input for the gradient of its weight, and its output for that of its activation
#: function, which is the next one's input.
MICROBATCH_BYTES = 4 * 8 * WIDTH
BLOCK_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
BATCH = torch.zeros(8, WIDTH), torch.zeros(8, WIDTH)


def network(num_blocks=NUM_BLOCKS):
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(num_blocks))
    )


def loss_of(model, batch):
    inputs, wanted = batch
    return nn.functional.mse_loss(model(inputs), wanted)


def job(world_size=NUM_RANKS, rank=0, **options):
    return mc.Ranks(
        world_size, "pipeline", rank=rank, **{"n_microbatches": NUM_MICROBATCHES, **options}
    )


def step(ranks, *, model=None, optimizer=torch.optim.SGD, loss=loss_of, batch=BATCH, **options):
    return mc.TrainingStep(
        model or network(), batch, loss=loss, optimizer=optimizer, ranks=ranks, **options
    )


def predicted(ranks, **options):
    return mc.predict(step(ranks, **options), device="cpu")


@cache
def of_rank(rank, schedule="1F1B"):
    """The windows of the steady step of a rank."""
    return predicted(job(rank=rank, schedule=schedule)).step.windows


def passes(rank, schedule="1F1B"):
    """The forward and backward passes of the steady step, in order."""
    letters = {mc.Phase.FORWARD: "F", mc.Phase.BACKWARD: "B", mc.Phase.OPTIMIZER_STEP: "U"}
    return "".join(letters[window.phase] for window in of_rank(rank, schedule))


def peaks(windows):
    return [window.peak_allocated_bytes for window in windows]


def test_the_passes_of_microbatches_are_in_the_order_of_the_schedule():
    # Forward passes one after the other are one window.
    assert passes(rank=0) == "FBFBBBU"
    assert passes(rank=2) == "FBFBFBFBU"
    assert passes(rank=0, schedule="GPipe") == "FBBBBU"


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_each_stage_holds_the_microbatches_that_are_in_flight(rank):
    # Of a microbatch a stage of two blocks keeps what both give; what it gets lies in a buffer.
    num_more = NUM_MICROBATCHES - (NUM_RANKS - rank)
    more = of_rank(rank, "GPipe")[0].end.allocated_bytes - of_rank(rank)[0].end.allocated_bytes
    assert more == pytest.approx(2 * num_more * MICROBATCH_BYTES, abs=8 * num_more)


def test_a_card_holds_its_stage_alone():
    update = mc.predict(step(job(), optimizer=torch.optim.Adam), device="L4").step.windows[-1]
    held = update.end.by_category
    assert held[mc.Category.PARAMETER] == held[mc.Category.GRADIENT] == 2 * BLOCK_BYTES
    assert held[mc.Category.OPTIMIZER_STATE] == 2 * 2 * BLOCK_BYTES


def test_an_optimizer_of_the_whole_model_updates_the_stage():
    model = network()
    given = predicted(job(rank=1), model=model, optimizer=torch.optim.Adam(model.parameters()))
    made = predicted(job(rank=1), optimizer=torch.optim.Adam)
    assert peaks(given.step.windows) == peaks(made.step.windows)


def test_a_microbatch_more_is_as_many_bytes_more():
    small, large = (
        predicted(job(rank=1), batch=tuple(torch.zeros(size, WIDTH) for _ in BATCH))
        for size in (8, 16)
    )
    assert small.at(batch_size=16).step.peak_allocated_bytes == large.step.peak_allocated_bytes


def test_stages_that_go_round_are_several_on_each_rank():
    held = predicted(
        job(rank=1, schedule="Interleaved1F1B", stages_per_rank=2), optimizer=torch.optim.Adam
    ).step.windows[-1]
    assert held.end.by_category[mc.Category.OPTIMIZER_STATE] == pytest.approx(
        2 * 2 * BLOCK_BYTES, abs=64
    )


class Residual(nn.Module):
    """What cannot be cut without being told how."""

    def __init__(self):
        super().__init__()
        self.blocks = network()

    def forward(self, x):
        return x + self.blocks(x)


def halves(model, number, num_stages):
    size = NUM_BLOCKS // num_stages
    return model.blocks[number * size : (number + 1) * size]


def test_a_function_says_how_a_model_is_cut():
    told = predicted(job(split=halves), model=Residual())
    assert peaks(told.step.windows) == peaks(of_rank(0))
    with pytest.raises(mc.PredictionError, match=r"cannot be cut into 3 stages.* Give split="):
        predicted(job(), model=Residual())
    with pytest.raises(
        mc.PredictionError, match=r"Sequential with 2 children cannot be cut into 3 stages"
    ):
        predicted(job(), model=network(2))


def own_schedule(model, mesh):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    number, group = mesh.get_local_rank(), mesh.get_group()
    stage = PipelineStage(
        model[2 * number : 2 * number + 2],
        number,
        mesh.size(),
        torch.device(mesh.device_type),
        group=group,
    )
    return Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss)


def run_own(schedule, batch):
    inputs, wanted = batch
    if schedule._stage.is_first:
        schedule.step(inputs)
    else:
        schedule.step(target=wanted if schedule._stage.is_last else None)


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_schedule_of_ones_own_is_predicted_like_ours(rank):
    own = peaks(predicted(mc.Ranks(NUM_RANKS, own_schedule, rank=rank), loss=run_own).step.windows)
    # For the loss of a whole model there is a byte for each sample on the host, which here is the
    # device, and the losses are returned.
    of_loss = NUM_MICROBATCHES * (len(BATCH[0]) + 4) if rank == NUM_RANKS - 1 else 0
    assert own == pytest.approx(peaks(of_rank(rank)), abs=of_loss)


def test_what_fails_in_a_stage_is_told_as_it_failed():
    class Fails(nn.Linear):
        def forward(self, x):
            raise ValueError("no such thing")

    with pytest.raises(mc.PredictionError, match=r"no such thing"):
        predicted(job(2), model=nn.Sequential(Fails(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))


def waits_for_ever(model, mesh):
    if mesh.get_local_rank() == 1:
        dist.recv_object_list([None], src=0)
    return model


def test_a_rank_that_waits_for_what_nobody_sends_is_told():
    with pytest.raises(
        mc.PredictionError, match="rank 1 waits for an object from rank 0, which sends none"
    ):
        predicted(mc.Ranks(2, waits_for_ever, rank=1))


def waits_for_the_other(model, mesh):
    other = 1 - mesh.get_local_rank()
    dist.recv_object_list([None], src=other)
    dist.send_object_list([None], dst=other)
    return model


def test_ranks_that_wait_for_each_other_are_told():
    with pytest.raises(mc.PredictionError, match="wait for each other"):
        predicted(mc.Ranks(2, waits_for_the_other))


def test_a_loss_that_does_not_call_the_model_once_is_refused():
    with pytest.raises(mc.PredictionError, match="called it 0 times"):
        predicted(job(), loss=lambda model, batch: batch[0].sum())
    with pytest.raises(mc.PredictionError, match="called it 2 times"):
        predicted(
            job(2, rank=1), loss=lambda model, batch: (model(batch[0]) - model(batch[1])).sum()
        )
    with pytest.raises(mc.PredictionError, match="reads the model's 'weight'"):
        predicted(
            job(2, rank=1), loss=lambda model, batch: model(batch[0]).sum() + model.weight.sum()
        )
    with pytest.raises(mc.PredictionError, match="Reduce it"):
        predicted(job(2, rank=1), loss=lambda model, batch: model(batch[0]))


def test_what_a_pipeline_is_not_is_refused():
    with pytest.raises(TypeError, match="needs n_microbatches"):
        mc.Ranks(4, "pipeline")
    with pytest.raises(ValueError, match="n_microbatches must be"):
        job(n_microbatches=0)
    with pytest.raises(ValueError, match="Unknown schedule name"):
        job(schedule="2F2B")
    with pytest.raises(ValueError, match="one stage on each rank"):
        job(stages_per_rank=2)
    with pytest.raises(ValueError, match="two on each rank"):
        job(schedule="ZBVZeroBubble", stages_per_rank=3)
    with pytest.raises(ValueError, match="stages_per_rank must be"):
        job(schedule="Interleaved1F1B", stages_per_rank=0)
    with pytest.raises(ValueError, match="is a base class of schedules"):
        job(schedule="PipelineScheduleSingle")
    with pytest.raises(TypeError, match="schedule must be a name"):
        job(schedule=None)
    with pytest.raises(TypeError, match="split must be a function"):
        job(split=3)
    with pytest.raises(ValueError, match="uses one"):
        mc.Ranks(4, "pipeline", mesh={"dp": 2, "pp": 2}, n_microbatches=4)
    with pytest.raises(mc.PredictionError, match="accumulate=2 is not supported"):
        predicted(job(), accumulate=2)
    with pytest.raises(mc.PredictionError, match="bf16-mixed"):
        predicted(job(), precision="16-mixed")
    with pytest.raises(mc.PredictionError, match="LBFGS is not supported"):
        predicted(job(), optimizer=torch.optim.LBFGS)
    with pytest.raises(mc.PredictionError, match="ran no stage of the pipeline"):
        predicted(mc.Ranks(NUM_RANKS, own_schedule), loss=lambda schedule, batch: None)


def train(rank, world_size, folder):
    """One rank: for each schedule, whether the gradients of its stages are those of the model."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    equal = {schedule: equal_gradients(rank, world_size, schedule) for schedule in TRAINED}
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(equal, file)
    dist.barrier()
    dist.destroy_process_group()


def equal_gradients(rank, world_size, schedule):
    """By parameter of the rank's stages, whether its gradient is that of the whole model."""
    torch.manual_seed(0)
    model = network()
    # Of the inputs all rows are one in memory.
    batch = torch.randn(1, WIDTH).expand(16, WIDTH), torch.randn(16, WIDTH)
    pipeline = mc.Ranks(
        world_size, "pipeline", rank=rank, n_microbatches=4, schedule=schedule
    ).parallelize(model, "cpu")
    losses = pipeline.step(loss_of, batch)
    assert len(losses) == (4 if rank == world_size - 1 else 0)
    with pytest.raises(ValueError, match="A batch of 10 samples cannot be cut into 4 microbatches"):
        pipeline.step(loss_of, tuple(torch.randn(10, WIDTH) for _ in BATCH))
    whole = network()
    whole.load_state_dict(model.state_dict())
    loss_of(whole, batch).backward()
    return {
        name: torch.allclose(parameter.grad, one.grad)
        for (name, parameter), one in zip(model.named_parameters(), whole.parameters(), strict=True)
        if parameter.grad is not None
    }


TRAINED = ["1F1B", "Interleaved1F1B"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What `train` found on each of two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    torch.multiprocessing.spawn(train, (2, str(folder)), nprocs=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("schedule", TRAINED)
def test_a_pipeline_has_the_gradients_of_the_whole_model(trained, schedule):
    found = [one[schedule] for one in trained]
    assert all(found[0].values())
    assert all(found[1].values())
    assert {*found[0], *found[1]} == {name for name, _ in network().named_parameters()}
    assert not {*found[0]} & {*found[1]}
