"""Both packages' Trainers, and several processes."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

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
trainer = pl.Trainer(callbacks=callback, max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[1])
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
def test_the_trainer_of_either_package_takes_the_callback_whatever_is_imported_first(tmp_path, imports):
    script = ALONE.format(imports=imports)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "stopped recording" not in done.stderr


DDP = """
import sys
sys.path.insert(0, {tests!r})
import torch, training
from lightning.pytorch import LightningModule
from memcallback import MemoryCallback
if __name__ == "__main__":
    callback = MemoryCallback()
    loop = training.trainer(sys.argv[1], [callback], strategy={strategy!r}, devices=2)
    loop.fit(training.Automatic(), training.loader(8))
    steps = callback.recorder.steps
    assert len(steps) == 4, len(steps)
    assert steps[-1].peak_allocated_bytes > 0
    print("RANK", loop.global_rank, [w.phase.value for w in steps[-1].windows], callback.prediction is not None)
"""


def test_under_ddp_every_rank_records_and_only_rank_zero_prints(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(DDP.format(tests=str(TESTS), strategy="ddp"))
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ranks = sorted(line for line in done.stdout.splitlines() if line.startswith("RANK"))
    assert ranks == [f"RANK {rank} ['forward', 'backward', 'optimizer_step'] True" for rank in (0, 1)]
    assert done.stdout.count("Memory of one training step") == 2
    assert len(list((tmp_path / "memcallback").iterdir())) == 1
