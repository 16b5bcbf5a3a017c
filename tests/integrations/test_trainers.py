"""Both packages' Trainers, and several processes."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from event_files import curves_of

TESTS = Path(__file__).parents[1]

ALONE = """
import sys
import torch
{imports}
from memcallback import MemoryCallback
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
callback = MemoryCallback()
assert isinstance(callback, pl.Callback)
trainer = pl.Trainer(callbacks=callback, max_epochs=1, accelerator="cpu", logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    default_root_dir=sys.argv[1])
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(12, 8), batch_size=4))
assert len(callback.recorder.steps) == 3, callback.recorder.steps
assert callback.prediction is not None
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import lightning.pytorch as pl",
        "import pytorch_lightning as pl",
        "import pytorch_lightning\nimport lightning.pytorch as pl",
        "from memcallback import MemoryCallback\nimport lightning.pytorch as pl",
        "from memcallback import MemoryCallback\nimport pytorch_lightning as pl",
    ],
)
def test_the_trainer_of_either_package_takes_the_callback_whatever_is_imported_first(
    tmp_path, imports
):
    script = ALONE.format(imports=imports)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "stopped recording" not in done.stderr


DDP = """
import json, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch, training
from lightning.pytorch import seed_everything
from memcallback import MemoryCallback
def weights(*callbacks):
    seed_everything(7, verbose=False)
    loop = training.trainer(sys.argv[1], callbacks, strategy="ddp", devices=2)
    module = training.Automatic()
    loop.fit(module, training.loader(8))
    return loop.global_rank, [*module.parameters(), torch.get_rng_state()]
if __name__ == "__main__":
    callback = MemoryCallback()
    (rank, ours), (_, theirs) = weights(callback), weights()
    is_same = all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    steps = callback.recorder.steps
    assert len(steps) == 4, len(steps)
    assert steps[-1].peak_allocated_bytes > 0
    told = [[w.phase.value for w in steps[-1].windows], callback.prediction is not None, is_same]
    (Path(sys.argv[1]) / f"rank{{rank}}.json").write_text(json.dumps(told))
"""


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    script = folder / "train.py"
    script.write_text(DDP.format(tests=str(TESTS)))
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # Each rank tells what it saw in a file of its own: what several processes print mixes.
    told = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    return SimpleNamespace(output=done.stdout, runs=folder / "memcallback", told=told)


def test_under_ddp_every_rank_records_the_same_training_as_without_us(ddp):
    assert ddp.told == [[["forward", "backward", "optimizer_step"], True, True]] * 2


def test_under_ddp_rank_zero_alone_prints_and_shows_both(ddp):
    assert ddp.output.count("memcallback │") == 1
    assert ddp.output.count("memcallback: ") == 1
    assert ddp.output.count("  ranks        0-1: ") == 1
    (run,) = ddp.runs.iterdir()
    curves = curves_of(run)
    assert list(curves["ranks_max"]["memory_gib/peak_forward"]) == list(range(4))
    assert "memory/num_ranks_missing" not in curves[""]
