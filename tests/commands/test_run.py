"""`memcallback run` with programs that train: they compute and print what they do without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import memcallback

ROOT = Path(memcallback.__file__).parents[1]
TRAINS = """
import hashlib, os, sys
assert "torch" not in sys.modules  # what PyTorch reads on import can still be set
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.ReLU(), nn.Linear(256, 10))
model(torch.zeros(2, 64)).sum()  # before there is an optimizer: its first step finds the loop
optimizer = torch.optim.AdamW(model.parameters())
for number in range(6):
    batch = torch.randn(32, 64)
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
weights = torch.cat([one.flatten() for one in model.parameters()]).detach()
print(hashlib.sha256(weights.numpy().tobytes()).hexdigest(), torch.rand(1).item())
print(sorted(os.listdir(".")))
"""
RUNS_OUT = """
import torch
from torch import nn

class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

model = Large()
optimizer = torch.optim.AdamW(model.parameters())
model(torch.zeros(32, 64))
"""
RUNS_OUT_BEFORE = """
import torch
raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
"""
NEVER_TRAINS = """
import torch
model = torch.nn.Linear(3, 4)
with torch.no_grad():
    model(torch.zeros(2, 3))
"""
ACCELERATED = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(64, 10)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for number in range(5):
    accelerator.backward(model(torch.zeros(32, 64)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""
COMPILED = """
import torch
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.AdamW(model.parameters())
model.compile(backend="eager", fullgraph=True)
for number in range(3):
    model(torch.zeros(32, 64)).square().mean().backward()
    optimizer.step()
print("trained")
"""
LIGHTNING = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = Trainer(accelerator="cpu", max_steps=3, **options)
trainer.fit(BoringModel())
print(*[type(one).__name__ for one in trainer.callbacks])
"""


@pytest.fixture
def run(tmp_path):
    def run(program, *options, command=("-m", "memcallback", "run"), **environment):
        (tmp_path / "train.py").write_text(program)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *command, *options, "train.py"],
            cwd=tmp_path,
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
            | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return run


def test_a_loop_is_reported_and_its_weights_output_and_files_stay_the_same(run):
    without = run(TRAINS, command=())
    code, out, err = run(TRAINS)
    assert without[0] == 0, without[2]
    assert (code, out) == without[:2]
    assert err.startswith("memcallback │ Sequential · batch 32 · AdamW · CPU")
    assert err.splitlines()[-1].startswith("memcallback: 5 steps, peak ")


def test_with_a_folder_the_page_is_written_there(run, tmp_path):
    assert run(TRAINS, "--log-dir", "memory")[0] == 0
    assert [path.name for path in tmp_path.glob("memory/**/*.html")] == ["memory.html"]


def test_memory_that_runs_out_in_the_first_step_is_explained_before_the_traceback(run):
    code, out, err = run(RUNS_OUT)
    assert (code, out) == (1, "")
    report, _, traceback = err.partition("Traceback (most recent call last):\n")
    assert report.startswith("Out of memory on CPU in the forward pass of step 1 (batch size 32).")
    assert "Your line: train.py:11 in forward" in report
    assert traceback.startswith('  File "')
    assert "memcallback" not in traceback  # which stays the last that is printed


def test_memory_that_runs_out_before_any_step_is_explained_too(run):
    code, _, err = run(RUNS_OUT_BEFORE)
    assert code == 1
    assert err.startswith("Out of memory on CPU.\n")
    assert err.index("requested") < err.index("Traceback (most recent call last):")


def test_a_program_that_does_not_train_is_told_so(run):
    code, out, err = run(NEVER_TRAINS)
    assert (code, out) == (0, "")
    assert err.startswith("memcallback: no training step was seen: no module was called in tra")


def test_optimizers_of_accelerate_are_seen_through(run):
    pytest.importorskip("accelerate")
    code, _, err = run(ACCELERATED)
    assert code == 0, err
    assert "memcallback: 5 steps, peak " in err


def test_a_model_that_is_compiled_in_place_compiles_and_trains(run):
    code, out, err = run(COMPILED)
    assert (code, out) == (0, "trained\n"), err


def test_a_trainer_of_lightning_is_left_to_its_callback(run, tmp_path):
    code, out, err = run(LIGHTNING, PYTHONPATH=os.pathsep.join([str(ROOT), str(site(tmp_path))]))
    assert code == 0, err
    assert "AddedMemoryCallback" in out
    assert out.count("memcallback │ BoringModel") == 1
    assert "memcallback │" not in err
    assert "no training step" not in err


def site(tmp_path):
    """A folder in which the package is installed, so that Lightning sees its entry point."""
    folder = tmp_path / "site" / "memcallback-99.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: memcallback\nVersion: 99\n")
    at = "memcallback.integrations.lightning.from_environment:callbacks"
    (folder / "entry_points.txt").write_text(
        f"[lightning.pytorch.callbacks_factory]\nmemcallback = {at}\n"
    )
    return folder.parent
