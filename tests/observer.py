"""Trains with or without the callback and gives everything that must not differ; run by
test_observer.py and test_recorder_cuda.py.
"""

from __future__ import annotations

import random

import numpy as np
import torch
import training
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers.logger import Logger
from torch import nn

from memcallback import MemoryCallback


class Memo(Logger):
    """Keeps what the user logs."""

    name = version = "memo"

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        own = {name: value for name, value in metrics.items() if not name.startswith("memory")}
        if own:
            self.rows.append((step, own))

    def log_hyperparams(self, *args, **kwargs):
        pass


#: Tensors that a module uses and does not own.
AVERAGE = torch.zeros(training.NUM_FEATURES)
TEACHER = nn.BatchNorm1d(training.NUM_FEATURES)


class UsesEveryRandomSource(training.Automatic):
    """Draws from Python's, numpy's and torch's generators in each step, counts its calls, and
    changes tensors outside of itself.
    """

    def __init__(self):
        super().__init__(lambda parameters, lr: torch.optim.Adam(parameters, lr=lr))
        self.norm = nn.BatchNorm1d(training.NUM_FEATURES)
        self.calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        features, classes = batch
        AVERAGE.mul_(0.9).add_(1)
        TEACHER(features.detach().cpu())
        noise = torch.randn_like(features) * random.random() * float(np.random.rand())
        loss = nn.functional.cross_entropy(self.network(self.norm(features + noise)), classes)
        self.log("loss", loss)
        self.log("calls", float(self.calls))
        return loss


def run(tmp_path, *, with_callback, accelerator, callback=None, prepare=None, **options):
    """Everything that a training leaves: weights, optimizer state, random states, logged values,
    checkpoint. `prepare` is called with the module before.
    """
    seed_everything(1234, verbose=False)
    AVERAGE.zero_()
    TEACHER.reset_running_stats()
    module, memo = UsesEveryRandomSource(), Memo()
    if prepare:
        prepare(module)
    callbacks = [callback or MemoryCallback()] if with_callback else []
    loop = training.trainer(
        tmp_path, callbacks, accelerator=accelerator, max_epochs=2, logger=memo, **options
    )
    loop.fit(module, training.loader(6), training.loader(2))
    loop.save_checkpoint(tmp_path / f"{with_callback}.ckpt")
    checkpoint = torch.load(tmp_path / f"{with_callback}.ckpt", weights_only=False)
    checkpoint["callbacks"] = {
        name: state
        for name, state in checkpoint["callbacks"].items()
        if "MemoryCallback" not in name
    }
    return {
        "checkpoint": checkpoint,
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "logged": memo.rows,
        "callback_metrics": dict(loop.callback_metrics),
        "calls": module.calls,
        "outside": (
            AVERAGE.clone(),
            {name: value.clone() for name, value in TEACHER.state_dict().items()},
        ),
        "threads": (
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.is_autocast_enabled("cpu"),
        ),
    }


def differences(left, right, path=""):
    """Paths at which two nestings differ, bit by bit."""
    if isinstance(left, torch.Tensor):
        same = (
            isinstance(right, torch.Tensor)
            and left.dtype == right.dtype
            and torch.equal(left, right)
        )
        return [] if same else [path]
    if isinstance(left, np.ndarray):
        return [] if np.array_equal(left, right) else [path]
    if isinstance(left, dict):
        if not isinstance(right, dict) or left.keys() != right.keys():
            return [f"{path}: keys"]
        return [
            found for key in left for found in differences(left[key], right[key], f"{path}/{key}")
        ]
    if isinstance(left, (list, tuple)):
        if type(left) is not type(right) or len(left) != len(right):
            return [f"{path}: length"]
        return [
            found
            for i, pair in enumerate(zip(left, right, strict=True))
            for found in differences(*pair, f"{path}/{i}")
        ]
    return [] if left == right else [path]
