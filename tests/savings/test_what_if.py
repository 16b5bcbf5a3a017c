"""What savings would buy: each row of a plan is a prediction of the step with that saving, made by
hand here.
"""

import json
import re
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tried_savings import only

import memcallback as mc
from memcallback.devices.catalogue import find_device
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.predict_here import predict_once
from memcallback.savings.plan import Plan, PlanRow

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
    return mc.TrainingStep(
        model or convolutional(), batch, loss=loss, **{"optimizer": torch.optim.AdamW} | options
    )


@pytest.fixture(scope="module")
def planned():
    """A plan, its step, and the state of the step and of the random numbers before and after."""
    model = convolutional()
    optimizer = torch.optim.AdamW(model.parameters())
    tried = step(model, optimizer=optimizer)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    plan = mc.what_if(tried, device=CARD)
    return SimpleNamespace(
        plan=plan,
        model=model,
        optimizer=optimizer,
        weights=weights,
        random=(random, torch.get_rng_state()),
    )


@pytest.fixture(scope="module")
def plan(planned):
    return planned.plan


def row(plan, saving):
    return next(row for row in plan.rows if row.saving == saving)


def figures(prediction):
    return prediction.peak_allocated_bytes, prediction.peak_reserved_bytes


def test_the_step_as_it_is_comes_first(plan):
    as_it_is = mc.predict(step(), device=CARD)
    assert (plan.current.peak_allocated_bytes, plan.current.peak_reserved_bytes) == figures(
        as_it_is
    )
    assert plan.current.batch_size == BATCH_SIZE
    assert (
        plan.current.largest_batch_size
        == mc.suggest_batch_size(step(), device=CARD, multiple_of=1).batch_size
    )


def traced_once(step, batch_size=BATCH_SIZE, *, device=CARD, settings=None):
    """A prediction of one size alone, for which one trace is enough."""
    return predict_once(step, device=find_device(device), batch_size=batch_size, settings=settings)


