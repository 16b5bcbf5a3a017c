"""Trainings that are healthy and trainings that are not, small and whole, each named for what it
does; run by test_health_of_trainings.py.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field

import torch
import training
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from memcallback.core.units import MiB

NUM_STEPS = 20  # of an epoch
SAMPLES = 8
FEATURES, CLASSES = training.NUM_FEATURES, training.NUM_CLASSES

GLOBAL_LOSSES = []


@dataclass
class Program:
    """A training.

    Attributes:
        module: Makes the module.
        data: Makes its data.
        options: Of the Trainer.
        names: For a sick one: words that its warning has to have.
        ends_out_of_memory: Whether it does.
    """

    module: type
    data: object = lambda: training.loader(NUM_STEPS, SAMPLES)
    options: dict = field(default_factory=dict)
    names: tuple[str, ...] = ()
    ends_out_of_memory: bool = False


def loss_of(module, batch):
    return nn.functional.cross_entropy(module.network(batch[0]), batch[1])


class Base(training.Automatic):
    """A perceptron."""

    def training_step(self, batch, batch_idx):
        return loss_of(self, batch)


# Healthy ones.


class Convolutions(Base):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(288, CLASSES),
        )


class Lengths(Base):
    """A transformer over sequences; `lengths` gives those of the batches."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.network = nn.Sequential(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True),
            nn.Linear(16, CLASSES),
        )

    def training_step(self, batch, batch_idx):
        return self.network(self.embedding(batch[0])).square().mean()


def sequences(lengths):
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randint(0, 100, (SAMPLES, length), generator=generator),) for length in lengths
    ]
    return DataLoader(batches, batch_size=None)


def random_lengths():
    return sequences(
        torch.randint(2, 200, (NUM_STEPS,), generator=torch.Generator().manual_seed(2)).tolist()
    )


class ChecksPointed(Base):
    def training_step(self, batch, batch_idx):
        hidden = checkpoint(self.network[:3], batch[0].requires_grad_(), use_reentrant=False)
        return nn.functional.cross_entropy(self.network[3](hidden), batch[1])


class Validated(Base):
    def val_dataloader(self):
        return training.loader(2, 512)


class Average(Base):
    """An exponential moving average of the weights."""

    def on_train_start(self):
        self.average = copy.deepcopy(self.network)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for mean, weight in zip(
                self.average.parameters(), self.network.parameters(), strict=True
            ):
                mean.lerp_(weight, 0.01)


class Queue(Base):
    """Features of the last 30 steps, as contrastive learning keeps them."""

    def __init__(self):
        super().__init__()
        self.queue = deque(maxlen=30)

    def training_step(self, batch, batch_idx):
        features = self.network[:3](batch[0])
        self.queue.append(features.detach())
        return nn.functional.cross_entropy(self.network[3](features), batch[1])


class Adversarial(Base):
    """Two optimizers, by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(16, FEATURES), nn.Linear(FEATURES, 1)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        fake = self.generator(torch.randn(SAMPLES, 16, device=self.device))
        for optimizer, loss in (
            (first, lambda: -self.critic(fake).mean()),
            (second, lambda: self.critic(fake.detach()).square().mean()),
        ):
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.generator.parameters()),
            torch.optim.Adam(self.critic.parameters()),
        ]


class CachesData(Base):
    """The batches of the first epoch stay on the device."""

    def __init__(self):
        super().__init__()
        self.cache = {}

    def training_step(self, batch, batch_idx):
        if batch_idx not in self.cache:
            self.cache[batch_idx] = [one.clone() for one in batch]
        return loss_of(self, self.cache[batch_idx])


class LargerBatches(Base):
    """The batch size doubles after each epoch."""

    def train_dataloader(self):
        return training.loader(NUM_STEPS, SAMPLES << self.current_epoch)


class SkipsBatches(Base):
    def training_step(self, batch, batch_idx):
        return None if batch_idx % 5 == 3 else loss_of(self, batch)


class EpochLosses(Base):
    """As Lightning's guide averages a loss over an epoch."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def training_step(self, batch, batch_idx):
        loss = loss_of(self, batch)
        self.outputs.append(loss)
        return loss

    def on_train_epoch_end(self):
        self.log("mean", torch.stack(self.outputs).mean())
        self.outputs.clear()


