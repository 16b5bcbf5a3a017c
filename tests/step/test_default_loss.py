"""A step that was given no loss: what the model makes of the batch."""

from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from needs import needs_recorded_version
from torch import nn

import memcallback as mc
from memcallback.prediction.textbook.predict import predict as predict_by_the_textbook

WIDTH = 16


class Tagger(nn.Module):
    """As a model of transformers: arguments with names, and a loss where there are labels."""

    def __init__(self, returns=dict):
        super().__init__()
        self.embed, self.score, self.returns = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 4), returns

    def forward(self, input_ids=None, labels=None):
        logits = self.score(self.embed(input_ids))
        if labels is None:
            return self.returns(logits=logits, loss=None)
        return self.returns(
            loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits
        )


class TakesOneMapping(nn.Module):
    """Arguments of `forward` are not the keys of the batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch, scale=2.0):
        return {"prediction": self.layer(batch["x"]) * scale, "index": batch["x"].argmax(-1)}


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def ids(*, has_labels=True):
    names = ("input_ids", "labels") if has_labels else ("input_ids",)
    return {name: torch.zeros(8, 12, dtype=torch.long) for name in names}


def events(model, batch, loss=None):
    step = mc.TrainingStep(model, batch, loss=loss, optimizer=torch.optim.AdamW)
    return mc.predict(step, device="24GiB").trace.traced.trace.events


def sum_of(name, call):
    """The loss that is one output summed, in a loop that holds all outputs meanwhile."""

    def loss(model, batch):
        returned = call(model, batch)
        return torch.stack([returned[name].sum()]).sum()

    return loss


@pytest.mark.parametrize("returns", [dict, UserDict, SimpleNamespace])
def test_a_batch_is_passed_by_name_and_the_loss_that_the_model_returns_is_taken(returns):
    model = Tagger(returns)

    def loss(model, batch):
        returned = model(input_ids=batch["input_ids"], labels=batch["labels"])
        return returned.loss if returns is SimpleNamespace else returned["loss"]

    assert events(model, ids()) == events(model, ids(), loss)
    assert events(model, UserDict(ids())) == events(model, ids(), loss)


def test_a_batch_is_passed_by_name_through_wrappers_to_what_they_wrap():
    model = Wrapper(Wrapper(Tagger()))
    assert events(model, ids()) == events(model, ids(), lambda model, batch: model(**batch)["loss"])


def test_without_labels_the_outputs_are_summed():
    batch = ids(has_labels=False)
    assert events(Tagger(), batch) == events(
        Tagger(), batch, sum_of("logits", lambda model, batch: model(input_ids=batch["input_ids"]))
    )


class Squares(nn.Linear):
    """A model that returns its loss itself."""

    def forward(self, x):
        return super().forward(x).square().mean()


@pytest.mark.parametrize(
    ("model", "batch", "is_told"),
    [
        (nn.Linear(WIDTH, 4), torch.zeros(8, WIDTH), True),
        (Tagger(), ids(has_labels=False), True),
        (Tagger(), ids(), False),
        (Squares(WIDTH, 4), torch.zeros(8, WIDTH), False),
    ],
)
def test_that_the_outputs_were_summed_is_told(model, batch, is_told):
    step = mc.TrainingStep(model, batch, optimizer=torch.optim.AdamW)
    said = [one for one in mc.predict(step, device="24GiB").caveats if "No loss was given" in one]
    assert len(said) == is_told


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapper])
def test_a_mapping_that_is_one_argument_stays_one(wrap):
    batch = {"x": torch.zeros(8, WIDTH)}
    model = wrap(TakesOneMapping())
    assert events(model, batch) == events(
        model, batch, sum_of("prediction", lambda model, batch: model(batch))
    )


def test_a_model_that_returns_no_numbers_is_told_what_to_give():
    class Counts(nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax()

    step = mc.TrainingStep(Counts(WIDTH, WIDTH), torch.zeros(8, WIDTH), optimizer=torch.optim.SGD)
    with pytest.raises(mc.PredictionError, match="Give loss="):
        mc.predict(step, device="24GiB")


@needs_recorded_version  # with PyTorch 2.6 the peak is before the loss in each case
def test_outputs_that_a_loop_keeps_are_there_until_the_next_ones_have_come():
    batch = torch.zeros(64, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, 4096), nn.Linear(4096, 1024))
    kept = {}

    def keeping(model, batch):
        kept["outputs"] = model(batch)
        return kept["outputs"].sum()

    def loss(model, batch):
        return model(batch).sum()

    def peak(loss, **options):
        step = mc.TrainingStep(model, batch, loss=loss, optimizer=torch.optim.SGD, **options)
        return mc.predict(step, device="24GiB").step.phases[mc.Phase.FORWARD].peak_allocated_bytes

    # The peak is then before the loss is there, which takes a block of 512 bytes.
    assert peak(loss, keep_outputs="last") == peak(keeping) == peak(loss) + 64 * 1024 * 4 - 512
    assert not kept
    with pytest.raises(ValueError, match=r"keep_outputs 'all' is not known. Use one of 'none', "):
        peak(loss, keep_outputs="all")


def test_the_textbook_law_hands_over_by_name_too():
    step = mc.TrainingStep(Tagger(), ids(), optimizer=torch.optim.AdamW)
    assert predict_by_the_textbook(step).peak_allocated_bytes > 8 * 12 * WIDTH * 4


class Wrapper(nn.Module):
    def __init__(self, wrapped):
        super().__init__()
        self.wrapped = wrapped

    def forward(self, *args, **kwargs):
        return self.wrapped(*args, **kwargs)


def test_the_textbook_law_follows_what_takes_anything_too():
    step = mc.TrainingStep(
        Wrapper(Tagger()),
        ids(),
        loss=lambda model, batch: model(**batch).loss,
        optimizer=torch.optim.AdamW,
    )
    assert predict_by_the_textbook(step).peak_allocated_bytes > 8 * 12 * WIDTH * 4


def test_a_model_whose_forward_does_not_say_what_it_takes_gets_the_whole_batch():
    class Silent(nn.Linear):
        def forward(self, batch):
            return super().forward(batch["x"])

        forward.__signature__ = "anything"

    step = mc.TrainingStep(
        Silent(WIDTH, 1), {"x": torch.zeros(8, WIDTH)}, optimizer=torch.optim.SGD
    )
    assert mc.predict(step, device="24GiB").peak_allocated_bytes > 0


def test_a_model_that_cannot_do_with_what_it_got_by_name_is_told_of_the_loss():
    class UnshardedModule(nn.Linear):
        def forward(self, batch):
            return super().forward(batch["batch"])

    step = mc.TrainingStep(
        UnshardedModule(WIDTH, 1), {"batch": torch.zeros(8, WIDTH)}, optimizer=torch.optim.SGD
    )
    with pytest.raises(
        mc.PredictionError,
        match=r"called as model\(\*\*batch\): give TrainingStep\(model, batch, loss=",
    ):
        mc.predict(step, device="24GiB")


@pytest.mark.parametrize(
    "batch", [(torch.zeros(8, WIDTH), torch.zeros(8)), {"x": torch.zeros(8, WIDTH)}]
)
def test_a_model_that_does_not_take_the_whole_batch_is_told_of_the_loss(batch):
    step = mc.TrainingStep(nn.Sequential(nn.Linear(WIDTH, 1)), batch, optimizer=torch.optim.SGD)
    with pytest.raises(
        mc.PredictionError,
        match=r"called with the whole batch: give TrainingStep\(model, batch, loss=",
    ):
        mc.predict(step, device="24GiB")


def test_a_loss_of_ones_own_that_fails_is_not_told_to_be_missing():
    step = mc.TrainingStep(
        nn.Linear(WIDTH, 1),
        (torch.zeros(8, WIDTH), torch.zeros(8)),
        loss=lambda model, batch: model(batch),
        optimizer=torch.optim.SGD,
    )
    with pytest.raises(mc.PredictionError, match="leave that code out") as told:
        mc.predict(step, device="24GiB")

    assert "whole batch" not in str(told.value)
