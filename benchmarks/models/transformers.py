"""Networks with attention, for text and for images; MLP-Mixer, which is built alike."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.common import Residual, Stack


class Attention(nn.Module):
    """Self-attention, or attention to another sequence, by `scaled_dot_product_attention`.

    Args:
        width: Features.
        num_heads: Heads.
        dropout: Of the attention's weights.
        is_causal: Whether a position sees only itself and those before it.
    """

    def __init__(
        self, width: int, num_heads: int, *, dropout: float = 0.0, is_causal: bool = False
    ) -> None:
        super().__init__()
        self.num_heads, self.dropout, self.is_causal = num_heads, dropout, is_causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend."""
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(x)
            .view(batch, length, 3, self.num_heads, width // self.num_heads)
            .permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout if self.training else 0.0, self.is_causal
        )
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return out


def feed_forward(width: int, hidden: int, *, dropout: float = 0.0) -> nn.Sequential:
    """Two linear layers with GELU between."""
    layers: list[nn.Module] = [nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)]
    return nn.Sequential(*layers, *([nn.Dropout(dropout)] if dropout else []))


class PreNormBlock(nn.Module):
    """Normalisation before each half: ViT, GPT-2.

    Args:
        width: Features.
        num_heads: Heads.
        dropout: Of the halves' outputs and of the attention's weights.
        is_causal: See `Attention`.
    """

    def __init__(
        self, width: int, num_heads: int, *, dropout: float = 0.0, is_causal: bool = False
    ) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout=dropout, is_causal=is_causal)
        self.dropout = nn.Dropout(dropout)
        self.norm_2 = nn.LayerNorm(width)
        self.feed_forward = feed_forward(width, 4 * width, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Run."""
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return torch.add(x, self.feed_forward(self.norm_2(x)))


class PostNormBlock(nn.Module):
    """Normalisation after each half, and a mask of what is padding: BERT.

    Args:
        width: Features.
        num_heads: Heads.
        dropout: Of the halves' outputs and of the attention's weights.
    """

    def __init__(self, width: int, num_heads: int, *, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, num_heads, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.norm_1 = nn.LayerNorm(width)
        self.feed_forward = feed_forward(width, 4 * width, dropout=dropout)
        self.norm_2 = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Run."""
        x = self.norm_1(x + self.dropout(self.attention(x, mask)))
        y: Tensor = self.norm_2(x + self.feed_forward(x))
        return y


class Gpt(nn.Module):
    """GPT-2: learned positions, causal attention, the embedding's weight is the head's.

    Args:
        width: Features.
        depth: Blocks.
        num_heads: Heads.
        vocabulary: Tokens.
        length: The longest sequence.
        dropout: Everywhere.
    """

    def __init__(
        self,
        *,
        width: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        vocabulary: int = 50257,
        length: int = 1024,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = Stack(
            PreNormBlock(width, num_heads, dropout=dropout, is_causal=True) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        y: Tensor = self.head(self.norm(self.blocks(x)))
        return y


class Bert(nn.Module):
    """BERT with a head for masked words.

    Args:
        width: Features.
        depth: Blocks.
        num_heads: Heads.
        vocabulary: Tokens.
        dropout: Everywhere.
    """

    def __init__(
        self,
        *,
        width: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        vocabulary: int = 30522,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.positions = nn.Embedding(512, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = Stack(PostNormBlock(width, num_heads, dropout=dropout) for _ in range(depth))
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, is_word: Tensor) -> Tensor:
        """The logits; `is_word` is False where a sequence is padded."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = (
            self.tokens(tokens)
            + self.positions(positions)
            + self.segments(torch.zeros_like(tokens))
        )
        x = self.dropout(self.norm(x))
        y: Tensor = self.head(self.transform(self.blocks(x, is_word[:, None, None, :])))
        return y


class EncoderClassifier(nn.Module):
    """`nn.TransformerEncoder` with a padding mask; the mean of the words is classified.

    Args:
        width: Features.
        depth: Layers.
        num_heads: Heads.
        vocabulary: Tokens.
        num_classes: Outputs.
    """

    def __init__(
        self,
        *,
        width: int = 512,
        depth: int = 6,
        num_heads: int = 8,
        vocabulary: int = 30000,
        num_classes: int = 20,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(
            width, num_heads, 4 * width, dropout=0.1, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_classes)

    def forward(self, tokens: Tensor, is_word: Tensor) -> Tensor:
        """The logits."""
        x = self.encoder(self.tokens(tokens), src_key_padding_mask=~is_word)
        y: Tensor = self.head(x.mean(dim=1))
        return y


class RmsNorm(nn.Module):
    """Root-mean-square normalisation in float32, as Llama does it.

    Args:
        width: Features.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class LlamaBlock(nn.Module):
    """Rotary positions, fewer heads for keys and values than for queries, SwiGLU.

    Args:
        width: Features.
        num_heads: Heads of the queries.
        num_kv_heads: Heads of keys and values.
        hidden: Features inside the feed-forward half.
    """

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.repeats = num_heads // num_kv_heads
        self.norm_1 = RmsNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, num_kv_heads * self.head_width, bias=False)
        self.v = nn.Linear(width, num_kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_2 = RmsNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Run."""
        x = x + self._attend(self.norm_1(x), cos, sin)
        y = self.norm_2(x)
        return torch.add(x, self.down(F.silu(self.gate(y)) * self.up(y)))

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, self.head_width).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        k, v = (part.repeat_interleave(self.repeats, dim=1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Llama(nn.Module):
    """A decoder like Llama's.

    Args:
        width: Features.
        depth: Blocks.
        num_heads: Heads of the queries.
        num_kv_heads: Heads of keys and values.
        hidden: Features inside the feed-forward half.
        vocabulary: Tokens.
        length: The longest sequence.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, *, width: int = 1024, depth: int = 8, num_heads: int = 16, num_kv_heads: int = 4,
        hidden: int = 2816, vocabulary: int = 32000, length: int = 1024,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = Stack(
            LlamaBlock(width, num_heads, num_kv_heads, hidden) for _ in range(depth)
        )
        self.norm = RmsNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        half = torch.arange(0, width // num_heads, 2)
        angles = torch.outer(
            torch.arange(length), 10000.0 ** (-half / (width // num_heads))
        ).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits."""
        x = self.tokens(tokens)
        cos, sin = (table[: tokens.shape[1]].to(x.dtype) for table in (self.cos, self.sin))
        y: Tensor = self.head(self.norm(self.blocks(x, cos, sin)))
        return y


class BiasedAttention(nn.Module):
    """Attention written out, with a bias that is added to the scores: T5, Swin.

    Args:
        width: Features.
        num_heads: Heads.
        scale: What the scores are multiplied with.
        dropout: Of the attention's weights.
    """

    def __init__(
        self, width: int, num_heads: int, *, scale: float = 1.0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, scale
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, other: Tensor, bias: Tensor | None) -> Tensor:
        """Attend from `x` to `other`."""
        q, k, v = (
            layer(part).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer, part in ((self.q, x), (self.k, other), (self.v, other))
        )
        scores = (q * self.scale) @ k.transpose(-2, -1)
        if bias is not None:
            scores = scores + bias
        weights = self.dropout(scores.softmax(dim=-1))
        out: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return out


class RelativeBias(nn.Module):
    """A learned bias for each head and distance.

    Args:
        num_heads: Heads.
        is_causal: Whether what comes later is masked.
        num_distances: Distances that are told apart.
    """

    def __init__(self, num_heads: int, *, is_causal: bool, num_distances: int = 32) -> None:
        super().__init__()
        self.is_causal, self.num_distances = is_causal, num_distances
        self.table = nn.Embedding(num_distances, num_heads)

    def forward(self, length: int) -> Tensor:
        """The bias of a sequence."""
        position = torch.arange(length, device=self.table.weight.device)
        distance = position[None, :] - position[:, None]
        bucket = (
            distance.clamp(-self.num_distances // 2, self.num_distances // 2 - 1)
            + self.num_distances // 2
        )
        bias: Tensor = self.table(bucket).permute(2, 0, 1).unsqueeze(0)
        return bias.masked_fill(distance > 0, -1e4) if self.is_causal else bias


class T5Block(nn.Module):
    """Attention to itself, in the decoder also to the encoder, and two linear layers.

    Args:
        width: Features.
        num_heads: Heads.
        dropout: Everywhere.
        is_decoder: Whether it attends to the encoder.
    """

    def __init__(self, width: int, num_heads: int, *, dropout: float, is_decoder: bool) -> None:
        super().__init__()
        self.norm_1 = RmsNorm(width)
        self.attention = BiasedAttention(width, num_heads, dropout=dropout)
        self.norm_2 = RmsNorm(width) if is_decoder else None
        self.cross_attention = (
            BiasedAttention(width, num_heads, dropout=dropout) if is_decoder else None
        )
        self.norm_3 = RmsNorm(width)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        """Run."""
        y = self.norm_1(x)
        x = x + self.dropout(self.attention(y, y, bias))
        if self.norm_2 is not None and self.cross_attention is not None:
            x = x + self.dropout(self.cross_attention(self.norm_2(x), memory, None))
        y = self.dropout(F.relu(self.expand(self.norm_3(x))))
        return torch.add(x, self.dropout(self.contract(y)))


class T5(nn.Module):
    """An encoder and a decoder with relative positions.

    Args:
        width: Features.
        depth: Blocks in each.
        num_heads: Heads.
        vocabulary: Tokens.
        dropout: Everywhere.
    """

    def __init__(
        self,
        *,
        width: int = 512,
        depth: int = 6,
        num_heads: int = 8,
        vocabulary: int = 32128,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.encoder_bias = RelativeBias(num_heads, is_causal=False)
        self.encoder = Stack(
            T5Block(width, num_heads, dropout=dropout, is_decoder=False) for _ in range(depth)
        )
        self.encoder_norm = RmsNorm(width)
        self.decoder_bias = RelativeBias(num_heads, is_causal=True)
        self.decoder = Stack(
            T5Block(width, num_heads, dropout=dropout, is_decoder=True) for _ in range(depth)
        )
        self.decoder_norm = RmsNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The logits of the target."""
        memory = self.dropout(self.tokens(source))
        memory = self.dropout(
            self.encoder_norm(self.encoder(memory, self.encoder_bias(source.shape[1])))
        )
        x = self.dropout(self.tokens(target))
        x = self.dropout(
            self.decoder_norm(self.decoder(x, self.decoder_bias(target.shape[1]), memory))
        )
        y: Tensor = self.head(x)
        return y


class Lora(nn.Module):
    """A frozen linear layer plus a trained product of two thin ones (arXiv 2106.09685).

    Args:
        base: The layer.
        rank: Features between the two.
    """

    def __init__(self, base: nn.Linear, *, rank: int = 16) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.dropout = nn.Dropout(0.05)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        return torch.add(self.base(x), self.b(self.a(self.dropout(x))) * 2.0)


def with_lora(model: nn.Module, *, names: tuple[str, ...], rank: int = 16) -> nn.Module:
    """Freeze a model, and give its linear layers of these names adapters."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(module, name, Lora(child, rank=rank))
    return model


class ViT(nn.Module):
    """A vision transformer (arXiv 2010.11929).

    Args:
        width: Features.
        depth: Blocks.
        num_heads: Heads.
        image_size: Pixels along each side.
        patch_size: Pixels along each side of a patch.
        dropout: Everywhere.
        num_classes: Outputs.
    """

    def __init__(
        self, *, width: int = 384, depth: int = 12, num_heads: int = 6, image_size: int = 224,
        patch_size: int = 16, dropout: float = 0.0, num_classes: int = 1000,
    ) -> None:  # fmt: skip
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch_size, patch_size)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (image_size // patch_size) ** 2 + 1, width))
        self.blocks = Stack(PreNormBlock(width, num_heads, dropout=dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        y: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return y


class SwinBlock(nn.Module):
    """Attention inside windows, which every other block shifts (arXiv 2103.14030).

    Args:
        width: Features.
        num_heads: Heads.
        window: Positions along each side of a window.
        shift: By how much the windows are shifted.
        size: Positions along each side of the image.
    """

    index: Tensor
    mask: Tensor | None

    def __init__(self, width: int, num_heads: int, *, window: int, shift: int, size: int) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.norm_1 = nn.LayerNorm(width)
        self.attention = BiasedAttention(width, num_heads, scale=(width // num_heads) ** -0.5)
        self.norm_2 = nn.LayerNorm(width)
        self.feed_forward = feed_forward(width, 4 * width)
        self.bias = nn.Parameter(torch.zeros((2 * window - 1) ** 2, num_heads))
        rows = torch.arange(window).repeat_interleave(window)
        columns = torch.arange(window).repeat(window)
        between_rows, between_columns = (
            each[:, None] - each[None, :] + window - 1 for each in (rows, columns)
        )
        self.register_buffer("index", between_rows * (2 * window - 1) + between_columns)
        mask = (
            torch.zeros((size // window) ** 2, window * window, window * window) if shift else None
        )
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run, on (batch, rows, columns, features)."""
        batch, size, _, width = x.shape
        num_windows = size // self.window
        y = self.norm_1(x)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), dims=(1, 2))
        y = (
            y.view(batch, num_windows, self.window, num_windows, self.window, width)
            .transpose(2, 3)
            .reshape(-1, self.window**2, width)
        )
        bias = (
            self.bias[self.index.flatten()]
            .view(self.window**2, self.window**2, -1)
            .permute(2, 0, 1)
            .unsqueeze(0)
        )
        if self.mask is not None:
            bias = (bias + self.mask[:, None]).repeat(batch, 1, 1, 1)
        y = self.attention(y, y, bias)
        y = (
            y.view(batch, num_windows, num_windows, self.window, self.window, width)
            .transpose(2, 3)
            .reshape(batch, size, size, width)
        )
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), dims=(1, 2))
        x = x + y
        return torch.add(x, self.feed_forward(self.norm_2(x)))


class PatchMerging(nn.Module):
    """Four neighbours become one position.

    Args:
        width: Features.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduce = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Merge."""
        x = torch.cat([x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], dim=-1)
        y: Tensor = self.reduce(self.norm(x))
        return y


class Swin(nn.Module):
    """Swin-T with fewer blocks.

    Args:
        width: Features in the first stage.
        depths: Blocks in each stage.
        image_size: Pixels along each side.
        num_classes: Outputs.
    """

    def __init__(
        self,
        *,
        width: int = 96,
        depths: tuple[int, ...] = (2, 2, 4, 2),
        image_size: int = 224,
        num_classes: int = 1000,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        stages: list[nn.Module] = []
        size = image_size // 4
        for number, depth in enumerate(depths):
            if number:
                stages.append(PatchMerging(width))
                width, size = 2 * width, size // 2
            shifts = [3 if block % 2 and size > 7 else 0 for block in range(depth)]
            stages.append(
                Stack(
                    SwinBlock(width, width // 32, window=7, shift=shift, size=size)
                    for shift in shifts
                )
            )
        self.stages = nn.Sequential(*stages)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        x = self.stages(self.patches(x).permute(0, 2, 3, 1).contiguous())
        y: Tensor = self.head(self.norm(x).mean(dim=(1, 2)))
        return y


class Transposed(nn.Module):
    """Layers that run over the positions instead of the features.

    Args:
        body: The layers.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """Run."""
        y: Tensor = self.body(x.transpose(1, 2)).transpose(1, 2)
        return y


class Mixer(nn.Module):
    """MLP-Mixer (arXiv 2105.01601).

    Args:
        width: Features.
        depth: Blocks.
        image_size: Pixels along each side.
        patch_size: Pixels along each side of a patch.
        num_classes: Outputs.
    """

    def __init__(
        self,
        *,
        width: int = 512,
        depth: int = 8,
        image_size: int = 224,
        patch_size: int = 16,
        num_classes: int = 1000,
    ) -> None:
        super().__init__()
        length = (image_size // patch_size) ** 2
        self.patches = nn.Conv2d(3, width, patch_size, patch_size)
        self.blocks = Stack(
            nn.Sequential(
                Residual(nn.LayerNorm(width), Transposed(feed_forward(length, 256))),
                Residual(nn.LayerNorm(width), feed_forward(width, 2048)),
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        y: Tensor = self.head(self.norm(self.blocks(x)).mean(dim=1))
        return y


class SpeechEncoder(nn.Module):
    """Strided 1-D convolutions over a spectrogram, then attention; letters are found by CTC.

    Args:
        num_bands: Bands of the spectrogram.
        width: Features.
        depth: Blocks.
        num_heads: Heads.
        num_letters: Outputs, the blank included.
    """

    def __init__(
        self,
        *,
        num_bands: int = 80,
        width: int = 384,
        depth: int = 6,
        num_heads: int = 6,
        num_letters: int = 32,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv1d(num_bands, width, 3, padding=1), nn.GELU(),
            nn.Conv1d(width, width, 3, stride=2, padding=1), nn.GELU()
        )  # fmt: skip
        self.blocks = Stack(PreNormBlock(width, num_heads, dropout=0.1) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_letters)

    def forward(self, spectrogram: Tensor) -> Tensor:
        """Logarithms of the letters' probabilities, (length, batch, letters)."""
        x = self.stem(spectrogram).transpose(1, 2)
        x = x + _sinusoids(x)
        y: Tensor = self.head(self.norm(self.blocks(x)))
        return y.log_softmax(dim=-1).transpose(0, 1)


def _sinusoids(x: Tensor) -> Tensor:
    _, length, width = x.shape
    frequencies = torch.exp(
        torch.arange(0, width, 2, device=x.device) * (-math.log(10000.0) / width)
    )
    angles = torch.arange(length, device=x.device)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(x.dtype)


class EncoderTower(nn.Module):
    """Tokens to features, (batch, length, features).

    Args:
        width: Features.
        depth: Blocks.
        num_heads: Heads.
        vocabulary: Tokens.
    """

    def __init__(self, *, width: int, depth: int, num_heads: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = Stack(PreNormBlock(width, num_heads, is_causal=True) for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        """Run."""
        x: Tensor = self.blocks(self.tokens(tokens))
        return x
