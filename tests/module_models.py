"""Small models of the kinds that are trained most, each named for what it has, and a loop that
records them by module.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memcallback as mc
from memcallback import MemoryRecorder, Phase


class Perceptron(nn.Module):
    """Linear layers, one of them never called."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(2)]
        )
        self.head = nn.Linear(64, 10)
        self.idle = nn.Linear(3, 5)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Residual(nn.Module):
    """A block of a ResNet: in-place activations and an in-place sum, a branch only where the width
    changes.
    """

    def __init__(self, width, out):
        super().__init__()
        self.conv1, self.norm1 = (
            nn.Conv2d(width, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.down = (
            nn.Sequential(nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out))
            if width != out
            else None
        )

    def forward(self, x):
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


class Convolutional(nn.Module):
    """A small ResNet."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 32, 7, 2, 3, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        self.layers = nn.Sequential(Residual(32, 32), Residual(32, 64))
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.qkv, self.proj = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.norm2, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        )
        attended = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, length, width)
        )
        x = x + self.drop(self.proj(attended))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Tied weights; with `use_reentrant` each block is checkpointed."""

    def __init__(self, use_reentrant=None):
        super().__init__()
        self.emb, self.blocks = (
            nn.Embedding(1000, 128),
            nn.ModuleList([Block(128) for _ in range(2)]),
        )
        self.norm, self.head = nn.LayerNorm(128), nn.Linear(128, 1000, bias=False)
        self.head.weight = self.emb.weight
        self.use_reentrant = use_reentrant

    def forward(self, tokens):
        x = self.emb(tokens)
        for block in self.blocks:
            x = (
                block(x)
                if self.use_reentrant is None
                else checkpoint(block, x, use_reentrant=self.use_reentrant)
            )
        return self.head(self.norm(x))


def vectors():
    return torch.randn(128, 64), torch.randint(0, 10, (128,))


def images():
    return torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))


def tokens():
    return torch.randint(0, 1000, (4, 64)), torch.randint(0, 1000, (4, 64))


CASES = {
    "perceptron": (Perceptron, vectors),
    "convolutional": (Convolutional, images),
    "transformer": (Transformer, tokens),
    "checkpointed": (lambda: Transformer(use_reentrant=False), tokens),
    "checkpointed, reentrant": (lambda: Transformer(use_reentrant=True), tokens),
}


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def record(
    model,
    batch,
    *,
    num_steps=3,
    device="cpu",
    dtype=None,
    at_step=lambda number: None,
    loss_of=loss_of,
    **options,
):
    """Train a few steps, and what was recorded of them."""
    model, batch = model.to(device), tuple(tensor.to(device) for tensor in batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recorder = MemoryRecorder(model, optimizer, **{"per_module": True, **options})
    for number in range(num_steps):
        optimizer.zero_grad()
        with recorder.step(batch):
            with (
                recorder.phase(Phase.FORWARD),
                torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None),
            ):
                loss = loss_of(model, batch)
            at_step(number)
            with recorder.phase(Phase.BACKWARD):
                loss.backward()
            with recorder.phase(Phase.OPTIMIZER_STEP):
                optimizer.step()
        del loss
    recorder.close()
    return recorder


def predict(make, make_batch, *, device, precision="32-true"):
    step = mc.TrainingStep(
        make(),
        make_batch(),
        loss=loss_of,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        precision=precision,
    )
    return mc.predict(step, device=device)
