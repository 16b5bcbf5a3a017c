"""Trainings on a device that also has other things: an average of the weights, an earlier model."""

import gc
import weakref
from collections import Counter

import lightning.pytorch as L
import pytest
import test_huggingface
import torch
import training
from device_loop import empty_device
from torch import nn

import memcallback as mc

pytestmark = pytest.mark.cuda
WIDTH = 1024
MIB = 1 << 20


class Average:
    """An average of weights, in plain tensors."""

    def __init__(self, parameters):
        self.shadows = [parameter.detach().clone() for parameter in parameters]

    def update(self, parameters):
        with torch.no_grad():
            for shadow, parameter in zip(self.shadows, parameters, strict=True):
                shadow.lerp_(parameter, 0.01)


def layers():
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def squares(model, batch):
    return model(batch).square().mean()


def check(model, batches, *, loss=squares, after=lambda: None, difference_bytes=0):
    """Train with a log; the prediction must be what was measured. Return it and the report."""
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = mc.MemoryRecorder(model, optimizer)
    step = mc.TrainingStep(model, next(batches()), loss=loss, optimizer=optimizer)
    log = mc.MemoryLog(recorder, step, log_dir=None, wait_for_prediction=True, verbose=0)
    del step
    with log, recorder.watch():
        for batch in batches():
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            after()
            del batch, value
        prediction, report = log.prediction, log.report
    measured = recorder.steady
    assert [window.peak_allocated_bytes + difference_bytes for window in measured.windows] == [
        window.peak_allocated_bytes for window in prediction.step.windows
    ]
    return prediction, report


def on_device():
    return (torch.zeros(64, WIDTH, device="cuda") for _ in range(4))


def named(prediction):
    """The bytes that lie beside the model at the peak, by name."""
    sizes = Counter()
    for live in prediction.at_peak:
        if live.alloc.operator == "Module.to" and not live.alloc.module[:1].isdigit():
            sizes[live.alloc.module] += live.alloc.size_bytes
    return sizes


def test_an_average_of_the_weights():
    empty_device()
    model = layers().cuda()
    average = torch.optim.swa_utils.AveragedModel(model)
    prediction, report = check(model, on_device, after=lambda: average.update_parameters(model))
    assert named(prediction) == {"average": sum(p.nbytes for p in model.parameters())}
    alone = mc.predict(
        mc.TrainingStep(model, next(on_device()), loss=squares, optimizer=torch.optim.AdamW),
        device=prediction.device,
    )
    # Nothing of it grows with the batch: the card has as much less room.
    assert 0 < alone.largest_batch_size - report.advice.batch_size < 0.07 * alone.largest_batch_size


def test_an_average_in_plain_tensors():
    empty_device()
    model = layers().cuda()
    average = Average(model.parameters())
    prediction, _ = check(model, on_device, after=lambda: average.update(model.parameters()))
    assert set(named(prediction)) == {"average.shadows"}


def test_an_earlier_model_and_its_optimizer():
    empty_device()
    earlier = layers().cuda()
    optimizer = torch.optim.AdamW(earlier.parameters())
    earlier(torch.ones(2, WIDTH, device="cuda")).sum().backward()
    optimizer.step()
    prediction, _ = check(layers().cuda(), on_device)
    # With gradients and state it is four times its weights.
    assert sum(named(prediction).values()) == pytest.approx(
        4 * sum(p.nbytes for p in earlier.parameters()), rel=0.01
    )


@pytest.mark.parametrize("is_view", [True, False])
def test_a_training_set_on_the_device(is_view):
    empty_device()
    images = torch.zeros(64 * 1024, WIDTH, device="cuda")

    def batches():
        for first in range(0, 4 * 4096, 4096):
            one = images[first : first + 4096]
            yield one if is_view else one.clone()

    # The prediction of a step brings its batch to the device; a view is there already.
    check(layers().cuda(), batches, difference_bytes=is_view * 4096 * WIDTH * 4)


@pytest.mark.parametrize("is_global", [True, False])
def test_what_the_loss_reaches_counts_once(is_global):
    empty_device()
    images = torch.zeros(16 * 1024, WIDTH, device="cuda")
    teacher = layers().cuda()

    def loss(model, batch):
        with torch.no_grad():
            wanted = teacher(images[batch])
        return (model(images[batch]) - wanted).square().mean()

    check(layers().cuda(), indices, loss=loss)


class Set:
    """A training set of the program's own."""

    def __init__(self):
        self.images = torch.zeros(16 * 1024, WIDTH, device="cuda")


class Looks(nn.Module):
    """Its forward pass reads a global tensor."""

    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, batch):
        return self.layers(TABLE[0][batch])


TABLE = []


@pytest.fixture
def table():
    empty_device()
    TABLE.append(torch.zeros(16 * 1024, WIDTH, device="cuda"))
    yield
    TABLE.clear()


def indices():
    return (torch.arange(64, device="cuda") for _ in range(4))


