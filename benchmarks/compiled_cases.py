"""The compiled steps of `compiled.py`: small ones of its own, and models of the accuracy proof."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from models.workloads import WORKLOADS
from programs import Program, own_loss
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import memcallback as mc


class Block(nn.Module):
    """A block of a decoder."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and a perceptron."""
        parts = self.project(self.norm(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = self.attend(query, key, value)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        x = x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))
        return x

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        """Attention of each word to the words before it, with dropout."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=0.1)


class Decoder(nn.Module):
    """A decoder of three blocks, with a graph break after each or checkpointing if asked for."""

    def __init__(
        self,
        *,
        breaks: bool = False,
        is_checkpointed: bool = False,
        width: int = 384,
        words: int = 5000,
        block: type[Block] = Block,
    ) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.layers = nn.ModuleList(block(width, 6) for _ in range(3))
        self.norm, self.breaks = nn.LayerNorm(width), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the next words."""
        hidden = self.embed(x)
        for layer in self.layers:
            if self.is_checkpointed:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
            if self.breaks:
                torch._dynamo.graph_break()
        scores: torch.Tensor = self.head(self.norm(hidden))
        return scores


class FlexBlock(Block):
    """A block whose attention has a bias by distance, which `flex_attention` fuses."""

    call: Any = staticmethod(flex_attention)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        """Attention of each word to the words before it."""
        return self.call(query, key, value, score_mod=alibi)


class FlexAloneBlock(FlexBlock):
    """The same, with nothing compiled but that attention."""

    call = staticmethod(torch.compile(flex_attention))


class MaskedBlock(FlexAloneBlock):
    """The same with a mask, which is made in each step."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        """Attention of each word to the words before it."""
        length = query.shape[2]
        mask = create_block_mask(causal, None, None, length, length, device=query.device.type)
        return self.call(query, key, value, block_mask=mask)


def causal(sample: Any, head: Any, query: Any, key: Any) -> Any:
    """Whether a word is seen."""
    return query >= key


def alibi(score: Any, sample: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
    """A score that falls with the distance; none for words that follow."""
    return torch.where(query >= key, score + (key - query) * torch.exp2(-head), -float("inf"))


class Scaled(nn.Module):
    """Linear layers with a Triton kernel of its own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale what is between the layers."""
        from triton_kernel import scale

        hidden: torch.Tensor = self.down(F.gelu(scale(self.up(x), 0.5)))
        return hidden


class Residual(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the classes."""
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        scores: torch.Tensor = self.head(x.mean((2, 3)))
        return scores


def perceptron() -> nn.Module:
    """A perceptron."""
    return nn.Sequential(
        nn.Linear(1024, 4096), nn.GELU(), nn.LayerNorm(4096), nn.Linear(4096, 1024)
    )


def squares(model: Any, batch: torch.Tensor) -> Any:
    """A loss of any output."""
    return model(batch).float().square().mean()


def difference(model: Any, batch: torch.Tensor) -> Any:
    """A loss that calls the model twice, so that gradients of two graphs are added up."""
    return (model(batch) - model(2 * batch)).square().mean()


def next_word(model: Any, batch: torch.Tensor) -> Any:
    """A loss of a decoder."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def compile_layers(model: Any, mode: str | None = None) -> Any:
    """Compile each layer by itself."""
    for layer in model.layers:
        layer.compile(mode=mode)
    return model


def not_compiled(model: Any) -> Any:
    """Leave a model as it is: something else of its step is compiled."""
    return model


def scores_and_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """A product with rows that are padded, and its loss."""
    labels = torch.zeros(batch.shape[0], dtype=torch.long, device=batch.device)
    return F.cross_entropy(model(batch), labels)


#: Compile with CUDA graphs.
with_graphs = partial(torch.compile, mode="reduce-overhead")
#: Compile with kernels of matrix products that are chosen by measuring.
tuned = partial(torch.compile, mode="max-autotune-no-cudagraphs")
tuned_with_graphs = partial(torch.compile, mode="max-autotune")


compiled_cross_entropy = torch.compile(F.cross_entropy)


def compiled_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """A loss that is compiled by itself."""
    return compiled_cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class CompiledAdamW(torch.optim.AdamW):
    """AdamW whose update is compiled."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.step: Any = torch.compile(self.step)


