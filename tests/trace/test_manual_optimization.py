"""Lightning's manual optimization with an update at every n-th batch."""

import lightning.pytorch as pl
import pytest
import torch
from device_loop import empty_device
from needs import needs_ranks
from torch import nn

import memcallback as mc

WIDTH = 1024


class EveryNth(pl.LightningModule):
    def __init__(self, n):
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.n = n

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.layers(batch).square().mean() / self.n)
        if (batch_idx + 1) % self.n == 0:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def labels(n):
    step = mc.TrainingStep.from_lightning(EveryNth(n), torch.zeros(256, WIDTH))
    return [window.label for window in mc.predict(step, device="H200").step.windows]


def test_the_update_of_every_nth_batch_is_predicted():
    assert labels(1) == labels(3) == ["forward", "backward", "optimizer step"]


def test_a_module_that_makes_no_update_is_predicted_without_one():
    assert labels(1000) == ["forward", "backward"]


@needs_ranks
@pytest.mark.parametrize("unused", [False, True])
def test_a_rank_sends_gradients_after_each_backward_pass(unused):
    """In DDP, which a module's own backward pass does not tell; on devices:
    test_lightning_ranks_cuda.py.
    """

    def predicted(ranks):
        step = mc.TrainingStep.from_lightning(EveryNth(1), torch.zeros(256, WIDTH), ranks=ranks)
        return mc.predict(step, device="H200").step

    alone, rank = predicted(None), predicted(mc.Ranks(2, find_unused_parameters=unused))
    assert [window.label for window in rank.windows] == [w.label for w in alone.windows]
    buckets = 4 * (2 * WIDTH * WIDTH + 2 * WIDTH)
    for ours, own in zip(rank.windows, alone.windows, strict=True):
        more = ours.peak_allocated_bytes - own.peak_allocated_bytes
        assert buckets <= more <= 1.1 * buckets


@pytest.mark.cuda
@pytest.mark.parametrize("n", [1, 3])
def test_a_fit_reserves_what_is_predicted(tmp_path, n):
    empty_device()
    callback = mc.MemoryCallback(wait_for_prediction=True, verbose=0)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cuda",
        devices=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(EveryNth(n), torch.utils.data.DataLoader(torch.zeros(9 * 256, WIDTH), 256))
    reserved = max(step.peak_reserved_bytes for step in callback.recorder.steps)
    assert callback.prediction.run_peak_reserved_bytes == reserved
