"""A step by module as data: spans added up, the tables, and what a prediction says."""

import json

import module_models
import pytest
import torch
from module_models import CASES
from trace_json import from_json, to_json

from memcallback import Kind, Phase
from memcallback.core.allocation_trace import (
    Alloc,
    AllocationTrace,
    Free,
    ModuleMark,
    PhaseEnd,
    PhaseStart,
    StepEnd,
    StepStart,
)
from memcallback.core.module_table import ModuleInfo, ModuleTable, Span, modules_of, phase_of_span
from memcallback.core.types import Category
from memcallback.prediction.module_spans import last_step
from memcallback.report.plots.modules import module_icicle

F, B, O = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP  # noqa: E741

INFOS = (
    ModuleInfo("", "Net", 0),
    ModuleInfo("a", "Sequential", 0),
    ModuleInfo("a.0", "Linear", 100),
    ModuleInfo("idle", "Linear", 7),
)


def test_a_module_has_what_happens_while_it_or_a_module_inside_it_runs():
    spans = [
        Span(F, (), 1000, 1010, 1010),
        Span(F, ("", "a"), 1010, 1010, 1010),
        Span(F, ("", "a", "a.0"), 1010, 1200, 1500),
        Span(F, ("", "a"), 1200, 1150, 1200),
        Span(F, (), 1150, 1160, 1170),
        Span(B, (), 1160, 1165, 1180),
        Span(B, ("", "a", "a.0"), 1165, 1000, 2000),
    ]
    root, outer, inner, idle = modules_of([spans], INFOS)
    assert (
        root.forward.num_runs,
        root.forward.start_allocated_bytes,
        root.forward.end_allocated_bytes,
    ) == (1, 1000, 1160)
    assert (
        root.forward.peak_allocated_bytes,
        root.kept_bytes,
        root.backward.peak_allocated_bytes,
    ) == (1500, 160, 2000)
    assert (outer.forward.num_runs, outer.forward.start_allocated_bytes, outer.kept_bytes) == (
        1,
        1010,
        140,
    )
    assert (inner.kept_bytes, inner.forward.peak_allocated_bytes, inner.backward.change_bytes) == (
        190,
        1500,
        -165,
    )
    assert (idle.forward, idle.backward, idle.kept_bytes) == (None, None, None)
    assert [module.parameter_bytes for module in (root, outer, inner, idle)] == [107, 100, 100, 7]


def test_calls_of_a_module_are_added_up_and_what_is_between_them_is_not():
    spans = [Span(F, ("a",), 0, 10, 30), Span(F, (), 10, 500, 600), Span(F, ("a",), 500, 520, 540)]
    *_, outer, _, _ = modules_of([spans], INFOS)
    assert (outer.forward.num_runs, outer.kept_bytes, outer.forward.peak_allocated_bytes) == (
        2,
        30,
        540,
    )
    assert (outer.forward.start_allocated_bytes, outer.forward.end_allocated_bytes) == (0, 520)


def test_a_module_that_is_called_from_another_counts_in_both():
    spans = [Span(F, ("a", "b.shared"), 0, 10, 12)]
    infos = [ModuleInfo(name, "M", 0) for name in ("", "a", "b", "b.shared")]
    assert [module.kept_bytes for module in modules_of([spans], infos)] == [10, 10, 10, 10]


def test_each_window_begins_a_new_run():
    spans = [Span(F, (), 0, 1, 1)]
    assert modules_of([spans, spans], INFOS)[0].forward.num_runs == 2


def test_what_is_unknown_stays_unknown():
    spans = [Span(F, (), None, None, None), Span(F, ("a",), 5, 6, None)]
    root, outer, *_ = modules_of([spans], INFOS)
    assert (root.kept_bytes, root.forward.peak_allocated_bytes) == (None, None)
    assert (outer.kept_bytes, outer.forward.peak_allocated_bytes) == (1, None)


@pytest.mark.parametrize(
    ("covers", "is_backward", "phase"),
    [
        ((F,), False, F),
        ((F,), True, F),  # a gradient that the forward pass asks for
        ((B,), False, B),
        ((F, B), False, F),
        ((F, B), True, B),
        ((O, F), False, F),
        ((O,), False, None),
    ],
)
def test_a_stretch_belongs_to_the_pass_that_its_window_and_autograd_say(covers, is_backward, phase):
    assert phase_of_span(covers, is_backward=is_backward) is phase


