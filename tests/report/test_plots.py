"""Pictures of one size, drawn beside whatever a program draws itself."""

import random

import matplotlib
import matplotlib.style
import numpy as np
import pytest
import torch
from hand_made import prediction as traced

import memcallback as mc
from memcallback.batch_size.estimate import suggest
from memcallback.core.module_table import ModuleTable
from memcallback.report.plots.at_peak import at_peak
from memcallback.report.plots.batch_size import batch_size_curve
from memcallback.report.plots.canvas import Canvas
from memcallback.report.plots.modules import module_icicle
from memcallback.report.plots.step import boundaries, timeline
from memcallback.report.plots.what_if import what_if_bars

BATCH = torch.zeros(16, 64)


def network():
    return torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Linear(256, 8))
    )


def model_step():
    model = network()
    return mc.TrainingStep(
        model,
        BATCH,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.Adam(model.parameters()),
    )


@pytest.fixture(scope="module")
def prediction():
    return mc.predict(model_step(), device="24GiB")


@pytest.fixture(scope="module")
def on_a_cpu():
    return mc.predict(model_step(), device="cpu")


@pytest.fixture(scope="module")
def recorder():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    recorder = mc.MemoryRecorder(model, optimizer, sample_every_n_steps=1)
    with recorder.watch():
        for _ in range(3):
            model(BATCH).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return recorder


@pytest.fixture(scope="module")
def plan():
    return mc.what_if(model_step(), device="24GiB")


def draw_timeline(request):
    prediction = request.getfixturevalue("prediction")
    return timeline(prediction, prediction.step)


def draw_timeline_on_a_cpu(request):
    return timeline(request.getfixturevalue("on_a_cpu"))


def draw_boundaries(request):
    return boundaries(request.getfixturevalue("recorder").steps[-1])


def draw_at_peak(request):
    return at_peak(request.getfixturevalue("prediction"))


def draw_batch_size_curve(request):
    predicted = traced(16)
    capacity_bytes = predicted.capacity_bytes
    return batch_size_curve(
        suggest(measured=None, predicted=predicted, capacity_bytes=capacity_bytes)
    )


def draw_what_if_bars(request):
    return what_if_bars(request.getfixturevalue("plan"))


def draw_module_icicle(request):
    modules = request.getfixturevalue("prediction").modules
    assert isinstance(modules, ModuleTable)
    return module_icicle(modules)


DRAWINGS = [
    draw_timeline,
    draw_timeline_on_a_cpu,
    draw_boundaries,
    draw_at_peak,
    draw_batch_size_curve,
    draw_what_if_bars,
    draw_module_icicle,
]


@pytest.mark.parametrize("draw", DRAWINGS)
def test_every_picture_has_one_size_and_something_on_it(draw, request):
    picture = draw(request)
    assert picture.shape == (400, 640, 3)
    assert picture.std() > 10


@pytest.mark.parametrize("draw", DRAWINGS)
def test_a_programs_own_settings_figures_and_random_numbers_stay(draw, request):
    def state():
        numbers = np.random.get_state()
        return (
            dict(matplotlib.rcParams),
            random.getstate(),
            numbers[0],
            numbers[1].tolist(),
            torch.get_rng_state().tolist(),
        )

    draw(request)
    before = state()
    draw(request)
    assert state() == before


@pytest.mark.parametrize("draw", DRAWINGS)
def test_a_picture_is_the_same_whatever_style_a_program_has_set(draw, request):
    expected = draw(request)
    with matplotlib.style.context("dark_background"):
        matplotlib.rcParams.update({"text.usetex": True, "font.family": "serif"})
        matplotlib.rcParams.update({"axes.grid": True, "axes.formatter.use_mathtext": True})
        picture = draw(request)
    assert (picture == expected).all()


def test_names_with_dollars_are_no_formulas():
    assert Canvas(r"layer $\wrong{$").pixels().std() > 0
