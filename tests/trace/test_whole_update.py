"""A loop that compiles a function of the whole update, with compiled autograd and without."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch._dynamo
from needs import needs_compilation
from torch import nn

import memcallback as mc
from memcallback.core.errors import PredictionError
from memcallback.core.types import Category
from memcallback.devices.catalogue import find_device

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
#: With the workspaces of the PyTorch that ran on the devices.
CARD = replace(find_device("NVIDIA H200"), torch_version=(2, 11))
COMPILED = "Compiled code is predicted from what Inductor of PyTorch"
AS_EAGER = "Compiled code ran as it would without compilation"
AUTOGRAD = "Compiled autograd is on"
IN_CONTEXT = "The program is in a context of compiled autograd"
with_graphs = partial(torch.compile, mode="reduce-overhead")


@pytest.fixture
def in_a_child(monkeypatch):
    monkeypatch.delenv("MEMCALLBACK_ISOLATE", raising=False)


def squares(model, batch):
    return model(batch).float().square().mean()


def step_of(width=1024, batch_size=4096, loss=squares, **options):
    model = nn.Sequential(
        nn.Linear(width, 4 * width), nn.GELU(), nn.LayerNorm(4 * width), nn.Linear(4 * width, width)
    )
    return mc.TrainingStep(
        model,
        torch.zeros(batch_size, width),
        loss=loss,
        optimizer=torch.optim.AdamW,
        **options,
    )


def small(**options):
    return step_of(64, 32, **options)


def said(prediction, start):
    return [caveat for caveat in prediction.caveats if caveat.startswith(start)]


@needs_compilation
@pytest.mark.parametrize(
    ("compile_update", "has_compiled_autograd", "measured"),
    # Measured with PyTorch 2.11 on a virtual H200, in a process that found its code in the cache
    # (benchmarks/results/nvidia-h200-virtual-2026-11-27/compiled.json): allocated, and reserved in
    # the last and in the first update.
    [
        (torch.compile, False, (353_570_816, 356_515_840, 289_406_976)),
        (torch.compile, True, (320_016_384, 322_961_408, 255_852_544)),
        (with_graphs, False, (117_604_864, 341_835_776, 341_835_776)),
        (with_graphs, True, (117_604_864, 341_835_776, 341_835_776)),
    ],
)
def test_a_whole_update_is_predicted_as_it_ran_on_a_device(
    compile_update, has_compiled_autograd, measured, in_a_child
):
    with torch._dynamo.config.patch(compiled_autograd=has_compiled_autograd):
        prediction = mc.predict(step_of(compile_update=compile_update), device=CARD)
    assert measured == (
        prediction.peak_allocated_bytes,
        prediction.peak_reserved_bytes,
        prediction.warm_up.peak_reserved_bytes,
    )
    assert said(prediction, COMPILED)
    assert not said(prediction, AS_EAGER)
    assert not said(prediction, AUTOGRAD)
    left_by_recording = said(prediction, "In the update after the recording, gradients")
    assert len(left_by_recording) == (compile_update is with_graphs)


@needs_compilation
def test_what_is_assumed_with_compiled_autograd_is_said_of_a_training_that_compiles_something_else(
    in_a_child,
):
    compiled_loss = torch.compile(squares)
    with torch._dynamo.config.patch(compiled_autograd=True):
        with_it = mc.predict(small(loss=compiled_loss), device=CARD)
        forward_pass = mc.predict(
            mc.InferenceStep(torch.compile(nn.Linear(64, 64)), torch.zeros(32, 64)), device=CARD
        )
    without = mc.predict(small(loss=compiled_loss), device=CARD)
    assert with_it.peak_allocated_bytes == without.peak_allocated_bytes
    found = [len(said(each, AUTOGRAD)) for each in (with_it, without, forward_pass)]
    assert found == [1, 0, 0]
    assert "compile_update=torch.compile" in said(with_it, AUTOGRAD)[0]


def test_a_program_s_own_context_of_compiled_autograd_is_left_for_a_prediction():
    plain = mc.predict(small(), device=CARD)
    with torch._dynamo.compiled_autograd._enable(torch.compile):
        inside = mc.predict(small(), device=CARD)
        assert torch._dynamo.compiled_autograd.compiled_autograd_enabled
    assert not torch._dynamo.compiled_autograd.compiled_autograd_enabled
    assert said(inside, IN_CONTEXT)
    assert not said(plain, IN_CONTEXT)
    # Backward passes in it run in the calling thread.
    saved_bytes = plain.peak_allocated_bytes - inside.peak_allocated_bytes
    assert saved_bytes == find_device(CARD).cublas_workspace_bytes


@needs_compilation
@pytest.mark.parametrize("has_compiled_autograd", [False, True])
def test_with_another_compiler_it_is_predicted_as_without_compilation(
    has_compiled_autograd, in_a_child
):
    step = small(compile_update=partial(torch.compile, backend="aot_eager"))
    with torch._dynamo.config.patch(compiled_autograd=has_compiled_autograd):
        prediction = mc.predict(step, device=CARD)
    assert prediction.peak_allocated_bytes == mc.predict(small(), device=CARD).peak_allocated_bytes
    (sentence,) = said(prediction, AS_EAGER)
    assert "the whole update" in sentence


@needs_compilation
def test_forward_passes_after_a_whole_update_are_no_part_of_it(in_a_child):
    model = with_graphs(nn.Linear(64, 64, bias=False))
    training = mc.TrainingStep(
        model,
        torch.zeros(32, 64),
        loss=squares,
        optimizer=torch.optim.SGD,
        compile_update=torch.compile,
    )

    def twice(model, batch):
        first = model(batch)
        second = model(batch + 2)  # whose graph overwrites what the first returned
        return first.sum() + second.sum()

    step = mc.InferenceStep(model, torch.zeros(64, 64), forward=twice, after=training)
    with torch._dynamo.config.patch(compiled_autograd=True):
        prediction = mc.predict(step, device=CARD)
    assert any("PyTorch refuses that with an error" in caveat for caveat in prediction.caveats)
    assert not said(prediction, AUTOGRAD)


@needs_compilation
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "16-mixed", "clip_grad_norm": 1.0},
        {"precision": "bf16-mixed", "clip_grad_value": 0.5},
        {"loss": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("has_compiled_autograd", [False, True])
def test_scaler_clipping_and_the_default_loss_are_compiled_with_it(
    options, has_compiled_autograd, in_a_child
):
    with torch._dynamo.config.patch(compiled_autograd=has_compiled_autograd):
        prediction = mc.predict(small(**options, compile_update=torch.compile), device=CARD)
    assert said(prediction, COMPILED)
    assert not said(prediction, AS_EAGER)


@pytest.mark.parametrize(
    "compile_update", [torch.compile, lambda function: torch.compile(function)], ids=["", "lambda"]
)
def test_without_a_child_it_runs_as_without_compilation_and_one_sentence_says_so(compile_update):
    # MEMCALLBACK_ISOLATE is 0 in tests.
    with torch._dynamo.config.patch(compiled_autograd=True):
        prediction = mc.predict(small(compile_update=compile_update), device=CARD)
    assert prediction.peak_allocated_bytes == mc.predict(small(), device=CARD).peak_allocated_bytes
    (sentence,) = said(prediction, AS_EAGER)
    assert "the whole update" in sentence


def test_a_whole_update_needs_one_loss_and_one_batch_on_one_device():
    with pytest.raises(ValueError, match=r"compile_update with accumulate=2 is not supported"):
        small(compile_update=torch.compile, accumulate=2)
    with pytest.raises(ValueError, match=r"compile_update with keep_outputs='last' is not"):
        small(compile_update=torch.compile, keep_outputs="last")
    with pytest.raises(ValueError, match=r"compile_update with ranks is not supported"):
        small(compile_update=torch.compile, ranks=mc.Ranks(2, "ddp"))
    with pytest.raises(TypeError, match=r"compile_update must be a function .*, got True"):
        small(compile_update=True)
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"compile_update with 2 losses is not supported"):
        mc.TrainingStep(
            model,
            torch.zeros(2, 4),
            loss=[squares, squares],
            optimizer=[torch.optim.SGD(model.parameters()) for _ in range(2)],
            compile_update=torch.compile,
        )


def test_what_cannot_compile_a_whole_update_is_named():
    with pytest.raises(PredictionError, match=r"compile_update .* failed: .*mode=foo"):
        mc.predict(small(compile_update=partial(torch.compile, mode="foo")), device=CARD)
    with pytest.raises(PredictionError, match=r"compile_update .* must return the compiled funct"):
        mc.predict(small(compile_update=lambda function: None), device=CARD)
    step = mc.TrainingStep(
        nn.Linear(4, 4),
        torch.zeros(2, 4),
        loss=squares,
        optimizer=torch.optim.LBFGS,
        compile_update=torch.compile,
    )
    with pytest.raises(PredictionError, match="compile_update with LBFGS is not supported"):
        mc.predict(step, device=CARD)


def test_a_backward_pass_in_the_calling_thread_uses_the_workspace_of_the_forward_pass():
    def of_workspaces():
        return mc.predict(small(), device=CARD).by_category[Category.WORKSPACE]

    in_two_threads = of_workspaces()
    with torch.autograd.set_multithreading_enabled(False):
        assert in_two_threads - of_workspaces() == CARD.cublas_workspace_bytes
