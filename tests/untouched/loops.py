"""The loops that train a program's module, each with and without memcallback.

Each takes the program, the device, whether memcallback watches, a dictionary for what comes out,
which is filled however the loop ends, and the seconds that a prediction may take, None for the
default.
"""

from __future__ import annotations

import lightning.pytorch as L
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from parts import NUM_EPOCHS, Samples, loader


class Kept(Logger):
    """Keeps what is logged, but for the callback's own values."""

    name, version = "kept", 0

    def __init__(self):
        super().__init__()
        self.lines = []

    def log_hyperparams(self, *_):
        pass

    def log_metrics(self, metrics, step=None):
        own = {name: value for name, value in metrics.items() if not name.startswith("memory")}
        if own:
            self.lines.append([step, own])


def _kind(prediction):
    """How a step was predicted: by its trace, by the textbook estimate, or not at all."""
    return "not" if prediction is None else prediction.source


def _be_patient_for(seconds):
    """How long the end of a training waits for a prediction that has not come."""
    if seconds is not None:
        from memcallback.record import monitor

        monitor.PATIENCE_S = seconds


def batches_of(program):
    return program.batches() if hasattr(program, "batches") else loader()


def fit(program, device, is_watched, out, patience_s):
    """`Trainer(callbacks=[MemoryCallback()]).fit`, with nothing switched off."""
    callbacks = []
    if is_watched:
        from memcallback import MemoryCallback

        callbacks = [MemoryCallback()]
        _be_patient_for(patience_s)
    logger, model = Kept(), program.Model()
    trainer = L.Trainer(
        max_epochs=NUM_EPOCHS,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        logger=[TensorBoardLogger("."), logger],
        log_every_n_steps=2,
        callbacks=[*callbacks],
    )
    try:
        trainer.fit(model, batches_of(program))
    finally:
        out["model"], out["optimizers"] = model, trainer.optimizers
        out["logged"] = logger.lines
        out["metrics"] = [trainer.callback_metrics, trainer.logged_metrics]
        out["ended"] = [str(trainer.state.status), trainer.global_step, trainer.current_epoch]
        out["predicted"] = [_kind(callback.prediction) for callback in callbacks]


def fit_twice(program, device, is_watched, out, patience_s):
    """Two fits in one process: before the second one the device has trained."""
    first, second = {}, {}
    fit(program, device, is_watched, first, patience_s)
    fit(program, device, is_watched, second, patience_s)
    out["predicted"] = first.pop("predicted") + second.pop("predicted")
    out.update(first=first, second=second)


def predict(program, device, is_watched, out, patience_s):
    """A plain loop, with `mc.predict` before its first step and after its last one."""
    model = program.Model().to(device)
    optimizer = model.configure_optimizers()
    out.update(model=model, optimizer=optimizer, losses=[], predicted=[])

    def prediction_of(batch):
        import memcallback as mc

        step = mc.TrainingStep(model, batch, loss=_loss, optimizer=optimizer)
        limit = {} if patience_s is None else {"timeout_s": patience_s}
        try:
            return _kind(mc.predict(step, device=device, **limit))
        except mc.PredictionError as error:
            out.setdefault("refused", []).append(str(error))
            return "refused"

    first = next(iter(loader()))
    if is_watched:
        out["predicted"].append(prediction_of(first))
    for batch in batches_of(program):
        _update(model, optimizer, [part.to(device) for part in batch], out["losses"])
    if is_watched:
        out["predicted"].append(prediction_of(first))


def log(program, device, is_watched, out, patience_s):
    """A plain loop with a `MemoryLog`."""
    model = program.Model().to(device)
    optimizer = model.configure_optimizers()
    out.update(model=model, optimizer=optimizer, losses=[], predicted=[])
    first = next(iter(loader()))
    if not is_watched:
        for batch in batches_of(program):
            _update(model, optimizer, [part.to(device) for part in batch], out["losses"])
        return
    import memcallback as mc

    _be_patient_for(patience_s)
    recorder = mc.MemoryRecorder(model.net, optimizer, device=device)
    step = mc.TrainingStep(model, first, loss=_loss, optimizer=optimizer)
    with mc.MemoryLog(recorder, step) as memory_log, recorder.watch():
        for batch in batches_of(program):
            _update(model, optimizer, [part.to(device) for part in batch], out["losses"])
    out["predicted"].append(_kind(memory_log.prediction))


def _loss(model, batch):
    return model.loss(*batch)


def _update(model, optimizer, batch, losses):
    optimizer.zero_grad()
    loss = model.loss(*batch)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())


class Named(torch.nn.Module):
    """A program's module as a Trainer of transformers calls it."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, features, labels):
        return {"loss": self.module.loss(features, labels)}


def huggingface(program, device, is_watched, out, patience_s):
    """A Trainer of transformers with `MemoryTrainerCallback`."""
    from transformers import Trainer, TrainingArguments

    callbacks = []
    if is_watched:
        from memcallback import MemoryTrainerCallback

        callbacks = [MemoryTrainerCallback()]
        _be_patient_for(patience_s)
    trainer = Trainer(
        model=Named(program.Model()),
        args=TrainingArguments(
            output_dir="out",
            per_device_train_batch_size=4,
            num_train_epochs=NUM_EPOCHS,
            report_to="none",
            save_strategy="no",
            logging_steps=2,
            use_cpu=device == "cpu",
        ),
        train_dataset=[{"features": one, "labels": label} for one, label in Samples()],
        callbacks=callbacks,
    )
    try:
        trainer.train()
    finally:
        out["model"], out["optimizer"] = trainer.model, trainer.optimizer
        timed = {"train_runtime", "train_samples_per_second", "train_steps_per_second"}
        out["logged"] = [
            {name: value for name, value in line.items() if name not in timed}
            for line in trainer.state.log_history
        ]
        out["predicted"] = [_kind(callback.prediction) for callback in callbacks]


LOOPS = {one.__name__: one for one in (fit, fit_twice, predict, log, huggingface)}