class Numbers(Base):
    """The losses of all steps, as numbers."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = loss_of(self, batch)
        self.losses.append(loss.item())
        return loss


class DetachedLosses(Numbers):
    """The losses of all steps on the device, which is 512 bytes a step and no graph."""

    def training_step(self, batch, batch_idx):
        loss = loss_of(self, batch)
        self.losses.append(loss.detach())
        return loss


class Logs(Base):
    def training_step(self, batch, batch_idx):
        loss = loss_of(self, batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class CarriesDetached(Base):
    """A recurrent state that is carried over, cut from its graph."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(FEATURES, 32)
        self.head = nn.Linear(32, CLASSES)
        self.state = None

    def training_step(self, batch, batch_idx):
        self.state = self.cell(batch[0], self.state)
        loss = nn.functional.cross_entropy(self.head(self.state), batch[1])
        self.state = self.state.detach()
        return loss


def own(module, **options):
    """A program whose module brings its data."""
    return Program(module, lambda: None, options)


HEALTHY = {
    "perceptron": Program(Base),
    "convolutions": Program(Convolutions),
    "variable lengths": Program(Lengths, random_lengths),
    "lengths that grow": Program(Lengths, lambda: sequences(range(10, 10 + 3 * NUM_STEPS, 3))),
    "accumulation": Program(Base, options={"accumulate_grad_batches": 4}),
    "bfloat16": Program(Base, options={"precision": "bf16-mixed"}),
    "validation with larger batches": Program(Validated),
    "average of weights": Program(Average),
    "queue that fills up": Program(Queue),
    "two optimizers": Program(Adversarial),
    "data cached in the first epoch": Program(CachesData),
    "weight averaging and checkpoints": Program(
        Base,
        options={
            "enable_checkpointing": True,
            "callbacks": [StochasticWeightAveraging(0.01, swa_epoch_start=1), ModelCheckpoint()],
        },
    ),
    "recomputation": Program(ChecksPointed),
    "batches that double each epoch": own(LargerBatches, reload_dataloaders_every_n_epochs=1),
    "steps without a loss": Program(SkipsBatches),
    "losses of an epoch": Program(EpochLosses),
    "losses as numbers": Program(Numbers),
    "detached losses": Program(DetachedLosses),
    "logged losses": Program(Logs),
    "detached recurrent state": Program(CarriesDetached),
}


# Sick ones, on any device: they keep graphs.


class KeepsLosses(Numbers):
    """The classic."""

    def training_step(self, batch, batch_idx):
        loss = loss_of(self, batch)
        self.losses.append(loss)
        return loss


class KeepsLossesInDict(Base):
    def __init__(self):
        super().__init__()
        self.history = {"loss": []}

    def training_step(self, batch, batch_idx):
        loss = loss_of(self, batch)
        self.history["loss"].append(loss)
        return loss


class KeepsLossesGlobally(Base):
    def training_step(self, batch, batch_idx):
        loss = loss_of(self, batch)
        GLOBAL_LOSSES.append(loss)
        return loss


class KeepsOutputs(Base):
    def __init__(self):
        super().__init__()
        self.outputs = []

    def training_step(self, batch, batch_idx):
        scores = self.network(batch[0])
        self.outputs.append(scores)
        return nn.functional.cross_entropy(scores, batch[1])


class RetainsGraph(Base):
    """The sum of all losses so far has its backward pass in each step."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.total = 0.0

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.total = self.total + loss_of(self, batch)
        self.manual_backward(self.total, retain_graph=True)
        optimizer.step()

    def configure_optimizers(self):
        # Those weights alone that the kept graph has not saved.
        return torch.optim.SGD([self.network[3].bias], lr=0.1)


class Metric:
    """A metric that keeps what it is given."""

    def __init__(self):
        self.values = []

    def update(self, value):
        self.values.append(value)


class KeepsInMetric(Base):
    def __init__(self):
        super().__init__()
        self.metric = Metric()

    def training_step(self, batch, batch_idx):
        loss = loss_of(self, batch)
        self.metric.update(loss)
        return loss


class StoresActivations(Base):
    """A forward hook that was written to look at one activation."""

    def __init__(self):
        super().__init__()
        self.activations = []
        self.network[0].register_forward_hook(
            lambda module, args, output: self.activations.append(output)
        )


class CarriesGraph(CarriesDetached):
    """A recurrent state that is carried over with its graph."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.state = self.cell(batch[0], self.state)
        # Only the head is trained: the cell's weights, which the graph saved, stay as they are.
        self.manual_backward(
            nn.functional.cross_entropy(self.head(self.state), batch[1]), retain_graph=True
        )
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD([self.head.bias], lr=0.1)


