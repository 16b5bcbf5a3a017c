"""What is on the device beside the model: a teacher in the loss, an average of the weights."""

import functools
import gc
import weakref

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import memcallback as mc
from memcallback import Category, Phase

CARD = "L4"
BATCH = torch.zeros(16, 64)


def network(width):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 8))


def num_bytes(module):
    return sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())


def step_of(model, loss, **options):
    return mc.TrainingStep(model, BATCH, loss=loss, optimizer=torch.optim.AdamW, **options)


def predicted(model, loss, **options):
    return mc.predict(step_of(model, loss, **options), device=CARD)


def squares(model, batch):
    return model(batch).square().mean()


@functools.cache
def alone():
    """The prediction of a model with nothing beside it."""
    return predicted(network(256), squares)


def parameter_bytes(prediction):
    return prediction.phases[Phase.FORWARD].start.by_category[Category.PARAMETER]


GLOBAL_TEACHER = network(512).requires_grad_(False)
TEACHER_BEFORE = [*map(torch.clone, GLOBAL_TEACHER.parameters())]


def distilled(model, batch, teacher):
    with torch.no_grad():
        targets = teacher(batch)
    return F.mse_loss(model(batch), targets)


def distilled_by_a_global(model, batch):
    return distilled(model, batch, GLOBAL_TEACHER)


class Distilling:
    """A training class with its own models, as many programs have one."""

    def __init__(self, model, teacher):
        self.model, self.teacher, self.num_calls = model, teacher, 0

    def loss(self, model, batch):
        self.num_calls += 1
        return distilled(self.model, batch, self.teacher)

    def __call__(self, model, batch):
        return self.loss(model, batch)


def ways_to_a_teacher(model, teacher):
    return {
        "closure": lambda model, batch: distilled(model, batch, teacher),
        "global": distilled_by_a_global,
        "partial": functools.partial(distilled, teacher=teacher),
        "default": lambda model, batch, teacher=teacher: distilled(model, batch, teacher),
        "method": Distilling(model, teacher).loss,
        "callable": Distilling(model, teacher),
        "container": lambda model, batch, all_of={"them": [teacher]}: distilled(
            model, batch, all_of["them"][0]
        ),
    }


WAYS = list(ways_to_a_teacher(None, None))


class WithTeacher(nn.Module):
    """The same step with the teacher as a part of the model."""

    def __init__(self, model, teacher):
        super().__init__()
        self.model, self.teacher = model, teacher

    def forward(self, batch):
        return distilled(self.model, batch, self.teacher)


@functools.cache
def predicted_with_a_teacher(way):
    """A step whose loss reaches the teacher in this way, and its prediction, made here."""
    model = network(256)
    loss = ways_to_a_teacher(model, GLOBAL_TEACHER)[way]
    step = step_of(model, loss)
    prediction = mc.predict(step, device=CARD, isolate=False)
    assert step.loss is loss
    return step, prediction


@functools.cache
def whole():
    """The prediction of the model with its teacher as a part of it."""
    return predicted(WithTeacher(network(256), GLOBAL_TEACHER), lambda model, batch: model(batch))


@pytest.mark.parametrize("way", WAYS)
def test_a_teacher_that_the_loss_reaches_is_on_the_device(way):
    step, found = predicted_with_a_teacher(way)
    assert parameter_bytes(found) == num_bytes(step.model) + num_bytes(GLOBAL_TEACHER)
    assert found.peak_allocated_bytes == whole().peak_allocated_bytes
    assert found.peak_reserved_bytes == whole().peak_reserved_bytes
    assert found.at(64).peak_allocated_bytes == whole().at(64).peak_allocated_bytes


def test_a_loss_that_reaches_the_model_by_a_variable_trains_the_model():
    model = network(256)
    found = predicted(model, lambda _, batch: model(batch).square().mean())
    assert found.step == alone().step
    assert found.at(32).peak_allocated_bytes == alone().at(32).peak_allocated_bytes


@pytest.mark.parametrize("way", WAYS)
def test_the_users_modules_and_variables_are_as_before(way):
    step, _ = predicted_with_a_teacher(way)
    owner = getattr(step.loss, "__self__", step.loss)
    assert all(map(torch.equal, GLOBAL_TEACHER.parameters(), TEACHER_BEFORE))
    assert all(type(parameter) is nn.Parameter for parameter in GLOBAL_TEACHER.parameters())
    if isinstance(owner, Distilling):
        assert (owner.model, owner.teacher) == (step.model, GLOBAL_TEACHER)
        assert owner.num_calls == 0


