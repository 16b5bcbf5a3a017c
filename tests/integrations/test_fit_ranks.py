"""An error of one rank ends the search of all ranks, and none waits for another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from needs import needs_ranks

TESTS = Path(__file__).parents[1]

#: Where rank one fails; its error, and what the other rank says.
FAILURES = {
    "loader": ("ValueError: The training loader returns no batch", "The search for a batch size"),
    "transfer": ("OutOfMemoryError: CUDA out of memory", "The search for a batch size"),
    "first size": ("ValueError: The memory of a step does not grow", "The search for a batch size"),
    "step": ("ZeroDivisionError: in the step", "The trial of batch size"),
    "exit": ("SystemExit: 3", "The trial of batch size"),
}

JOB = """
import json, sys
from pathlib import Path
sys.path[:0] = {tests!r}
import torch, training
import memcallback as mc
from test_fit_batch_size import SHORT, Sized
from torch.utils.data import DataLoader, IterableDataset

class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)

class OneFails(Sized):
    def fails_in(self, place):
        return place == {place!r} and self.trainer.global_rank == 1

    def train_dataloader(self):
        sample = (torch.zeros(training.NUM_FEATURES), 0)
        if self.fails_in("first size"):
            sample = torch.empty(0)
        samples = [] if self.fails_in("loader") else [sample] * 1_000
        return DataLoader(Stream(samples), self.batch_size)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if self.fails_in("transfer"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return batch

    def training_step(self, batch, batch_idx):
        if isinstance(batch, torch.Tensor):
            return self.network(torch.ones(4, training.NUM_FEATURES)).sum()
        if self.fails_in("step") and len(batch[0]) != 8:
            raise ZeroDivisionError("in the step")
        if self.fails_in("exit"):
            sys.exit(3)
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    loop = training.trainer(sys.argv[1], [], max_steps=3, strategy="ddp", devices=2, **SHORT)
    try:
        mc.fit_batch_size(loop, OneFails(), capacity="4MiB")
        told = "found"
    except (Exception, SystemExit) as error:
        told = f"{{type(error).__name__}}: {{error}}"
    (Path(sys.argv[1]) / f"rank{{loop.global_rank}}.json").write_text(json.dumps(told))
"""


# It is a prediction that finds that the memory of a step does not grow.
OF_PREDICTION = pytest.param("first size", marks=needs_ranks)


@pytest.mark.parametrize("place", [OF_PREDICTION, *sorted(set(FAILURES) - {"first size"})])
def test_all_ranks_stop_with_one_that_fails_which_raises_its_own_error(tmp_path, place):
    script = tmp_path / "train.py"
    tests = [str(TESTS), str(TESTS / "integrations")]
    script.write_text(JOB.format(tests=tests, place=place))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    other, own = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    error, what = FAILURES[place]
    assert own.startswith(error), done.stderr
    assert other.startswith(f"RuntimeError: {what}")
    assert other.endswith("failed on another rank; see that rank's error.")