@pytest.mark.parametrize(
    ("saving", "by_hand"),
    [
        ("accumulate 4 batches", lambda: traced_once(_accumulated(), BATCH_SIZE // 4)),
        ("bf16-mixed", lambda: traced_once(step(precision="bf16-mixed"))),
        ("16-mixed", lambda: traced_once(step(precision="16-mixed"))),
        ("SGD", lambda: traced_once(step(optimizer=lambda ps: torch.optim.SGD(ps, lr=1e-3)))),
        ("Adafactor", lambda: traced_once(step(optimizer=torch.optim.Adafactor))),
        (
            "fused optimizer",
            lambda: traced_once(step(optimizer=lambda ps: torch.optim.AdamW(ps, fused=True))),
        ),
        (
            "expandable_segments",
            lambda: traced_once(step(), settings=AllocatorSettings(expandable_segments=True)),
        ),
        ("channels_last", lambda: traced_once(_channels_last())),
        ("bf16-true", lambda: traced_once(_in_half(torch.bfloat16))),
        ("16-true", lambda: traced_once(_in_half(torch.float16))),
        ("freeze all but the last layer", lambda: traced_once(step(_frozen()))),
        ("checkpoint_sequential, 4 segments", lambda: _checkpointed(4)),
        ("inplace activations", lambda: traced_once(step(_inplace()))),
    ],
)
def test_each_row_is_the_prediction_of_the_step_with_that_saving(plan, saving, by_hand):
    found = row(plan, saving)
    assert not found.problem
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == figures(by_hand())


def _accumulated(**options):
    accumulated = step(accumulate=4, **options)
    accumulated.has_accumulation = True
    return accumulated


def _channels_last():
    images = torch.randn(BATCH_SIZE, 3, 32, 32).to(memory_format=torch.channels_last)
    model = convolutional().to(memory_format=torch.channels_last)
    return mc.TrainingStep(
        model,
        (images, torch.zeros(BATCH_SIZE, dtype=torch.int64)),
        loss=loss,
        optimizer=torch.optim.AdamW,
    )


def _in_half(dtype):
    batch = (
        torch.randn(BATCH_SIZE, 3, 32, 32, dtype=dtype),
        torch.zeros(BATCH_SIZE, dtype=torch.int64),
    )
    return mc.TrainingStep(convolutional().to(dtype), batch, loss=loss, optimizer=torch.optim.AdamW)


def _frozen():
    model = convolutional().requires_grad_(False)
    model[-1].requires_grad_(True)
    return model


def _checkpointed(segments):
    model = convolutional()
    mc.checkpoint(model, {"": segments})
    return traced_once(step(model))


def _inplace():
    model = convolutional()
    for module in model:
        if isinstance(module, nn.ReLU):
            module.inplace = True
    return model


def test_rows_that_help_come_first_and_those_that_do_not_are_left_out_of_the_text(plan):
    helping = [plan.helps(row) for row in plan.rows]
    assert helping == sorted(helping, reverse=True)
    assert True in helping
    assert False in helping
    num_more, num_others = sum(helping) - len(plan.shown), helping.count(False)
    assert f"Left out: {num_more} more that help and {num_others} that do not" in plan.to_text()
    for one in plan.rows:
        assert one in plan.shown or f" {one.saving} " not in plan.to_text()


def test_each_saving_is_in_a_group(plan):
    group = {one.saving: one.group for one in plan.rows}
    assert group["checkpoint_sequential, 3 segments"] == mc.SavingGroup.SAME_RESULT
    assert group["expandable_segments"] == mc.SavingGroup.SAME_RESULT
    assert group["bf16-mixed"] == mc.SavingGroup.CHANGES_NUMBERS
    # The mean over a batch is rounded otherwise than that over its parts.
    assert group["accumulate 2 batches"] == mc.SavingGroup.CHANGES_NUMBERS
    assert group["16-true"] == mc.SavingGroup.CHANGES_TRAINING
    assert group["SGD"] == mc.SavingGroup.CHANGES_TRAINING
    # In how many segments depends on what the installed PyTorch needs.
    together = r"checkpoint_sequential, \d segments \+ accumulate 4 batches"
    assert [group[saving] for saving in group if re.fullmatch(together, saving)] == [
        mc.SavingGroup.CHANGES_NUMBERS
    ]
    assert plan.current.group == mc.SavingGroup.SAME_RESULT
    for one, data in zip(plan.rows, plan.to_dict()["savings"], strict=True):
        assert json.loads(json.dumps(data))["group"] == one.group.value


def test_the_text_is_in_groups_of_ten_rows_that_fit_a_console(plan):
    lines = plan.to_text().splitlines()
    assert max(map(len, lines)) <= 100
    places = [lines.index(f" {group.value}") for group in mc.SavingGroup]
    assert places == sorted(places)
    assert len(plan.shown) == 10
    for group in mc.SavingGroup:
        peaks = [one.peak_bytes for one in plan.shown if one.group == group]
        assert peaks == sorted(peaks)


def test_savings_are_tried_together(plan):
    # Which precision needs less depends on the workspaces of the PyTorch that is installed.
    precision, both = next(
        (precision, one)
        for one in plan.rows
        for precision in ("16-mixed", "bf16-mixed")
        if one.saving == f"{precision} + accumulate 4 batches"
    )
    by_hand = traced_once(_accumulated(precision=precision), BATCH_SIZE // 4)
    assert (both.peak_allocated_bytes, both.peak_reserved_bytes) == figures(by_hand)


def test_what_does_not_work_with_the_others_is_left_out_of_them():
    layers = [nn.Linear(64, 64)]
    for _ in range(4):
        layers += [nn.ReLU(), nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 64)]
    batch = torch.randn(512, 64), torch.zeros(512, dtype=torch.int64)
    step = mc.TrainingStep(nn.Sequential(*layers), batch, loss=loss, optimizer=torch.optim.SGD)
    with only("inplace .*", ".*-mixed", "checkpoint.*", "accumulate .*", "fused .*", "expand.*"):
        plan = mc.what_if(step, device=CARD)
    # The second segment begins with an activation, which would change the input that is kept for
    # it.
    assert plan.helps(row(plan, "inplace activations"))
    most = max(plan.rows, key=lambda one: one.saving.count(" + "))
    assert most.saving == "bf16-mixed + checkpoint_sequential, 3 segments + accumulate 4 batches"
    assert not most.problem


def test_the_best_number_of_segments_is_among_those_that_were_tried(plan):
    tried = [
        one
        for one in plan.rows
        if one.saving.startswith("checkpoint_sequential") and " + " not in one.saving
    ]
    best = min(_checkpointed(segments).peak_allocated_bytes for segments in range(2, 16))
    assert min(one.peak_allocated_bytes for one in tried) == best
    assert all(0 < one.extra_compute_pct < 50 for one in tried)


def test_blocks_are_checkpointed_all_or_every_second():
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)
            )

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x

    step = mc.TrainingStep(Blocks(), torch.randn(512, 64), optimizer=torch.optim.SGD)
    with only("checkpoint .*"):
        plan = mc.what_if(step, device="cpu")
    every, second = row(plan, "checkpoint 4 blocks"), row(plan, "checkpoint every second block")
    assert (
        every.peak_allocated_bytes < second.peak_allocated_bytes < plan.current.peak_allocated_bytes
    )
    assert every.extra_compute_pct > second.extra_compute_pct > 0
    assert every.line == "memcallback.checkpoint(model)"
    assert second.line == "memcallback.checkpoint(model, {'blocks.0': 1, 'blocks.2': 1})"


