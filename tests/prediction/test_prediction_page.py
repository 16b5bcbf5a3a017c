"""The page of a prediction: its figures are those of the prediction."""

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import memcallback as mc
from memcallback.core.types import Category, Phase
from memcallback.core.units import MiB
from memcallback.devices.catalogue import find_device
from memcallback.page.charts import LineChart
from memcallback.prediction.batch_trace import UnknownBatchSize
from memcallback.prediction.consumers import Peak
from memcallback.prediction.peak_tree import peak_tree
from memcallback.prediction.timeline import timeline_of

#: A card with so little room for the step that it does not fit.
SMALL = replace(find_device("L4"), capacity_bytes=540 * MiB)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(128)
        self.mlp = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(128, 4000)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model, batch):
    return model(batch).log_softmax(-1).square().mean()


@cache
def predict(device="L4"):
    step = mc.TrainingStep(Model(), torch.zeros(256, 128), loss=loss_of, optimizer=torch.optim.Adam)
    return mc.predict(step, device=device)


@pytest.fixture(scope="module")
def prediction():
    return predict()


def timeline(prediction, **options):
    return timeline_of(
        prediction.trace.at(prediction.batch_size).events,
        prediction.device,
        prediction.settings,
        prediction.origin_of,
        lambda alloc: "loss_of, train.py:12",
        is_unlimited=not prediction.fits,
        **options,
    )


def tree(prediction):
    kinds = {module.name: module.kind for module in prediction.modules.modules}
    return peak_tree(
        Peak(
            live=prediction.at_peak,
            saved=prediction.saved,
            events=prediction.trace.at(prediction.batch_size).events,
            origin_of=prediction.origin_of,
            kinds=kinds,
            phase=prediction.peak_phase,
        )
    )


@pytest.mark.parametrize("device", ["L4", "cpu", "20MiB"])
def test_the_timeline_has_the_peaks_of_the_prediction(device):
    prediction = predict(device if device != "20MiB" else SMALL)
    assert prediction.fits is (device != "20MiB")
    drawn = timeline(prediction)
    peak = drawn.moments[drawn.peak]
    assert peak.allocated_bytes == prediction.peak_allocated_bytes
    by_category = dict(zip(Category, peak.by_category, strict=True))
    assert {c: size for c, size in by_category.items() if size} == dict(prediction.by_category)
    for phase, start, stop in drawn.phases:
        highest = max(moment.allocated_bytes for moment in drawn.moments[start:stop])
        assert highest == prediction.phases[phase].peak_allocated_bytes
    assert [phase for phase, _, _ in drawn.phases] == list(Phase)
    reserved = [moment.reserved_bytes for moment in drawn.moments]
    if device == "cpu":
        assert set(reserved) == {None}
    else:
        assert max(reserved) == prediction.peak_reserved_bytes


def test_a_long_step_keeps_its_peak_though_moments_share_columns():
    model = nn.Sequential(nn.Linear(8, 8), *(nn.Sigmoid() for _ in range(600)))
    prediction = mc.predict(mc.TrainingStep(model, torch.zeros(4, 8)), device="L4")
    drawn = timeline(prediction)
    assert len(drawn.moments) < drawn.num_allocations
    assert drawn.moments[drawn.peak].allocated_bytes == prediction.peak_allocated_bytes


def test_boxes_at_the_peak_add_up_to_it(prediction):
    root = tree(prediction)
    assert root.num_bytes == prediction.peak_allocated_bytes

    def check(node):
        if node.children:
            assert node.num_bytes == sum(child.num_bytes for child in node.children)
            for child in node.children:
                check(child)
        else:
            assert node.category is not None

    check(root)


def test_repeated_layers_share_a_box_and_the_loss_is_named_by_its_function(prediction):
    names = [child.name for child in tree(prediction).children]
    assert "blocks.* Block (4)" in names
    assert "head" in names
    assert any(re.fullmatch(r"loss_of, .*test_prediction_page\.py:\d+", name) for name in names)
    assert not any("root" in name for name in names)


def test_a_page_marks_the_largest_batch_size_that_it_is_given(prediction):
    assert "largest 300: " in prediction.page(largest=300).html()
    assert f"largest {prediction.largest_batch_size:,}: " in prediction.page().html()


def test_the_loss_is_named_by_its_line_in_the_backward_pass_too(prediction):
    moments = prediction.timeline().moments
    (place,) = {one.where for one in moments if one.what == "_log_softmax_backward_data"}
    assert re.fullmatch(r"in loss_of, .*test_prediction_page\.py:\d+", place)