def test_an_average_of_the_weights_is_said_to_the_step():
    model = network(256)
    average = AveragedModel(model)
    both = predicted(model, squares, also=[average])
    more = parameter_bytes(both) - parameter_bytes(alone())
    assert more == num_bytes(model)
    # Blocks of the allocator are multiples of 512 bytes; so is the average's count of updates.
    assert both.peak_allocated_bytes - alone().peak_allocated_bytes >= num_bytes(average)
    assert both.peak_allocated_bytes - alone().peak_allocated_bytes < num_bytes(average) + 5 * 512


def test_bare_tensors_beside_the_model_are_counted_too():
    model, shadow = network(256), [torch.zeros(1024, 1024), {"more": torch.zeros(512, 1024)}]
    both = predicted(model, squares, also=shadow)
    assert both.peak_allocated_bytes - alone().peak_allocated_bytes == 6 * 2**20


def test_what_is_said_and_found_is_counted_once():
    model = network(256)
    loss = ways_to_a_teacher(model, GLOBAL_TEACHER)["closure"]
    assert predicted(model, loss, also=[GLOBAL_TEACHER, model]).step == predicted(model, loss).step


def test_its_modules_have_names():
    model = network(256)
    teacher = network(512).requires_grad_(False)
    average = AveragedModel(model)
    found = predicted(model, lambda model, batch: distilled(model, batch, teacher), also=[average])
    assert {"teacher.0", "also[0].module.0"} <= found.by_module.keys()
    named = predicted(model, lambda model, batch: model(batch).sum(), also={"average": average})
    assert "average.module.0" in named.by_module


