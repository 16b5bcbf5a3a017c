"""What a `training_step` of Lightning returns beside its loss is kept until the batch ends."""

import pytest
import torch
from device_loop import empty_device
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F

import memcallback as mc

BATCH, WIDTH, CLASSES = 1024, 64, 4096
LOGITS = BATCH * CLASSES * 4


class Classifier(LightningModule):
    """A module whose logits are most of its memory."""

    def __init__(self, returned="nothing"):
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)
        self.returned = returned

    def training_step(self, batch, batch_idx):
        logits = self.layer(batch)
        loss = F.cross_entropy(logits, torch.zeros_like(batch[:, 0], dtype=torch.long))
        more = {
            "nothing": {},
            "logits": {"logits": logits},
            "detached": {"logits": logits.detach()},
        }
        return {"loss": loss, **more[self.returned]}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def predicted(returned, **options):
    module = Classifier(returned)
    step = mc.TrainingStep.from_lightning(module, torch.zeros(BATCH, WIDTH), **options)
    return mc.predict(step, device="NVIDIA H200")


@pytest.mark.parametrize("returned", ["logits", "detached"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_logits_that_a_training_step_returns_are_there_in_the_update(returned, accumulate):
    def update(returned):
        return predicted(returned, accumulate=accumulate).step.phases[mc.Phase.OPTIMIZER_STEP]

    without, kept = update("nothing"), update(returned)
    assert kept.peak_allocated_bytes == without.peak_allocated_bytes + LOGITS


def test_logits_of_the_batch_before_are_gone_in_the_next_forward_pass():
    def forward(returned):
        return predicted(returned).step.phases[mc.Phase.FORWARD]

    # Beside them are the loss that the Trainer divides, and a copy of it.
    more = forward("logits").peak_allocated_bytes - forward("nothing").peak_allocated_bytes
    assert 0 <= more <= 2 * 512


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.parametrize("returned", ["nothing", "logits", "detached"])
def test_a_lightning_trainer_that_keeps_logits_is_predicted_to_the_byte(tmp_path, returned):
    empty_device()
    callback = mc.MemoryCallback()
    rows = torch.utils.data.DataLoader(torch.zeros(BATCH * 4, WIDTH), batch_size=BATCH)
    Trainer(
        max_epochs=1,
        accelerator="cuda",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[callback],
    ).fit(Classifier(returned), rows)
    measured, foreseen = callback.report.measured, callback.prediction.step
    for phase in measured.phases:
        sizes = [step.phases[phase] for step in (measured, foreseen)]
        assert sizes[0].peak_reserved_bytes == sizes[1].peak_reserved_bytes
        assert abs(sizes[0].peak_allocated_bytes - sizes[1].peak_allocated_bytes) <= 16 * 512