def test_data_of_a_cpu_without_a_capacity_do_not_say_that_it_fits(prediction):
    assert prediction.to_dict()["fits"] is True
    unknown = predict("cpu").to_dict()
    assert unknown["fits"] is None
    assert unknown["fits_without_retry"] is None


def test_a_page_begins_with_the_answer(prediction):
    page = prediction.page("mine:step")
    assert page.title == f"mine:step, batch size 256 on {prediction.device_name}"
    assert page.verdict[0].startswith("Fits. Peak ")
    assert page.is_good
    too_small = predict(SMALL).page()
    assert too_small.verdict[0].startswith("Does not fit. Peak ")
    assert any("Out of memory in step 1" in line for line in too_small.verdict)
    assert too_small.is_good is False
    assert predict("cpu").page().is_good is None


def test_measured_peaks_are_dots_on_the_prediction(prediction):
    drawn = timeline(prediction, measured={Phase.BACKWARD: 9 * MiB})
    assert "measured peak of backward: 9.00 MiB" in drawn.html()


def test_a_measured_peak_above_the_prediction_is_on_the_chart(prediction):
    drawn = timeline(prediction, measured={Phase.BACKWARD: 3 * prediction.peak_reserved_bytes})
    (place,) = re.findall(r'class="measured".*?bottom:([0-9.]+)%', drawn.html(), re.DOTALL)
    assert 80 < float(place) < 100


def test_what_an_update_takes_for_itself_is_the_optimizers_on_the_page_too():
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    step = mc.TrainingStep(
        model, torch.ones(1, 512), loss=lambda m, batch: m(batch).mean(), optimizer=torch.optim.Adam
    )
    prediction = mc.predict(step, device="L4")
    assert prediction.peak_phase is Phase.OPTIMIZER_STEP
    boxes = {child.name: child.num_bytes for child in tree(prediction).children}
    assert boxes["optimizer step"] == prediction.by_category[Category.TEMPORARY]
    (most,) = [line for line in prediction.page().verdict if line.startswith("Most at the peak")]
    assert "optimizer step" in most


def test_a_page_is_saved_whole(prediction, tmp_path):
    path = tmp_path / "memory.html"
    prediction.save_html(path, title="mine:step")
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "<title>mine:step, batch size 256" in text
    assert len(text) < 500_000
    prediction.save_html(str(path))
    assert "<title>One training step, batch size 256" in path.read_text(encoding="utf-8")


def test_lines_of_a_backward_pass_are_not_those_that_asked_for_the_prediction(prediction):
    functions = {
        source.own_line.function
        for live in prediction.at_peak
        if (source := prediction.origin_of(live.alloc)) is not None and source.own_line
    }
    assert functions == {"loss_of", "forward"}


class Differences(nn.Module):
    """Has something for all samples but two."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1024, 1024)

    def forward(self, x):
        y = self.linear(x)
        return (y[2:] - y[:-2]) @ self.linear.weight


def test_batch_sizes_at_which_a_size_would_be_negative_are_not_on_the_chart():
    predicted = mc.predict(mc.TrainingStep(Differences(), torch.zeros(32, 1024)), device="L4")
    (chart,) = (
        part
        for section in predicted.page().sections
        for part in section.parts
        if isinstance(part, LineChart)
    )
    sizes = [size for size, _ in chart.lines[0].points]
    assert sizes[0] > 2
    assert len(sizes) > 5
    assert predicted.at(2).peak_allocated_bytes < predicted.at(3).peak_allocated_bytes
    with pytest.raises(UnknownBatchSize, match="gives a negative size"):
        predicted.at(1)


@pytest.mark.parametrize("batch_size", [4, 32])
def test_a_step_that_does_not_fit_has_an_answer_though_small_batch_sizes_are_unknown(batch_size):
    step = mc.TrainingStep(Differences(), torch.zeros(batch_size, 1024))
    predicted = mc.predict(step, device="528MiB")
    assert not predicted.fits
    assert predicted.limit == 0
    advice = mc.suggest_batch_size(step, device="528MiB")
    assert advice.batch_size == 0
    assert min(size for size, _ in advice.curve) == 2


def test_a_step_that_changes_nothing_has_a_page():
    step = mc.InferenceStep(nn.Identity(), torch.zeros(0, 4), batch_size=1)
    assert "One inference" in mc.predict(step, device="L4").page().html()


def test_a_timeline_of_one_moment_is_drawn(prediction):
    drawn = replace(timeline(prediction), moments=timeline(prediction).moments[:1], measured={})
    assert "Memory over" in drawn.html()
