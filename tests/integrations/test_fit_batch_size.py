"""The batch size that is found was run, is the largest, and nothing else has changed."""

from __future__ import annotations

import json
import queue
import random
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import training
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from observer import Memo, differences
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric

import memcallback as mc
from memcallback.core.units import MiB

TESTS = Path(__file__).parents[1]
NUM_SAMPLES = 100_000
#: Little validation, for the tests' sake.
SHORT = {"limit_val_batches": 1, "num_sanity_val_steps": 1}


class Samples(Dataset):
    """Many samples that take no memory."""

    def __init__(self, num_samples=NUM_SAMPLES):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return torch.full((training.NUM_FEATURES,), index % 7 / 7), index % training.NUM_CLASSES

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Sized(training.Automatic):
    """A module that makes its loaders with its attribute batch_size."""

    def __init__(self, batch_size=8, num_samples=NUM_SAMPLES, **options):
        super().__init__(**options)
        self.batch_size = batch_size
        self.num_samples = num_samples

    def train_dataloader(self):
        return DataLoader(Samples(self.num_samples), self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Samples(self.num_samples), self.batch_size)


class Stateful(Sized):
    """Changes whatever a module can: buffers, metrics, counters, lists, every random generator, its
    own hooks.
    """

    def __init__(self, **options):
        super().__init__(**options)
        self.norm = nn.BatchNorm1d(training.NUM_FEATURES)
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.metric = MeanMetric()
        self.calls = 0
        self.outputs = []
        self.generator = torch.Generator().manual_seed(5)

    def training_step(self, batch, batch_idx):
        self.calls += 1
        self.seen += 1
        features, classes = batch
        noise = (
            torch.randn_like(features)
            * random.random()
            * float(np.random.rand())
            * torch.rand(1, generator=self.generator)
        )
        loss = nn.functional.cross_entropy(self.network(self.norm(features + noise)), classes)
        self.metric.update(loss.detach())
        self.outputs.append(loss.detach())
        self.log("loss", loss)
        self.log("metric", self.metric)
        self.logger.experiment.add_scalar("loss", loss)
        return loss

    def on_train_epoch_end(self):
        self.outputs.clear()
        self.epoch_ended = True

    def on_train_end(self):
        raise AssertionError("training has not ended")

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}
        ]


class Heavy(Sized):
    """Holds 2 MiB."""

    def __init__(self, **options):
        super().__init__(**options)
        self.heavy = nn.Parameter(torch.zeros(2 * MiB // 4))


class RunsOut(Sized):
    """Memory runs out in the backward pass of a batch that is larger than it should be."""

    limit = 60
    error: BaseException = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB."
    )

    def on_after_backward(self):
        if self.num_in_batch > self.limit:
            raise self.error

    def training_step(self, batch, batch_idx):
        self.num_in_batch = len(batch[0])
        return super().training_step(batch, batch_idx)


def fit(
    tmp_path,
    module=None,
    *,
    capacity="4MiB",
    callbacks=(),
    data=None,
    trainer_options=None,
    **options,
):
    loop = training.trainer(tmp_path, callbacks, **(SHORT | (trainer_options or {})))
    return mc.fit_batch_size(loop, module or Sized(), data, capacity=capacity, **options), loop


# What is found.


def test_the_predicted_size_is_run_once_and_is_the_largest(tmp_path):
    module = Sized()
    found, _ = fit(tmp_path, module)
    (trial,) = found.trials
    assert (
        found.batch_size
        == module.batch_size
        == trial.batch_size
        == found.predicted_batch_size
        > 700
    )
    assert found.previous_batch_size == 8
    assert (found.num_ooms, found.corrections, found.counts) == (0, (), "allocated")
    budget = int(4 * MiB * 0.95)
    assert trial.budget_bytes == int(4 * MiB * 0.975)
    assert 0.98 * budget < trial.peak_bytes <= budget
    assert found.batch_size % 8 == 0
    assert fit(tmp_path, multiple_of=100)[0].batch_size % 100 == 0
    # One step larger takes more than there is.
    more, _ = fit(
        tmp_path,
        Sized(batch_size=int(1.1 * found.batch_size)),
        capacity="1GiB",
        max_batch_size=int(1.1 * found.batch_size),
    )
    assert more.trials[-1].peak_bytes > budget


def test_a_data_module_is_set(tmp_path):
    class Data(LightningDataModule):
        def __init__(self):
            super().__init__()
            self.batch_size = 8

        def setup(self, stage):
            self.samples = Samples()

        def train_dataloader(self):
            return DataLoader(self.samples, self.batch_size)

    data = Data()
    module = training.Automatic()
    found, loop = fit(tmp_path, module, data=data)
    assert data.batch_size == found.batch_size > 700
    assert "samples" not in vars(data)
    loop.fit_loop.epoch_loop.max_steps = 1
    loop.fit(module, data)
    assert loop.train_dataloader.batch_size == found.batch_size


def test_hyperparameters_are_set(tmp_path):
    class Hyper(training.Automatic):
        def __init__(self, batch_size=8):
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self):
            return DataLoader(Samples(), self.hparams.batch_size)

    module = Hyper()
    found, _ = fit(tmp_path, module)
    assert module.hparams.batch_size == found.batch_size > 700
    assert not hasattr(module, "batch_size")


