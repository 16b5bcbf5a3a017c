"""`memcallback run` with programs that train: they compute and print what they do without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import memcallback

ROOT = Path(memcallback.__file__).parents[1]
TRAINS = """
import copy, hashlib, importlib.util, os, sys
assert "torch" not in sys.modules  # what PyTorch reads on import can still be set
assert importlib.util.find_spec("torch")  # many ask for it long before they import it
class Finder:  # of a kind that Python passes over
    def find_module(self, name, path=None):
        return None
sys.meta_path.insert(0, Finder())
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.ReLU(), nn.Linear(256, 10))
model(torch.zeros(2, 64)).sum()  # before there is an optimizer
optimizer = torch.optim.AdamW(model.parameters())
for number in range(6):
    batch = torch.randn(32, 64)
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(model, "whole.pt")  # to be read where nothing of ours is installed
with open("whole.pt", "rb") as file:
    print(b"memcallback" in file.read())
os.remove("whole.pt")
again = copy.deepcopy(model)
again(batch).sum().backward()
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
NEVER_TRAINS = """
import torch
model = torch.nn.Linear(3, 4)
with torch.no_grad():
    model(torch.zeros(2, 3))
"""
TRAINS_LATE = """
import threading, torch

def train():
    threading.main_thread().join()
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        model(torch.ones(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

threading.Thread(target=train).start()
"""
RUNS_OUT_ON_A_DEVICE = """
import torch
from torch import nn

torch.cuda.set_per_process_memory_fraction(2**30 / torch.cuda.mem_get_info()[1])
model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU()).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for num_samples in [64, 64, 64, 2**20]:
    model(torch.zeros(num_samples, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
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
    assert err.splitlines()[-1].startswith("memcallback: 6 steps, peak ")


def test_the_script_may_come_after_two_dashes_as_for_python(run):
    code, out, err = run(NEVER_TRAINS, "--")
    assert (code, out) == (0, "")
    assert "no training step was seen" in err


def test_memory_that_runs_out_in_the_first_step_is_explained_before_the_traceback(run):
    code, out, err = run(RUNS_OUT)
    assert (code, out) == (1, "")
    report, _, traceback = err.partition("Traceback (most recent call last):\n")
    assert report.startswith("Out of memory on CPU in the forward pass of step 1 (batch size 32).")
    assert "Your line: train.py:11 in forward" in report
    assert traceback.startswith('  File "')
    assert "memcallback" not in traceback  # which stays the last that is printed


@pytest.mark.cuda
def test_memory_that_runs_out_on_a_device_is_explained_with_the_batch_and_the_line(run):
    code, out, err = run(RUNS_OUT_ON_A_DEVICE)
    assert (code, out) == (1, "")
    assert "batch 64 · AdamW" in err
    assert "Out of memory on " in err
    assert "Your line: train.py:9" in err
    assert err.rstrip().splitlines()[-1].startswith("torch.OutOfMemoryError: CUDA out of memory.")


def test_a_program_that_does_not_train_is_told_so(run):
    code, out, err = run(NEVER_TRAINS)
    assert (code, out) == (0, "")
    assert err.startswith("memcallback: no training step was seen. A step is seen if a module ")


@pytest.mark.parametrize("last", ["", "raise SystemExit(3)"], ids=["end", "exit"])
def test_a_thread_that_trains_when_the_main_thread_has_ended_is_waited_for(last, run, tmp_path):
    code, out, err = run(TRAINS_LATE + last, "--log-dir", "logs")
    assert (code, out) == (3 if last else 0, "")
    assert "memcallback │ Linear · batch 32 · AdamW · CPU" in err
    assert "memcallback: 4 steps, peak " in err
    assert "no training step" not in err
    assert "Exception ignored" not in err
    assert list((tmp_path / "logs").rglob("*.html"))


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


@pytest.mark.skipif(sys.platform == "win32", reason="closes a descriptor")
def test_with_a_closed_stderr_stdout_is_the_program_s_alone(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(4):\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "print('end')\n"
    )
    done = subprocess.run(
        f"exec {sys.executable} -m memcallback run train.py 2>&-",
        shell=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout) == (0, "end\n")
