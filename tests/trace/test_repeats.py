"""The middle batches of an update that are repeated are those that would have been run."""

import itertools
import random

import numpy as np
import pytest
import torch
import training
from torch import nn

import memcallback as mc
from memcallback.devices.catalogue import find_device
from memcallback.prediction.predict_here import predict_once
from memcallback.trace.loops import loop, repeats

WIDTH, BATCH_SIZE = 16, 8
COUNT = 0


class Model(nn.Module):
    """Two layers, and something between them that a batch may do in another way than the last."""

    def __init__(self, between=lambda model, features: features):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.between = between
        self.num_calls = 0

    def forward(self, features):
        return self.last(self.between(self, self.first(features)))


def every_third(model, features):
    model.num_calls += 1
    return features.tanh().sin() if model.num_calls % 3 == 0 else features


def every_third_of_a_global(model, features):
    global COUNT
    COUNT += 1
    return features.tanh().sin() if COUNT % 3 == 0 else features


class OfClass:
    count = 0


def every_third_of_a_class(model, features):
    OfClass.count += 1
    return features.tanh().sin() if OfClass.count % 3 == 0 else features


def every_third_of_an_iterator():
    numbers = itertools.count(1)
    return lambda model, features: features.tanh() if next(numbers) % 3 == 0 else features


def every_third_of_a_closure():
    number = 0

    def between(model, features):
        nonlocal number
        number += 1
        return features.tanh() if number % 3 == 0 else features

    return between


def at_random(model, features):
    return features.tanh() if random.random() < 0.5 else features


def keeping(model, features):
    model.kept = [*getattr(model, "kept", []), features.detach().clone()]
    return features


def keeping_the_last(model, features):
    model.kept = features.detach().clone()
    return features


def with_hooks():
    model = Model()
    model.first.register_forward_hook(lambda module, inputs, outputs: outputs.tanh())
    model.last.weight.register_hook(lambda gradient: gradient * 2)
    return model


def with_a_counting_hook():
    model, seen = Model(), []
    model.first.register_forward_hook(lambda *_: seen.append(1))
    return model


def with_an_array():
    model = Model(lambda model, features: features * float(model.weights[0]))
    model.weights = np.ones(3)
    return model


def with_a_counting_array():
    model = Model(count_in_an_array)
    model.counts = np.zeros(3)
    return model


def count_in_an_array(model, features):
    model.counts[0] += 1
    return features.tanh() if model.counts[0] % 3 == 0 else features


def used_late():
    """A layer without gradients before the second batch."""

    def between(model, features):
        model.num_calls += 1
        return model.late(features) if model.num_calls > 1 else features

    model = Model(between)
    model.late = nn.Linear(WIDTH, WIDTH)
    return model


def used_from_then_on():
    def between(model, features):
        model.is_late = hasattr(model, "is_late")
        return model.late(features) if model.is_late else features

    model = Model(between)
    model.late = nn.Linear(WIDTH, WIDTH)
    return model


MODELS = {
    "plain": Model,
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.ReLU()),
    "batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
    "hooks": with_hooks,
    "gradients None at first": used_from_then_on,
    "an array": with_an_array,
    "the last is kept": lambda: Model(keeping_the_last),
}
CHANGING = {
    "a counter": lambda: Model(every_third),
    "a global": lambda: Model(every_third_of_a_global),
    "a class": lambda: Model(every_third_of_a_class),
    "an iterator": lambda: Model(every_third_of_an_iterator()),
    "a closure": lambda: Model(every_third_of_a_closure()),
    "at random": lambda: Model(at_random),
    "a list that grows": lambda: Model(keeping),
    "an array that counts": with_a_counting_array,
    "a hook that counts": with_a_counting_hook,
    "a counter, gradients None at first": used_late,
}


@pytest.fixture
def run(monkeypatch):
    """How many batches were run, in one list."""
    numbers = []
    original = loop._automatic_step

    def counted(*args, **options):
        numbers.append(1)
        original(*args, **options)

    monkeypatch.setattr(loop, "_automatic_step", counted)
    return numbers


def traced(make, accumulate, device="L4", **options):
    """A prediction from one trace: in each trace it is decided anew which batches are repeated."""
    global COUNT
    COUNT = OfClass.count = 0
    random.seed(0)
    model = make()
    step = mc.TrainingStep(
        model,
        torch.zeros(BATCH_SIZE, WIDTH),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.AdamW(model.parameters()),
        accumulate=accumulate,
        **options,
    )
    return predict_once(step, device=find_device(device), batch_size=BATCH_SIZE)


def check_same(make, accumulate, monkeypatch, run, **options):
    """Compare with all batches run; returns how many were run, and how many there were."""
    run.clear()
    repeated, num_run = traced(make, accumulate, **options), len(run)
    monkeypatch.setattr(repeats, "_NUM_COMPARED", 0)
    run.clear()
    full = traced(make, accumulate, **options)
    ours, theirs = repeated.trace.traced, full.trace.traced
    assert ours == theirs
    assert ours.origins == theirs.origins
    assert repeated == full
    return num_run, len(run)


@pytest.mark.parametrize(("name", "accumulate"), [*((name, 8) for name in MODELS), ("plain", 16)])
def test_batches_that_are_the_same_are_run_once(name, accumulate, monkeypatch, run):
    num_run, num_batches = check_same(MODELS[name], accumulate, monkeypatch, run)
    assert num_run < num_batches


def test_of_four_batches_none_is_left_to_repeat(monkeypatch, run):
    num_run, num_batches = check_same(Model, 4, monkeypatch, run)
    assert num_run == num_batches


@pytest.mark.parametrize(
    ("name", "accumulate"), [*((name, 8) for name in CHANGING), ("a counter", 16)]
)
def test_batches_that_may_differ_are_all_run(name, accumulate, monkeypatch, run):
    num_run, num_batches = check_same(CHANGING[name], accumulate, monkeypatch, run)
    assert num_run == num_batches


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-mixed"},
        {"precision": "16-mixed", "clip_grad_norm": 1.0},
        {"device": "cpu"},
    ],
)
def test_in_every_precision_and_on_a_cpu(options, monkeypatch, run):
    num_run, num_batches = check_same(Model, 8, monkeypatch, run, **options)
    assert num_run < num_batches


def test_in_lightning_and_checkpointed(monkeypatch, run):
    def predicted():
        torch.manual_seed(0)
        module = training.Automatic()
        mc.checkpoint(module, ["network"])
        step = mc.TrainingStep.from_lightning(module, next(iter(training.loader(1))), accumulate=8)
        return mc.predict(step, device="L4")

    repeated, num_run = predicted(), len(run)
    monkeypatch.setattr(repeats, "_NUM_COMPARED", 0)
    run.clear()
    assert predicted() == repeated
    assert num_run < len(run)


def test_the_work_of_repeated_batches_counts():
    few, many = traced(Model, 8), traced(Model, 16)
    assert 2 * few.trace.traced.num_flops == many.trace.traced.num_flops > 0