def test_loaders_that_were_given_come_back_larger(tmp_path):
    generator = torch.Generator().manual_seed(7)
    loader = DataLoader(Samples(), 8, shuffle=True, generator=generator, drop_last=True)
    module = training.Automatic()
    state = generator.get_state()
    found, _ = fit(
        tmp_path, module, train_dataloaders=loader, val_dataloaders=DataLoader(Samples(100), 4)
    )
    assert torch.equal(generator.get_state(), state)
    assert found.train_dataloaders.batch_size == found.batch_size > 700
    assert (loader.batch_size, loader.batch_sampler.batch_size) == (8, 8)
    assert found.train_dataloaders.sampler is loader.sampler
    assert not hasattr(module, "batch_size")


def test_the_data_are_a_limit_and_that_is_said(tmp_path):
    found, _ = fit(tmp_path, Sized(num_samples=56))
    assert found.batch_size == 56
    assert found.notes == ("The training data have 56 samples: no larger batch was tried.",)
    assert found.trials[0].peak_bytes < found.trials[0].budget_bytes / 2


def test_a_batch_size_above_the_number_of_samples_is_no_mistake(tmp_path):
    found, _ = fit(tmp_path, Sized(batch_size=64, num_samples=60))
    assert (found.batch_size, found.previous_batch_size) == (56, 64)


def test_a_largest_size_is_kept_to(tmp_path):
    found, _ = fit(tmp_path, max_batch_size=500)
    assert found.batch_size == 496
    assert found.notes == ("max_batch_size is 500: no larger batch was tried.",)


def test_accumulation_clipping_and_validation_are_part_of_a_trial(tmp_path):
    class Greedy(Sized):
        """Validation takes more than training."""

        def validation_step(self, batch, batch_idx):
            torch.empty(len(batch[0]) * 8192, dtype=torch.uint8)

    plain, _ = fit(
        tmp_path, trainer_options={"accumulate_grad_batches": 3, "gradient_clip_val": 1.0}
    )
    found, _ = fit(
        tmp_path, Greedy(), trainer_options={"accumulate_grad_batches": 3, "gradient_clip_val": 1.0}
    )
    assert found.has_validation
    assert found.batch_size < plain.batch_size / 1.5
    assert found.trials[0].batch_size == plain.batch_size
    assert [trial.fits for trial in found.trials] == [False, True]
    assert 0.9 * found.trials[-1].budget_bytes < found.trials[-1].peak_bytes
    assert "more than the 3.90 MiB that may be used" in found.corrections[0]