EVENTS = (
    Alloc(0, 100, category=Category.PARAMETER),
    StepStart(),
    PhaseStart(F),
    Alloc(1, 10, category=Category.ACTIVATION, module="a"),  # 3
    Alloc(2, 5, category=Category.TEMPORARY, module="a"),
    Free(2),
    Alloc(3, 7, category=Category.ACTIVATION),  # 6
    PhaseEnd(F),
    PhaseStart(B),
    Alloc(4, 20, category=Category.GRADIENT, module="a"),  # 9
    Free(1),
    Free(3),
    PhaseEnd(B),
    StepEnd(),
)
MARKS = (ModuleMark(3, ("a",)), ModuleMark(6, ()), ModuleMark(9, ("a",), True))


def test_the_last_step_of_a_trace_is_cut_at_its_marks_by_what_was_handed_out():
    spans = last_step(AllocationTrace(EVENTS, MARKS), dict.fromkeys(range(5), 512))
    assert spans.windows == [
        [
            Span(F, (), 512, 512, 512),
            Span(F, ("a",), 512, 1024, 1536),
            Span(F, (), 1024, 1536, 1536),
        ],
        [Span(B, (), 1536, 1536, 1536), Span(B, ("a",), 1536, 1024, 2048)],
    ]
    assert [standing.alloc.id for standing in spans.saved] == [1, 3]
    assert spans.saved_bytes == {"a": 512, "": 512}


def test_in_a_window_of_both_passes_the_forward_pass_ends_where_autograd_begins():
    both = tuple(
        PhaseStart(B, (F, B)) if event == PhaseStart(F) else event
        for event in EVENTS
        if event not in (PhaseEnd(F), PhaseStart(B))
    )
    marks = (MARKS[0], MARKS[1], ModuleMark(7, ("a",), True))
    spans = last_step(AllocationTrace(both, marks), dict.fromkeys(range(5), 1))
    assert [span.phase for span in spans.windows[0]] == [F, F, F, B]
    assert spans.saved_bytes == {"a": 1, "": 1}


def test_marks_go_to_json_and_back():
    trace = AllocationTrace(EVENTS, MARKS)
    assert from_json(to_json(trace)).marks == MARKS
    assert from_json(to_json(AllocationTrace(EVENTS))).marks == ()


@pytest.fixture(scope="module")
def prediction():
    make, make_batch = CASES["perceptron"]
    return module_models.predict(make, make_batch, device="24GiB")


def test_a_prediction_by_module_agrees_with_its_phases(prediction):
    table, phases = prediction.modules, prediction.phases
    root = table[""]
    assert table.step_kind is Kind.PREDICTED
    for phase, window in ((F, root.forward), (B, root.backward)):
        assert window.start_allocated_bytes == phases[phase].start.allocated_bytes
        assert window.end_allocated_bytes == phases[phase].end.allocated_bytes
        assert window.peak_allocated_bytes == phases[phase].peak_allocated_bytes
    assert (
        max(module.backward.peak_allocated_bytes for module in table.children(""))
        == phases[B].peak_allocated_bytes
    )


def test_a_predicted_module_keeps_what_its_layers_make(prediction):
    table = prediction.modules
    hidden, out = 128 * 256 * 4, 128 * 64 * 4
    assert table["layers.0.0"].kept_bytes == table["layers.0.1"].kept_bytes == hidden
    # The first linear layer's output, which nothing saves, is gone when the Sequential returns.
    assert table["layers.0"].kept_bytes == hidden + out
    assert table["layers.0"].saved_bytes == hidden
    assert table["layers"].kept_bytes == 2 * (hidden + out)
    assert table["idle"].forward is None
    assert (table["layers"].forward.num_runs, table["layers.1.2"].backward.num_runs) == (2, 1)
    assert table["idle"].parameter_bytes == (3 * 5 + 5) * 4


def test_what_is_saved_is_listed_with_its_bytes(prediction):
    assert (
        sum(standing.block_bytes for standing in prediction.saved)
        == prediction.modules[""].saved_bytes
    )
    sizes = [standing.block_bytes for standing in prediction.saved]
    assert sizes == sorted(sizes, reverse=True)
    assert {standing.alloc.operator for standing in prediction.saved[:2]} == {"aten::relu"}


