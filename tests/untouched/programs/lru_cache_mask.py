"""A mask that a module-level `lru_cache` keeps."""

from functools import lru_cache

import torch
from parts import Small
from torch import nn


@lru_cache
def mask(size, device):
    return torch.ones(size, size, device=device).tril()


class Model(Small):
    def loss(self, features, classes):
        features = features @ mask(8, features.device)
        return nn.functional.cross_entropy(self(features), classes)
