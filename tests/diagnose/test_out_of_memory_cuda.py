"""On a CUDA device, real or virtual: memory really runs out; the report says where and why."""

import gc
import json
import pickle
import weakref

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

import memcallback as mc
from memcallback.core.units import GiB, MiB

pytestmark = pytest.mark.cuda
LIMIT_BYTES = GiB
#: Of an embedding of 256 numbers a row.
ROWS_OF_300_MIB = 300 * 1024


@pytest.fixture(autouse=True)
def small_device():
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(LIMIT_BYTES / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


class Greedy(nn.Module):
    def forward(self, x):
        return torch.zeros(2 * GiB // 4 // 256, 256, device=x.device) + x[0, 0]


class Net(LightningModule):
    """An embedding of some size; memory can also be asked for in one place."""

    def __init__(self, rows, optimizer=torch.optim.Adam, greedy_in=""):
        super().__init__()
        self.table, self.head, self.make_optimizer, self.greedy_in = (
            nn.Embedding(rows, 256),
            nn.Linear(256, 4),
            optimizer,
            greedy_in,
        )
        self.inner = nn.Sequential(nn.Identity(), Greedy() if greedy_in else nn.Identity())

    def training_step(self, batch, batch_idx):
        hidden = self.table(batch)
        if self.greedy_in == "training":
            hidden = self.inner(hidden)
        return self.head(hidden).sum()

    def validation_step(self, batch, batch_idx):
        if self.greedy_in == "validation":
            self.inner(self.table(batch))

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters(), lr=0.1)


def run(module, folder, **options):
    callback = mc.MemoryCallback(**options)
    data = torch.utils.data.DataLoader(torch.zeros(16, dtype=torch.long), batch_size=8)
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        logger=False,
        callbacks=[callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(torch.OutOfMemoryError) as failed:
        trainer.fit(module, data, data)
    report = callback.out_of_memory
    assert report is not None
    assert report.error in str(failed.value)
    assert failed.value.__context__ is None
    return report


def test_in_the_forward_pass(tmp_path, capsys):
    report = run(Net(1024, greedy_in="training"), tmp_path, predict=False)
    assert (report.place.phase, report.place.step, report.batch_size) == ("forward pass", 1, 8)
    assert (report.place.operator, report.place.module) == ("torch.zeros", "inner.1")
    assert report.place.line.text.startswith("return torch.zeros(2 * GiB")
    assert report.batch == (("batch", (8,), "int64"),)
    assert report.shortage.requested_bytes == 2 * GiB
    assert report.shortage.capacity_bytes == pytest.approx(LIMIT_BYTES, abs=1)
    assert dict(report.by_category)["parameters"] == 1024 * 256 * 4 + 4 * 256 * 4 + 4 * 4
    assert report.tensors[0].owner == "table.weight"
    out = capsys.readouterr().out
    assert out.count("Out of memory on") == 1
    assert "made at" not in out
    (written,) = tmp_path.glob("memcallback/version_0/*.json")
    assert written.name == "out_of_memory_step1.json"
    assert json.loads(written.read_text())["requested_bytes"] == 2 * GiB
    assert written.with_suffix(".md").read_text().startswith("# Out of memory on")


def test_in_the_backward_pass(tmp_path):
    report = run(Net(2 * ROWS_OF_300_MIB), tmp_path)
    assert report.place.forward_line.text == "hidden = self.table(batch)"
    assert (report.place.phase, report.place.operator, report.place.module) == (
        "backward pass",
        "EmbeddingBackward0",
        "table",
    )
    assert not report.place.is_near
    assert report.shortage.requested_bytes == 600 * MiB
    assert dict(report.by_category)["parameters"] > 600 * MiB
    categories = dict(report.by_category)
    assert sum(categories.values()) == report.shortage.allocated_bytes


def test_in_the_optimizer_step(tmp_path):
    report = run(Net(ROWS_OF_300_MIB), tmp_path, predict=False)
    assert report.place.phase == "optimizer step"
    assert report.place.module is None
    assert report.place.operator.startswith("torch.zeros_like")
    assert [tensor.owner for tensor in report.tensors[:2]] in (
        ["table.weight", "gradient of table.weight"],
        ["gradient of table.weight", "table.weight"],
    )
    assert dict(report.by_category)["gradients"] > 300 * MiB


def test_in_validation(tmp_path):
    report = run(Net(1024, greedy_in="validation"), tmp_path)
    assert (report.place.phase, report.place.step) == ("validation", None)
    assert report.place.module == "inner.1"
    assert report.expected is None
    assert report.batch == (("batch", (8,), "int64"),)
    assert (tmp_path / "memcallback" / "version_0" / "out_of_memory.json").exists()


def test_in_validation_before_training(tmp_path):
    module, callback = Net(1024, greedy_in="validation"), mc.MemoryCallback()
    data = torch.utils.data.DataLoader(torch.zeros(16, dtype=torch.long), batch_size=8)
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        default_root_dir=tmp_path,
        logger=False,
        callbacks=[callback],
        enable_progress_bar=False,
    )
    with pytest.raises(torch.OutOfMemoryError):
        trainer.fit(module, data, data)
    assert callback.out_of_memory.place.phase == "validation before training"


def test_what_was_predicted_and_what_would_help(tmp_path, capsys):
    report = run(Net(ROWS_OF_300_MIB), tmp_path)
    expected = report.expected
    assert not expected.fits
    # Weight, gradient and two states of Adam, of which the memory holds three.
    assert expected.peak_allocated_bytes > 1200 * MiB
    assert (
        expected.shortfall_bytes == expected.peak_allocated_bytes - report.shortage.available_bytes
    )
    assert report.savings == ()
    report = run(Net(ROWS_OF_300_MIB // 2, greedy_in="training"), tmp_path, device="2GiB")
    assert [row.saving for row in report.savings]
    assert all(row.line and not row.problem for row in report.savings)
    assert "What would help, predicted with" in capsys.readouterr().out


def test_lines_of_saved_tensors_are_those_that_made_them(tmp_path):
    class Deep(Net):
        def training_step(self, batch, batch_idx):
            hidden = self.table(batch)
            first = hidden.exp()
            wide = first.repeat(4096, 1)
            second = wide.sigmoid()
            return self.inner(second).sum()

    report = run(Deep(1024, greedy_in="training"), tmp_path)
    made = {tensor.shape: tensor.line.text for tensor in report.tensors if tensor.line is not None}
    assert made[(8, 256)] == "first = hidden.exp()"
    assert made[(8 * 4096, 256)] == "second = wide.sigmoid()"


def test_memory_is_free_again_after_the_error(tmp_path):
    module = Net(2 * ROWS_OF_300_MIB)
    run(module, tmp_path)
    module.cpu()
    gc.collect()
    assert torch.cuda.memory_allocated() < 64 * MiB


def test_a_plain_loop_is_told_too_and_its_error_goes_on(capsys):
    model = nn.Sequential(nn.Linear(8, 8), Greedy()).cuda()
    recorder = mc.MemoryRecorder(model, torch.optim.SGD(model.parameters(), lr=0.1))
    references = []

    def step():
        with recorder.step(torch.ones(4, 8).cuda()), recorder.phase(mc.Phase.FORWARD):
            activations = torch.ones(64, 1024, 1024, device="cuda")
            references.append(weakref.ref(activations.untyped_storage()))
            model(torch.ones(4, 8).cuda())

    with pytest.raises(torch.OutOfMemoryError):
        step()
    report = recorder.out_of_memory
    assert (report.place.phase, report.place.step, report.place.module) == ("forward pass", 1, "1")
    assert report.tensors[0].owner.startswith("local variable 'activations'")
    assert report.tensors[0].size_bytes == 256 * MiB
    assert capsys.readouterr().err.count("Out of memory on") == 1
    assert recorder.steps[-1].is_interrupted
    gc.collect()
    assert references[0]() is None


def test_an_error_that_the_program_catches_inside_a_step_is_nobodys_report():
    model = nn.Linear(8, 8).cuda()
    recorder = mc.MemoryRecorder(model)
    with recorder.step(torch.ones(4, 8)):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(4 * GiB, dtype=torch.uint8, device="cuda")
        with recorder.phase(mc.Phase.FORWARD):
            model(torch.ones(4, 8).cuda())
    assert recorder.out_of_memory is None
    with pytest.raises(ValueError, match="something else"), recorder.step(torch.ones(4, 8)):
        raise ValueError("something else")
    assert recorder.out_of_memory is None


def test_the_history_is_written_for_memory_viz_and_no_longer_recorded(tmp_path):
    assert not torch._C._cuda_isHistoryEnabled()
    run(Net(2 * ROWS_OF_300_MIB), tmp_path, predict=False, oom_snapshot=True)
    (path,) = tmp_path.glob("memcallback/version_0/out_of_memory_step1.pickle")
    snapshot = pickle.loads(path.read_bytes())
    actions = [event["action"] for event in snapshot["device_traces"][0]]
    assert "oom" in actions
    assert any("training_step" in str(event["frames"]) for event in snapshot["device_traces"][0])
    assert not torch._C._cuda_isHistoryEnabled()


def test_a_history_of_somebody_else_goes_on(tmp_path):
    torch.cuda.memory._record_memory_history(max_entries=100)
    try:
        run(Net(2 * ROWS_OF_300_MIB), tmp_path, predict=False, oom_snapshot=True)
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