SICK = {
    "losses on the module": Program(
        KeepsLosses,
        names=("attribute 'losses' of the root module", "loss.item()"),
    ),
    "losses in a dict": Program(
        KeepsLossesInDict,
        names=("attribute 'history' of the root module",),
    ),
    "losses in a global list": Program(
        KeepsLossesGlobally, names=("variable 'GLOBAL_LOSSES' in health_programs.py",)
    ),
    "outputs": Program(
        KeepsOutputs, names=("attribute 'outputs' of the root module", "(8, 10) float32")
    ),
    "a graph that is retained": Program(
        RetainsGraph, names=("attribute 'total' of the root module",)
    ),
    "a metric": Program(
        KeepsInMetric,
        names=("attribute 'metric.values' of the root module",),
    ),
    "a hook": Program(
        StoresActivations, names=("attribute 'activations' of the root module", "(8, 256) float32")
    ),
    "a state with its graph": Program(
        CarriesGraph, names=("attribute 'state' of the root module", "detach()")
    ),
}


# Sick ones on a small CUDA device.


class GrowingCache(Base):
    """4 MiB more in each step, in one tensor."""

    cache = None

    def training_step(self, batch, batch_idx):
        new = torch.zeros(4 * MiB, dtype=torch.uint8, device=self.device)
        self.cache = new if self.cache is None else torch.cat([self.cache, new])
        return loss_of(self, batch)


class KeepsDetached(KeepsOutputs):
    """4 MiB more in each step, without a graph."""

    def training_step(self, batch, batch_idx):
        self.outputs.append(torch.zeros(MiB, device=self.device))
        return loss_of(self, batch)


class LongerAndLonger(Base):
    """Each step needs a block that is a little larger than the free one, and the device has no room
    for both.
    """

    def training_step(self, batch, batch_idx):
        if self.global_step > 2:  # what stays has its place by then
            self.size = getattr(self, "size", 480 * MiB) + 2 * MiB
            torch.empty(self.size, dtype=torch.uint8, device=self.device)
        return loss_of(self, batch)


class Fragmented(Base):
    """Small tensors that stay lie between what is free, on a device that is nearly full."""

    def on_train_start(self):
        pieces = []
        for _ in range(4):
            whole = torch.empty(200 * MiB, dtype=torch.uint8, device=self.device)
            del whole
            pieces += [
                torch.empty(12 * MiB, dtype=torch.uint8, device=self.device) for _ in range(16)
            ]
        self.pieces = pieces[::2]
        self.large = torch.empty(130 * MiB, dtype=torch.uint8, device=self.device)


class NearlyFull(Base):
    def on_train_start(self):
        self.large = torch.empty(920 * MiB, dtype=torch.uint8, device=self.device)


SICK_ON_A_SMALL_DEVICE = {
    "a cache that grows": Program(
        GrowingCache,
        options={"max_epochs": 1000},
        ends_out_of_memory=True,
        names=(
            "attribute 'cache' of the root module: tensors have become larger",
            "the device is full in about",
        ),
    ),
    "outputs without a graph": Program(
        KeepsDetached,
        options={"max_epochs": 1000},
        ends_out_of_memory=True,
        names=("attribute 'outputs' of the root module", "(1048576,) float32", ".cpu()"),
    ),
    "blocks that grow": Program(LongerAndLonger, names=("tried again", "expandable_segments:True")),
    "fragments": Program(Fragmented, names=("between tensors", "expandable_segments:True")),
    "a device that is nearly full": Program(
        NearlyFull, names=("are left on", "5 % should stay free")
    ),
}
