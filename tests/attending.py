"""A network with flex_attention, to be compiled: with a device and without."""

import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

SIZE = 64


class Attending(nn.Module):
    """Causal attention with a bias by distance, which flex_attention fuses."""

    def __init__(self, width):
        super().__init__()
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        query, key, value = (
            part.unflatten(-1, (-1, SIZE)).transpose(0, 1)[None]
            for part in self.project(x).chunk(3, -1)
        )
        attended = flex_attention(query, key, value, score_mod=alibi)
        return self.join(attended[0].transpose(0, 1).flatten(1))


def alibi(score, sample, head, query, key):
    return torch.where(query >= key, score + (key - query) * torch.exp2(-head), -float("inf"))
