"""Training programs that can be drawn at random, and what must hold of each;
test_generated_programs.py draws them.

A program is plain data, so that one that fails can be written down as a test of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from hand_made import boundaries
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memcallback as mc
from memcallback import MemoryRecorder, Phase, TrainingStep
from memcallback.trace.request import TraceRequest
from memcallback.trace.tracer import trace

NUM_CLASSES = 5
NUM_TOKENS = 30
NUM_CHANNELS = 4
#: From the end of the forward pass until the backward pass autograd keeps the number that the loss
#: is divided by, on the host on any device; a trace has tensors alone.
BYTES_OF_A_NUMBER = 8


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Attributes:
        kind: Of `VECTOR_LAYERS`, `IMAGE_LAYERS` or `SEQUENCE_LAYERS`, after the program's family.
        around: How it is called: as it is, twice (so that its weights are shared), with its input
            added, or computed again in the backward pass.
        is_frozen: Whether its parameters are not trained.
    """

    kind: str
    around: str = "plain"
    is_frozen: bool = False


@dataclass(frozen=True)
class Program:
    """A training program.

    Attributes:
        family: What a batch has: vectors, images or sequences.
        layers: Between the first layer and the head.
        width: Features of what goes through the layers.
        batch_size: Samples.
        batch: How a batch is nested.
        loss: Which.
        optimizer: Of `OPTIMIZERS`.
        accumulate: Batches for each update.
        clips: Whether gradients are clipped.
    """

    family: str
    layers: tuple[Layer, ...]
    width: int = 16
    batch_size: int = 3
    batch: str = "tuple"
    loss: str = "cross entropy"
    optimizer: str = "adam"
    accumulate: int = 1
    clips: bool = False


class Split(nn.Module):
    """Two branches of which one gates the other; the halves are views."""

    def __init__(self, width):
        super().__init__()
        self.both = nn.Linear(width, 2 * width)

    def forward(self, x):
        value, gate = self.both(x).chunk(2, dim=-1)
        return value * torch.sigmoid(gate)


