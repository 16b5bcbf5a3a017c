"""Hooks of a LightningModule around its steps: what they allocate is foreseen, on a CUDA device,
real or virtual, to the byte.
"""

import lightning.pytorch as L
import pytest
import torch
import training
from torch import nn
from torch.nn import functional as F

import memcallback as mc

BATCH, WIDTH = 1024, 4096


class Probe(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, WIDTH))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.layers(batch[0]), batch[0])

    def validation_step(self, batch, batch_idx):
        self.layers(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), foreach=False)


class KeepsInValidation(Probe):
    """Outputs of all batches of a validation, until its epoch ends."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def validation_step(self, batch, batch_idx):
        self.kept.append(self.layers(batch[0]))

    def on_validation_epoch_end(self):
        self.kept.clear()


def loader(num_batches):
    data = torch.utils.data.TensorDataset(torch.zeros(BATCH * num_batches, WIDTH))
    return torch.utils.data.DataLoader(data, batch_size=BATCH)


@pytest.mark.cuda
def test_what_a_validation_keeps(tmp_path):
    training.check_on_cuda(
        tmp_path, KeepsInValidation(), train_dataloaders=loader(3), val_dataloaders=loader(18)
    )


def test_the_trainer_lets_go_of_the_loss_that_a_step_returns():
    def of_lightning(batch):
        return mc.TrainingStep.from_lightning(Probe(), batch)

    def of_a_loop(batch):
        model = Probe()
        return mc.TrainingStep(
            model,
            batch,
            loss=lambda model, batch: model.training_step(batch, 0),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=False),
        )

    batch = [torch.zeros(BATCH, WIDTH)]
    divided, kept = (
        mc.predict(make(batch), device="H100").step for make in (of_lightning, of_a_loop)
    )
    for phase in (mc.Phase.BACKWARD, mc.Phase.OPTIMIZER_STEP):
        peaks = [step.phases[phase].peak_allocated_bytes for step in (kept, divided)]
        # The loss of `mse_loss` has the memory of all its elements; the Trainer has a divided one
        # and a copy of that.
        assert peaks[0] - peaks[1] == 4 * BATCH * WIDTH - 2 * 512


@pytest.mark.cuda
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_with_the_memory_of_its_elements(tmp_path, accumulate):
    training.check_on_cuda(
        tmp_path, Probe(), train_dataloaders=loader(6), accumulate_grad_batches=accumulate
    )
