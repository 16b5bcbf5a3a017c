"""Small Lightning programs whose steps keep state outside of what a checkpoint holds, each named
for where; run by integrations/test_trials.py.

    python tests/trial_programs.py HOW [--accelerator cuda] [NAME ...]

HOW is `plain` (only train), `function` (search with `mc.fit_batch_size`, then train) or `callback`
(train with `MemoryCallback(fit_batch_size=True)`). The search finds the size that the program has.
Each program runs in a process of its own, forked before anything has run but imports, and prints a
line of JSON: digests of all that the training leaves, or the refusal.
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import gc
import hashlib
import io
import itertools
import json
import os
import queue
import random
import signal
import sys
import tempfile
import threading
import traceback
import types
import weakref
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memcallback as mc
from memcallback.prediction.predict_here import load_tracer

BATCH_SIZE, NUM_FEATURES = 8, 4
PROGRAMS = {}


def program(make):
    PROGRAMS[make.__name__] = make
    return make


class Base(LightningModule):
    """Classifies three classes; `scale` is the state's part in the loss."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 3)
        self.batch_size = BATCH_SIZE
        self.num_samples = 3 * BATCH_SIZE

    def scale(self, features):
        return 1.0

    def training_step(self, batch, batch_idx):
        features, classes = batch
        scale = self.scale(features)
        loss = nn.functional.cross_entropy(self.head(self.network(features)), classes) * scale
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def forward(self, features):
        return self.head(self.network(features))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)

    def _loader(self):
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(self.num_samples, NUM_FEATURES, generator=generator)
        classes = torch.randint(0, 3, (self.num_samples,), generator=generator)
        return DataLoader(TensorDataset(features, classes), self.batch_size, shuffle=True)

    train_dataloader = val_dataloader = _loader


MEAN = torch.zeros(NUM_FEATURES)


@program
def a_running_mean_in_a_global():
    class Module(Base):
        def scale(self, features):
            MEAN.mul_(0.9).add_(features.detach().mean(0).cpu())
            return 1 + float(MEAN.abs().sum())

    return Module(), lambda: MEAN


@program
def a_global_that_is_bound_anew():
    class Module(Base):
        def scale(self, features):
            global MEAN
            MEAN = MEAN + features.detach().mean(0).cpu()
            return 1 + float(MEAN.abs().sum())

    return Module(), lambda: MEAN


AUXILIARY = []


class Layer(nn.Module):
    def forward(self, features):
        AUXILIARY.append(features.pow(2).mean())
        return features


@program
def a_registry_of_auxiliary_losses():
    class Module(Base):
        def __init__(self):
            super().__init__()
            self.network.append(Layer())

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss + 0.1 * sum(AUXILIARY[-1:]) + 0.01 * len(AUXILIARY)

        def on_train_batch_end(self, *args):
            AUXILIARY[:] = [one.detach() for one in AUXILIARY]

    return Module(), lambda: AUXILIARY


LOSSES, AVERAGES = [], []


@program
def losses_averaged_at_the_end_of_an_epoch():
    class Module(Base):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            LOSSES.append(loss.detach())
            return loss * (1 + len(LOSSES))

        def on_train_epoch_end(self):
            AVERAGES.append(float(torch.stack(LOSSES).mean()))
            if self.current_epoch % 2:
                LOSSES.clear()

    return Module(), lambda: (LOSSES, AVERAGES)


class Counts(Base):
    num_steps = 0
    sizes: ClassVar = collections.Counter()

    def scale(self, features):
        type(self).num_steps += 1
        self.sizes[len(features)] += 1
        type(self).last = features.detach().cpu()
        return 1 + 0.1 * Counts.num_steps


@program
def attributes_of_the_class():
    return Counts(), lambda: (Counts.num_steps, Counts.sizes, Counts.last)


GENERATOR, PYTHONS, OLD = np.random.default_rng(3), random.Random(3), np.random.RandomState(3)
TORCHS = torch.Generator().manual_seed(3)


@program
def random_generators_in_globals():
    class Module(Base):
        def scale(self, features):
            own = torch.rand((), generator=TORCHS).item()
            return 1 + GENERATOR.random() + PYTHONS.random() + OLD.rand() + own

    return Module(), lambda: (
        GENERATOR.bit_generator.state,
        PYTHONS.getstate(),
        OLD.get_state(),
        TORCHS.get_state(),
    )


