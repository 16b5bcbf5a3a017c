"""A small network and batches for loops of other libraries, and what their recordings have in
common.
"""

import torch
from torch import nn

FEATURES, CLASSES = 64, 10
F, B, O = "forward", "backward", "optimizer step"  # noqa: E741


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, CLASSES)
    )


def loss_of(model, batch):
    features, classes = batch
    return nn.functional.cross_entropy(model(features), classes)


def dataset(num_samples=48):
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(
        torch.randn(num_samples, FEATURES, generator=generator),
        torch.randint(0, CLASSES, (num_samples,), generator=generator),
    )


def loader(batch_size=8):
    return torch.utils.data.DataLoader(dataset(), batch_size=batch_size)


def labels(recorder):
    return [[window.label for window in step.windows] for step in recorder.steps]


def off_bytes(recorder, prediction):
    """By how much the measured peaks of the last step are above the predicted ones, at most."""
    measured = recorder.steps[-1]
    return max(
        abs(
            measured.phases[phase].peak_allocated_bytes
            - prediction.phases[phase].peak_allocated_bytes
        )
        for phase in measured.phases
    )
