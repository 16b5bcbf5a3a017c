"""Recurrent networks, recommenders, generators, and what else is trained."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.common import Stack


def mlp(
    num_in: int = 1024,
    width: int = 4096,
    depth: int = 8,
    num_classes: int = 100,
    *,
    dropout: float = 0.1,
) -> nn.Sequential:
    """Linear layers with ReLU and dropout."""
    blocks = [
        nn.Sequential(
            nn.Linear(num_in if number == 0 else width, width), nn.ReLU(), nn.Dropout(dropout)
        )
        for number in range(depth)
    ]
    return nn.Sequential(Stack(blocks), nn.Linear(width, num_classes))


class RecurrentTagger(nn.Module):
    """A recurrent layer of PyTorch over words: cuDNN's on CUDA.

    Args:
        kind: `nn.LSTM` or `nn.GRU`.
        width: Features.
        depth: Layers.
        vocabulary: Words.
        num_classes: Outputs for each word.
    """

    def __init__(
        self,
        kind: type[nn.LSTM | nn.GRU],
        *,
        width: int = 512,
        depth: int = 2,
        vocabulary: int = 20000,
        num_classes: int = 50,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.layers = kind(width, width, depth, batch_first=True, dropout=0.1, bidirectional=True)
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, words: Tensor) -> Tensor:
        """The logits."""
        y: Tensor = self.head(self.layers(self.words(words))[0])
        return y


class CellTagger(nn.Module):
    """The same by a loop over the cells of one layer.

    Args:
        kind: `nn.LSTMCell` or `nn.GRUCell`.
        width: Features.
        vocabulary: Words.
        num_classes: Outputs for each word.
    """

    def __init__(
        self,
        kind: type[nn.LSTMCell | nn.GRUCell],
        *,
        width: int = 512,
        vocabulary: int = 20000,
        num_classes: int = 50,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.cell = kind(width, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, words: Tensor) -> Tensor:
        """The logits."""
        state, outputs = None, []
        for x in self.words(words).unbind(dim=1):
            state = self.cell(x, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        y: Tensor = self.head(torch.stack(outputs, dim=1))
        return y


class Dlrm(nn.Module):
    """A recommender (arXiv 1906.00091): bags of embeddings, their products, linear layers.

    Args:
        num_rows: Rows in each table.
        num_tables: Tables.
        width: Features.
        num_dense: Numbers beside the categories.
        is_sparse: Whether the tables' gradients are sparse tensors.
    """

    upper: Tensor

    def __init__(
        self,
        *,
        num_rows: int = 200000,
        num_tables: int = 16,
        width: int = 64,
        num_dense: int = 13,
        is_sparse: bool = False,
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(num_rows, width, mode="sum", sparse=is_sparse)
            for _ in range(num_tables)
        )
        self.bottom = nn.Sequential(
            nn.Linear(num_dense, 512),
            nn.ReLU(),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Linear(256, width),
            nn.ReLU(),
        )
        num_products = (num_tables + 1) * num_tables // 2
        self.top = nn.Sequential(
            nn.Linear(num_products + width, 1024),
            nn.ReLU(),
            nn.Linear(1024, 512),
            nn.ReLU(),
            nn.Linear(512, 1),
        )
        self.register_buffer("upper", torch.triu_indices(num_tables + 1, num_tables + 1, offset=1))

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """The logits; `categories` is (tables, batch, items)."""
        x = self.bottom(dense)
        features = torch.stack(
            [x, *(table(items) for table, items in zip(self.tables, categories, strict=True))],
            dim=1,
        )
        products = torch.bmm(features, features.transpose(1, 2))[:, self.upper[0], self.upper[1]]
        y: Tensor = self.top(torch.cat([x, products], dim=1))
        return y.squeeze(1)


class Gan(nn.Module):
    """A generator and a discriminator of images of 64x64 (DCGAN, arXiv 1511.06434).

    Args:
        num_noise: Features of the noise.
        num_channels: At the largest size; doubled with each halving.
    """

    def __init__(self, *, num_noise: int = 128, num_channels: int = 64) -> None:
        super().__init__()
        sizes = [num_channels * 2**level for level in range(4)]
        up: list[nn.Module] = [
            nn.ConvTranspose2d(num_noise, sizes[-1], 4, bias=False),
            nn.BatchNorm2d(sizes[-1]),
            nn.ReLU(True),
        ]
        for num_in, num_out in zip(sizes[:0:-1], sizes[-2::-1], strict=True):
            up += [
                nn.ConvTranspose2d(num_in, num_out, 4, 2, padding=1, bias=False),
                nn.BatchNorm2d(num_out),
                nn.ReLU(True),
            ]
        self.generator = nn.Sequential(
            *up, nn.ConvTranspose2d(num_channels, 3, 4, 2, padding=1), nn.Tanh()
        )
        down: list[nn.Module] = [
            nn.Conv2d(3, num_channels, 4, 2, padding=1),
            nn.LeakyReLU(0.2, True),
        ]
        for num_in, num_out in pairwise(sizes):
            down += [
                nn.Conv2d(num_in, num_out, 4, 2, padding=1, bias=False),
                nn.BatchNorm2d(num_out),
                nn.LeakyReLU(0.2, True),
            ]
        self.discriminator = nn.Sequential(*down, nn.Conv2d(sizes[-1], 1, 4), nn.Flatten(0))


class Vae(nn.Module):
    """A variational autoencoder of images of 64x64.

    Args:
        num_channels: At the largest size; doubled with each halving.
        num_latent: Features between.
    """

    def __init__(self, *, num_channels: int = 64, num_latent: int = 256) -> None:
        super().__init__()
        sizes = [num_channels * 2**level for level in range(4)]
        down: list[nn.Module] = []
        for num_in, num_out in zip([3, *sizes], sizes, strict=False):
            down += [nn.Conv2d(num_in, num_out, 3, 2, padding=1), nn.SiLU()]
        self.encoder = nn.Sequential(*down, nn.Flatten(), nn.Linear(sizes[-1] * 16, 2 * num_latent))
        up: list[nn.Module] = [
            nn.Linear(num_latent, sizes[-1] * 16),
            nn.Unflatten(1, (sizes[-1], 4, 4)),
        ]
        for num_in, num_out in zip(sizes[::-1], [*sizes[-2::-1], 3], strict=True):
            up += [nn.SiLU(), nn.Upsample(scale_factor=2), nn.Conv2d(num_in, num_out, 3, padding=1)]
        self.decoder = nn.Sequential(*up)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The image again, and mean and logarithm of the variance of what is between."""
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        latent = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(latent), mean, log_variance