def test_a_step_that_cannot_be_traced_is_estimated_and_the_estimate_corrected(tmp_path):
    class Untraceable(Sized):
        def training_step(self, batch, batch_idx):
            if isinstance(batch[0], torch._subclasses.FakeTensor):
                raise ValueError("no fakes")
            return super().training_step(batch, batch_idx)

    with pytest.warns(mc.MemoryWarning, match="no fakes.*The textbook estimate is used instead"):
        found, _ = fit(tmp_path, Untraceable())
    first, *_, last = found.trials
    assert first.batch_size == found.predicted_batch_size
    assert last.batch_size == found.batch_size > 1.1 * first.batch_size
    assert 0.8 * last.budget_bytes < last.peak_bytes <= last.budget_bytes
    assert len(found.trials) <= 4


def test_a_search_without_a_prediction_says_why_and_names_no_setting_that_it_lacks(
    tmp_path, monkeypatch
):
    def unknown(*args, **options):
        raise mc.PredictionError("No step is known.")

    monkeypatch.setattr("memcallback.integrations.lightning.fit.search.step_of", unknown)
    with pytest.warns(
        mc.MemoryWarning, match=r"^The search goes on without a prediction\. No step is known\.$"
    ):
        found, _ = fit(tmp_path)
    assert found.predicted_batch_size is None
    assert found.trials[0].batch_size == 8


def test_without_any_prediction_the_search_starts_from_the_size_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "memcallback.integrations.lightning.fit.search.predict_or_warn",
        lambda *args, **kwargs: None,
    )
    found, _ = fit(tmp_path)
    assert found.predicted_batch_size is None
    assert found.trials[0].batch_size == 8
    assert found.trials[0].predicted_bytes is None
    assert (
        0.8 * found.trials[-1].budget_bytes
        < found.trials[-1].peak_bytes
        <= found.trials[-1].budget_bytes
    )
    assert len(found.trials) <= 6


@pytest.mark.parametrize("kind", [training.ManualTwoOptimizers, training.ManualRaw])
def test_modules_that_optimize_by_hand_are_fitted(tmp_path, kind):
    module = kind()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    found, _ = fit(tmp_path, module, train_dataloaders=DataLoader(Samples(), 8))
    assert found.batch_size > 700
    assert differences(module.state_dict(), weights) == []


def test_worker_processes_are_ended(tmp_path):
    loader = DataLoader(Samples(), 8, num_workers=1, persistent_workers=True)
    found, _ = fit(tmp_path, training.Automatic(), train_dataloaders=loader, max_batch_size=64)
    assert found.batch_size == 64
    assert loader._iterator is None
    assert not torch.multiprocessing.active_children()


# What happens when memory runs out.


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("MPS backend out of memory (MPS allocated: 6.04 GB)"),
        MemoryError(),
    ],
    ids=["cuda", "cublas", "mps", "host"],
)
def test_an_error_for_want_of_memory_is_caught_and_a_smaller_size_found(tmp_path, error):
    class Here(RunsOut):
        pass

    Here.error = error
    module = Here()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    found, loop = fit(tmp_path, module)
    assert module.batch_size == found.batch_size
    assert found.batch_size == 56
    assert found.trials[0].is_out_of_memory
    assert found.trials[-1].batch_size <= 2 * found.batch_size
    assert found.num_ooms >= 1
    assert "ran out of memory, and the error was caught" in found.to_text()
    assert differences(module.state_dict(), weights) == []
    assert loop.global_step == 0


def test_another_error_of_the_step_is_raised_and_everything_is_as_before(tmp_path):
    class Broken(RunsOut):
        error = ZeroDivisionError("in the step")

    module, loop = Broken(), training.trainer(tmp_path)
    before = everything(loop, module)
    with pytest.raises(ZeroDivisionError, match="in the step"):
        mc.fit_batch_size(loop, module, capacity="4MiB")
    assert changes(before, everything(loop, module)) == []


