"""What convolutions take on CUDA: recorded on devices and compared to the byte, and compared anew
where there is a device.
"""

from dataclasses import replace

import convolution_plans
import pytest
import torch
from convolution_cases import (
    CARDS,
    CASES,
    MULTIPLY,
    Case,
    key,
    once,
    predicted,
    recorded,
    significant,
    truth,
)
from convolution_plans import first_plans

import memcallback as mc
from memcallback.core.kernel import AllocOutput, AllocTemp, FreeTemp, OpenBlasHandles
from memcallback.core.types import Category
from memcallback.cuda.convolution import cudnn
from memcallback.cuda.convolution import workspace as convolution_workspace
from memcallback.cuda.convolution.call import ConvolutionCall, Direction
from memcallback.cuda.convolution.rule import workspaces_are_known
from memcallback.cuda.convolution.workspace import estimated_workspace_bytes
from memcallback.cuda.op_call import OpCall
from memcallback.cuda.rules import corrected_result, kernel_of
from memcallback.devices.catalogue import find_device

aten = torch.ops.aten
H200, T4 = CARDS["NVIDIA H200"], CARDS["Tesla T4"]
PLAIN = Case("plain", (8, 64, 28, 28), (32, 64, 3, 3), padding=1, bias=True)
RECORDS = {record["meta"]["device"]: record for record in recorded()}


def kernel(op, args, kwargs, card):
    return kernel_of(OpCall(op, args, kwargs, card))


def layouts(op, args, card):
    """The shape, strides and dtype of each output on CUDA, None for one that is not asked for."""
    result = corrected_result(OpCall(op, args, {}, card, op(*args)))
    outputs = result if isinstance(result, tuple) else (result,)
    return [None if one is None else (one.shape, one.stride(), one.dtype) for one in outputs]


def ours(case, card):
    """The predicted steps, and the strides of each output that say where its elements lie."""
    op, args = case.call("meta")
    outputs = layouts(op, args, card)
    steps = once(predicted(kernel(op, args, {}, card), outputs))
    return steps, [None if one is None else significant(*one[:2]) for one in outputs], outputs


def compare(case, card, steps, strides):
    found, found_strides, outputs = ours(case, card)
    shapes = [None if one is None else one[0] for one in outputs]
    expected = [
        None if one is None else significant(shape, one)
        for shape, one in zip(shapes, strides, strict=True)
    ]
    assert (found, found_strides) == (once(steps), expected), str(case)


@pytest.fixture
def no_cudnn(monkeypatch):
    monkeypatch.setattr(cudnn, "load", lambda: None)
    convolution_workspace._workspace_bytes.cache_clear()
    yield
    convolution_workspace._workspace_bytes.cache_clear()


@pytest.mark.parametrize("device", RECORDS)
def test_every_recorded_convolution_is_known_to_the_byte(device, monkeypatch):
    cases, workspaces = RECORDS[device]["cases"], RECORDS[device]["workspaces"]
    answer = lambda convolution, input_shape, card: workspaces[key(convolution, input_shape)]  # noqa: E731
    monkeypatch.setattr(convolution_workspace, "workspace_bytes", answer)
    compared = [case for case in CASES if str(case) in cases]
    assert len(compared) == len(cases) >= 1444
    for case in compared:
        compare(case, CARDS[device], *cases[str(case)])


def kept(steps):
    """Without what is given back at once, again and again: workspaces, and copies around them."""
    left = []
    for step in steps:
        if left and step != MULTIPLY and left[-1] != MULTIPLY and step == -left[-1] < 0:
            left.pop()
        else:
            left.append(step)
    return left


def test_a_real_card_allocates_what_is_predicted_and_chooses_some_workspaces_itself(monkeypatch):
    (record,) = recorded("convolutions_h100")
    cases, workspaces = record["cases"], record["workspaces"]
    answer = lambda convolution, input_shape, card: workspaces[key(convolution, input_shape)]  # noqa: E731
    monkeypatch.setattr(convolution_workspace, "workspace_bytes", answer)
    num_others = 0
    compared = [case for case in CASES if str(case) in cases]
    for case in compared:
        steps, strides = cases[str(case)]
        found, found_strides, outputs = ours(case, find_device(record["meta"]["device"]))
        shapes = [None if one is None else one[0] for one in outputs]
        assert found_strides == [
            None if one is None else significant(shape, one)
            for shape, one in zip(shapes, strides, strict=True)
        ]
        num_others += found != once(steps)
        if MULTIPLY not in [*found, *steps]:  # another algorithm is one of cuBLAS
            assert kept(found) == kept(once(steps)), str(case)
    assert (num_others, len(compared)) == (282, 1476)


def test_a_real_card_takes_the_workspace_of_the_plan_that_its_handle_puts_first(monkeypatch):
    plans = zip(convolution_plans.questions(), first_plans("H200", "handle"), strict=True)
    first = {asked: plan[1] for asked, plan in plans if plan is not None}
    unknown = []

    def answer(convolution, input_shape, card):
        if (convolution, tuple(input_shape)) not in first:
            unknown.append(convolution.dtype)
        return first.get((convolution, tuple(input_shape)), 0)

    monkeypatch.setattr(convolution_workspace, "workspace_bytes", answer)
    (record,) = recorded("convolutions_h200")
    num_compared = 0
    for case in CASES:
        if str(case) not in record["cases"] or case.dtype == "float64":
            continue
        found, _, _ = ours(case, find_device("H200"))
        assert sorted(map(str, found)) == sorted(map(str, once(record["cases"][str(case)][0])))
        num_compared += 1
    assert (num_compared, unknown) == (1470, [])


