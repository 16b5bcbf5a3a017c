"""What compiling a step would buy, and a smaller budget of what a compiled one keeps."""

import pytest
import torch
import training
from keeping_loss import AgainstTheLast
from needs import needs_compilation, needs_ranks
from torch import nn
from tried_savings import only

import memcallback as mc
from memcallback.savings import rank_candidates
from memcallback.savings.compilation import compilation

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
    needs_compilation,
]
CARD = "NVIDIA H200"


@pytest.fixture(autouse=True)
def in_a_child(monkeypatch):
    monkeypatch.delenv("MEMCALLBACK_ISOLATE", raising=False)


@pytest.fixture(scope="module")
def plan():
    """What would save memory in a step that is not compiled."""
    with pytest.MonkeyPatch.context() as patch, only("torch.compile.*"):
        patch.delenv("MEMCALLBACK_ISOLATE", raising=False)
        return rows(mc.what_if(step(perceptron()), device=CARD))


def perceptron():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def squares(model, batch):
    return model(batch).square().mean()


def step(model):
    return mc.TrainingStep(model, torch.zeros(512, 64), loss=squares, optimizer=torch.optim.AdamW)


def rows(plan):
    return {row.saving: row for row in plan.rows}


def test_compiling_the_model_is_a_row_with_what_is_predicted_of_the_compiled_step(plan):
    row = plan["torch.compile"]
    compiled = mc.predict(step(torch.compile(perceptron())), device=CARD)
    assert row.peak_allocated_bytes == compiled.peak_allocated_bytes
    assert row.peak_reserved_bytes == compiled.peak_reserved_bytes
    assert row.line == "model = torch.compile(model)"
    assert "compiling took" in row.changes


def test_a_lightning_module_has_the_same_rows_if_it_is_not_compiled():
    module, batch = training.Automatic(), training.loader(1, batch_size=8).dataset[:8]
    savings = compilation(mc.TrainingStep.from_lightning(module, list(batch)))
    names = ["torch.compile", 'torch.compile, mode="reduce-overhead"']
    assert [saving.name for saving in savings] == names


def test_compiling_with_cuda_graphs_is_a_row_of_its_own(plan):
    row = plan['torch.compile, mode="reduce-overhead"']
    compiled = mc.predict(step(torch.compile(perceptron(), mode="reduce-overhead")), device=CARD)
    assert row.peak_allocated_bytes == compiled.peak_allocated_bytes
    assert row.peak_reserved_bytes == compiled.peak_reserved_bytes
    assert row.line == 'model = torch.compile(model, mode="reduce-overhead")'
    assert row.peak_allocated_bytes < plan["torch.compile"].peak_allocated_bytes


def test_cuda_graphs_are_no_saving_where_pytorch_stops_the_training():
    kept = mc.TrainingStep(
        perceptron(), torch.zeros(512, 64), loss=AgainstTheLast(), optimizer=torch.optim.AdamW
    )
    with only('torch.compile, mode="reduce-overhead"'):
        plan = rows(mc.what_if(kept, device=CARD))
    graphs = plan['torch.compile, mode="reduce-overhead"']
    assert "uses a tensor that a CUDA graph returned in an earlier" in graphs.problem


def test_a_budget_of_what_is_kept_is_a_row_of_a_compiled_step():
    with only("torch.compile", "activation_memory_budget 0"):
        plan = mc.what_if(step(torch.compile(perceptron())), device=CARD)
    found = rows(plan)
    assert "torch.compile" not in found
    none_kept = found["activation_memory_budget 0"]
    assert none_kept.line == "torch._functorch.config.activation_memory_budget = 0"
    with torch._functorch.config.patch(activation_memory_budget=0.0):
        compiled = mc.predict(step(torch.compile(perceptron())), device=CARD)
    assert none_kept.peak_allocated_bytes == compiled.peak_allocated_bytes
    assert none_kept.peak_allocated_bytes < plan.current.peak_allocated_bytes


