"""What a search for a batch size leaves changed in a training.

On a CPU, where values are real; the out-of-memory error is one of ours.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from memcallback import TrainingStep, fit_batch_size, suggest_batch_size

#: More samples than these do not fit.
LIMIT = 1000
NUM_SAMPLES, NUM_FEATURES = 4096, 16
State = dict[str, Tensor]


class Network(LightningModule):
    """Batch norm and dropout, which have a state of their own and draw random numbers.

    Attributes:
        batch_size: Samples in a batch.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(
            nn.Linear(NUM_FEATURES, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(64, 1),
        )
        self.batch_size = 32

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss; memory ends after batch norm."""
        (x,) = batch
        hidden = self.network[:2](x)
        if len(x) > LIMIT:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate memory for {len(x)} samples."
            )
        loss: Tensor = self.network[2:](hidden).square().mean()
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        """Random vectors."""
        return DataLoader(
            TensorDataset(torch.randn(NUM_SAMPLES, NUM_FEATURES)), batch_size=self.batch_size
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters())


def _state(module: Network) -> State:
    """Parameters, buffers and the state of the random numbers."""
    return {
        **{name: value.clone() for name, value in module.state_dict().items()},
        "random numbers": torch.get_rng_state(),
    }


def _differences(before: State, after: State) -> list[str]:
    return [
        f"{name} changed" for name, value in before.items() if not torch.equal(value, after[name])
    ]


def by_suggestion() -> list[str]:
    """What `memcallback.suggest_batch_size` changes."""
    module = Network()
    before = _state(module)
    suggest_batch_size(
        TrainingStep.from_lightning(module, [torch.zeros(32, NUM_FEATURES)]), device="8GiB"
    )
    return _differences(before, _state(module))


def by_fit() -> list[str]:
    """What `memcallback.fit_batch_size` changes."""
    return _by_trainer(lambda trainer, module: fit_batch_size(trainer, module, capacity="1GiB"))


def by_lightning(mode: str) -> list[str]:
    """What Lightning's search changes."""
    return _by_trainer(lambda trainer, module: Tuner(trainer).scale_batch_size(module, mode=mode))


def _by_trainer(search: Callable[[Trainer, Network], object]) -> list[str]:
    module = Network()
    with tempfile.TemporaryDirectory() as root:
        trainer = Trainer(
            accelerator="cpu",
            default_root_dir=root,
            max_steps=100,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        before = _state(module)
        search(trainer, module)
        step = [f"global_step is {trainer.global_step}"] if trainer.global_step else []
        return [
            *_differences(before, _state(module)),
            *step,
            *(f"{path.name} is left" for path in Path(root).rglob("*")),
        ]


def by_accelerate() -> list[str]:
    """What has changed when the attempt that fits begins, for a model made outside the function."""
    from accelerate.utils import find_executable_batch_size  # not on every machine with a device

    module = Network()
    before = _state(module)
    seen: list[State] = []

    def train(batch_size: int, module: Network) -> None:
        seen.append(_state(module))
        module.batch_size = batch_size
        module.training_step(next(iter(module.train_dataloader())), 0)

    find_executable_batch_size(train, starting_batch_size=2 * LIMIT)(module)
    return _differences(before, seen[-1])
