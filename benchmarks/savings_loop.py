"""Training with savings, each turned on as its row of `memcallback.what_if` says.

In a plain loop, or by a Lightning Trainer.

The line of a row is run as it stands wherever it is Python about the model, the optimizer,
`memcallback` or a Trainer; what is to be written elsewhere (`fused=True`, a smaller input) is done
in that place. So nothing of what a prediction did to its `TrainingStep` is shared with what is
measured. The plain loop is that of `training_loop.py`, with `memcallback.amp` and
`memcallback.accumulate` where they are the saving.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from accuracy_configs import OPTIMIZERS, Config, MakeOptimizer
from lightning.pytorch import LightningModule, Trainer
from models.workloads import Batch, Loss
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training_loop import NUM_WINDOWS, to_device

import memcallback
from memcallback import MemoryCallback, MemoryRecorder, Phase, StepMemory
from memcallback.savings.mixed_precision import Amp

#: Savings by name, each with its line.
Lines = Mapping[str, str]
_RATE = "1e-3"
_DEVICE = torch.device("cuda", 0)


class Training:
    """What is trained, on the CPU until it runs, as savings have changed it.

    Args:
        config: Model, batch, loss and optimizer; its precision is that of 32 bits.
        lines: The savings.
        initialise: Whether parameters get random values.
        is_lightning: Whether a Trainer trains.
    """

    def __init__(
        self, config: Config, lines: Lines, *, initialise: bool, is_lightning: bool
    ) -> None:
        parts = config.make(initialise=initialise)
        (self.loss,) = parts.losses
        self.model: nn.Module = Module(parts.model, self.loss) if is_lightning else parts.model
        self.batch = parts.batch
        self.is_lightning = is_lightning
        self.optimizer = config.optimizer
        self.make_optimizer = OPTIMIZERS[config.optimizer]
        self.accumulate = 1
        self.amp: Amp | None = None
        self.trainer_options: dict[str, Any] = {}
        self.callback_options: dict[str, Any] = {}
        for name, line in lines.items():
            _saving(name)(self, name, line)

    def run(self) -> list[StepMemory]:
        """Train; the steps of the last update."""
        torch.cuda.init()
        if isinstance(self.model, Module):
            return self._by_trainer(self.model)
        return self._by_hand()

    def _by_hand(self) -> list[StepMemory]:
        model = self.model.to(_DEVICE)
        optimizer = self.make_optimizer(
            parameter for parameter in model.parameters() if parameter.requires_grad
        )
        recorder = MemoryRecorder(device=_DEVICE)
        if self.accumulate > 1:
            self._accumulated(model, optimizer, recorder)
        else:
            for _ in range(NUM_WINDOWS):
                with recorder.step(self.batch):
                    self._step(model, optimizer, recorder)
        return list(recorder.steps)[-self.accumulate :]

    def _step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, recorder: MemoryRecorder
    ) -> None:
        batch = to_device(self.batch, _DEVICE)
        optimizer.zero_grad()
        with recorder.phase(Phase.FORWARD), self.amp.autocast() if self.amp else nullcontext():
            loss = self.loss(model, batch)
        with recorder.phase(Phase.BACKWARD):
            if self.amp:
                self.amp.backward(loss)
            else:
                loss.backward()
        with recorder.phase(Phase.OPTIMIZER_STEP):
            if self.amp:
                self.amp.step(optimizer)
            else:
                optimizer.step()

    def _accumulated(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, recorder: MemoryRecorder
    ) -> None:
        accumulation = memcallback.accumulate(self.accumulate, model, optimizer, amp=self.amp)
        for on_host in accumulation.over([self.batch] * NUM_WINDOWS * self.accumulate):
            batch = to_device(on_host, _DEVICE)
            with recorder.step(batch):
                with (
                    recorder.phase(Phase.FORWARD),
                    self.amp.autocast() if self.amp else nullcontext(),
                ):
                    loss = self.loss(model, batch)
                with recorder.phase(Phase.BACKWARD):
                    accumulation.backward(loss)
                with recorder.phase(Phase.OPTIMIZER_STEP):
                    accumulation.step()
            del loss, batch

    def _by_trainer(self, module: Module) -> list[StepMemory]:
        module.make_optimizer = self.make_optimizer
        callback = MemoryCallback(predict=False, **self.callback_options)
        with tempfile.TemporaryDirectory() as folder:
            self._fit(module, callback, folder)
        assert callback.recorder is not None
        return list(callback.recorder.steps)[-self.accumulate :]

    def _fit(self, module: Module, callback: MemoryCallback, folder: str) -> None:
        trainer = Trainer(
            default_root_dir=folder,
            accelerator="gpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback],
            **self.trainer_options,
        )
        batches: Any = [self.batch] * NUM_WINDOWS * self.accumulate
        trainer.fit(module, DataLoader(batches, batch_size=None))


class Module(LightningModule):
    """A model with its loss.

    Args:
        model: The model.
        loss_function: The loss.
    """

    def __init__(self, model: nn.Module, loss_function: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss_function = loss_function
        self.make_optimizer: MakeOptimizer = OPTIMIZERS["adamw"]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss."""
        return self.loss_function(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer, of what learns."""
        return self.make_optimizer(
            parameter for parameter in self.parameters() if parameter.requires_grad
        )


# How each saving is had.

Apply = Callable[[Training, str, str], None]


def _saving(name: str) -> Apply:
    return next(apply for pattern, apply in _SAVINGS.items() if re.fullmatch(pattern, name))


def _run(training: Training, line: str, **names: Any) -> dict[str, Any]:
    """Run a line and return the names it defines.

    What it passes to a Trainer or a callback is kept for it.
    """
    known: dict[str, Any] = {
        "torch": torch,
        "memcallback": memcallback,
        "model": training.model,
        "Trainer": lambda **options: training.trainer_options.update(options),
        "MemoryCallback": lambda **options: training.callback_options.update(options),
        **names,
    }
    exec(line, known)
    return known


def _as_it_stands(training: Training, name: str, line: str) -> None:
    _run(training, line)


def _accumulate(training: Training, name: str, line: str) -> None:
    training.accumulate = int(name.split()[1])
    if training.is_lightning:
        _run(training, line)
    size = (
        next(value.shape[0] for value in training.batch.values() if isinstance(value, Tensor))
        // training.accumulate
    )
    training.batch = {name: value[:size] for name, value in training.batch.items()}


def _mixed(training: Training, name: str, line: str) -> None:
    training.amp = _run(training, f"amp = {line}")["amp"]


def _in_half(training: Training, name: str, line: str) -> None:
    _run(training, line)
    dtype = torch.bfloat16 if name == "bf16-true" else torch.float16
    if not training.is_lightning:
        training.batch = _mapped(
            training.batch, lambda value: value.to(dtype) if value.is_floating_point() else value
        )


def _optimizer(training: Training, name: str, line: str) -> None:
    owner, expression = "self" if training.is_lightning else "model", line.replace("...", _RATE)

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        learning = nn.ParameterList(parameters)
        optimizer: torch.optim.Optimizer = _run(
            training, f"optimizer = {expression}", **{owner: learning}
        )["optimizer"]
        return optimizer

    training.make_optimizer = make


def _fused(training: Training, name: str, line: str) -> None:
    training.make_optimizer = OPTIMIZERS[f"{training.optimizer}-fused"]


def _gradients_cleared_early(training: Training, name: str, line: str) -> None:
    hook = _run(training, line)["on_train_batch_start"]
    training.model.on_train_batch_start = hook.__get__(training.model)


def _channels_last(training: Training, name: str, line: str) -> None:
    training.batch["image"] = _run(training, line, images=training.batch["image"])["images"]


def _smaller_images(training: Training, name: str, line: str) -> None:
    sides = training.batch["image"].shape[-2:]
    training.batch = _mapped(
        training.batch,
        lambda value: value[..., ::2, ::2].contiguous() if value.shape[-2:] == sides else value,
    )


def _shorter_sequences(training: Training, name: str, line: str) -> None:
    length = int(name.split()[-1])
    training.batch = _mapped(
        training.batch, lambda value: value[:, :length].contiguous() if value.dim() > 1 else value
    )


def _mapped(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    return {
        name: function(value) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def _of_the_process(training: Training, name: str, line: str) -> None:
    """A setting of the environment in which this process was begun."""


_SAVINGS: dict[str, Apply] = {
    r"accumulate \d+ batches": _accumulate,
    r"(bf)?16-mixed": _mixed,
    r"(bf)?16-true": _in_half,
    r"checkpoint.*|inplace activations|freeze all but the last layer": _as_it_stands,
    r"SGD|SGD with momentum|Adam|Adafactor": _optimizer,
    r"fused optimizer": _fused,
    r"zero_grad before forward": _gradients_cleared_early,
    r"expandable_segments": _of_the_process,
    r"channels_last": _channels_last,
    r"images of half the side": _smaller_images,
    r"sequences of \d+": _shorter_sequences,
}
