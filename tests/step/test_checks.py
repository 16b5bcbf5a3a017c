"""Plain mistakes in a step: refused with the value, the rule and the way out, when it is made where
it can be known there.
"""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from training import Automatic

import memcallback as mc
from memcallback import PredictionError, TrainingStep


def make_step(model=None, **options):
    return TrainingStep(model or nn.Linear(8, 4), torch.ones(4, 8), **options)


SGD = torch.optim.SGD
#: An optimizer of parameters that are no model's here.
OTHERS = SGD([nn.Parameter(torch.ones(3))])


def takes_a_rate(parameters, rate):
    return SGD(parameters, lr=rate)


def not_wrapped(loss):
    @functools.wraps(loss)
    def wrapper(*arguments):
        return loss(*arguments, 1)

    return wrapper


@not_wrapped
def scaled(model, batch, scale):
    return model(batch).sum() * scale


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"loss": []},
            ValueError,
            "loss is an empty list. Give one function of the model and the batch, or leave it out",
        ),
        (
            {"loss": "mse"},
            TypeError,
            r"loss must be a function of the model and the batch.* got 'mse'. Give loss=lambda "
            r"model, batch: ",
        ),
        (
            {"loss": ["mse"]},
            TypeError,
            r"loss\[0\] must be a function of the model and the batch.* got 'mse'\.",
        ),
        ({"loss": torch.ones(())}, TypeError, "loss must be a function .* got a Tensor"),
        (
            {"loss": nn.MSELoss()},
            TypeError,
            r"loss is MSELoss, which compares .* loss=lambda model, batch: "
            r"MSELoss\(\)\(model\(batch\[0\]\),",
        ),
        (
            {"loss": nn.MSELoss},
            TypeError,
            r"loss is MSELoss, which compares .* loss=lambda model, batch: "
            r"MSELoss\(\)\(model\(batch\[0\]\),",
        ),
        (
            {"loss": nn.functional.mse_loss},
            TypeError,
            r"loss is mse_loss, which compares .* batch: mse_loss\(model\(batch\[0\]\), "
            r"batch\[1\]\)",
        ),
        (
            {"loss": lambda model: model.weight.sum()},
            TypeError,
            "loss .*<lambda> cannot be called with the model and the batch: too many",
        ),
        (
            {"optimizer": "adam"},
            TypeError,
            r"optimizer must be an optimizer .* got 'adam'. Give "
            r"torch.optim.Adam\(model.parameters\(\)\)",
        ),
        (
            {"optimizer": "mine"},
            TypeError,
            r"got 'mine'. Give torch.optim.AdamW\(model.parameters\(\)\), or torch.optim.AdamW "
            r"alone",
        ),
        ({"optimizer": 3}, TypeError, "optimizer must be an optimizer .* got 3"),
        (
            {"optimizer": {"optimizer": OTHERS}},
            TypeError,
            "optimizer must be an optimizer .* got a dict",
        ),
        (
            {"optimizer": torch.optim.lr_scheduler.ConstantLR(OTHERS)},
            TypeError,
            "optimizer must be .* got a ConstantLR",
        ),
        (
            {"optimizer": [SGD]},
            TypeError,
            r"optimizer\[0\] is SGD, which makes an optimizer; a list must hold .* Give it alone",
        ),
        (
            {"optimizer": ["sgd"]},
            TypeError,
            r"optimizer\[0\] must be an optimizer .* got 'sgd'. Give torch.optim.SGD\(",
        ),
        (
            {"optimizer": takes_a_rate},
            TypeError,
            "optimizer takes_a_rate cannot be called with parameters alone: missing a .*'rate'",
        ),
        (
            {"optimizer": lambda: OTHERS},
            TypeError,
            "cannot be called with parameters alone: too many .* optimizer=lambda parameters: ",
        ),
        (
            {"optimizer": OTHERS},
            ValueError,
            "the optimizer SGD has 1 parameter, and none is the model's. Give one that was made of",
        ),
        (
            {"accumulate": 0},
            ValueError,
            "accumulate must be at least 1, got 0. It is the number of batches",
        ),
        (
            {"accumulate": 1.5},
            TypeError,
            "accumulate must be a whole number, got 1.5. It is the number of batches",
        ),
        ({"accumulate": True}, TypeError, "accumulate must be a whole number, got True."),
        ({"accumulate": None}, TypeError, "accumulate must be a whole number, got None."),
        (
            {"clip_grad_norm": "a"},
            TypeError,
            "clip_grad_norm must be a number, got 'a'. Give the largest norm, such as 1.0, or "
            "None for no",
        ),
        ({"clip_grad_norm": True}, TypeError, "clip_grad_norm must be a number, got True."),
        ({"clip_grad_norm": 0}, ValueError, "clip_grad_norm must be above 0, got 0."),
        ({"clip_grad_norm": -1}, ValueError, "clip_grad_norm must be above 0, got -1."),
        ({"clip_grad_norm": float("nan")}, ValueError, "clip_grad_norm must be above 0, got nan."),
        (
            {"clip_grad_value": "a"},
            TypeError,
            "clip_grad_value must be a number, got 'a'. Give the largest value, such as 0.5, or "
            "None",
        ),
        ({"clip_grad_value": 0.0}, ValueError, "clip_grad_value must be above 0, got 0.0."),
        (
            {"precision": "fp8"},
            ValueError,
            "precision 'fp8' is not known. Use one of 16-mixed, bf16-mixed, ",
        ),
        (
            {"precision": torch.float16},
            ValueError,
            "precision torch.float16 is not known. Use one of",
        ),
    ],
)
def test_an_argument_that_cannot_be_is_refused_when_the_step_is_made(options, error, message):
    with pytest.raises(error, match=message):
        make_step(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"loss": scaled},
        {
            "loss": functools.partial(
                lambda model, batch, scale: model(batch).sum() * scale, scale=2
            )
        },
        {"optimizer": functools.partial(SGD, lr=0.1)},
        {"optimizer": []},
        {"accumulate": np.int64(2)},
        {"clip_grad_norm": np.float32(1), "clip_grad_value": 1},
        {"precision": 16},
    ],
)
def test_an_argument_that_can_be_is_taken(options):
    assert mc.predict(make_step(**options), device="cpu").peak_allocated_bytes > 0