def _images(number: int = 16) -> torch.Tensor:
    return torch.zeros(number, 3, 64, 64)


def _rows(number: int = 4096, width: int = 1024) -> torch.Tensor:
    return torch.zeros(number, width)


def _words(number: int = 8) -> torch.Tensor:
    return torch.zeros(number, 257, dtype=torch.long)


@dataclass(frozen=True)
class Case:
    """A step, what of it is compiled, and the batch of its second update if that is another.

    Attributes:
        compile_update: How the training compiles a function of the whole update; None if it does
            not.
        settings: Values of PyTorch's settings, by their full name.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[Any, Any], torch.Tensor]
    precision: str = "32-true"
    compiled: Callable[[Any], Any] = torch.compile
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
    another: Callable[[], Any] | None = None
    compile_update: Callable[[Any], Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def set_up(self) -> None:
        """Set PyTorch's settings in this process."""
        for name, value in self.settings.items():
            module, _, attribute = name.rpartition(".")
            setattr(import_module(module), attribute, value)

    def step(self) -> mc.TrainingStep:
        """The step, to be predicted."""
        return mc.TrainingStep(
            self.compiled(self.model()),
            self.batch(),
            loss=self.loss,
            optimizer=self.optimizer,
            precision=self.precision,
            compile_update=self.compile_update,
        )


def _decoder(precision: str = "bf16-mixed", **options: Any) -> Case:
    return Case(
        **{"model": Decoder, "batch": _words, "loss": next_word, **options}, precision=precision
    )


def _perceptron(precision: str = "32-true", **options: Any) -> Case:
    return Case(
        **{"model": perceptron, "batch": _rows, "loss": squares, **options}, precision=precision
    )


def _workload(architecture: str, precision: str = "32-true", **options: Any) -> Case:
    workload = WORKLOADS[architecture]
    return Case(workload.model, workload.batch, workload.losses[0], precision, **options)


def _program(name: str, **options: Any) -> Case:
    """A model of a library, with AdamW; its file is imported when it is made."""

    def program() -> Program:
        made: Program = import_module(f"programs.{name}").make()
        return made

    return Case(lambda: program().model, lambda: program().batch, own_loss, "bf16-mixed", **options)


_BUDGET = "torch._functorch.config.activation_memory_budget"
_COMPILED_AUTOGRAD = "torch._dynamo.config.compiled_autograd"