def test_where_not_one_sample_fits_it_is_said_what_would_help(tmp_path):
    with pytest.raises(
        RuntimeError,
        match=r"No batch size fits CPU: 1 is the smallest that was tried\. It takes 4\d\d\.\d\d "
        r"KiB, and 195\.00 KiB may be used of 200\.00 KiB\. "
        r"At the predicted peak, parameters, gradients and optimizer state are .* a smaller model, "
        r"an optimizer with less state",
    ):
        fit(tmp_path, capacity="200KiB")
    with pytest.raises(RuntimeError, match=r"It ran out of memory, with 3\.90 MiB to use"):
        fit(tmp_path, type("Never", (RunsOut,), {"limit": 0})())


# Nothing else has changed.


def everything(*roots):
    """Path -> what is there, for all that can be reached: values, and which object it is."""
    found, seen, pending = {}, set(), [(str(position), root) for position, root in enumerate(roots)]
    while pending:
        path, value = pending.pop()
        atom = value is None or isinstance(
            value, (bool, int, float, str, bytes, type, torch.dtype, torch.device)
        )
        found[path] = repr(value) if atom else (type(value).__name__, id(value))
        if atom or id(value) in seen:
            continue
        seen.add(id(value))
        keep.append(value)
        if isinstance(value, torch.Tensor):
            found[f"{path}#"] = (
                value.detach().clone(),
                value.requires_grad,
                id(value.grad),
                value.data_ptr(),
            )
        elif isinstance(value, torch.Generator):
            found[f"{path}#"] = value.get_state()
        elif isinstance(value, dict):
            pending += [
                (f"{path}[{key!r}]" if isinstance(key, str) else f"{path}[{n}]", one)
                for n, (key, one) in enumerate(value.items())
            ]
        elif isinstance(value, (list, tuple)):
            pending += [(f"{path}[{n}]", one) for n, one in enumerate(value)]
        elif isinstance(value, set):
            found[f"{path}#"] = sorted(map(str, value))
        elif type(value).__module__.startswith(
            ("lightning", "torch.", "torchmetrics", "test_", "training", "observer")
        ):
            pending += (
                [(f"{path}.{name}", one) for name, one in vars(value).items()]
                if hasattr(value, "__dict__")
                else []
            )
    return found | {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }


#: What was looked at stays alive, so that an id means one object.
keep: list[object] = []


def changes(before, after):
    if before.keys() != after.keys():
        return sorted(before.keys() ^ after.keys())
    return [path for path in before if differences(before[path], after[path])]


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


class Counts(Callback):
    """Notes the hooks that are called."""

    def __init__(self):
        self.hooks = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            vars(self)["hooks"].append(name)
        return super().__getattribute__(name)