@pytest.mark.parametrize("case", ["perceptron", "convolutional"])
def test_the_modules_at_another_batch_size_are_those_of_a_trace_there(case):
    make, make_batch = CASES[case]
    features, classes = make_batch()
    at_eleven = module_models.predict(make, make_batch, device="24GiB").at(11).modules
    traced = module_models.predict(
        make,
        lambda: (features[:1].repeat(11, *[1] * (features.dim() - 1)), classes[:1].repeat(11)),
        device="24GiB",
    )
    assert at_eleven.modules == traced.modules.modules
    assert at_eleven.batch_size == 11


def test_one_row_for_each_module_that_ran_measured_beside_predicted(prediction):
    predicted = prediction.modules
    measured = ModuleTable(
        step_kind=Kind.MEASURED,
        source="s",
        device_name="d",
        batch_size=128,
        modules=predicted.modules,
        notes=("A note.",),
    )
    table = measured.to_table(predicted)
    assert len(table.rows) == len(predicted.ran) == len(predicted.modules) - 1
    assert table.columns[4:6] == ("kept predicted", "kept measured")
    assert {row[-1] for row in table.rows} == {"+0.0 %"}
    assert "1 did not run" in table.title
    assert "A note." in measured.to_markdown(predicted)
    assert "layers.*.* (4)" in measured.to_text(predicted)
    assert "kept, predicted" in measured.to_text(predicted)


def test_a_long_list_of_modules_ends_with_the_rest():
    infos = [
        ModuleInfo("", "Net", 0),
        *(ModuleInfo(f"layer{'x' * number}", "Linear", 0) for number in range(14)),
    ]
    spans = [Span(F, (info.name,), 0, 100, 100) for info in infos[1:]]
    table = ModuleTable(
        step_kind=Kind.MEASURED,
        source="s",
        device_name="d",
        batch_size=None,
        modules=modules_of([spans], infos),
    )
    rows = table.summary().rows
    assert len(rows) == 11
    assert rows[-1] == ("4 more", "", "400 bytes", "", "")
    assert "batch size unknown" in table.to_table().title


def test_two_modules_that_differ_in_a_number_share_a_row_and_one_alone_has_its_name():
    infos = [
        ModuleInfo("", "Net", 0),
        ModuleInfo("layer0", "Linear", 0),
        ModuleInfo("layer1", "Linear", 0),
        ModuleInfo("head9", "Linear", 0),
        ModuleInfo("layer2", "Conv2d", 0),
    ]
    spans = [Span(F, (info.name,), 0, 100, 100) for info in infos[1:]]
    table = ModuleTable(
        step_kind=Kind.MEASURED,
        source="s",
        device_name="d",
        batch_size=None,
        modules=modules_of([spans], infos),
    )
    assert [row[:3] for row in table.summary().rows] == [
        ("layer* (2)", "Linear", "200 bytes"),
        ("head9", "Linear", "100 bytes"),
        ("layer2", "Conv2d", "100 bytes"),
    ]


def test_json_has_every_figure_with_its_unit(prediction):
    document = json.loads(json.dumps(prediction.modules.to_dict()))
    row = next(row for row in document["modules"] if row["name"] == "layers.0")
    assert (
        row["kept_bytes"]
        == row["forward"]["change_bytes"]
        == prediction.modules["layers.0"].kept_bytes
    )
    assert document["kind"] == "predicted"


def test_the_icicle_is_drawn_also_where_no_module_keeps_memory(prediction):
    assert module_icicle(prediction.modules).shape[2] == 3
    nothing = ModuleTable(
        step_kind=Kind.MEASURED,
        source="s",
        device_name="d",
        batch_size=None,
        modules=modules_of([], INFOS),
    )
    assert module_icicle(nothing).any()


def test_the_trace_has_no_hooks_left_on_the_users_model():
    make, make_batch = CASES["perceptron"]
    model = make()
    module_models.predict(lambda: model, make_batch, device="24GiB")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert isinstance(model(torch.zeros(2, 64)), torch.Tensor)
