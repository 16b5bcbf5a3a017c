"""Predict the memory of training a small GPT, for each of two cards, without a GPU.

The program says on which of them the training fits, and how large the batch may be.

    python examples/predict_without_gpu.py

Nothing is trained and no data is needed: the model lies on the meta device, and one training step
of it is traced. The command line does the same with any function that returns a TrainingStep:

    memcallback predict examples.predict_without_gpu:make_step --device "NVIDIA A100-SXM4-80GB"
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import memcallback as mc

VOCABULARY_SIZE, CONTEXT_LENGTH, BATCH_SIZE = 50_257, 512, 16
NUM_LAYERS, NUM_HEADS, WIDTH = 12, 12, 768
CARDS = ("NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-80GB")
#: How many of the largest holders of memory at the peak are shown.
NUM_CONSUMERS = 3


class Block(nn.Module):
    """Attention and a perceptron of two layers, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.to_heads, self.from_heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, length, width) to the same."""
        query, key, value = (
            self.to_heads(self.norm1(x)).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended_to: Tensor = x + self.from_heads(attended.transpose(1, 2).flatten(2))
        transformed: Tensor = self.perceptron(self.norm2(attended_to))
        return attended_to + transformed


class Gpt(nn.Module):
    """The size of GPT-2 small: 124 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(VOCABULARY_SIZE, WIDTH),
            nn.Embedding(CONTEXT_LENGTH, WIDTH),
        )
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY_SIZE, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """From (batch, length) to (batch, length, vocabulary)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(
            self.norm(self.blocks(self.tokens(tokens) + self.positions(positions)))
        )
        return logits


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """How surprising each next token is."""
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def make_step() -> mc.TrainingStep:
    """One step with AdamW under bf16 autocast."""
    with torch.device("meta"):
        model, tokens = Gpt(), torch.zeros(BATCH_SIZE, CONTEXT_LENGTH + 1, dtype=torch.long)
    return mc.TrainingStep(
        model, tokens, loss=loss_of, optimizer=torch.optim.AdamW, precision="bf16-mixed"
    )


def main() -> None:
    """Predict for each card, and print what a person would ask first."""
    step = make_step()
    num_parameters = sum(parameter.numel() for parameter in step.model.parameters())
    print(
        f"GPT of {num_parameters / 1e6:.0f} million parameters, batch size {BATCH_SIZE}, "
        f"{CONTEXT_LENGTH} tokens, {step.precision}\n"
    )
    print(f"{'':28}{'reserved peak':>15}{'of':>12}{'fits':>7}{'largest batch':>15}")
    for card in CARDS:
        prediction = mc.predict(step, device=card)
        peak, capacity = (
            mc.format_bytes(size or 0)
            for size in (prediction.peak_reserved_bytes, prediction.capacity_bytes)
        )
        fits = "yes" if prediction.fits_without_retry else "no"
        largest = (
            "unknown"
            if prediction.largest_batch_size is None
            else str(prediction.largest_batch_size)
        )
        print(f"{prediction.device_name:28}{peak:>15}{capacity:>12}{fits:>7}{largest:>15}")

    print(f"\nOn the {prediction.device_name}, in each phase of a steady step:")
    for phase, memory in prediction.phases.items():
        print(
            f"  {phase.label:28}{mc.format_bytes(memory.peak_allocated_bytes or 0):>13} allocated "
            "at most"
        )
    print(f"Live at the peak ({prediction.peak_phase.label}):")
    for category, size in sorted(prediction.by_category.items(), key=lambda item: -item[1]):
        print(f"  {category.label:28}{mc.format_bytes(size):>13}")
    print("Most of it is held by:")
    for consumer in prediction.consumers[:NUM_CONSUMERS]:
        print(f"  {consumer.name:44}{mc.format_bytes(consumer.num_bytes):>13}")


if __name__ == "__main__":
    main()