CASES = {
    "fp32": lambda: {},
    "accumulation": lambda: {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "16-mixed": lambda: {
        "plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
    },
}


@pytest.mark.parametrize(
    ("case", "runs_out"),
    [*((case, False) for case in CASES), ("fp32", True), ("16-mixed", True)],
    ids=lambda one: str(one),
)
def test_trainer_module_generators_loggers_and_disk_are_as_before(
    tmp_path, case, runs_out, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    memo, counts = Memo(), Counts()
    module = (type("RunsOutToo", (RunsOut, Stateful), {}) if runs_out else Stateful)()
    callbacks = [counts, ModelCheckpoint(), LearningRateMonitor()]
    visible = {
        "logger": [memo, CSVLogger(tmp_path)],
        "enable_checkpointing": True,
        "enable_progress_bar": True,
    }
    loop = training.trainer(tmp_path, callbacks, **(SHORT | visible | CASES[case]()))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    module(torch.ones(1, training.NUM_FEATURES)).sum().backward()
    before = everything(loop, module)
    found = mc.fit_batch_size(loop, module, capacity="1MiB")
    assert (found.num_ooms > 0) == runs_out
    assert not any(
        name.startswith(("on_train", "on_validation", "on_save", "on_exception"))
        for name in counts.hooks
    )
    counts.hooks.clear()
    module.batch_size = 8
    assert changes(before, everything(loop, module)) == []
    assert module.network[0].weight.grad is not None
    assert memo.rows == []
    assert files(tmp_path) == []
    assert loop.global_step == 0


def leavings(loop, module):
    """All that a training leaves behind."""
    loop.save_checkpoint(loop.default_root_dir + "/after.ckpt")
    checkpoint = torch.load(loop.default_root_dir + "/after.ckpt", weights_only=False)
    checkpoint["callbacks"] = {}
    return {
        "checkpoint": checkpoint,
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "own": torch.Generator.get_state(module.generator),
        "calls": (module.calls, module.seen.clone(), len(module.outputs)),
        "logged": loop.logger.rows,
        "metrics": dict(loop.callback_metrics),
    }


class Trains(Stateful):
    """As Stateful, to be trained to the end."""

    def on_train_end(self):
        pass


def trained(tmp_path, *, before=lambda loop, module: None, batch_size=20, **options):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    module = Trains(num_samples=96, batch_size=batch_size)
    loop = training.trainer(tmp_path, logger=Memo(), max_epochs=2, **(SHORT | options))
    before(loop, module)
    loop.fit(module)
    return leavings(loop, module)


class Experiment:
    def add_scalar(self, *args):
        pass


@pytest.fixture(autouse=True)
def _experiment(monkeypatch):
    monkeypatch.setattr(Memo, "experiment", Experiment(), raising=False)


@pytest.mark.parametrize("case", CASES)
def test_training_goes_the_same_way_after_a_search(tmp_path, case):
    def search(loop, module):
        found = mc.fit_batch_size(loop, module, capacity="4MiB")
        assert (found.batch_size, module.batch_size) == (96, 96)
        module.batch_size = 20

    assert (
        differences(
            trained(tmp_path, before=search, **CASES[case]()), trained(tmp_path, **CASES[case]())
        )
        == []
    )


@pytest.mark.parametrize("case", CASES)
def test_training_with_the_callback_is_training_with_the_size_that_it_found(tmp_path, case):
    callback = mc.MemoryCallback(fit_batch_size=True, device="4MiB")
    found = trained(tmp_path, callbacks=[callback], **CASES[case]())
    assert callback.fitted.batch_size == 96
    assert callback.recorder.steps[-1].batch_size == 96
    given = trained(tmp_path, batch_size=96, **CASES[case]())
    assert [step for step, _ in found["logged"]] == [step for step, _ in given["logged"]]
    found["logged"], given["logged"] = (
        [row for _, row in rows] for rows in (found["logged"], given["logged"])
    )
    assert differences(found, given) == []


def test_a_finished_fit_can_be_followed_by_a_search(tmp_path):
    module, loop = Trains(num_samples=96), training.trainer(tmp_path, logger=Memo())
    loop.fit(module)
    before = everything(loop, module)
    found = mc.fit_batch_size(loop, module, capacity="4MiB")
    assert found.batch_size == 96
    module.batch_size = 8
    assert changes(before, everything(loop, module)) == []


def test_a_search_is_deterministic(tmp_path):
    first, second = (fit(tmp_path, Sized())[0] for _ in range(2))
    assert first.to_dict() == second.to_dict()


def test_a_queue_of_a_running_thread_is_left_to_it(tmp_path):
    tasks, goes_on = queue.Queue(), threading.Event()

    def work():
        is_over = False
        while not is_over:
            is_over = tasks.get() is None
            goes_on.wait()
            tasks.task_done()

    class Saves(Sized):
        def training_step(self, batch, batch_idx):
            tasks.put(batch_idx)
            return super().training_step(batch, batch_idx)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    fit(tmp_path, Saves())
    assert tasks.unfinished_tasks > 0
    goes_on.set()
    tasks.put(None)
    thread.join()
    assert tasks.unfinished_tasks == 0


# The callback.


def test_savings_of_the_callback_are_in_force_in_the_search(tmp_path):
    plain, _ = fit(tmp_path, callbacks=[mc.MemoryCallback()])
    module = Sized()
    found, loop = fit(
        tmp_path,
        module,
        callbacks=[mc.MemoryCallback(accumulate=2, amp="bf16-mixed", checkpoint=True)],
    )
    assert found.batch_size > 1.3 * plain.batch_size
    assert (loop.accumulate_grad_batches, loop.precision) == (1, "32-true")
    callback = mc.MemoryCallback(
        accumulate=2, amp="bf16-mixed", checkpoint=True, fit_batch_size=True, device="4MiB"
    )
    module = Sized()
    training.trainer(tmp_path, [callback], max_steps=2, **SHORT).fit(module)
    assert callback.fitted.batch_size == module.batch_size == found.batch_size


def test_the_callback_trains_with_given_loaders_resized(tmp_path, capsys):
    callback = mc.MemoryCallback(fit_batch_size=True, device="4MiB")
    loop = training.trainer(tmp_path, [callback])
    loop.fit(training.Automatic(), DataLoader(Samples(304), 8))
    assert callback.fitted.batch_size == loop.train_dataloader.batch_size == 304
    assert loop.global_step == 1
    assert "Batch size 304 (it was 8) is the largest found to fit CPU" in capsys.readouterr().out


@pytest.mark.filterwarnings(
    "ignore:.*was made.*A steady step begins after it, and none was:memcallback.MemoryWarning"
)
def test_a_schedule_is_made_for_the_number_of_steps_that_there_will_be(tmp_path):
    class Scheduled(Sized):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            self.total_steps = self.trainer.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.1, total_steps=self.total_steps
            )
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    module = Scheduled(num_samples=304)
    loop = training.trainer(
        tmp_path, [mc.MemoryCallback(fit_batch_size=True, device="4MiB")], max_epochs=10
    )
    loop.fit(module)
    assert module.batch_size == 304
    assert (
        module.total_steps
        == loop.global_step
        == loop.lr_scheduler_configs[0].scheduler.total_steps
        == 10
    )


@pytest.mark.parametrize(
    ("module", "device", "text"),
    [
        (
            RunsOut(batch_size=4),
            None,
            r"ValueError: The module trains on a CPU.*Say how much may be used, such as "
            r"capacity='8GiB'",
        ),
        (training.Automatic(), "4MiB", r"ValueError: The training DataLoader has batch_size=None"),
        (
            Heavy(batch_size=4, num_samples=40),
            "1MiB",
            r"RuntimeError: No batch size fits CPU: 1 is the smallest",
        ),
    ],
)
def test_where_nothing_is_found_training_goes_on_as_it_was(tmp_path, module, device, text):
    callback = mc.MemoryCallback(fit_batch_size=True, device=device, predict=False)
    loop = training.trainer(tmp_path, [callback], max_steps=3)
    loaders = (
        []
        if isinstance(module, Sized)
        else [DataLoader([(torch.ones(8, 64), torch.ones(8).long())] * 5, batch_size=None)]
    )
    with pytest.warns(
        mc.MemoryWarning,
        match=rf"No batch size was found, and training goes on with the size as it is. {text}",
    ):
        loop.fit(module, *loaders)
    assert callback.fitted is None
    assert loop.global_step == 3
    assert [step.batch_size for step in callback.recorder.steps] == [
        4 if isinstance(module, Sized) else 8
    ] * 3


def test_the_callback_leaves_the_search_to_the_function(tmp_path):
    callback = mc.MemoryCallback(fit_batch_size=True, device="1MiB")
    found, _ = fit(tmp_path, callbacks=[callback], max_batch_size=72)
    assert found.batch_size == 72
    assert callback.fitted is None


def test_a_batch_size_and_a_search_for_one_contradict_each_other():
    with pytest.raises(
        ValueError,
        match=r"batch_size=8 is the number of samples in a batch, and fit_batch_size=True is to "
        r"find it\. Leave one of the two out",
    ):
        mc.MemoryCallback(batch_size=8, fit_batch_size=True)


# Several processes, and the other package.


RANKS = """
import json, sys
from pathlib import Path
sys.path[:0] = {tests!r}
import torch, training
import memcallback as mc
from test_fit_batch_size import RunsOut, SHORT, Samples, differences
from torch.utils.data import DataLoader

class OneRunsOut(RunsOut):
    def training_step(self, batch, batch_idx):
        self.limit = 60 if self.trainer.global_rank else 10_000
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        # Ranks that wait for each other here would wait for ever.
        self.log("val_loss", self.network(batch[0]).sum(), sync_dist=True)
        self.all_gather(torch.ones(1))

if __name__ == "__main__":
    torch.manual_seed(1)
    callback = mc.MemoryCallback(fit_batch_size={in_callback}, device="4MiB")
    ddp = dict(strategy="ddp", devices=2)
    loop = training.trainer(sys.argv[1], [callback], max_steps=3, **ddp, **SHORT)
    module = OneRunsOut() if {runs_out} else training.Automatic()
    loaders = [] if {runs_out} else [DataLoader(Samples(), 8)]
    weights = {{name: value.clone() for name, value in module.state_dict().items()}}
    found = None
    if not {in_callback}:
        loader = loaders[0] if loaders else None
        found = mc.fit_batch_size(loop, module, capacity="4MiB", train_dataloaders=loader)
        assert differences(module.state_dict(), weights) == []
        loaders = [found.train_dataloaders] if loaders else []
    loop.fit(module, *loaders)
    found = found or callback.fitted
    seen = {{step.batch_size for step in callback.recorder.steps}}
    assert seen == {{found.batch_size}}, (seen, found)
    assert loop.train_dataloader.batch_size == found.batch_size
    told = [found.batch_size, found.num_ooms, loop.global_step]
    (Path(sys.argv[1]) / f"rank{{loop.global_rank}}.json").write_text(json.dumps(told))
"""


@pytest.mark.parametrize(
    ("in_callback", "runs_out"),
    [(False, True), (True, False)],
    ids=["function, one runs out", "callback"],
)
def test_ranks_agree_on_a_size_and_none_waits_for_another_that_ran_out(
    tmp_path, in_callback, runs_out
):
    script = tmp_path / "train.py"
    script.write_text(
        RANKS.format(
            tests=[str(TESTS), str(TESTS / "integrations")],
            in_callback=in_callback,
            runs_out=runs_out,
        )
    )
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    # Each rank tells it in a file of its own: what several processes print mixes.
    (first_size, first_ooms, first_steps), (second_size, second_ooms, second_steps) = (
        json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)
    )
    assert first_size == second_size
    assert (first_steps, second_steps) == (3, 3)
    if runs_out:
        assert first_size == 56
        assert (first_ooms, second_ooms > 0) == (0, True)
    else:
        assert first_size > 700