IDS = itertools.count()
next_id = itertools.count(10).__next__
take = functools.partial(next, itertools.count(5, 2))
VOCABULARY = collections.defaultdict(itertools.count().__next__)


@program
def counters_of_itertools():
    class Module(Base):
        def __init__(self):
            super().__init__()
            self.turns = itertools.cycle([0.1, 0.2, 0.3])
            self.pairs = enumerate(iter(range(100)))
            self.items = iter([float(number) for number in range(100)])

        def scale(self, features, ids):
            number = next(IDS) + next_id() + take() + VOCABULARY[len(VOCABULARY)] + next(ids)
            return 1 + 0.01 * number + next(self.turns) + sum(next(self.pairs)) + next(self.items)

    Module.scale.__defaults__ = (itertools.count(1),)
    module = Module()
    return module, lambda: (
        next(IDS),
        next_id(),
        take(),
        VOCABULARY["new"],
        next(Module.scale.__defaults__[0]),
        next(module.turns),
        next(module.pairs),
        next(module.items),
    )


@functools.lru_cache
def mask(size):
    return torch.rand(size)


@program
def a_mask_in_an_empty_cache():
    class Module(Base):
        def scale(self, features):
            return 1 + float(mask(len(features)).sum())

    return Module(), lambda: (mask.cache_info(), mask(BATCH_SIZE))


@functools.cache
def table(size):
    return torch.rand(size).tolist()


@program
def a_table_in_a_cache_that_is_in_use():
    table(3)

    class Module(Base):
        def scale(self, features):
            table(3)[0] += 0.1
            return table(3)[0] + sum(table(len(features)))

    return Module(), lambda: (table.cache_info().currsize, table(3), table(BATCH_SIZE))


@functools.lru_cache(maxsize=2)
def teacher(size):
    return nn.BatchNorm1d(size)


@program
def the_only_one_of_its_kind_in_a_cache():
    first = teacher(NUM_FEATURES)

    class Module(Base):
        def scale(self, features):
            return 1 + float(teacher(NUM_FEATURES)(features.detach().cpu()).abs().mean())

    def state():
        assert teacher(NUM_FEATURES) is first
        return first.state_dict()

    return Module(), state


INDICES, SIMPLE, LATEST = queue.Queue(), queue.SimpleQueue(), collections.deque(maxlen=3)


@program
def queues_of_indices():
    for number in range(100):
        INDICES.put(number)
        SIMPLE.put(number)

    class Module(Base):
        def scale(self, features):
            LATEST.append(INDICES.get(timeout=1) + SIMPLE.get(timeout=1))
            return 1 + 0.1 * sum(LATEST)

    return Module(), lambda: (
        list(INDICES.queue),
        INDICES.unfinished_tasks,
        SIMPLE.qsize(),
        SIMPLE.get(),
        LATEST,
    )


HISTOGRAMS = collections.defaultdict(lambda: np.zeros(3))
TABLE = np.zeros((2, NUM_FEATURES))


@program
def histograms_in_a_global():
    class Module(Base):
        def training_step(self, batch, batch_idx):
            HISTOGRAMS[batch_idx] += np.bincount(batch[1].cpu().numpy(), minlength=3)
            TABLE[batch_idx % 2] += batch[0].mean(0).cpu().numpy()
            return super().training_step(batch, batch_idx) * float(1 + HISTOGRAMS[0][0])

    return Module(), lambda: (dict(HISTOGRAMS), TABLE)


TEACHER, COMPILED_TEACHER = (
    nn.BatchNorm1d(NUM_FEATURES),
    torch.fx.symbolic_trace(nn.Sequential(nn.BatchNorm1d(NUM_FEATURES))),
)


@program
def teachers_with_statistics():
    class Module(Base):
        def scale(self, features):
            values = features.detach().cpu()
            return 1 + float(TEACHER(values).var() + COMPILED_TEACHER(values * 2).var())

    return Module(), lambda: (TEACHER.state_dict(), COMPILED_TEACHER.state_dict())


AVERAGE = None


@program
def a_moving_average_in_a_global():
    class Module(Base):
        def on_before_zero_grad(self, optimizer):
            global AVERAGE
            if AVERAGE is None:
                AVERAGE = copy.deepcopy(self.network).requires_grad_(False)
            for own, value in zip(AVERAGE.parameters(), self.network.parameters(), strict=True):
                own.lerp_(value.detach(), 0.1)

        def scale(self, features):
            return 1.0 if AVERAGE is None else 1 + float(AVERAGE[0].weight.abs().mean())

    return Module(), lambda: AVERAGE.state_dict()