CASES: dict[str, Case] = {
    "perceptron": _perceptron(),
    "perceptron, bf16": _perceptron("bf16-mixed"),
    "perceptron, 16": _perceptron("16-mixed"),
    "perceptron, batch 1000": _perceptron(batch=partial(_rows, 1000)),
    "perceptron, called twice": _perceptron(loss=difference),
    "perceptron, compiled AdamW too": _perceptron(optimizer=CompiledAdamW),
    "language head, whole loss": Case(
        partial(nn.Linear, 256, 5000),
        partial(_rows, 2048, 256),
        torch.compile(scores_and_loss),
        compiled=not_compiled,
    ),
    "language head, whole loss, bf16": Case(
        partial(nn.Linear, 256, 5000),
        partial(_rows, 2048, 256),
        torch.compile(scores_and_loss),
        "bf16-mixed",
        not_compiled,
    ),
    "convolutions": Case(Residual, _images, squares),
    "convolutions, bf16": Case(Residual, _images, squares, "bf16-mixed"),
    "convolutions, 16": Case(Residual, _images, squares, "16-mixed"),
    "decoder": _decoder("32-true"),
    "decoder, bf16": _decoder(),
    "decoder, 16": _decoder("16-mixed"),
    "decoder, bf16, batch 5": _decoder(batch=partial(_words, 5)),
    "decoder, bf16, dynamic": _decoder(compiled=partial(torch.compile, dynamic=True)),
    "decoder, bf16, by layer": _decoder(compiled=compile_layers),
    "decoder, bf16, graph breaks": _decoder(model=partial(Decoder, breaks=True)),
    "decoder, bf16, checkpointing": _decoder(model=partial(Decoder, is_checkpointed=True)),
    "decoder, bf16, checkpointing, by layer": _decoder(
        model=partial(Decoder, is_checkpointed=True), compiled=compile_layers
    ),
    "decoder, bf16, the loss alone": _decoder(loss=compiled_loss, compiled=not_compiled),
    "decoder, bf16, model and loss as one": _decoder(
        loss=torch.compile(next_word), compiled=not_compiled
    ),
    "mlp": _workload("mlp"),
    "mlp, 16": _workload("mlp", "16-mixed"),
    "vae": _workload("vae"),
    "vae, bf16": _workload("vae", "bf16-mixed"),
    "dlrm": _workload("dlrm"),
    "autoencoder, bf16": _workload("autoencoder", "bf16-mixed"),
    "wavenet": _workload("wavenet"),
    "graph-network": _workload("graph-network"),
    "unet, bf16": _workload("unet", "bf16-mixed"),
    "resnet18, bf16": _workload("resnet18", "bf16-mixed"),
    "vit-s16, bf16": _workload("vit-s16", "bf16-mixed"),
    "torch-encoder, bf16": _workload("torch-encoder", "bf16-mixed"),
    "convnext, 16": _workload("convnext", "16-mixed"),
    "gpt2, bf16": _workload("gpt2", "bf16-mixed"),
    "bert, bf16": _workload("bert", "bf16-mixed"),
    "perceptron, graphs": _perceptron(compiled=with_graphs),
    "perceptron, bf16, graphs": _perceptron("bf16-mixed", compiled=with_graphs),
    "perceptron, 16, graphs": _perceptron("16-mixed", compiled=with_graphs),
    "perceptron, batch 1000, graphs": _perceptron(batch=partial(_rows, 1000), compiled=with_graphs),
    "perceptron, called twice, graphs": _perceptron(loss=difference, compiled=with_graphs),
    "language head, whole loss, graphs": Case(
        partial(nn.Linear, 256, 5000),
        partial(_rows, 2048, 256),
        with_graphs(scores_and_loss),
        compiled=not_compiled,
    ),
    "convolutions, graphs": Case(Residual, _images, squares, compiled=with_graphs),
    "convolutions, bf16, graphs": Case(
        Residual, _images, squares, "bf16-mixed", compiled=with_graphs
    ),
    "convolutions, 16, graphs": Case(Residual, _images, squares, "16-mixed", compiled=with_graphs),
    "decoder, graphs": _decoder("32-true", compiled=with_graphs),
    "decoder, bf16, graphs": _decoder(compiled=with_graphs),
    "decoder, 16, graphs": _decoder("16-mixed", compiled=with_graphs),
    "decoder, bf16, batch 5, graphs": _decoder(batch=partial(_words, 5), compiled=with_graphs),
    "decoder, bf16, by layer, graphs": _decoder(
        compiled=partial(compile_layers, mode="reduce-overhead")
    ),
    "decoder, bf16, graph breaks, graphs": _decoder(
        model=partial(Decoder, breaks=True), compiled=with_graphs
    ),
    "decoder, bf16, checkpointing, graphs": _decoder(
        model=partial(Decoder, is_checkpointed=True), compiled=with_graphs
    ),
    "decoder, bf16, model and loss as one, graphs": _decoder(
        loss=with_graphs(next_word), compiled=not_compiled
    ),
    "mlp, graphs": _workload("mlp", compiled=with_graphs),
    "vae, graphs": _workload("vae", compiled=with_graphs),
    "dlrm, graphs": _workload("dlrm", compiled=with_graphs),
    "resnet18, bf16, graphs": _workload("resnet18", "bf16-mixed", compiled=with_graphs),
    "vit-s16, bf16, graphs": _workload("vit-s16", "bf16-mixed", compiled=with_graphs),
    "gpt2, bf16, graphs": _workload("gpt2", "bf16-mixed", compiled=with_graphs),
    "perceptron, tuned": _perceptron(compiled=tuned),
    "perceptron, bf16, tuned, graphs": _perceptron("bf16-mixed", compiled=tuned_with_graphs),
    "decoder, bf16, tuned": _decoder(compiled=tuned),
    "decoder, bf16, tuned, graphs": _decoder(compiled=tuned_with_graphs),
    "perceptron, after another size": _perceptron(another=partial(_rows, 1000)),
    "convolutions, bf16, after another size": Case(
        Residual, _images, squares, "bf16-mixed", another=partial(_images, 10)
    ),
    "decoder, bf16, after another size": _decoder(another=partial(_words, 5)),
    "perceptron, graphs, after another size": _perceptron(
        compiled=with_graphs, another=partial(_rows, 1000)
    ),
    "decoder, bf16, graphs, after another size": _decoder(
        compiled=with_graphs, another=partial(_words, 5)
    ),
    "decoder, bf16, flex attention": _decoder(model=partial(Decoder, block=FlexBlock)),
    "decoder, bf16, flex attention, graphs": _decoder(
        model=partial(Decoder, block=FlexBlock), compiled=with_graphs
    ),
    "perceptron, fullgraph": _perceptron(compiled=partial(torch.compile, fullgraph=True)),
    "perceptron, Triton kernel": _perceptron(model=Scaled),
    "perceptron, bf16, Triton kernel, graphs": _perceptron(
        "bf16-mixed", model=Scaled, compiled=with_graphs
    ),
    "perceptron, whole update": _perceptron(compiled=not_compiled, compile_update=torch.compile),
    "decoder, bf16, whole update": _decoder(compiled=not_compiled, compile_update=torch.compile),
    "decoder, bf16, budget 0.5": _decoder(settings={_BUDGET: 0.5}),
    "decoder, bf16, budget 0": _decoder(settings={_BUDGET: 0.0}),
    "resnet18, bf16, budget 0.5": _workload("resnet18", "bf16-mixed", settings={_BUDGET: 0.5}),
    "perceptron, whole update, compiled autograd": _perceptron(
        compiled=not_compiled, compile_update=torch.compile, settings={_COMPILED_AUTOGRAD: True}
    ),
    "decoder, bf16, whole update, compiled autograd": _decoder(
        compiled=not_compiled, compile_update=torch.compile, settings={_COMPILED_AUTOGRAD: True}
    ),
    "perceptron, whole update, graphs": _perceptron(
        compiled=not_compiled, compile_update=with_graphs
    ),
    "decoder, bf16, whole update, graphs": _decoder(
        compiled=not_compiled, compile_update=with_graphs
    ),
    "decoder, 16, whole update": _decoder(
        "16-mixed", compiled=not_compiled, compile_update=torch.compile
    ),
    "perceptron, whole update, compiled autograd, graphs": _perceptron(
        compiled=not_compiled, compile_update=with_graphs, settings={_COMPILED_AUTOGRAD: True}
    ),
    "convolutions, whole update, compiled autograd": Case(
        Residual,
        _images,
        squares,
        compiled=not_compiled,
        compile_update=torch.compile,
        settings={_COMPILED_AUTOGRAD: True},
    ),
    "decoder, bf16, flex attention by itself": _decoder(
        model=partial(Decoder, block=FlexAloneBlock), compiled=not_compiled
    ),
    "decoder, bf16, flex attention with a mask by itself": _decoder(
        model=partial(Decoder, block=MaskedBlock), compiled=not_compiled
    ),
    "llama, bf16": _workload("llama", "bf16-mixed"),
    "llama, bf16, graphs": _workload("llama", "bf16-mixed", compiled=with_graphs),
    "gpt2-lora, bf16": _workload("gpt2-lora", "bf16-mixed"),
    "mlp-mixer, 16": _workload("mlp-mixer", "16-mixed"),
    "speech-ctc, bf16": _workload("speech-ctc", "bf16-mixed"),
    "mlp-mixer, 16, graphs": _workload("mlp-mixer", "16-mixed", compiled=with_graphs),
    "Qwen3, bf16": _program("qwen3"),
    "masked autoencoder, bf16": _program("vit_mae"),
    "Whisper, bf16": _program("whisper"),
}