ALONE = """
import sys
import pytorch_lightning as pl
import torch
import memcallback as mc
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.batch_size = 4
    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(10_000, 64), batch_size=self.batch_size)
trainer = pl.Trainer(max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[1],
    callbacks=[mc.MemoryCallback(predict=False)])
module = Module()
found = mc.fit_batch_size(trainer, module, capacity="1MiB")
assert "lightning" not in sys.modules or "lightning.pytorch" not in sys.modules
assert module.batch_size == found.batch_size > 1000, found
trainer.fit(module)
assert trainer.train_dataloader.batch_size == found.batch_size
"""


def test_a_trainer_of_the_other_package_is_fitted_without_lightning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


# What cannot be done.


class HardCoded(Sized):
    def train_dataloader(self):
        return DataLoader(Samples(), 8)


class Stream(IterableDataset):
    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __iter__(self):
        return (Samples()[index] for index in range(self.num_samples))


class Exhausted(Stream):
    def __init__(self):
        self.samples = iter(Stream(100))

    def __iter__(self):
        return self.samples


class Wholesale(torch.utils.data.BatchSampler):
    """A batch sampler that does not use its batch_size."""

    def __iter__(self):
        return iter([list(range(8))] * 10)


def given(**options):
    return {"module": training.Automatic(), "train_dataloaders": DataLoader(**options)}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"module": HardCoded()},
            r"train_dataloader\(\) returns batches of 8 samples although module.batch_size is \d+, "
            r"so it does not use that",
        ),
        (
            {"module": training.Automatic()},
            r"Neither the module nor its data module has the attribute or hyperparameter "
            r"batch_size",
        ),
        (
            {"capacity": None},
            r"The module trains on a CPU and no capacity is given.*capacity='8GiB'",
        ),
        ({"capacity": "-1GiB"}, r"-1GiB"),
        ({"headroom": 1.0}, r"headroom must be at least 0 and below 1, got 1.0"),
        ({"num_updates": 1}, r"num_updates must be at least 2, got 1"),
        ({"max_batch_size": 0}, r"max_batch_size must be at least 1, got 0"),
        ({"multiple_of": 0}, r"multiple_of must be at least 1, got 0"),
        (
            given(dataset=Samples(), batch_size=None),
            r"has batch_size=None: its dataset returns whole batches",
        ),
        (
            given(dataset=Exhausted(), batch_size=4),
            r"The dataset Exhausted keeps a running iterator in its attribute 'samples'",
        ),
        (
            given(dataset=Stream(100), batch_size=4),
            r"training loader's batch size is \d+, but its first batch has 100 samples",
        ),
        (
            given(dataset=Samples(), batch_sampler=Wholesale(range(100), 8, False)),
            r"training loader's batch size is \d+, but its first batch has 8 samples. Let the "
            r"loader's batch sampler use its batch_size",
        ),
        (
            {"trainer_options": {"fast_dev_run": True}},
            r"Trainer\(fast_dev_run=True\) trains with a few batches",
        ),
        ({"trainer_options": {"limit_train_batches": 0}}, r"returns no batch"),
        (
            {"trainer_options": {"strategy": "ddp_spawn", "devices": 2}},
            r"trains in processes of its own.*MemoryCallback\(fit_batch_size=True\)",
        ),
    ],
)
def test_what_cannot_be_done_is_said_in_words_and_leaves_nothing(tmp_path, options, text):
    module = options.pop("module", None) or Sized()
    random.seed(1)
    torch.manual_seed(1)
    before = everything(module)
    with pytest.raises(ValueError, match=text):
        fit(tmp_path, module, **options)
    assert changes(before, everything(module)) == []
    assert files(tmp_path) == []