def make_counter():
    number, numbers = 0, []

    def count(amount, seen, *, by):
        nonlocal number
        number += amount
        numbers.append(number)
        seen.append(amount)
        by["calls"] += 1
        count.last = number
        return number + len(seen) + by["calls"]

    count.__defaults__, count.__kwdefaults__ = ([],), {"by": collections.Counter()}
    return count


@program
def closures_and_defaults():
    count = make_counter()

    class Module(Base):
        def scale(self, features):
            return 1 + 0.1 * count(1)

    return Module(), lambda: (count(1), count.last, count.__defaults__, count.__kwdefaults__)


class Positions:
    """An iterator of the user's own."""

    def __init__(self, numbers):
        self.position, self.numbers = 0, iter(numbers)

    def __iter__(self):
        return self

    def __next__(self):
        self.position += 1
        return next(self.numbers) + self.position


@program
def an_iterator_of_the_programs_own():
    class Module(Base):
        def __init__(self):
            super().__init__()
            self.positions = Positions(range(100))
            self.numbered = enumerate(Positions(range(100)))

        def scale(self, features):
            return 1 + 0.1 * (next(self.positions) + sum(next(self.numbered)))

    module = Module()
    return module, lambda: (next(module.positions), next(module.numbered))


@program
def globals_of_other_files():
    """One that is imported, and one that is run as a text."""
    code = "TOTAL = 0\ndef add():\n    global TOTAL\n    TOTAL += 1\n    return TOTAL\n"
    folder = tempfile.mkdtemp()
    Path(folder, "trial_state.py").write_text(code)
    sys.path.insert(0, folder)
    import trial_state

    run = {}
    exec(compile(code, f"{folder}/run.py", "exec"), run)

    class Module(Base):
        def scale(self, features):
            return 1 + 0.1 * (trial_state.add() + add())

    add = run["add"]
    return Module(), lambda: (trial_state.TOTAL, run["TOTAL"])


OF_MODULES = weakref.WeakKeyDictionary()
OF_THREAD = threading.local()
TEXT = io.StringIO("".join(f"{number}\n" for number in range(100)))
SETTINGS = types.MappingProxyType({"seen": []})
BYTES = bytearray(4)


@program
def what_python_brings():
    OF_THREAD.number = 0
    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        file.write(TEXT.getvalue())
    lines = os.fdopen(os.open(file.name, os.O_RDONLY))

    class Module(Base):
        def scale(self, features):
            OF_MODULES[self] = OF_MODULES.get(self, 0) + 1
            OF_THREAD.number += 1
            SETTINGS["seen"].append(1)
            BYTES[0] += 1
            read = int(TEXT.readline()) + int(lines.readline())
            return 1 + 0.1 * (OF_MODULES[self] + OF_THREAD.number + len(SETTINGS["seen"]) + read)

    module = Module()
    return module, lambda: (
        OF_MODULES[module],
        OF_THREAD.number,
        SETTINGS["seen"],
        BYTES,
        TEXT.tell(),
        lines.readline(),
    )


# What cannot be wound back.


def numbers():
    yield from range(100)


@program
def a_generator_held_by_the_module():
    class Module(Base):
        def __init__(self):
            super().__init__()
            self.numbers = numbers()

        def scale(self, features):
            return 1 + 0.1 * next(self.numbers)

    module = Module()
    return module, lambda: next(module.numbers)


RUNNING = [numbers()]


@program
def a_generator_whose_refusal_is_caught():
    class Module(Base):
        def scale(self, features):
            try:
                return 1 + 0.1 * next(enumerate(RUNNING[0]))[1]
            except Exception:
                return 1.0

    return Module(), lambda: next(RUNNING[0])


@program
def a_loader_that_is_being_read():
    class Module(Base):
        def __init__(self):
            super().__init__()
            data = TensorDataset(torch.arange(100.0))
            self.unlabelled = iter(DataLoader(data, 2, num_workers=1))

        def scale(self, features):
            return 1 + 0.01 * float(next(self.unlabelled)[0].sum())

    module = Module()
    return module, lambda: next(module.unlabelled)


REFUSED = (
    "a_generator_held_by_the_module",
    "a_generator_whose_refusal_is_caught",
    "a_loader_that_is_being_read",
)


# Signals in a trial.