@pytest.mark.cuda
def test_a_device_does_what_is_predicted():
    card = CARDS.get(torch.cuda.get_device_name())
    if (
        card is None
        or not cudnn.is_available()
        or cudnn.version() != torch.backends.cudnn.version()
    ):
        pytest.skip("needs a device that is described here, and its cuDNN")
    compared = 0
    for case in CASES[::9]:
        try:
            steps, strides = truth(case)
        except RuntimeError:  # PyTorch finds no engine
            continue
        compare(case, card, steps, strides)
        compared += 1
    assert compared > 100


@pytest.mark.cuda
def test_a_device_does_what_is_predicted_without_tf32_and_deterministically(monkeypatch):
    card = CARDS.get(torch.cuda.get_device_name())
    if (
        card is None
        or not cudnn.is_available()
        or cudnn.version() != torch.backends.cudnn.version()
    ):
        pytest.skip("needs a device that is described here, and its cuDNN")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    for case in [one for one in CASES if one.dtype == "float32"][::9]:
        compare(case, card, *truth(case))


def test_the_workspace_is_named(no_cudnn):
    op, args = PLAIN.call("meta")
    make, workspace, give = kernel(op, args, {}, H200)
    assert (make, give) == (AllocOutput(0), FreeTemp(0))
    assert isinstance(workspace, AllocTemp)
    assert workspace.category is Category.WORKSPACE


def test_keyword_arguments_are_as_good():
    op, args = PLAIN.call("meta")
    names = [argument.name for argument in op._schema.arguments]
    by_name = dict(zip(names[2:], args[2:], strict=True))
    assert kernel(op, args[:2], by_name, H200) == kernel(op, args, {}, H200)


def test_the_inner_operator_carries_its_own_settings(no_cudnn):
    _, args = replace(PLAIN, dtype="float16").call("meta")
    off = kernel(aten._convolution.default, (*args, False, False, False, True), {}, H200)
    on = kernel(aten._convolution.default, (*args, False, False, True, True), {}, H200)
    assert [
        [step.category for step in steps if isinstance(step, AllocTemp)] for steps in (off, on)
    ] == [
        [Category.TEMPORARY],
        [Category.WORKSPACE],
    ]


def test_cudnn_switched_off_means_columns(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    op, args = PLAIN.call("meta")
    assert kernel(op, args, {}, H200) == (
        AllocOutput(0),
        AllocTemp(64 * 9 * 28 * 28 * 4),
        OpenBlasHandles(),
        FreeTemp(0),
    )


def test_a_convolution_keeps_the_flags_of_its_trace_at_other_batch_sizes():
    def loss(model, batch):
        with torch.backends.cudnn.flags(enabled=False):
            return model(batch).sum()

    def predict(batch_size):
        model = torch.nn.Conv2d(64, 32, 3)
        step = mc.TrainingStep(model, torch.zeros(batch_size, 64, 28, 28), loss=loss)
        return mc.predict(step, device="NVIDIA H200")

    assert predict(8).at(3).peak_allocated_bytes == predict(3).peak_allocated_bytes


def test_other_operators_and_dtypes_are_not_ours():
    tensor = torch.empty(2, 2, device="meta")
    assert kernel(aten.add.Tensor, (tensor, tensor), {}, H200) is None
    op, (input_, *rest) = PLAIN.call("meta")
    args = (input_.to(torch.int32), *rest)
    assert kernel(op, args, {}, H200) is None
    assert corrected_result(OpCall(op, args, {}, H200, input_)) is None


def test_the_layout_of_a_weight_decides_that_of_the_output():
    op, args = replace(PLAIN, layouts=("c", "cl", "c")).call("meta")
    assert layouts(op, args, H200) == [((8, 32, 28, 28), (25088, 1, 896, 32), torch.float32)]


def test_gradients_that_are_not_asked_for_are_not_there():
    op, args = replace(PLAIN, mask=(False, True, False)).call("meta")
    assert [one is None for one in layouts(op, args, H200)] == [True, False, True]


def test_workspaces_are_known_only_from_cudnn_itself(monkeypatch):
    monkeypatch.setattr(cudnn, "load", lambda: None)
    assert not workspaces_are_known()
    monkeypatch.setattr(cudnn, "load", lambda: object())
    assert workspaces_are_known()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert not workspaces_are_known()


def test_an_estimate_stands_in_for_cudnn(no_cudnn):
    op, args = PLAIN.call("meta")
    workspace = kernel(op, args, {}, T4)[1]
    convolution = ConvolutionCall.of(OpCall(op, args, {}, T4)).problem(Direction.FORWARD, False)
    assert workspace.size_bytes == estimated_workspace_bytes(convolution, (8, 64, 28, 28), T4)