class Attention(nn.Module):
    """Self-attention, written out by `scaled_dot_product_attention`."""

    def __init__(self, width):
        super().__init__()
        self.projections, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        query, key, value = self.projections(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.out(
            F.scaled_dot_product_attention(query, key, value, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


class Statistics(nn.Module):
    """Divides by a running mean, which it keeps in a buffer."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.ones(width))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.detach().abs().flatten(0, -2).mean(0), 0.1)
        return x / (self.mean + 1)


def convolution(width, **options):
    return nn.Conv2d(width, width, 3, padding=1, **options)


VECTOR_LAYERS = {
    "linear": lambda width: nn.Linear(width, width),
    "linear without bias": lambda width: nn.Linear(width, width, bias=False),
    "relu": lambda width: nn.ReLU(),
    "linear and relu in place": lambda width: nn.Sequential(
        nn.Linear(width, width), nn.ReLU(inplace=True)
    ),
    "gelu": lambda width: nn.GELU(),
    "tanh": lambda width: nn.Tanh(),
    "silu": lambda width: nn.SiLU(),
    "dropout": lambda width: nn.Dropout(0.3),
    "layer norm": lambda width: nn.LayerNorm(width),
    "bottleneck": lambda width: nn.Sequential(nn.Linear(width, 7), nn.ELU(), nn.Linear(7, width)),
    "split": Split,
    "softmax": lambda width: nn.Softmax(dim=-1),
    "statistics": Statistics,
}
IMAGE_LAYERS = {
    "convolution": convolution,
    "convolution without bias": lambda width: convolution(width, bias=False),
    "depthwise convolution": lambda width: convolution(width, groups=width),
    "convolution and relu in place": lambda width: nn.Sequential(
        convolution(width), nn.ReLU(inplace=True)
    ),
    "batch norm": lambda width: nn.BatchNorm2d(width),
    "group norm": lambda width: nn.GroupNorm(2, width),
    "relu": lambda width: nn.ReLU(),
    "average": lambda width: nn.AvgPool2d(3, stride=1, padding=1),
    "maximum": lambda width: nn.MaxPool2d(3, stride=1, padding=1),
    "dropout": lambda width: nn.Dropout2d(0.3),
    "down and up": lambda width: nn.Sequential(
        nn.Conv2d(width, width, 2, 2), nn.Upsample(scale_factor=2)
    ),
}
SEQUENCE_LAYERS = {
    name: VECTOR_LAYERS[name]
    for name in ("linear", "gelu", "dropout", "layer norm", "split", "statistics")
} | {
    "attention": Attention,
    "encoder layer": lambda width: nn.TransformerEncoderLayer(
        width, 2, 24, batch_first=True, norm_first=True
    ),
    "convolution": lambda width: nn.Sequential(
        Transposed(), nn.Conv1d(width, width, 3, padding=1), Transposed()
    ),
}
LAYERS = {"vectors": VECTOR_LAYERS, "images": IMAGE_LAYERS, "sequences": SEQUENCE_LAYERS}
AROUND = ("plain", "twice", "residual", "recomputed")
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters),
    "adamw, amsgrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "adam, foreach": lambda parameters: torch.optim.Adam(parameters, foreach=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, centered=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters),
    "adamax": lambda parameters: torch.optim.Adamax(parameters),
}
BATCHES = ("tuple", "list", "dict", "nested", "named")
LOSSES = ("cross entropy", "mean square", "both")


class Transposed(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


class Named(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor


class Model(nn.Module):
    """The first layer, those drawn, and a head."""

    def __init__(self, program):
        super().__init__()
        self.program, width = program, program.width
        self.first = {
            "vectors": lambda: nn.Linear(9, width),
            "images": lambda: nn.Conv2d(3, width, 3, padding=1),
            "sequences": lambda: nn.Embedding(NUM_TOKENS, width),
        }[program.family]()
        self.layers = nn.ModuleList(
            LAYERS[program.family][layer.kind](width) for layer in program.layers
        )
        self.head = nn.Linear(width, NUM_CLASSES)
        for layer, module in zip(program.layers, self.layers, strict=True):
            module.requires_grad_(not layer.is_frozen)

    def forward(self, x):
        x = self.first(x)
        for layer, module in zip(self.program.layers, self.layers, strict=True):
            if layer.around == "recomputed":
                x = checkpoint(module, x, use_reentrant=False)
            elif layer.around == "twice":
                x = module(module(x))
            else:
                x = x + module(x) if layer.around == "residual" else module(x)
        if self.program.family != "vectors":
            x = x.mean((2, 3) if self.program.family == "images" else 1)
        return self.head(x)


def batch_of(program):
    number = program.batch_size
    inputs = {
        "vectors": lambda: torch.randn(number, 9),
        "images": lambda: torch.randn(number, 3, 6, 6),
        "sequences": lambda: torch.randint(0, NUM_TOKENS, (number, 11)),
    }[program.family]()
    targets = torch.randint(0, NUM_CLASSES, (number,))
    return {
        "tuple": (inputs, targets),
        "list": [inputs, targets],
        "dict": {"inputs": inputs, "targets": targets, "name": "a batch"},
        "nested": [{"inputs": inputs}, (targets, 1)],
        "named": Named(inputs, targets),
    }[program.batch]


def parts_of(program, batch):
    if program.batch == "dict":
        return batch["inputs"], batch["targets"]
    return (batch[0]["inputs"], batch[1][0]) if program.batch == "nested" else (batch[0], batch[1])


def loss_of(program):
    def loss(model, batch):
        inputs, targets = parts_of(program, batch)
        scores = model(inputs)
        likelihood = 0.0 if program.loss == "mean square" else F.cross_entropy(scores, targets)
        return (
            likelihood if program.loss == "cross entropy" else likelihood + scores.square().mean()
        )

    return loss


def copy_of(batch):
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, batch)


def step_of(program, model, batch):
    options = {"accumulate": program.accumulate} if program.accumulate > 1 else {}
    return TrainingStep(
        model,
        batch,
        loss=loss_of(program),
        optimizer=OPTIMIZERS[program.optimizer],
        clip_grad_norm=1.0 if program.clips else None,
        **options,
    )


def predicted(program):
    """Bytes alive at the start and the end of each phase, step by step, of two updates."""
    torch.manual_seed(0)
    model = Model(program)
    return boundaries(trace(TraceRequest(step_of(program, model, batch_of(program)), None)))


def train(program, recorder=None):
    """Two updates of the real training.

    Args:
        program: The program.
        recorder: A `MemoryRecorder`; None trains without one.

    Returns:
        The bytes of each parameter and of each loss.
    """
    torch.manual_seed(0)
    model, batch, loss_function = Model(program), batch_of(program), loss_of(program)
    optimizer = OPTIMIZERS[program.optimizer](model.parameters())
    if recorder is not None:
        recorder.watch(model, optimizer, per_module=True)
    losses = []
    for _ in range(2):
        for number in range(program.accumulate):
            fresh = copy_of(batch)
            if number == 0:
                optimizer.zero_grad()
            loss = loss_function(model, fresh) / program.accumulate
            losses.append(loss.detach().numpy().tobytes())
            loss.backward()
            del loss, fresh
        if program.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()], losses


def measured(program):
    """As `predicted`, from PyTorch's own allocation events."""
    torch.manual_seed(0)
    model, batch, loss_function = Model(program), batch_of(program), loss_of(program)
    optimizer = OPTIMIZERS[program.optimizer](model.parameters())
    recorder = MemoryRecorder(model, optimizer, device="cpu")
    steps = []
    for _ in range(2):
        for number in range(program.accumulate):
            fresh = copy_of(batch)
            recorder.begin_step(fresh)
            if number == 0:
                optimizer.zero_grad()
            with recorder.phase(Phase.FORWARD):
                loss = loss_function(model, fresh)
                if program.accumulate > 1:
                    loss = loss / program.accumulate
            with recorder.phase(Phase.BACKWARD):
                loss.backward()
            if number == program.accumulate - 1:
                with recorder.phase(Phase.OPTIMIZER_STEP):
                    if program.clips:
                        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
            del loss, fresh
            step = recorder.end_step()
            sizes = [
                size
                for window in step.windows
                for size in (window.start.allocated_bytes, window.end.allocated_bytes)
            ]
            if program.accumulate > 1:
                sizes[1] -= BYTES_OF_A_NUMBER
                sizes[2] -= BYTES_OF_A_NUMBER
            steps.append(sizes)
    recorder.close()
    return steps


def check_observer(program):
    """Watching a training changes no bit of it, and every step is recorded."""
    recorder = MemoryRecorder(device="cpu")
    with_recorder = train(program, recorder)
    assert len(recorder.steps) == 2 * program.accumulate
    recorder.close()
    assert with_recorder == train(program)


def check_card(program):
    """A prediction for a card holds together, and says something of larger batches too."""
    prediction = mc.predict(step_of(program, Model(program), batch_of(program)), device="24GiB")
    assert prediction.fits
    assert prediction.peak_reserved_bytes >= prediction.peak_allocated_bytes
    assert (
        prediction.at(program.batch_size + 5).peak_allocated_bytes
        >= prediction.peak_allocated_bytes
    )