MUST = "it must return the loss of the batch, a scalar tensor that requires grad"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda model, batch: {"loss": model(batch).sum(), "size": 4},
            f"loss returned a dict of 'loss', 'size'; {MUST}. Return the tensor in it",
        ),
        (lambda model, batch: {}, f"loss returned an empty dict; {MUST}. Return that tensor"),
        (
            lambda model, batch: (model(batch).sum(), 4),
            f"loss returned a tuple of 2; {MUST}. Return the tensor in it",
        ),
        (lambda model, batch: [], f"loss returned an empty list; {MUST}."),
        (
            lambda model, batch: model(batch).sum().item(),
            f"loss returned a float; {MUST}. Return the tensor itself, without .item",
        ),
        (lambda model, batch: None, f"loss returned None; {MUST}. Return that tensor"),
        (
            lambda model, batch: model(batch),
            rf"loss returned a tensor of shape \(4, 4\); {MUST}. Reduce it, such as with .mean\(\)",
        ),
        (
            lambda model, batch: model(batch).sum().detach(),
            f"loss returned a tensor that does not require grad; {MUST}. Leave out .detach",
        ),
        (
            lambda model, batch: model(batch).sum().long(),
            f"loss returned a tensor of torch.int64; {MUST}. Return a floating-point one",
        ),
    ],
)
def test_a_loss_function_that_returns_no_loss_is_said_so(loss, message):
    with pytest.raises(PredictionError, match=f"^{message}"):
        mc.predict(make_step(loss=loss, optimizer=SGD), device="24GiB")


