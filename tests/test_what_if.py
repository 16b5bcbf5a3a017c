"""What savings would buy: each row of a plan is a prediction of the step with that saving, made by hand here."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memcallback as mc
from memcallback.allocator_settings import AllocatorSettings

CARD = "NVIDIA A100-SXM4-80GB"
BATCH_SIZE = 32


def convolutional():
    torch.manual_seed(0)
    layers = []
    for channels in (3, 16, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def step(model=None, **options):
    batch = torch.randn(BATCH_SIZE, 3, 32, 32), torch.zeros(BATCH_SIZE, dtype=torch.int64)
    return mc.TrainingStep(model or convolutional(), batch, loss=loss, **{"optimizer": torch.optim.AdamW} | options)


@pytest.fixture(scope="module")
def plan():
    return mc.what_if(step(), device=CARD)


def row(plan, saving):
    return next(row for row in plan.rows if row.saving == saving)


def figures(prediction):
    return prediction.peak_allocated_bytes, prediction.peak_reserved_bytes


def test_the_step_as_it_is_comes_first(plan):
    as_it_is = mc.predict(step(), device=CARD)
    assert (plan.current.peak_allocated_bytes, plan.current.peak_reserved_bytes) == figures(as_it_is)
    assert plan.current.batch_size == BATCH_SIZE
    assert plan.current.largest_batch_size == mc.suggest_batch_size(step(), device=CARD, multiple_of=1).batch_size


@pytest.mark.parametrize(
    ("saving", "by_hand"),
    [
        ("accumulate 4 batches", lambda: mc.predict(step(accumulate=4), device=CARD, batch_size=BATCH_SIZE // 4)),
        ("bf16-mixed", lambda: mc.predict(step(precision="bf16-mixed"), device=CARD)),
        ("16-mixed", lambda: mc.predict(step(precision="16-mixed"), device=CARD)),
        ("SGD", lambda: mc.predict(step(optimizer=lambda ps: torch.optim.SGD(ps, lr=1e-3)), device=CARD)),
        ("Adafactor", lambda: mc.predict(step(optimizer=torch.optim.Adafactor), device=CARD)),
        ("fused optimizer", lambda: mc.predict(step(optimizer=lambda ps: torch.optim.AdamW(ps, fused=True)), device=CARD)),
        ("expandable_segments", lambda: mc.predict(step(), device=CARD, settings=AllocatorSettings(expandable_segments=True))),
        ("channels_last", lambda: mc.predict(_channels_last(), device=CARD)),
        ("bf16-true", lambda: mc.predict(_bfloat16(), device=CARD)),
        ("freeze all but the last layer", lambda: mc.predict(step(_frozen()), device=CARD)),
        ("checkpoint_sequential, 4 segments", lambda: _checkpointed({"": 4})),
        ("inplace activations", lambda: mc.predict(step(_inplace()), device=CARD)),
    ],
)
def test_each_row_is_the_prediction_of_the_step_with_that_saving(plan, saving, by_hand):
    found = row(plan, saving)
    assert not found.problem
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == figures(by_hand())


def _channels_last():
    images = torch.randn(BATCH_SIZE, 3, 32, 32).to(memory_format=torch.channels_last)
    model = convolutional().to(memory_format=torch.channels_last)
    return mc.TrainingStep(model, (images, torch.zeros(BATCH_SIZE, dtype=torch.int64)), loss=loss, optimizer=torch.optim.AdamW)


def _bfloat16():
    batch = torch.randn(BATCH_SIZE, 3, 32, 32, dtype=torch.bfloat16), torch.zeros(BATCH_SIZE, dtype=torch.int64)
    return mc.TrainingStep(convolutional().bfloat16(), batch, loss=loss, optimizer=torch.optim.AdamW)


def _frozen():
    model = convolutional().requires_grad_(False)
    model[-1].requires_grad_(True)
    return model


def _checkpointed(segments):
    model = convolutional()
    mc.checkpoint(model, segments)
    return mc.predict(step(model), device=CARD)


def _inplace():
    model = convolutional()
    for module in model:
        if isinstance(module, nn.ReLU):
            module.inplace = True
    return model


def test_rows_that_help_come_first_and_those_that_do_not_are_shown_as_such(plan):
    helping = [plan.helps(row) for row in plan.rows]
    assert helping == sorted(helping, reverse=True)
    assert True in helping
    assert False in helping
    text = plan.to_text()
    for one in plan.rows:
        assert one.saving in text
    line = next(line for line in text.splitlines() if line.strip().startswith("Adam "))
    assert "does not help" in line


def test_savings_are_tried_together(plan):
    both = row(plan, "16-mixed + accumulate 4 batches")
    by_hand = mc.predict(step(precision="16-mixed", accumulate=4), device=CARD, batch_size=BATCH_SIZE // 4)
    assert (both.peak_allocated_bytes, both.peak_reserved_bytes) == figures(by_hand)


def test_what_does_not_work_with_the_others_is_left_out_of_them():
    layers = [nn.Linear(64, 64)]
    for _ in range(4):
        layers += [nn.ReLU(), nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 64)]
    batch = torch.randn(512, 64), torch.zeros(512, dtype=torch.int64)
    plan = mc.what_if(mc.TrainingStep(nn.Sequential(*layers), batch, loss=loss, optimizer=torch.optim.SGD), device=CARD)
    # The second segment begins with an activation, which would change the input that is kept for it.
    assert plan.helps(row(plan, "inplace activations"))
    most = max(plan.rows, key=lambda one: one.saving.count(" + "))
    assert most.saving == "bf16-mixed + checkpoint_sequential, 3 segments + accumulate 4 batches"
    assert not most.problem


def test_the_best_number_of_segments_is_among_those_that_were_tried(plan):
    tried = [one for one in plan.rows if one.saving.startswith("checkpoint_sequential") and " + " not in one.saving]
    best = min(_checkpointed({"": segments}).peak_allocated_bytes for segments in range(2, 16))
    assert min(one.peak_allocated_bytes for one in tried) == best
    assert all(0 < one.extra_compute_pct < 50 for one in tried)


def test_blocks_are_checkpointed_all_or_every_second():
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x

    plan = mc.what_if(mc.TrainingStep(Blocks(), torch.randn(512, 64), optimizer=torch.optim.SGD), device=CARD)
    every, second = row(plan, "checkpoint 4 blocks"), row(plan, "checkpoint every second block")
    assert every.peak_allocated_bytes < second.peak_allocated_bytes < plan.current.peak_allocated_bytes
    assert every.extra_compute_pct > second.extra_compute_pct > 0
    assert "blocks.2" in second.line


def test_extra_compute_is_that_of_pytorchs_own_counter(plan):
    assert row(plan, "bf16-mixed").extra_compute_pct == 0
    assert row(plan, "accumulate 4 batches").extra_compute_pct == 0
    assert row(plan, "images of half the side").extra_compute_pct == pytest.approx(-75, abs=0.2)


def test_nothing_of_the_users_is_changed():
    model = convolutional()
    optimizer = torch.optim.AdamW(model.parameters())
    tried = step(model, optimizer=optimizer)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    mc.what_if(tried, device=CARD)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.dtype is torch.float32 for parameter in model.parameters())
    assert not any(module.inplace for module in model if isinstance(module, nn.ReLU))
    assert not optimizer.state
    assert not optimizer.param_groups[0]["fused"]


def test_what_does_not_work_says_why():
    class Exp(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.act = nn.Linear(64, 64), nn.SiLU()

        def forward(self, x):
            y = torch.exp(self.lin(x))
            return self.act(y) + y

    batch = torch.randn(8, 64)
    plan = mc.what_if(mc.TrainingStep(Exp(), batch, optimizer=torch.optim.SGD), device=CARD)
    found = row(plan, "inplace activations")
    assert "modified by an inplace operation" in found.problem
    assert plan.rows[-1].problem
    assert "Not possible:" in plan.to_text()


def test_in_lightning_the_lines_are_the_trainers_and_gradients_can_be_cleared_earlier():
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = convolutional()

        def training_step(self, batch, batch_idx):
            return loss(self.model, batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    batch = torch.randn(BATCH_SIZE, 3, 32, 32), torch.zeros(BATCH_SIZE, dtype=torch.int64)
    plan = mc.what_if(mc.TrainingStep.from_lightning(Module(), batch), device=CARD)
    assert row(plan, "bf16-mixed").line == 'Trainer(precision="bf16-mixed")'
    assert "Trainer(accumulate_grad_batches=2)" in row(plan, "accumulate 2 batches").line
    early = row(plan, "zero_grad before forward")
    # The peak is in the backward pass, where gradients are there in either case.
    assert not plan.helps(early)


def test_as_data_every_figure_has_its_unit(plan):
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["current"]["peak_reserved_bytes"] == plan.current.peak_reserved_bytes
    assert {"saving", "helps", "saved_pct", "peak_allocated_bytes", "largest_batch_size", "extra_compute_pct"} <= data["savings"][0].keys()


def test_on_a_cpu_there_is_no_reserved_memory():
    plan = mc.what_if(step(), device="cpu")
    assert plan.current.peak_reserved_bytes is None
    assert plan.current.largest_batch_size is None
    assert plan.helps(row(plan, "accumulate 4 batches"))


def test_headroom_out_of_range_is_refused():
    with pytest.raises(ValueError, match="headroom must be at least 0 and below 1, got 2"):
        mc.what_if(step(), device=CARD, headroom=2)
