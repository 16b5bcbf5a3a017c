import gc
import weakref
from contextlib import closing

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import memcallback as mc
from memcallback.record.found_loop import FoundLoop


@pytest.fixture
def found():
    loop = FoundLoop()
    yield loop
    loop.close()


def train(model, optimizer, *, num_steps=4, batch_size=32):
    for _ in range(num_steps):
        model(torch.zeros(batch_size, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_model_with_an_optimizer_is_found_in_its_first_step(found, capsys):
    model = nn.Linear(64, 10)
    train(model, torch.optim.AdamW(model.parameters()))
    assert found.has_begun
    found.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert "memcallback: 4 steps, peak " in err


def test_a_program_that_lets_its_model_go_has_the_memory_again(found, capsys):
    model = nn.Linear(64, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    alive = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    assert alive[0]() is None  # at once, as without a recorder
    gc.collect()
    assert alive[1]() is None
    other = nn.Linear(64, 10)
    train(other, torch.optim.AdamW(other.parameters()))
    found.close()
    err = capsys.readouterr().err
    assert "memcallback │ Linear · batch 32 · AdamW" in err
    assert "memcallback: 4 steps, peak " in err


def test_what_is_not_trained_is_passed_over(found, capsys):
    teacher, model = nn.Linear(64, 10).requires_grad_(False), nn.Linear(64, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    teacher(torch.zeros(2, 64))
    model.eval()(torch.zeros(2, 64))
    with torch.no_grad():
        model.train()(torch.zeros(2, 64))
    assert not found.has_begun
    train(model, optimizer)
    found.close()
    assert "memcallback │ Linear · batch 32 · AdamW" in capsys.readouterr().err


@pytest.mark.parametrize("is_first", [True, False])
def test_an_optimizer_that_comes_after_the_first_call_is_found_in_its_first_step(
    is_first, found, capsys
):
    model = nn.Linear(64, 10)
    if not is_first:
        torch.optim.AdamW(nn.Linear(2, 2).parameters())
    model(torch.zeros(2, 64))
    train(model, torch.optim.AdamW(model.parameters()))
    found.close()
    assert "memcallback: 4 steps, peak " in capsys.readouterr().err


def test_an_optimizer_that_nobody_saw_being_made_is_found_in_its_second_step(capsys):
    model = nn.Linear(64, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    with closing(FoundLoop()):
        train(model, optimizer)
    assert "memcallback: 3 steps, peak " in capsys.readouterr().err


def test_a_search_that_finds_nothing_is_not_repeated_for_ever(found, monkeypatch):
    searched = []
    monkeypatch.setattr("gc.get_objects", lambda: searched.append(1) or [])
    torch.optim.AdamW(nn.Linear(2, 2).parameters())
    for _ in range(100):
        nn.Linear(64, 10)(torch.zeros(2, 64))
    assert len(searched) == 20


@pytest.mark.parametrize("isolate", [True, False])
def test_a_prediction_is_no_loop(found, isolate):
    model = nn.Linear(64, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    step = mc.TrainingStep(model, torch.zeros(32, 64), optimizer=optimizer)
    mc.predict(step, device="L4", isolate=isolate)
    assert not found.has_begun
    train(model, optimizer)
    assert found.has_begun


def test_optimizers_of_accelerate_are_seen_through(found, capsys):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(64, 10)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    train(model, optimizer)
    found.close()
    assert "memcallback: 4 steps, peak " in capsys.readouterr().err


class Doubled(nn.Linear):
    """Of PyTorch's own modules, `Module.compile()` compiles nothing."""

    def forward(self, x):
        return super().forward(x) * 2


def test_a_model_that_is_compiled_in_place_compiles_and_is_recorded(found, capsys):
    model = Doubled(64, 10)
    before = model.weight.detach().clone()
    model.compile(backend="eager", fullgraph=True)
    train(model, torch.optim.AdamW(model.parameters()))
    assert not torch.equal(model.weight, before)
    found.close()
    # Its first update finds it.
    assert "memcallback: 3 steps, peak " in capsys.readouterr().err


def test_a_model_that_torch_compile_compiles_is_found_and_nothing_is_warned_of(found, capsys):
    model = Doubled(64, 10)
    train(
        torch.compile(model, backend="eager", fullgraph=True),
        torch.optim.AdamW(model.parameters()),
    )
    found.close()
    assert "memcallback: 4 steps, peak " in capsys.readouterr().err


@pytest.mark.skipif(
    not hasattr(nn.modules.module, "_has_any_global_hook"),
    reason="this PyTorch does not warn of hooks for all modules",
)
def test_pytorch_still_warns_of_hooks_of_others(found):
    model = Doubled(64, 10)
    torch.optim.AdamW(model.parameters())
    handle = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    try:
        with pytest.warns(UserWarning, match="when there are global hooks"):
            torch.compile(model, backend="eager")(torch.zeros(2, 64))
    finally:
        handle.remove()


def test_a_model_is_exported_before_its_optimizer_is_made(found):
    exported = torch.export.export(Doubled(64, 10), (torch.zeros(2, 64),), strict=True)
    assert exported.module()(torch.zeros(2, 64)).shape == (2, 10)


def test_memory_that_runs_out_before_any_step_is_explained(found, capsys):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        raise error
    found.failed(raised.value)
    err = capsys.readouterr().err
    assert err.startswith("Out of memory on CPU.\n")
    assert "20.00 GiB" in err


def test_another_error_is_not_explained(found, capsys):
    found.failed(ValueError("no memory of it"))
    assert capsys.readouterr().err == ""


def test_with_a_folder_the_page_is_written_there(tmp_path, capsys):
    found = FoundLoop(str(tmp_path / "memory"))
    model = nn.Linear(64, 10)
    train(model, torch.optim.AdamW(model.parameters()))
    found.close()
    assert [path.name for path in tmp_path.glob("memory/**/*.html")] == ["memory.html"]


def test_afterwards_no_hook_is_left():
    module = nn.modules.module
    hooks, is_any, init = (
        module._global_forward_pre_hooks,
        getattr(module, "_has_any_global_hook", None),
        torch.optim.Optimizer.__init__,
    )
    before = len(hooks)
    found = FoundLoop()
    model = nn.Linear(64, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    assert len(hooks) == before + 1
    train(model, optimizer)
    assert len(hooks) == before
    assert getattr(module, "_has_any_global_hook", None) is is_any
    assert torch.optim.Optimizer.__init__ is init
    found.close()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


class Lightened(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def training_step(self, batch, number):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_in_a_fit_of_lightning_no_hook_for_all_modules_stays(found, tmp_path):
    hooks = nn.modules.module._global_forward_pre_hooks
    before = len(hooks)
    trainer = pl.Trainer(
        max_steps=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Lightened(), torch.utils.data.DataLoader(torch.zeros(4, 64)))
    assert found.is_lightning
    assert len(hooks) == before