def interrupted(number, hook):
    """A program that gets a signal in the second call of a hook, and the state that it changes."""

    class Module(Base):
        def scale(self, features):
            MEAN.add_(features.detach().mean(0).cpu())
            return 1.0

    calls = itertools.count(1)

    def called(self, *args):
        if next(calls) == 2:
            signal.raise_signal(number)
        return getattr(Base, hook)(self, *args)

    setattr(Module, hook, called)
    return Module(), lambda: MEAN


for _name, _number in (("interrupted", signal.SIGINT), ("terminated", signal.SIGTERM)):
    PROGRAMS[f"{_name}_in_a_step"] = functools.partial(interrupted, _number, "training_step")
    PROGRAMS[f"{_name}_in_validation"] = functools.partial(interrupted, _number, "validation_step")
PROGRAMS["terminated_and_handled"] = functools.partial(interrupted, signal.SIGTERM, "training_step")
SIGNALLED = [name for name in PROGRAMS if name.startswith(("interrupted", "terminated"))]


# Running them.


def digest(value):
    """A text that two equal states share, to the bit."""
    return hashlib.sha256(repr(_plain(value)).encode()).hexdigest()[:16]


def _plain(value):
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().cpu().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return [(_plain(key), _plain(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return [_plain(one) for one in value]
    assert isinstance(value, (str, int, float, bool, bytes, bytearray, type(None))), type(value)
    return value


def run(name, how, accelerator):
    """All that a program leaves; with `refused` what a search said."""
    tempfile.tempdir = tempfile.mkdtemp()
    folder = tempfile.mkdtemp()
    seed_everything(1234, verbose=False)
    module, state = PROGRAMS[name]()
    callbacks, before = [], digest([module.state_dict(), torch.get_rng_state(), MEAN])

    def leave(number, frame):
        now = digest([module.state_dict(), torch.get_rng_state(), MEAN])
        sys.exit(f"with everything as before: {now == before}")

    if name.startswith("terminated_and"):
        signal.signal(signal.SIGTERM, leave)
    if how == "callback":
        callbacks = [mc.MemoryCallback(fit_batch_size=True, device="1GiB")]
    trainer = Trainer(
        accelerator=accelerator,
        devices=1,
        max_epochs=2,
        limit_val_batches=1,
        default_root_dir=folder,
        callbacks=callbacks,
        **dict.fromkeys(
            ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
        ),
    )
    refused = ""
    if how == "function":
        try:
            found = mc.fit_batch_size(trainer, module, capacity="1GiB", max_batch_size=BATCH_SIZE)
            assert found.batch_size == BATCH_SIZE, found
        except ValueError as error:
            refused = str(error)
        except SystemExit as error:
            return after_signal(error, before, [module.state_dict(), torch.get_rng_state(), MEAN])
    if "callback" in how:
        # The callback finds the largest size that the data have.
        module.num_samples = BATCH_SIZE
    try:
        trainer.fit(module)
    except SystemExit as error:
        return after_signal(error, before, [module.state_dict(), torch.get_rng_state(), MEAN])
    if how == "callback" and callbacks[0].fitted is not None:
        assert callbacks[0].fitted.batch_size == BATCH_SIZE
    return {
        "weights": digest(module.state_dict()),
        "optimizer": digest(trainer.optimizers[0].state_dict()),
        "metrics": digest(dict(trainer.callback_metrics)),
        "progress": digest([trainer.global_step, trainer.current_epoch]),
        "random": digest([torch.get_rng_state(), random.getstate(), np.random.get_state()]),
        "state": digest(state()),
        "refused": refused,
        "files": sorted(path.name for path in Path(folder).rglob("*")),
    }


def after_signal(error, before, after):
    """How a program ended, and whether it is as it was and hears the next signal."""
    return {
        "ended": f"{type(error).__name__} {error}",
        "is_as_before": digest(after) == before,
        "hears": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "folders": [str(path) for path in Path(tempfile.gettempdir()).glob("tmp*/*")],
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=["plain", "plain-callback", "function", "callback"])
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("names", nargs="*", default=[*PROGRAMS])
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "plain" not in options.how:
        load_tracer()  # as each program would: seconds of imports
    gc.freeze()
    for name in options.names:
        sys.stdout.flush()
        if child := os.fork():
            ended = os.waitpid(child, 0)[1]
            if os.WIFSIGNALED(ended):
                print(json.dumps({"name": name, "signal": os.WTERMSIG(ended)}))
            continue
        status = 1
        try:
            left = run(name, options.how, options.accelerator)
            print(json.dumps({"name": name, **left}), flush=True)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)


if __name__ == "__main__":
    main()
