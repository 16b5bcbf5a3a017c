"""What a prediction says that it assumed."""

import pytest
import torch
from torch import nn

import memcallback as mc


class Tagger(nn.Module):
    """A recurrent layer and a head."""

    def __init__(self, recurrent):
        super().__init__()
        self.recurrent, self.head = recurrent, nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.recurrent(x)[0])


@pytest.mark.parametrize("device", ["NVIDIA H200", "cpu"])
def test_a_recurrent_layer_says_that_cudnn_s_sizes_are_estimates(device):
    step = mc.TrainingStep(
        Tagger(nn.LSTM(8, 16, 2)),
        torch.zeros(4, 6, 8),
        loss=lambda model, batch: model(batch).square().mean(),
    )
    told = [caveat for caveat in mc.predict(step, device=device).caveats if "cuDNN takes" in caveat]
    assert len(told) == (0 if device == "cpu" else 1)
