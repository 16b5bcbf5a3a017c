"""On a CPU: an out-of-memory error is explained, whatever trains; other errors are left alone."""

import gc
import json
import os
import subprocess
import sys
import weakref

import pytest
import torch
import training
from torch import nn

import memcallback as mc
from memcallback.core.units import MiB
from memcallback.diagnose.out_of_memory.context import OomContext
from memcallback.diagnose.out_of_memory.explain import explain


class Hungry(training.Automatic):
    """Asks for more than any machine has, in a module of its own."""

    class Layer(nn.Module):
        def forward(self, x):
            kept = torch.ones(2048, 1024)
            return torch.empty(2**60, dtype=torch.uint8) + kept[0, 0] + x

    def __init__(self, *, where):
        super().__init__()
        self.where, self.layer = where, self.Layer()

    def training_step(self, batch, batch_idx):
        if self.where == "training" and batch_idx == 2:
            self.layer(batch[0])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if self.where == "validation":
            self.layer(batch[0])


def run(module, folder, **options):
    callback = mc.MemoryCallback(predict=False, **options)
    trainer = training.trainer(
        folder, callbacks=[callback], max_epochs=1, logger=False, num_sanity_val_steps=0
    )
    with pytest.raises(RuntimeError, match="allocate memory") as failed:
        trainer.fit(module, training.loader(), training.loader())
    return callback, failed.value


def test_in_a_training_step(tmp_path, capsys):
    callback, error = run(Hungry(where="training"), tmp_path)
    report = callback.out_of_memory
    assert (report.place.phase, report.place.step, report.place.module) == (
        "forward pass",
        3,
        "layer",
    )
    if sys.version_info >= (3, 11):  # before, Python does not say which part of a line failed
        assert report.place.operator == "torch.empty"
    assert report.place.line.text.startswith("return torch.empty(2**60")
    assert report.shortage.requested_bytes == 2**60
    assert report.shortage.resident_bytes > 0
    assert (report.shortage.allocated_bytes, report.shortage.reserved_bytes) == (None, None)
    assert report.tensors[0].owner.startswith("local variable 'kept' in forward()")
    assert report.tensors[0].size_bytes == 8 * MiB
    # Parameters of models that others have left behind count too.
    assert dict(report.by_category)["parameters"] >= sum(
        p.numel() * 4 for p in training.network().parameters()
    )
    assert report.error in str(error)
    (path,) = (tmp_path / "memcallback").rglob("out_of_memory_step3.json")
    assert json.loads(path.read_text())["step"] == 3
    assert capsys.readouterr().out.count("Out of memory on CPU") == 1


def test_in_validation(tmp_path):
    callback, _ = run(Hungry(where="validation"), tmp_path)
    assert (callback.out_of_memory.place.phase, callback.out_of_memory.place.step) == (
        "validation",
        None,
    )


def test_a_folder_that_cannot_be_written_is_told_and_the_error_goes_on(tmp_path):
    (tmp_path / "memcallback").write_text("a file where the folder would be")
    with pytest.warns(mc.MemoryWarning, match="could not"):
        callback, _ = run(Hungry(where="training"), tmp_path)
    assert callback.out_of_memory.place.step == 3


def test_what_cannot_be_explained_goes_on_as_it_is(monkeypatch):
    def broken(*_, **__):
        raise KeyError("nothing is as it was")

    monkeypatch.setattr("memcallback.diagnose.out_of_memory.explain.explain", broken)
    recorder = mc.MemoryRecorder(nn.Linear(2, 2))
    with (
        pytest.warns(mc.MemoryWarning, match="could not be explained: KeyError"),
        pytest.raises(MemoryError),
        recorder.step(torch.ones(2, 2)),
    ):
        raise MemoryError


def test_a_report_keeps_nothing_alive():
    model = nn.Linear(4, 4)
    recorder = mc.MemoryRecorder(model)
    references = []

    def step():
        with recorder.step(torch.ones(2, 4)), recorder.phase(mc.Phase.FORWARD):
            activations = model(torch.ones(1_000_000, 4)).exp()
            references.extend(
                [weakref.ref(activations), weakref.ref(activations.untyped_storage())]
            )
            raise MemoryError

    with pytest.raises(MemoryError):
        step()
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert any(
        tensor.owner.startswith("local variable 'activations'")
        for tensor in recorder.out_of_memory.tensors
    )