def test_extra_compute_is_that_of_pytorchs_own_counter(plan):
    assert row(plan, "bf16-mixed").extra_compute_pct == 0
    assert row(plan, "accumulate 4 batches").extra_compute_pct == 0
    assert row(plan, "images of half the side").extra_compute_pct == pytest.approx(-75, abs=0.2)


def test_nothing_of_the_users_is_changed(planned):
    model, optimizer = planned.model, planned.optimizer
    assert torch.equal(*planned.random)
    assert all(
        torch.equal(tensor, planned.weights[name]) for name, tensor in model.state_dict().items()
    )
    assert all(
        parameter.requires_grad and parameter.dtype is torch.float32
        for parameter in model.parameters()
    )
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
    with only("inplace .*", "bf16-mixed", "expandable_segments"):
        plan = mc.what_if(mc.TrainingStep(Exp(), batch, optimizer=torch.optim.SGD), device="cpu")
    found = row(plan, "inplace activations")
    assert found.problem == "it would overwrite a tensor that the backward pass needs"
    assert plan.rows[-1].problem
    assert "Could not be predicted:" in plan.to_text()


def perceptron():
    """Four layers, whose activations are most of the memory of a step."""
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def samples():
    return torch.randn(2048, 64), torch.zeros(2048, dtype=torch.int64)


def perceptron_step(model):
    return mc.TrainingStep(model, samples(), loss=loss, optimizer=torch.optim.AdamW)


