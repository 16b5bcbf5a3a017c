"""A batch without samples: what is asked of us says so, and a training with one goes on."""

import pytest
import torch
import training
from lightning.pytorch import LightningModule
from torch import nn

import memcallback as mc

EMPTY = [
    (torch.zeros(0, 4), r"a Tensor with tensors of \(0, 4\)"),
    ((torch.zeros(0, 4), torch.zeros(0)), r"a tuple with tensors of \(0, 4\), \(0,\)"),
    ({"images": torch.zeros(0, 4)}, r"a dict with tensors of \(0, 4\)"),
    ([], "a list"),
    ({}, "a dict"),
    ((), "a tuple"),
]


def step_of(batch, **options):
    return mc.TrainingStep(
        nn.Linear(4, 2), batch, loss=lambda model, _: model(torch.zeros(1, 4)).sum(), **options
    )


@pytest.mark.parametrize(("batch", "outline"), EMPTY)
@pytest.mark.parametrize("ask", [mc.predict, mc.suggest_batch_size, mc.what_if])
def test_what_is_asked_of_it_names_the_batch_and_the_way_out(ask, batch, outline):
    message = rf"The batch has 0 samples \({outline}\).*at least 1.*Give a batch with samples\."
    with pytest.raises(mc.PredictionError, match=message):
        ask(step_of(batch), device="24GiB")


@pytest.mark.parametrize("batch", [torch.zeros(0, 4), []])
def test_a_step_that_makes_its_own_samples_may_say_how_many(batch):
    assert mc.predict(step_of(batch, batch_size=4), device="24GiB").batch_size == 4


class Summed(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def weights_after(sizes, tmp_path, *callbacks):
    torch.manual_seed(0)
    module = Summed()
    batches = torch.utils.data.DataLoader([torch.ones(size, 4) for size in sizes], batch_size=None)
    training.trainer(tmp_path, list(callbacks), log_every_n_steps=1).fit(module, batches)
    return module.state_dict()


@pytest.mark.parametrize("sizes", [(0, 2, 2, 2), (2, 2, 0, 2), (2, 2, 2, 0), (0, 0, 0)])
@pytest.mark.filterwarnings("ignore::memcallback.MemoryWarning")
def test_a_training_with_one_is_recorded_to_its_end(sizes, tmp_path):
    plain = weights_after(sizes, tmp_path)
    callback = mc.MemoryCallback()
    recorded = weights_after(sizes, tmp_path, callback)
    assert all(torch.equal(plain[name], recorded[name]) for name in plain)
    assert [step.batch_size for step in callback.recorder.steps] == list(sizes)
    assert callback.report is not None


def test_a_training_that_begins_with_one_is_told_that_it_is_not_predicted(tmp_path):
    with pytest.warns(mc.MemoryWarning, match="not predicted. The batch has 0 samples"):
        weights_after((0, 2, 2), tmp_path, mc.MemoryCallback())
