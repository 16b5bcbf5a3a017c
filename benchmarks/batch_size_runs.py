"""What `batch_size.py` runs on the device: a Trainer's first updates, and searches.

Each function is for a process of its own, in which nothing has touched the device, and gives what
goes into JSON.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accuracy_configs import Config
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.tuner.tuning import Tuner
from models.workloads import Batch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from training_loop import to_device

from memcallback import TrainingStep, fit_batch_size, suggest_batch_size

#: The warm-up, in which gradients and optimizer state come into being, and five more: by then the
#: allocator has settled.
NUM_UPDATES = 6
#: What a search runs for each size: Lightning's own default, and that of `fit_batch_size`.
NUM_SEARCHED = 3
NUM_SAMPLES = 10**7


class Workload(LightningModule):
    """A configuration of the accuracy proof with a batch size that can be set and is recorded.

    Args:
        config: The configuration, of one loss.
        batch_size: Samples in a batch; by default as many as it has.

    Attributes:
        batch_size: Samples in the batches of the next data loader.
        trials: In order, each batch size at which steps were begun, with how many ended.
    """

    def __init__(self, config: Config, batch_size: int | None = None) -> None:
        super().__init__()
        parts = config.make(initialise=False)
        self.model, self.batch = parts.model, parts.batch
        (self.loss_function,), (self.make_optimizer,) = parts.losses, parts.optimizers
        self.num_samples = next(
            value.shape[0] for value in parts.batch.values() if isinstance(value, Tensor)
        )
        self.batch_size = batch_size or self.num_samples
        self.trials: list[tuple[int, int]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss."""
        return self.loss_function(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return self.make_optimizer(self.model)

    def train_dataloader(self) -> DataLoader[Any]:
        """Batches of zeros, which take no memory on the host until somebody writes there."""
        return DataLoader(
            Numbers(),
            batch_size=self.batch_size,
            collate_fn=lambda numbers: self.sized(len(numbers)),
        )

    def sized(self, batch_size: int) -> Batch:
        """A batch of so many samples."""

        def zeros(value: Any) -> Any:
            is_sized = isinstance(value, Tensor) and value.shape[:1] == (self.num_samples,)
            return (
                torch.zeros((batch_size, *value.shape[1:]), dtype=value.dtype)
                if is_sized
                else value
            )

        return {name: zeros(value) for name, value in self.batch.items()}

    def on_train_epoch_start(self) -> None:
        """A trial begins."""
        self.trials.append((self.batch_size, 0))

    def on_train_batch_end(self, *_: Any) -> None:
        """A step has ended."""
        batch_size, num_steps = self.trials[-1]
        self.trials[-1] = (batch_size, num_steps + 1)


class Numbers(Dataset[int]):
    """As many as there are samples."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> int:
        return number


def trainer(config: Config, max_steps: int, root: str | None = None) -> Trainer:
    """A Trainer that trains and writes nothing."""
    precision: Any = config.precision
    return Trainer(
        accelerator="gpu",
        devices=1,
        precision=precision,
        max_steps=max_steps,
        default_root_dir=root,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Training for `NUM_UPDATES` updates at a batch size.

    Attributes:
        batch_size: Samples in the batch.
        ran: Whether it went to its end; else memory ran out.
        num_retries: How often the allocator gave back its cache and tried again.
        num_last_retries: The same in the last update.
        num_ooms: How often it gave up. cuDNN's convolutions then take an algorithm with a smaller
            workspace.
    """

    batch_size: int
    ran: bool
    num_retries: int
    num_last_retries: int
    num_ooms: int


def try_out(config: Config, batch_size: int) -> dict[str, Any]:
    """A `Trial`."""
    module, counts = Workload(config, batch_size), [0]
    module.on_train_batch_end = lambda *_: counts.append(_num("num_alloc_retries"))  # type: ignore[method-assign]
    with suppress(torch.OutOfMemoryError):
        trainer(config, NUM_UPDATES).fit(module)
    ran = len(counts) > NUM_UPDATES
    return asdict(
        Trial(
            batch_size=batch_size,
            ran=ran,
            num_retries=_num("num_alloc_retries"),
            num_last_retries=counts[-1] - counts[-2] if ran else 0,
            num_ooms=_num("num_ooms"),
        )
    )


def _num(name: str) -> int:
    return int(torch.cuda.memory_stats().get(name, 0))


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """What `memcallback.suggest_batch_size` says.

    Attributes:
        size: With its default headroom.
        limit_without_retry: Without any.
        limit: The same, where the allocator may give back its cache and try again.
    """

    size: int
    limit_without_retry: int | None
    limit: int | None


def suggested(config: Config) -> dict[str, Any]:
    """A `Suggestion` for the device of this process."""
    module = Workload(config)
    step = TrainingStep.from_lightning(module, module.batch, precision=config.precision)
    advice = suggest_batch_size(step, device="cuda", multiple_of=1)
    return asdict(
        Suggestion(
            size=advice.batch_size,
            limit_without_retry=advice.limit_without_retry,
            limit=advice.limit,
        )
    )


# Those who try.


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search on the device came to.

    Attributes:
        size: The batch size that it gives.
        trials: The batch sizes that it ran, with how many steps ended.
        num_ooms: How many of these trials ended for lack of memory.
        changed: What of the training was not as before.
    """

    size: int
    trials: list[tuple[int, int]]
    num_ooms: int
    changed: list[str]


def _found(size: int, trials: list[tuple[int, int]], changed: list[str]) -> dict[str, Any]:
    return asdict(
        Found(
            size=size,
            trials=trials,
            num_ooms=sum(num_steps < NUM_SEARCHED for _, num_steps in trials),
            changed=changed,
        )
    )


def _left(loop: Trainer, root: str) -> list[str]:
    step = [f"global_step is {loop.global_step}"] if loop.global_step else []
    return [*step, *(f"{path.relative_to(root)} is left" for path in Path(root).rglob("*"))]


def by_lightning(config: Config, mode: str) -> dict[str, Any]:
    """Lightning's `Tuner.scale_batch_size` (its `BatchSizeFinder`) with its own defaults."""
    module = Workload(config)
    with tempfile.TemporaryDirectory() as root:
        loop = trainer(config, 100, root)
        size = Tuner(loop).scale_batch_size(module, mode=mode)
        assert size is not None
        return _found(size, module.trials, _left(loop, root))


def by_fit(config: Config) -> dict[str, Any]:
    """`memcallback.fit_batch_size`, with its own defaults but any whole number."""
    module = Workload(config)
    with tempfile.TemporaryDirectory() as root:
        loop = trainer(config, 100, root)
        fitted = fit_batch_size(loop, module, multiple_of=1)
        trials = [
            (trial.batch_size, 0 if trial.is_out_of_memory else NUM_SEARCHED)
            for trial in fitted.trials
        ]
        return _found(fitted.batch_size, trials, _left(loop, root))


def by_accelerate(config: Config, starting_batch_size: int) -> dict[str, Any]:
    """Accelerate's `find_executable_batch_size` around a plain loop.

    Model and optimizer are made inside, as Accelerate's documentation shows it.
    """
    from accelerate.utils import find_executable_batch_size  # not on every machine with a device

    trials: list[tuple[int, int]] = []

    def train(batch_size: int) -> int:
        trials.append((batch_size, 0))
        module = Workload(config, batch_size).cuda()
        optimizer = module.configure_optimizers()
        scaler = torch.amp.GradScaler("cuda", enabled=config.has_grad_scaler)
        for number in range(NUM_SEARCHED):
            batch = to_device(module.sized(batch_size), torch.device("cuda"))
            with (
                torch.autocast("cuda", config.autocast_dtype)
                if config.autocast_dtype
                else nullcontext()
            ):
                loss = module.training_step(batch, number)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            trials[-1] = (batch_size, number + 1)
        return batch_size

    search: Callable[[], int] = find_executable_batch_size(
        train, starting_batch_size=starting_batch_size
    )
    return _found(search(), trials, [])