def test_of_several_losses_the_one_without_a_loss_is_named():
    model = nn.Linear(8, 4)
    step = make_step(
        model,
        loss=[lambda m, b: m(b).sum(), lambda m, b: 1.0],
        optimizer=[SGD(model.parameters()), SGD(model.parameters())],
    )
    with pytest.raises(PredictionError, match=r"^loss\[1\] returned a float; it must"):
        mc.predict(step, device="24GiB")


def test_a_model_of_which_nothing_is_trained_is_said_so():
    with pytest.raises(
        PredictionError,
        match=r"does not require grad; .* None of the model's 2 parameters requires grad: set "
        r"requires_grad",
    ):
        mc.predict(make_step(nn.Linear(8, 4).requires_grad_(False)), device="24GiB")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            {"los": 1},
            "^training_step returned a dict of 'los'; it must .* Return that tensor, alone or in "
            "a dict under 'loss'",
        ),
        (
            None,
            "^training_step returned None; it must .* Return that tensor, alone or in a dict "
            "under 'loss'",
        ),
        (
            {"loss": 1.5},
            "^training_step returned a dict with a float under 'loss'; it must .* without .item",
        ),
    ],
)
def test_a_training_step_that_returns_no_loss_is_said_so(returned, message):
    class Mistaken(Automatic):
        def training_step(self, batch, batch_idx):
            return returned

    with pytest.raises(PredictionError, match=message):
        mc.predict(TrainingStep.from_lightning(Mistaken(), torch.ones(4, 8)), device="24GiB")


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            lambda parameters: None,
            "returned None; it must return an optimizer. Give one that does: optimizer=lambda "
            "parameters: ",
        ),
        (lambda parameters: SGD, "returned the class SGD; it must return an optimizer"),
        (lambda parameters: [SGD(parameters)], "returned a list; it must return an optimizer"),
        (
            lambda parameters: OTHERS,
            "returned a SGD of 1 parameter, none of which was passed to the function. Let the "
            "function use the parameters that it gets",
        ),
        (
            lambda parameters: 1 / 0,
            "failed when it was called with the model's parameters: ZeroDivisionError: division "
            "by zero",
        ),
    ],
)
def test_a_function_that_makes_no_optimizer_of_its_parameters_is_said_so(optimizer, message):
    with pytest.raises(PredictionError, match=f"^optimizer .*<lambda> {message}"):
        mc.predict(make_step(optimizer=optimizer), device="24GiB")


def test_an_optimizer_that_a_list_holds_is_what_lightning_gives():
    module = Automatic()
    optimizer = module.configure_optimizers()
    step = TrainingStep.from_lightning(
        module, (torch.ones(4, 64), torch.zeros(4, dtype=torch.long)), optimizer=[optimizer]
    )
    assert step.given_optimizers == (optimizer,)


def test_a_module_without_training_step_is_no_lightning_module():
    with pytest.raises(
        TypeError,
        match=r"module must be a LightningModule, got a Linear, .* TrainingStep\(model, batch, "
        r"loss=\.\.\., optimizer=\.\.\.\)",
    ):
        TrainingStep.from_lightning(nn.Linear(8, 4), torch.ones(4, 8))


@pytest.mark.parametrize("ask", [mc.predict, mc.suggest_batch_size])
def test_what_is_no_step_is_refused(ask):
    with pytest.raises(
        TypeError,
        match=r"step must be a TrainingStep or an InferenceStep, got a Linear. Give "
        r"TrainingStep\(model, batch, loss=\.\.\., optimizer=\.\.\.\) or InferenceStep",
    ):
        ask(nn.Linear(8, 4), device="24GiB")


@pytest.mark.parametrize(
    "options", [{"accumulate": 2}, {"clip_grad_norm": 0.5}, {"clip_grad_value": 0.5}]
)
def test_what_lightning_refuses_with_manual_optimization_is_refused(options):
    (name, value), module = next(iter(options.items())), Automatic()
    module.automatic_optimization = False
    with pytest.raises(
        ValueError,
        match=f"{name}={value} is not supported with manual optimization, .* Leave {name} out.",
    ):
        TrainingStep.from_lightning(module, torch.ones(4, 8), **options)