def test_in_lightning_the_lines_are_the_trainers_and_gradients_can_be_cleared_earlier():
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = perceptron()

        def training_step(self, batch, batch_idx):
            return loss(self.model, batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    with only("bf16-mixed", "accumulate 2 batches", "zero_grad .*"):
        plan = mc.what_if(mc.TrainingStep.from_lightning(Module(), samples()), device=CARD)
    assert row(plan, "bf16-mixed").line == 'Trainer(precision="bf16-mixed")'
    assert "Trainer(accumulate_grad_batches=2)" in row(plan, "accumulate 2 batches").line
    early = row(plan, "zero_grad before forward")
    # The peak is in the backward pass, where gradients are there in either case.
    assert not plan.helps(early)


def test_as_data_every_figure_has_its_unit(plan):
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["current"]["peak_reserved_bytes"] == plan.current.peak_reserved_bytes
    assert {
        "saving",
        "helps",
        "saved_pct",
        "peak_allocated_bytes",
        "largest_batch_size",
        "extra_compute_pct",
        "kind",
    } <= data["savings"][0].keys()


def test_on_a_cpu_there_is_no_reserved_memory():
    with only("accumulate 4 batches"):
        plan = mc.what_if(perceptron_step(perceptron()), device="cpu")
    assert plan.current.peak_reserved_bytes is None
    assert plan.current.largest_batch_size is None
    assert plan.helps(row(plan, "accumulate 4 batches"))


def test_headroom_out_of_range_is_refused():
    with pytest.raises(ValueError, match="headroom must be at least 0 and below 1, got 2"):
        mc.what_if(step(), device=CARD, headroom=2)


def single(plan):
    return [one for one in plan.tried if " + " not in one.saving]


def linear(**options):
    return mc.TrainingStep(
        nn.Linear(64, 64), torch.randn(8, 64), **{"optimizer": torch.optim.SGD} | options
    )


@pytest.mark.parametrize(("batch_size", "parts"), [(1, set()), (6, {2}), (7, set()), (12, {2, 4})])
def test_a_batch_is_divided_only_where_that_leaves_no_rest(batch_size, parts):
    with only("accumulate .*"):
        plan = mc.what_if(linear(), device="cpu", batch_size=batch_size)
    divided = {
        int(one.saving.split()[1]): one
        for one in single(plan)
        if one.saving.startswith("accumulate")
    }
    assert divided.keys() == parts
    assert all(one.batch_size * num_parts == batch_size for num_parts, one in divided.items())
    assert plan.current.batch_size == batch_size


def test_what_cannot_be_a_step_is_the_problem_of_its_row():
    wrong = linear()
    wrong.clip_grad_norm = -1.0
    with only("bf16-mixed", "expandable_segments"):
        plan = mc.what_if(wrong, device=CARD)
    assert "clip_grad_norm must be above 0, got -1.0" in row(plan, "bf16-mixed").problem
    assert not row(plan, "expandable_segments").problem


class Vgg(nn.Module):
    def __init__(self):
        super().__init__()
        layers, channels = [], 3
        for position, width in enumerate((16, 16, 32, 32, 64, 64)):
            layers += [
                nn.Conv2d(channels, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ]
            layers += [nn.MaxPool2d(2)] if position % 2 else []
            channels = width
        self.features = nn.Sequential(
            OrderedDict((f"layer{number}", layer) for number, layer in enumerate(layers))
        )
        self.classifier = nn.Sequential(
            nn.Linear(64 * 16, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10)
        )

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def test_of_several_sequentials_the_large_one_is_cut_into_every_sensible_number_of_segments():
    with only("checkpoint.*"):
        plan = mc.what_if(step(Vgg()), device="cpu")
    tried = [one for one in single(plan) if one.kind == "checkpointing"]
    assert 5 < len(tried) <= 8

    def by_hand(segments):
        model = Vgg()
        mc.checkpoint(model, {"features": segments})
        return step(model)

    known = {segments: traced_once(by_hand(segments), device="cpu") for segments in range(1, 22)}
    six = row(plan, "checkpoint_sequential of features, 6 segments")
    assert figures(known[6]) == figures(mc.predict(by_hand(6), device="cpu"))
    assert figures(known[6]) == (six.peak_allocated_bytes, six.peak_reserved_bytes)
    assert six.line == "memcallback.checkpoint(model, {'features': 6})"
    assert min(one.peak_allocated_bytes for one in tried) == min(
        one.peak_allocated_bytes for one in known.values()
    )


def test_two_sequentials_alike_are_cut_together():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (
                nn.Sequential(
                    *(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.SiLU()))
                )
                for _ in range(2)
            )

        def forward(self, x):
            return self.second(self.first(x))

    step = mc.TrainingStep(Two(), torch.randn(4096, 64), optimizer=torch.optim.SGD)
    with only("checkpoint.*", "accumulate .*", "expandable_segments"):
        plan = mc.what_if(step, device="cpu")
    tried = [one for one in single(plan) if one.kind == "checkpointing"]
    assert len(tried) <= 8
    assert plan.is_best(row(plan, "checkpoint 2 sequentials"))
    assert {
        name for one in tried for name in ("first", "second") if f" of {name}," in one.saving
    } == {"first", "second"}


def test_the_best_of_each_group_is_marked(plan):
    for group in mc.SavingGroup:
        best, *others = plan.helping(group)
        assert best.peak_bytes == min(one.peak_bytes for one in (best, *others))
        assert plan.is_best(best)
        assert not any(map(plan.is_best, others))
        assert f"{best.saving} (best)" in " ".join(plan.to_markdown().replace("<br>", " ").split())
    marked = [one["saving"] for one in plan.to_dict()["savings"] if one["is_best"]]
    assert len(marked) == len(mc.SavingGroup)


def test_the_line_for_the_model_itself_names_no_module(plan):
    assert (
        row(plan, "checkpoint_sequential, 3 segments").line
        == "memcallback.checkpoint(model, segments=3)"
    )


def test_together_is_of_each_kind_what_lets_the_largest_batch_fit(plan):
    chosen = max(plan.tried, key=lambda one: one.saving.count(" + ")).saving.split(" + ")
    for kind in ("precision", "checkpointing"):
        same_training = [
            one for one in single(plan) if one.kind == kind and not one.saving.endswith("-true")
        ]
        largest = max(one.largest_batch_size for one in same_training)
        assert any(
            one.largest_batch_size == largest for one in same_training if one.saving in chosen
        )


def planned_by_hand(*, peak_bytes, largest, of_bytes=1000 * 2**20, of_largest=1000):
    """A plan with one saving, made by hand."""
    current = PlanRow(
        saving="as it is",
        batch_size=8,
        peak_allocated_bytes=of_bytes,
        largest_batch_size=of_largest,
    )
    saving = PlanRow(
        saving="a saving", batch_size=8, peak_allocated_bytes=peak_bytes, largest_batch_size=largest
    )
    return Plan(
        current=current, tried=(saving,), device_name="a card", capacity_bytes=2**40, headroom=0.05
    )


@pytest.mark.parametrize(
    ("peak_bytes", "largest", "helps", "saved"),
    [
        (980 * 2**20, 1000, True, "2.0 %"),
        (995 * 2**20, 1000, False, ""),
        (1000 * 2**20, 1009, False, ""),
        (1000 * 2**20, 1010, True, "1,010"),
        (1100 * 2**20, 2000, True, "2,000"),
        (1000 * 2**20, None, False, ""),
        (900 * 2**20, 900, True, "10.0 %"),
    ],
)
def test_what_saves_less_than_1_percent_is_no_help(peak_bytes, largest, helps, saved):
    plan = planned_by_hand(peak_bytes=peak_bytes, largest=largest)
    assert plan.helps(plan.tried[0]) == helps
    lines = [line for line in plan.to_text().splitlines() if line.strip().startswith("a saving ")]
    assert len(lines) == helps
    assert all(saved in line for line in lines)
    assert ("Left out: 1 that does not help." in plan.to_text()) != helps


def test_where_nothing_fits_the_text_says_so():
    text = planned_by_hand(peak_bytes=980 * 2**20, largest=0, of_largest=0).to_text()
    assert "Not even one sample is sure to fit, as it is or with any of these savings." in text


def test_where_a_batch_fits_only_with_a_saving_the_text_says_which():
    plan = planned_by_hand(peak_bytes=980 * 2**20, largest=3, of_largest=0)
    assert plan.helps(plan.tried[0])
    for text in (plan.to_text(), plan.to_markdown()):
        assert (
            "As it is, not even one sample is sure to fit. A batch fits with a saving (up to 3)."
            in text
        )


def test_what_is_checkpointed_already_is_not_checkpointed_again():
    model = perceptron()
    with mc.checkpoint(model), only(".*checkpoint.*"):
        plan = mc.what_if(perceptron_step(model), device="cpu")
    assert not [one for one in plan.rows if "checkpoint" in one.saving]
    said = "Checkpointing is in use already, so nothing else was tried of that kind."
    assert said in plan.caveats
    assert plan.to_text().count(said) == 1


def test_in_a_plain_loop_gradients_are_cleared_earlier_by_a_plain_line():
    late = linear()
    late.zero_grad_before_forward = False
    with only("zero_grad .*"):
        plan = mc.what_if(late, device="cpu")
    assert (
        row(plan, "zero_grad before forward").line
        == "optimizer.zero_grad()  # before the forward pass"
    )


def test_the_last_layer_that_is_trained_alone_is_no_norm():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    small = mc.TrainingStep(model, torch.zeros(2, 8), loss=lambda model, batch: model(batch).sum())
    with only("freeze .*"):
        freezing = row(mc.what_if(small, device="cpu"), "freeze all but the last layer")
    assert freezing.changes == "only module '1' is trained"
    assert freezing.line.endswith('model.get_submodule("1").requires_grad_(True)')