def test_what_an_object_of_the_program_holds_counts_once():
    empty_device()
    data = Set()
    check(
        layers().cuda(),
        indices,
        loss=lambda model, batch: model(data.images[batch]).square().mean(),
    )


def test_what_a_forward_pass_reads_counts_once(table):
    check(Looks().cuda(), indices)


class Refuses(nn.Module):
    """It does not let anybody read it."""

    def children(self):
        raise RuntimeError("not ready")

    parameters = named_modules = children


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_tensors_of_any_kind_do_not_end_the_search():
    empty_device()
    average, refuses = layers().cuda(), Refuses()
    nested = torch.nested.nested_tensor([torch.zeros(1024, 512), torch.zeros(512, 512)]).cuda()
    sparse = torch.eye(8).to_sparse().cuda()
    rows = torch.ones(1024, 512).to_sparse_csr().cuda()
    # What holds less than 1 MiB is not counted: here the small sparse tensor, in two blocks.
    prediction, _ = check(layers().cuda(), on_device, difference_bytes=-2 * 512)
    sizes = named(prediction)
    assert sizes["average"] == sum(p.nbytes for p in average.parameters())
    assert sizes["nested"] == 1536 * 512 * 4
    del refuses, nested, sparse, rows


def test_a_watch_that_gets_its_model_later():
    empty_device()
    model = layers().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    squares(model, next(on_device())).backward()
    optimizer.step()
    recorder = mc.MemoryRecorder()
    step = mc.TrainingStep(model, next(on_device()), loss=squares, optimizer=optimizer)
    with mc.MemoryLog(recorder, step, log_dir=None, verbose=0) as log:
        prediction = log.prediction
    assert named(prediction) == {}


def test_what_is_let_go_is_let_go():
    empty_device()
    model, other = layers().cuda(), torch.zeros(MIB, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = mc.MemoryRecorder(model, optimizer)
    step = mc.TrainingStep(model, next(on_device()), loss=squares, optimizer=optimizer)
    with mc.MemoryLog(recorder, step, log_dir=None, verbose=0) as log:
        reference = weakref.ref(other)
        del other
        gc.collect()
        assert reference() is None
        assert log.prediction is not None


class Augments(L.LightningDataModule):
    """It has a network of its own on the device."""

    def __init__(self):
        super().__init__()
        self.network = nn.Linear(WIDTH, WIDTH).cuda()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(4 * 64, WIDTH), batch_size=64)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        with torch.no_grad():
            return self.network(batch)


class Averages(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = layers()

    def on_fit_start(self):
        self.trainer.average = Average(self.parameters())

    def on_train_batch_end(self, *_):
        self.trainer.average.update(self.parameters())

    def training_step(self, batch):
        return squares(self.layers, batch)

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def test_an_average_that_a_trainer_holds(tmp_path):
    loader = torch.utils.data.DataLoader(torch.zeros(4 * 64, WIDTH), batch_size=64)
    training.check_on_cuda(tmp_path, Averages(), train_dataloaders=loader, val_dataloaders=loader)


class Scales(Averages):
    """Its hook makes another batch of what is loaded: the batch on the device is this step's."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch.float() / 255


def test_a_batch_that_a_hook_has_made_counts_once(tmp_path):
    loader = torch.utils.data.DataLoader(torch.zeros(4 * 1024, WIDTH, dtype=torch.uint8), 1024)
    training.check_on_cuda(tmp_path, Scales(), train_dataloaders=loader)


def test_what_a_datamodule_has_on_the_device(tmp_path):
    empty_device()
    training.check_on_cuda(tmp_path, Averages(), datamodule=Augments())


def test_a_teacher_of_a_trainer_of_transformers(tmp_path):
    """Its outputs are there as the Trainer calls the model; they are made in each step."""
    empty_device()
    teacher = test_huggingface.model().cuda()
    table = torch.zeros(4, MIB, device="cuda")

    class Distills(test_huggingface.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **_):
            with torch.no_grad():
                wanted = teacher(**inputs).logits.repeat(1, 16, 8)
            outputs = model(**inputs)
            loss = outputs.loss + 1e-9 * wanted.sum()
            return (loss, outputs) if return_outputs else loss

    callback = mc.MemoryTrainerCallback(wait_for_prediction=True)
    test_huggingface.train(
        tmp_path,
        callback,
        kind=Distills,
        use_cpu=False,
        eval_strategy="epoch",
        trainer_options={"eval_dataset": test_huggingface.data(8)},
    )
    measured, predicted = callback.report.measured, callback.prediction.step
    for phase in measured.phases:
        sizes = [step.phases[phase].peak_allocated_bytes for step in (measured, predicted)]
        assert abs(sizes[0] - sizes[1]) <= 32 * 512, (phase, sizes)
    assert named(callback.prediction)["table"] == table.nbytes
    assert callback.evaluation is not None