class Layer(nn.Sequential):
    """A layer with a forward pass of its own, which `compile()` compiles."""

    def forward(self, x):
        return x + super().forward(x)


def layers(*, kind=Layer, compiled=False):
    model = nn.Sequential(*(kind(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    for layer in model:
        if compiled:
            layer.compile()
    return model


@needs_ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_compiling_each_layer_is_a_saving_of_a_step_of_ranks(strategy):
    job = mc.Ranks(2, strategy)
    whole = step(layers()).varied(ranks=job)
    (saving,) = compilation(whole)
    assert saving.name == "torch.compile, each layer"
    assert saving.line == "for layer in model: layer.compile()"
    saved = mc.predict(saving.apply(whole), device=CARD)
    compiled = mc.predict(step(layers(compiled=True)).varied(ranks=job), device=CARD)
    assert saved.peak_allocated_bytes == compiled.peak_allocated_bytes
    assert saved.peak_reserved_bytes == compiled.peak_reserved_bytes
    assert any(one.startswith("Compiled code is predicted from") for one in saved.caveats)


def test_layers_of_pytorch_s_own_classes_are_compiled_as_it_compiles_them():
    whole = step(layers(kind=nn.Sequential)).varied(ranks=mc.Ranks(2, "ddp"))
    (saving,) = compilation(whole)
    assert saving.line == "for layer in model: layer.forward = torch.compile(layer.forward)"
    saved = mc.predict(saving.apply(whole), device=CARD)
    assert any(one.startswith("Compiled code is predicted from") for one in saved.caveats)


def test_layers_without_a_name_of_python_are_named_as_pytorch_does():
    model = nn.Sequential(nn.Linear(64, 64), layers(), nn.Linear(64, 64))
    (saving,) = compilation(step(model).varied(ranks=mc.Ranks(2, "ddp")))
    assert saving.line == 'for layer in model.get_submodule("1"): layer.compile()'


def test_ranks_of_compiled_layers_have_budgets():
    savings = compilation(step(layers(compiled=True)).varied(ranks=mc.Ranks(2, "fsdp2")))
    assert {saving.activation_memory_budget for saving in savings} == {0.75, 0.5, 0.25, 0}


@pytest.mark.parametrize("is_whole_update", [False, True])
def test_a_compiled_loss_or_whole_update_has_budgets(is_whole_update):
    options = (
        {"loss": squares, "compile_update": torch.compile}
        if is_whole_update
        else {"loss": torch.compile(squares)}
    )
    compiled = mc.TrainingStep(perceptron(), torch.zeros(8, 64), **options)
    savings = compilation(compiled)
    assert {saving.activation_memory_budget for saving in savings} == {0.75, 0.5, 0.25, 0}


def test_ranks_that_were_not_compared_compiled_have_no_such_saving():
    job = mc.Ranks(2, "pipeline", n_microbatches=2)
    assert not list(compilation(step(layers()).varied(ranks=job)))


def test_where_nothing_is_compiled_there_is_no_such_row():
    with only("torch.compile", "bf16-mixed"):
        here = rows(mc.what_if(step(perceptron()), device=CARD, isolate=False))
        on_a_cpu = rows(mc.what_if(step(perceptron()), device="cpu"))
    assert (*here, *on_a_cpu) == ("bf16-mixed", "bf16-mixed")


@needs_ranks
def test_jobs_to_try_are_compiled_as_the_job_of_the_step_is():
    step = mc.TrainingStep(
        nn.Linear(64, 64),
        torch.zeros(8, 64),
        optimizer=torch.optim.SGD,
        ranks=mc.Ranks(2, "ddp", compile=torch.compile),
    )
    (ddp,) = rank_candidates.usual(step, batch_size=8, world_size=2)
    assert ddp.options == {"compile": torch.compile, "gradient_as_bucket_view": True}
    plain = step.varied(ranks=mc.Ranks(2, "ddp"))
    assert {one.name for one in rank_candidates.usual(plain, 8, 2)} == {"ddp", "fsdp2"}
