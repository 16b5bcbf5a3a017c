"""Recorder, prediction and command line where Lightning or TensorBoard is not installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import memcallback

#: Begins a program in which some packages are not found, as where they are not installed.
WITHOUT = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec

def find_spec(name, *more, **most):
    return None if name.partition(".")[0] in {missing!r} else find(name, *more, **most)

PathFinder.find_spec = find_spec
"""
STEPS = """
import memcallback as mc
import torch

def compute_loss(model, batch):
    return model(batch).square().mean()

def make_step():
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    return mc.TrainingStep(model, torch.zeros(32, 64), loss=compute_loss, optimizer=optimizer)
"""
RECORDS_AND_PREDICTS = """
import memcallback as mc
import torch
from memcallback.cli import main
from steps import compute_loss, make_step

step = make_step()
optimizer = torch.optim.AdamW(step.model.parameters())
recorder = mc.MemoryRecorder(step.model, optimizer)
with mc.MemoryLog(recorder, step, log_every_n_steps=2) as log, recorder.watch():
    for _ in range(4):
        compute_loss(step.model, torch.zeros(32, 64)).backward()
        optimizer.step()
        optimizer.zero_grad()
assert len(recorder.steps) == 4
assert log.report is not None
assert log.prediction.peak_allocated_bytes > 10_000
assert mc.suggest_batch_size(step, device="L4").batch_size > 32
assert main(["predict", "steps:make_step", "--device", "L4"]) == 0
assert main(["report", "steps:make_step", "--device", "L4", "-o", "step.html"]) == 0
"""
NAMES_LIGHTNING = """
try:
    mc.MemoryCallback
except ModuleNotFoundError as error:
    assert "needs Lightning: pip install lightning" in str(error), error
else:
    raise AssertionError
"""
TRAINS_WITH_A_LOGGER = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

options = dict(accelerator="cpu", max_steps=4, log_every_n_steps=1, enable_checkpointing=False)
logger = CSVLogger("csv")
Trainer(logger=logger, callbacks=[mc.MemoryCallback()], **options).fit(BoringModel())
with open(f"{logger.log_dir}/metrics.csv") as file:
    assert "memory_gib/" in file.readline()
"""


@pytest.fixture
def run(tmp_path):
    def run(missing, program):
        (tmp_path / "steps.py").write_text(STEPS)
        (tmp_path / "program.py").write_text(WITHOUT.format(missing=missing) + program)
        root = str(Path(memcallback.__file__).parents[1])
        done = subprocess.run(
            [sys.executable, "program.py"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": root, "PYTHONWARNINGS": "default"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    return run


def test_all_but_the_callback_works_without_lightning(run, tmp_path):
    lightning = ["lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"]
    run(lightning, RECORDS_AND_PREDICTS + NAMES_LIGHTNING)
    assert len([*tmp_path.glob("memcallback/version_0/memory.html")]) == 1
    assert [*tmp_path.glob("memcallback/version_0/events.*")]


def test_without_tensorboard_a_warning_says_so_and_all_else_works(run, tmp_path):
    err = run(["tensorboard"], RECORDS_AND_PREDICTS + TRAINS_WITH_A_LOGGER)
    assert (
        err.count("TensorBoard is not installed, so no curves are logged to 'memcallback'. ") == 1
    )
    assert err.count("MemoryWarning") == 1
    assert len([*tmp_path.glob("memcallback/version_0/memory.html")]) == 1
