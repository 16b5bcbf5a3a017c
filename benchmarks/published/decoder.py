"""The decoder whose steady step two authors recorded on real cards, written from its description.

Sources: github.com/LINYUNLinYun/CS336-assignment2-systems at d7b9b89 (RTX PRO 6000 Blackwell,
PyTorch 2.11) and github.com/aimetrics/assignment2-systems at 8f79772 (a card of at least 80 GB,
PyTorch 2.8). Each operator matters to the byte, so attention, norms and losses are written out. So
does when each tensor is freed: the recorded histories tell.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor, nn

VOCABULARY, WIDTH, NUM_LAYERS, NUM_HEADS, INNER_WIDTH = 10_000, 2_560, 32, 32, 10_240
BATCH_SIZE = 4


class Projection(nn.Module):
    """A product with a weight of `outputs` x `inputs`, without a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, states: Tensor) -> Tensor:
        product: Tensor = einsum(states, self.weight, "... i, o i -> ... o")
        return product


class RootMeanSquareNorm(nn.Module):
    """The norm in float32, and back to the type of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, states: Tensor) -> Tensor:
        dtype = states.dtype
        states = states.to(torch.float32)
        scale = torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (states * scale * self.weight).to(dtype)


class Rotation(nn.Module):
    """Rotary embedding of pairs of neighbouring entries, from a table of cosines and sines."""

    table: Tensor

    def __init__(self, context: int) -> None:
        super().__init__()
        shape = (2, context, WIDTH // NUM_HEADS // 2)
        self.register_buffer("table", torch.empty(shape), persistent=False)

    def forward(self, states: Tensor) -> Tensor:
        first, second = rearrange(states, "... (half two) -> two ... half", two=2)
        cosine, sine = self.table[:, : states.shape[-2]]
        pairs = torch.stack(
            (cosine * first - sine * second, sine * first + cosine * second), dim=-1
        )
        rotated: Tensor = rearrange(pairs, "... half two -> ... (half two)")
        return rotated


def softmax(scores: Tensor) -> Tensor:
    """The softmax over the last dimension. What is shifted lives to its end, as it was recorded."""
    shifted = scores - scores.max(-1, keepdim=True).values
    exponentials = torch.exp(shifted)
    return exponentials / exponentials.sum(-1, keepdim=True)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention written out. The scores are gone when the output is projected."""
    scores = einsum(query, key, "b h q d, b h k d -> b h q k") / query.shape[-1] ** 0.5
    scores = torch.where(mask, scores, float("-inf"))
    mixed: Tensor = einsum(softmax(scores), value, "b h q k, b h k d -> b h q d")
    return mixed


class Attention(nn.Module):
    """Causal attention, its mask made anew. All layers share one table of the rotation."""

    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        self.query, self.key, self.value = (Projection(WIDTH, WIDTH) for _ in range(3))
        self.output = Projection(WIDTH, WIDTH)
        self.rotation = rotation

    def forward(self, states: Tensor) -> Tensor:
        num_tokens = states.shape[1]
        # All three before any is taken apart into heads: the backward pass follows this order.
        projected = [self.query(states), self.key(states), self.value(states)]
        query, key, value = (
            rearrange(one, "b n (h d) -> b h n d", h=NUM_HEADS) for one in projected
        )
        del projected
        query = self.rotation(query)
        key = self.rotation(key)
        rows = torch.arange(num_tokens, device=states.device)
        mask = rows[:, None] >= rows[None, :]
        mixed = attend(query, key, value, mask)
        mixed = rearrange(mixed, "b h n d -> b n (h d)").contiguous()
        joined: Tensor = self.output(mixed)
        return joined


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.third = (Projection(WIDTH, INNER_WIDTH) for _ in range(2))
        self.second = Projection(INNER_WIDTH, WIDTH)

    def forward(self, states: Tensor) -> Tensor:
        gate = self.first(states)
        outputs: Tensor = self.second(gate * torch.sigmoid(gate) * self.third(states))
        return outputs


class Block(nn.Module):
    """A layer with its norms before attention and feed-forward."""

    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        self.attention = Attention(rotation)
        self.feed_forward = FeedForward()
        self.norms = nn.ModuleList(RootMeanSquareNorm() for _ in range(2))

    def forward(self, states: Tensor) -> Tensor:
        attended = self.attention(self.norms[0](states))
        states = states + attended
        fed = self.feed_forward(self.norms[1](states))
        outputs: Tensor = states + fed
        return outputs


class Decoder(nn.Module):
    """3.41 billion parameters.

    Args:
        context: Tokens in a sequence.
    """

    def __init__(self, context: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, WIDTH))
        rotation = Rotation(context)
        self.blocks = nn.ModuleList(Block(rotation) for _ in range(NUM_LAYERS))
        self.norm = RootMeanSquareNorm()
        self.head = Projection(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.embedding[tokens]
        for block in self.blocks:
            states = block(states)
        logits: Tensor = self.head(self.norm(states))
        return logits
