"""An iterator over a DataLoader with a worker process, held by the module."""

from parts import Samples, Small
from torch.utils.data import DataLoader

SUMS = []


class Model(Small):
    def __init__(self):
        super().__init__()
        samples = DataLoader(Samples(), batch_size=1, num_workers=1)
        self.more = iter(samples)

    def loss(self, features, classes):
        extra, _ = next(self.more)
        SUMS.append(float(extra.sum()))
        return super().loss(features + extra.to(features.device), classes)
