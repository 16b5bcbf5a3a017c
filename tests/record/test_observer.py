"""The observer changes nothing: bit by bit, with and without the callback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from observer import differences, run

import memcallback
from memcallback import MemoryCallback


@pytest.mark.parametrize("case", ["fp32", "bf16-mixed", "16-mixed", "accumulation"])
def test_training_leaves_the_same_bits_with_and_without_the_callback(tmp_path, case):
    def options():
        return {
            "fp32": {},
            "bf16-mixed": {"precision": "bf16-mixed"},
            "16-mixed": {
                "plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
            },
            "accumulation": {"accumulate_grad_batches": 3},
        }[case]

    callback = MemoryCallback()
    with_it = run(tmp_path, with_callback=True, accelerator="cpu", callback=callback, **options())
    without = run(tmp_path, with_callback=False, accelerator="cpu", **options())
    assert differences(with_it, without) == []
    assert callback.prediction is not None
    assert callback.recorder.steps
    assert with_it["calls"] == 12
    assert with_it["logged"]


def test_the_comparison_finds_a_single_changed_bit():
    tensor = torch.zeros(1000)
    changed = tensor.clone()
    changed[777] = 1e-45
    assert differences({"a": [tensor, 1]}, {"a": [changed, 1]}) == ["/a/0"]
    assert differences({"a": 1}, {"b": 1}) == [": keys"]
    assert differences([1, 2], [1]) == [": length"]


#: Draws from every generator before and after all that a plain loop may ask for in between; alone,
#: so that all is imported for the first time.
_PLAIN_LOOP = """
import random, sys, tempfile
import numpy, torch
import memcallback as mc

def states():
    of_numpy = [
        part.tolist() if hasattr(part, "tolist") else part for part in numpy.random.get_state()
    ]
    return [random.getstate(), of_numpy, torch.get_rng_state().tolist()]

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
batch = torch.ones(8, 4)
before = states()
loss = lambda model, batch: model(batch).sum()
step = mc.TrainingStep(model, batch, loss=loss, optimizer=optimizer)
diff = mc.TensorDiff(model, optimizer, ledger=True)
recorder = mc.MemoryRecorder(model, optimizer, per_module=True)
folder = tempfile.mkdtemp()
log = mc.MemoryLog(recorder, step, log_dir=folder, log_every_n_steps=1, device="NVIDIA H200")
with log, recorder.watch(), diff:
    for _ in range(3):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        diff.mark("step")
prediction, plan = mc.predict(step, device="NVIDIA H200"), mc.what_if(step, device="NVIDIA H200")
said = [str(diff), str(recorder.report()), str(prediction), str(plan)]
assert len(recorder.steps) == 3 and all(said), said
assert states() == before
assert "rich" not in sys.modules, "its import draws from Python's generator, once in a process"
"""


def test_a_plain_loop_that_prints_all_there_is_draws_no_random_number():
    environment = {**os.environ, "PYTHONPATH": str(Path(memcallback.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", _PLAIN_LOOP],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