def test_a_stream_that_begins_anew_is_fitted(tmp_path):
    found, _ = fit(tmp_path, **given(dataset=Stream(10_000), batch_size=4), max_batch_size=64)
    assert found.batch_size == found.train_dataloaders.batch_size == 64


def test_memory_that_does_not_grow_with_the_batch_is_no_limit(tmp_path):
    class Constant(Sized):
        """Uses nothing of the batch but its existence."""

        def training_step(self, batch, batch_idx):
            return self.network(torch.ones(4, training.NUM_FEATURES)).sum()

    class Indices(Dataset):
        def __len__(self):
            return 56

        def __getitem__(self, index):
            return torch.empty(0)

    class Endless(Stream):
        def __iter__(self):
            while True:
                yield torch.empty(0)

    module = Constant()
    module.train_dataloader = lambda: DataLoader(Indices(), module.batch_size)
    without = {"trainer_options": {"limit_val_batches": 0}}
    found, _ = fit(tmp_path, module, **without)
    assert found.batch_size == 56
    assert found.notes[0] == "The memory of a step does not grow with the batch size."
    with pytest.raises(
        ValueError,
        match=r"does not grow with the batch size, so every size is predicted to "
        r"fit.*max_batch_size=\.\.\.",
    ):
        fit(tmp_path, Constant(), train_dataloaders=DataLoader(Endless(1), 4), **without)


def test_a_trainer_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="trainer must be a Lightning Trainer, got object"):
        mc.fit_batch_size(object(), Sized())


def test_a_loader_in_the_place_of_a_data_module_is_refused(tmp_path):
    with pytest.raises(
        TypeError,
        match=r"datamodule must be a LightningDataModule, got DataLoader. Give loaders as "
        r"train_dataloaders=...",
    ):
        fit(tmp_path, data=DataLoader(Samples(), 8))


def test_nothing_is_warned_of_a_search_that_went_well(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", mc.MemoryWarning)
        fit(tmp_path)