class Module(L.LightningModule):
    """Hides its teacher in a list, as one does to keep it out of the checkpoint."""

    def __init__(self):
        super().__init__()
        self.net, self.teachers = network(256), [network(512).requires_grad_(False)]

    def training_step(self, batch, batch_idx):
        return distilled(self.net, batch[0], self.teachers[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def test_a_module_in_a_list_is_on_the_device_too():
    module = Module()
    step = mc.TrainingStep.from_lightning(module, [BATCH])
    prediction = mc.predict(step, device=CARD)
    assert parameter_bytes(prediction) == num_bytes(module.net) + num_bytes(module.teachers[0])


class Average(L.Callback):
    def on_fit_start(self, trainer, pl_module):
        self.average = AveragedModel(pl_module)


def test_in_a_trainer_what_its_callbacks_hold_is_counted(tmp_path):
    def parameters_with(*callbacks):
        callback = mc.MemoryCallback(device=CARD, wait_for_prediction=True)
        trainer = L.Trainer(
            max_steps=2,
            accelerator="cpu",
            callbacks=[*callbacks, callback],
            logger=False,
            default_root_dir=tmp_path,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), torch.utils.data.DataLoader([[BATCH[0]]] * 32, batch_size=16))
        return parameter_bytes(callback.prediction)

    assert parameters_with(Average()) - parameters_with() == num_bytes(network(256))


@pytest.mark.parametrize("also", [network(8), 5, ["average"]])
def test_what_is_no_list_of_modules_or_tensors_is_refused(also):
    with pytest.raises(TypeError, match="also"):
        predicted(network(8), lambda model, batch: model(batch).sum(), also=also)


def test_what_is_measured_counts_it_too(tmp_path):
    module, callback = Module(), mc.MemoryCallback(wait_for_prediction=True)
    trainer = L.Trainer(
        max_steps=4,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader([BATCH[0]] * 64, batch_size=16))
    measured = callback.recorder.steady
    start = measured.phases[Phase.FORWARD].start
    assert start.by_category[Category.PARAMETER] == parameter_bytes(callback.prediction)
    # Lightning keeps a few numbers of its own, of at most 16 bytes together.
    assert 0 <= measured.peak_allocated_bytes - callback.prediction.peak_allocated_bytes <= 16


class Metrics(L.Callback):
    """Holds modules without tensors, and one whose size is not known yet."""

    def __init__(self):
        self.loss, self.lazy = nn.MSELoss(), nn.LazyLinear(3)


def test_what_callbacks_hold_is_no_reason_to_fail(tmp_path):
    callback = mc.MemoryCallback(device=CARD, wait_for_prediction=True)
    trainer = L.Trainer(
        max_steps=2,
        accelerator="cpu",
        callbacks=[Metrics(), callback],
        logger=False,
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader([[BATCH[0]]] * 32, batch_size=16))
    assert isinstance(callback.prediction, mc.Prediction)


ZOO = {"small": network(64), "large": network(4096), "lazy": nn.LazyLinear(3)}


def test_of_the_models_that_a_loss_could_reach_those_are_counted_that_run():
    model = network(256)
    found = predicted(model, lambda model, batch: distilled(model, batch, ZOO["small"]))
    assert parameter_bytes(found) == num_bytes(model) + num_bytes(ZOO["small"])


LAST = None


def remember(outputs):
    global LAST
    LAST = outputs.detach()


def remembering(model, batch):
    remember(GLOBAL_TEACHER(batch))
    return F.mse_loss(model(batch), LAST)


def test_functions_see_the_variables_that_others_write():
    model = network(256)
    assert parameter_bytes(predicted(model, remembering)) == num_bytes(model) + num_bytes(
        GLOBAL_TEACHER
    )


class Logging(Distilling):
    """Keeps a history, as trainers do."""

    def __init__(self, model, teacher):
        super().__init__(model, teacher)
        self.history = {"loss": []}

    def loss(self, model, batch):
        value = super().loss(model, batch)
        self.history["loss"].append(value.detach())
        return value


def test_the_history_of_a_trainer_of_ones_own_is_as_it_was():
    model = network(256)
    trainer = Logging(model, GLOBAL_TEACHER)
    step = mc.TrainingStep(model, BATCH, loss=trainer.loss, optimizer=torch.optim.AdamW)
    mc.predict(step, device=CARD, isolate=False)
    assert trainer.history == {"loss": []}


class LossTable(dict):
    """A loss that is a kind of dictionary."""

    def __call__(self, model, batch):
        return distilled(model, batch, self.teacher)


def test_a_loss_of_a_special_kind_is_predicted():
    loss = LossTable()
    loss.teacher = GLOBAL_TEACHER
    assert isinstance(predicted(network(256), loss), mc.Prediction)


def test_a_model_that_is_dropped_is_not_kept_alive():
    recorder = mc.MemoryRecorder(network(8))
    teacher = network(8)
    recorder.count_beside([teacher])
    alive = weakref.ref(teacher)
    del teacher
    gc.collect()
    assert alive() is None


class Refusing(tuple):
    """A container of a user's that has no length."""

    def __len__(self):
        raise NotImplementedError


def test_a_container_that_refuses_to_be_counted_is_no_obstacle():
    model = network(64)
    model.kinds = Refusing((1, 2))
    prediction = predicted(model, lambda model, batch: model(batch).sum())
    assert parameter_bytes(prediction) > 0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.device = network(512), torch.device("cuda")

    def forward(self, batch):
        return self.net(batch.to(self.device))


class Stack(nn.Module):
    """A model that keeps its blocks in a list, and registers their weights alone."""

    def __init__(self, blocks):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.blocks = blocks
        self.weights = nn.ParameterList(p for block in blocks for p in block.parameters())

    def forward(self, batch):
        states = self.first(batch).relu().exp()
        return sum(block(states * 2) for block in self.blocks)


def test_a_module_in_a_plain_list_finds_its_device():
    hidden, registered = Stack([Block(), Block()]), Stack([])
    registered.blocks = nn.ModuleList([Block(), Block()])
    one, other = (
        predicted(model, lambda model, batch: model(batch).sum()) for model in (hidden, registered)
    )
    assert one.phases[Phase.BACKWARD] == other.phases[Phase.BACKWARD]
    assert one.phases[Phase.FORWARD].peak_allocated_bytes == (
        other.phases[Phase.FORWARD].peak_allocated_bytes
    )


def test_a_list_that_holds_itself_is_no_obstacle():
    model = network(64)
    model.tree = [1]
    model.tree.append(model.tree)
    assert parameter_bytes(predicted(model, lambda model, batch: model(batch).sum())) > 0


def test_a_target_network_that_runs_after_the_model_was_moved_before_the_first_step():
    model, target = network(1024), network(1024).requires_grad_(False)

    def loss(model, batch):
        values = model(batch)
        with torch.no_grad():
            wanted = target(batch)
        return F.mse_loss(values, wanted)

    found = predicted(model, loss)
    said = predicted(model, loss, also=[target])
    assert found.step == said.step
    assert found.steps[0] == said.steps[0]


@pytest.mark.parametrize("kind", ["module", "tensors"])
def test_what_is_there_in_a_training_is_there_in_its_validation(kind):
    model, average = network(64), network(512)
    also = {"average": average if kind == "module" else list(average.parameters())}
    alone, beside = (
        mc.predict(
            mc.InferenceStep(
                model,
                BATCH,
                after=mc.TrainingStep(model, BATCH, optimizer=torch.optim.AdamW, also=more),
            ),
            device=CARD,
        )
        for more in (None, also)
    )
    added = beside.peak_allocated_bytes - alone.peak_allocated_bytes
    assert 0 <= added - num_bytes(average) < 4 * 512