class GraphLayer(nn.Module):
    """Messages along edges, summed at the nodes.

    Args:
        width: Features.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU())
        self.update = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Run; `edges` is (2, number of edges)."""
        source, target = edges
        messages = self.message(
            torch.cat([x.index_select(0, source), x.index_select(0, target)], dim=1)
        )
        total = torch.zeros_like(x, dtype=messages.dtype).index_add(0, target, messages)
        return torch.add(x, self.norm(F.relu(self.update(torch.cat([x, total], dim=1)))))


class GraphNetwork(nn.Module):
    """Layers of messages over one large graph; the nodes are classified.

    Args:
        num_in: Features of a node.
        width: Features inside.
        depth: Layers.
        num_classes: Outputs.
    """

    def __init__(
        self, *, num_in: int = 128, width: int = 128, depth: int = 4, num_classes: int = 40
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(num_in, width)
        self.layers = Stack(GraphLayer(width) for _ in range(depth))
        self.head = nn.Linear(width, num_classes)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """The logits."""
        y: Tensor = self.head(self.layers(self.stem(nodes), edges))
        return y


class TwoTowers(nn.Module):
    """Images and texts in one space, each told from the rest of the batch (arXiv 2103.00020, CLIP).

    Args:
        image_tower: Images to features.
        text_tower: Tokens to (length, features).
    """

    def __init__(self, image_tower: nn.Module, text_tower: nn.Module) -> None:
        super().__init__()
        self.image_tower, self.text_tower = image_tower, text_tower
        self.temperature = nn.Parameter(torch.tensor(2.66))

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        """The logits of image i and text j."""
        images = F.normalize(self.image_tower(image), dim=-1)
        texts = F.normalize(self.text_tower(tokens).mean(dim=1), dim=-1)
        return self.temperature.exp() * images @ texts.t()


class WaveNet(nn.Module):
    """Dilated 1-D convolutions with gates over samples of sound (arXiv 1609.03499).

    Args:
        num_channels: Channels.
        dilations: Of the layers.
        num_levels: Levels that a sample can have.
    """

    def __init__(
        self,
        *,
        num_channels: int = 64,
        dilations: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128),
        num_levels: int = 256,
    ) -> None:
        super().__init__()
        self.dilations = dilations
        self.stem = nn.Embedding(num_levels, num_channels)
        self.gates = nn.ModuleList(
            nn.Conv1d(num_channels, 2 * num_channels, 2, dilation=dilation)
            for dilation in dilations
        )
        self.mixes = nn.ModuleList(nn.Conv1d(num_channels, num_channels, 1) for _ in dilations)
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(num_channels, num_levels, 1))

    def forward(self, samples: Tensor) -> Tensor:
        """The logits of each next sample, (batch, levels, length)."""
        x = self.stem(samples).transpose(1, 2)
        total: Tensor | None = None
        for gate, mix, dilation in zip(self.gates, self.mixes, self.dilations, strict=True):
            signal, opening = gate(F.pad(x, (dilation, 0))).chunk(2, dim=1)
            skip = mix(torch.tanh(signal) * torch.sigmoid(opening))
            total = skip if total is None else total + skip
            x = x + skip
        y: Tensor = self.head(total)
        return y