@pytest.mark.parametrize("kind", ["steps", "watch", "log"])
def test_other_loops_are_told_once_too(kind, tmp_path, capsys):
    model = nn.Sequential(nn.Linear(4, 4), Hungry.Layer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = mc.MemoryRecorder(model, optimizer)
    log = mc.MemoryLog(recorder, log_dir=tmp_path) if kind == "log" else None

    def train():
        if kind == "steps":
            with recorder.step(torch.ones(2, 4)), recorder.phase(mc.Phase.FORWARD):
                model(torch.ones(2, 4))
        else:
            with recorder.watch():
                model(torch.ones(2, 4))

    with pytest.raises(RuntimeError, match="allocate memory"):
        train()
    said = capsys.readouterr()
    assert (said.out + said.err).count("Out of memory on CPU in the forward pass of step 1") == 1
    assert recorder.out_of_memory.place.module == "1"
    if log is not None:
        assert log.out_of_memory is recorder.out_of_memory
        assert list(tmp_path.rglob("out_of_memory_step1.md"))
    recorder.close()


def test_an_update_that_runs_out_of_memory_is_told_by_who_watches(capsys):
    class Greedy(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            torch.empty(2**60, dtype=torch.uint8)

    model = nn.Linear(4, 4)
    optimizer = Greedy(model.parameters(), lr=0.1)
    recorder = mc.MemoryRecorder(model, optimizer)

    def train():
        with recorder.watch():
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    with pytest.raises(RuntimeError, match="allocate memory"):
        train()
    place = recorder.out_of_memory.place
    assert (place.phase, place.step, place.module) == ("optimizer step", 1, None)
    assert capsys.readouterr().err.count("Out of memory on CPU") == 1


def test_other_errors_are_none_of_ours(capsys):
    recorder = mc.MemoryRecorder(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="shape"), recorder.step(torch.ones(2, 2)):
        raise ValueError("shape")
    assert recorder.out_of_memory is None
    assert recorder.explain(ValueError("out of memory")) is None
    assert "Out of memory" not in capsys.readouterr().err


def test_a_hook_of_the_users_that_fails_ends_the_step_and_not_us(tmp_path):
    class Failing(training.Automatic):
        def on_before_backward(self, loss):
            if self.trainer.global_step == 2:
                raise RuntimeError("a hook of the user's")

    callback = mc.MemoryCallback(predict=False)
    trainer = training.trainer(tmp_path, callbacks=[callback], max_epochs=1, logger=False)
    with pytest.raises(RuntimeError, match="a hook of the user's"):
        trainer.fit(Failing(), training.loader())
    assert callback.out_of_memory is None
    assert callback.recorder.steps[-1].is_interrupted
    assert callback.report is not None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_told(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.warns(mc.MemoryWarning, match="could not"):
        callback, _ = run(Hungry(where="training"), tmp_path)
    assert callback.out_of_memory is not None


def test_the_batch_is_described_by_the_names_of_its_tensors():
    batch = {"ids": torch.zeros(2, 5, dtype=torch.long), "meta": ["a"], "pair": (torch.ones(2), 3)}
    report = explain(MemoryError(), OomContext(device=torch.device("cpu"), batch=batch))
    assert report.batch_size == 2
    assert report.batch == (("['ids']", (2, 5), "int64"), ("['pair'][0]", (2,), "float32"))
    assert report.error == "MemoryError"


class OutOfMemoryInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.empty(2**60, dtype=torch.uint8)


def test_in_a_backward_pass_that_is_watched():
    model = nn.Linear(4, 4)
    recorder = mc.MemoryRecorder(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def train():
        with recorder.watch():
            OutOfMemoryInBackward.apply(model(torch.ones(2, 4))).sum().backward()

    with pytest.raises(RuntimeError, match="allocate memory"):
        train()
    assert recorder.out_of_memory.place.phase == "backward pass"


def test_an_error_that_was_raised_from_it_is_told_once_and_from_where_it_began(capsys):
    model = nn.Sequential(nn.Linear(4, 4), Hungry.Layer())
    recorder = mc.MemoryRecorder(model)

    def train():
        with recorder.watch():
            try:
                model(torch.ones(2, 4))
            except RuntimeError as error:
                raise ValueError("the batch is too large") from error

    with pytest.raises(ValueError, match="too large"):
        train()
    report = recorder.out_of_memory
    assert (report.place.module, report.shortage.requested_bytes) == ("1", 2**60)
    assert capsys.readouterr().err.count("Out of memory on CPU") == 1


def test_an_error_that_is_raised_again_later_is_explained_once(capsys):
    model = nn.Linear(4, 4)
    recorder = mc.MemoryRecorder(model)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 GiB.")

    def step(fails):
        loss = model(torch.ones(2, 4)).sum()
        if fails:
            raise error
        loss.backward()

    def train():
        with recorder.watch():
            step(fails=False)
            try:
                step(fails=True)
            except torch.OutOfMemoryError as first:
                kept = first
            step(fails=False)
            recorder.failed(kept)
            step(fails=False)
            raise kept

    with pytest.raises(torch.OutOfMemoryError):
        train()
    assert capsys.readouterr().err.count("Out of memory on CPU") == 1


def test_an_error_that_came_while_it_was_handled_is_its_own(capsys):
    model = nn.Sequential(nn.Linear(4, 4), Hungry.Layer())
    recorder = mc.MemoryRecorder(model)

    def train():
        with recorder.watch():
            try:
                model(torch.ones(2, 4))
            except RuntimeError:
                raise ValueError("another matter")  # noqa: B904

    with pytest.raises(ValueError, match="another matter"):
        train()
    assert capsys.readouterr().err.count("Out of memory on CPU") == 1


def test_a_log_inside_of_a_watch_is_told_before_it_closes(tmp_path):
    model = nn.Linear(4, 4)
    recorder = mc.MemoryRecorder(model, torch.optim.SGD(model.parameters(), lr=0.1))
    logs = []

    def train():
        with recorder.watch(), mc.MemoryLog(recorder, log_dir=tmp_path) as log:
            logs.append(log)
            Hungry.Layer()(model(torch.ones(2, 4)))

    with pytest.raises(RuntimeError, match="allocate memory"):
        train()
    assert logs[0].out_of_memory is not None
    assert list(tmp_path.rglob("out_of_memory_step1.md"))
    (page,) = tmp_path.rglob("out_of_memory_step1.html")
    text = page.read_text(encoding="utf-8")
    assert '<div class="verdict bad"><p><strong>Out of memory on CPU' in text
    assert "<h2>At that moment" in text


@pytest.mark.filterwarnings("error")
def test_where_warnings_are_errors_the_error_is_still_the_users(monkeypatch):
    def broken(*_, **__):
        raise KeyError("nothing is as it was")

    monkeypatch.setattr("memcallback.diagnose.out_of_memory.explain.explain", broken)
    recorder = mc.MemoryRecorder(nn.Linear(2, 2))
    with pytest.raises(MemoryError), recorder.step(torch.ones(2, 2)):
        raise MemoryError
    assert not recorder.is_in_step


def test_an_error_that_nothing_catches_is_told_by_a_watch_that_nobody_closes(tmp_path):
    program = (
        "import torch, memcallback as mc\n"
        "class Greedy(torch.optim.SGD):\n"
        "    @torch.no_grad()\n"
        "    def step(self, closure=None):\n"
        "        torch.empty(2**60, dtype=torch.uint8)\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = Greedy(model.parameters(), lr=0.1)\n"
        "recorder = mc.MemoryRecorder(model, optimizer)\n"
        "recorder.watch()\n"
        "model(torch.ones(2, 4)).sum().backward()\n"
        "optimizer.step()\n"
    )
    script = tmp_path / "train.py"
    script.write_text(program)
    failed = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert failed.returncode == 1
    assert failed.stderr.count("Out of memory on CPU in the optimizer step of step 1") == 1
    assert "Traceback (most recent call last)" in failed.stderr
    assert "torch.empty(2**60" in failed.stderr


def test_a_watch_that_is_closed_leaves_the_hook_of_the_process_as_it_was():
    before = sys.excepthook
    model = nn.Linear(4, 4)
    recorder = mc.MemoryRecorder(model)
    with recorder.watch():
        assert sys.excepthook is not before
    assert sys.excepthook is before
