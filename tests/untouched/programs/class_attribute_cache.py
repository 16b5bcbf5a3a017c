"""A scale that is made once and kept by the class."""

import torch
from parts import Small


class Model(Small):
    scale = None

    def forward(self, features):
        if Model.scale is None:
            Model.scale = torch.linspace(0.5, 1.5, 8, device=features.device)
        return self.net(features * Model.scale)
