"""Trainings that profile themselves, each with every step sampled by a recorder and without.

    python tests/profiled_programs.py FILE    # writes a JSON line for each program to FILE

Each runs in a process of its own: PyTorch ends the process where two profiles meet.
"""

import json
import os
import sys
import tempfile
import threading
import traceback
import warnings
from contextlib import ExitStack, nullcontext
from pathlib import Path

import lightning.pytorch as L
import torch
from torch import nn
from torch.profiler import ProfilerActivity, schedule

from memcallback import MemoryCallback, MemoryRecorder, MemoryWarning, Phase
from memcallback.core import torch_private

NUM_STEPS = 6
#: Modules with functions that start profiles, and what was in them at first.
STARTS = [
    (module, dict(vars(module)))
    for module in (torch.autograd.profiler, torch.autograd.profiler_legacy, torch.autograd)
]
CPU = [ProfilerActivity.CPU]


class Training:
    """A plain loop of a small model; `at` is called at named places of each step."""

    def __init__(self, is_recorded):
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.recorder = (
            MemoryRecorder(self.model, self.optimizer, sample_every_n_steps=1)
            if is_recorded
            else None
        )
        self.losses = []

    def run(self, at):
        for number in range(NUM_STEPS):
            at("before", number)
            batch = torch.randn(4, 8)
            with self.recorder.step(batch) if self.recorder else nullcontext():
                with self.phase(Phase.FORWARD):
                    self.optimizer.zero_grad()
                    loss = self.model(batch).square().sum()
                    at("forward", number)
                with self.phase(Phase.BACKWARD):
                    loss.backward()
                at("between", number)
                with self.phase(Phase.OPTIMIZER_STEP):
                    self.optimizer.step()
            self.losses.append(loss.item())
            at("after", number)

    def phase(self, phase):
        return self.recorder.phase(phase) if self.recorder else nullcontext()

    def counted(self):
        """For each recorded step, whether its bytes were counted."""
        steps = self.recorder.steps if self.recorder else ()
        return [step.peak_allocated_bytes is not None for step in steps]


def seen(profile):
    """What a profile has recorded, in order."""
    events = profile.events() if isinstance(profile, torch.profiler.profile) else None
    return [
        [event.name, event.input_shapes, event.scope]
        for event in (profile.function_events if events is None else events)
    ]


def new_profile(**options):
    return torch.profiler.profile(activities=CPU, record_shapes=True, **options)


def between(first, last, make=new_profile):
    """A profile from one place to another."""

    def program(training):
        profile = make()

        def at(place, number):
            if (place, number) == first:
                profile.__enter__()
            if (place, number) == last:
                profile.__exit__(None, None, None)

        training.run(at)
        return seen(profile)

    return program


def scheduled(place_of_step, **options):
    def program(training):
        windows = []
        profile = new_profile(
            schedule=schedule(wait=1, warmup=1, active=1, repeat=2),
            on_trace_ready=lambda one: windows.append(seen(one)),
            **options,
        )
        with profile:
            training.run(lambda place, _: profile.step() if place == place_of_step else None)
        return windows

    return program


def dropped_and_made_again(training):
    """A profile takes the place of a finished one and is prepared before a step begins."""
    profiles = [new_profile()]
    with profiles[0]:
        torch.ones(3)

    def at(place, number):
        if (place, number) == ("after", 2):
            profiles.clear()
            profiles.append(new_profile(schedule=schedule(wait=0, warmup=1, active=1, repeat=1)))
            profiles[0].start()
        if place == "after" and number in (3, 4):
            profiles[0].step()

    training.run(at)
    return seen(profiles[0])


def in_a_thread(first, last):
    """A thread profiles its own work from one place of the training to another."""

    def program(training):
        begin, begun, end = (threading.Event() for _ in range(3))
        profile = new_profile()

        def work():
            begin.wait()
            with profile:
                torch.ones(3).add(1)
                begun.set()
                end.wait()
                torch.ones(5).mul(2)

        thread = threading.Thread(target=work)
        thread.start()

        def at(place, number):
            if (place, number) == first:
                begin.set()
                begun.wait()
            if (place, number) == last:
                end.set()
                thread.join()

        training.run(at)
        return seen(profile), exported(profile)

    return program


def exported(profile):
    """The names in an exported trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sorted(event["name"] for event in events if event["ph"] in "Xi")


def nested(training):
    """Two profiles at a time, of which PyTorch keeps what it keeps."""
    outer, inner = new_profile(), torch.autograd.profiler.profile(use_kineto=True)
    said = []

    def attempt(call, *args):
        try:
            call(*args)
        except RuntimeError as error:
            said.append(str(error))

    def at(place, number):
        if (place, number) == ("forward", 3):
            outer.__enter__()
            attempt(inner.__enter__)
        if (place, number) == ("after", 3):
            attempt(inner.__exit__, None, None, None)
            attempt(outer.__exit__, None, None, None)

    training.run(at)
    return said, seen(inner)


def one_inside_another(training):
    """A profile of a whole step, with named regions in it, inside a recorded step."""
    profile = new_profile(with_stack=False)

    def at(place, number):
        if (place, number) == ("before", 3):
            stack.enter_context(profile)
            stack.enter_context(torch.profiler.record_function("mine"))
        if (place, number) == ("after", 4):
            stack.close()

    with ExitStack() as stack:
        training.run(at)
    return seen(profile)


def execution_trace(training):
    """PyTorch's other observer of operators, which runs beside any profile."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))

        def at(place, number):
            if (place, number) == ("before", 3):
                observer.start()
            if (place, number) == ("after", 3):
                observer.stop()

        training.run(at)
        observer.unregister_callback()
        return [node["name"] for node in json.loads(path.read_text())["nodes"]]


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def lightning(training):
    """Lightning's profiler in a fit, with our callback or without; its regions name callbacks."""
    from lightning.pytorch.profilers import PyTorchProfiler

    windows = []
    with tempfile.TemporaryDirectory() as folder:
        profiler = PyTorchProfiler(
            dirpath=folder,
            filename="p",
            activities=CPU,
            export_to_chrome=False,
            schedule=schedule(wait=1, warmup=1, active=2, repeat=1),
            on_trace_ready=lambda one: windows.append([event.name for event in one.events()]),
        )
        module = Module()
        trainer = L.Trainer(
            max_steps=NUM_STEPS,
            accelerator="cpu",
            callbacks=[MemoryCallback(predict=False)] if training.recorder else [],
            profiler=profiler,
            logger=False,
            default_root_dir=folder,
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, torch.utils.data.DataLoader(torch.ones(NUM_STEPS * 4, 8), batch_size=4))
    training.losses = [weight.tolist() for weight in module.parameters()]
    return [[name for name in names if "Callback]" not in name] for names in windows]


def legacy():
    from torch.autograd.profiler_legacy import profile

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return profile()


def seen_by_legacy(program):
    return lambda training: [name for name, *_ in program(training)]


PROGRAMS = {
    "scheduled, stepped between steps": scheduled("after"),
    "scheduled, stepped inside a step": scheduled("between"),
    "scheduled, accumulating": scheduled("after", acc_events=True),
    "prepared where a finished one was": dropped_and_made_again,
    "inside one phase": between(("forward", 3), ("between", 3)),
    "begun inside a step, ended after it": between(("forward", 3), ("after", 3)),
    "begun inside a step, ended in the next": between(("forward", 3), ("forward", 4)),
    "begun before a step, ended inside": between(("before", 3), ("between", 3)),
    "autograd's profile inside a step": between(
        ("forward", 3),
        ("between", 3),
        lambda: torch.autograd.profiler.profile(use_kineto=True, record_shapes=True),
    ),
    "in another thread, begun inside a step": in_a_thread(("forward", 3), ("after", 4)),
    "in another thread, inside a step": in_a_thread(("forward", 3), ("between", 3)),
    "in another thread, begun before": in_a_thread(("before", 3), ("between", 4)),
    "nested": nested,
    "with regions": one_inside_another,
    "an execution trace": execution_trace,
    "Lightning's profiler": lightning,
    "the legacy profile inside a step": between(("forward", 3), ("between", 3), legacy),
}


def run(name, is_recorded):
    """What a program did and saw."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = Training(is_recorded)
        profiled = PROGRAMS[name](training)
    if training.recorder:
        training.recorder.close()
    return {
        "profiled": profiled,
        "trained": [training.losses, [weight.tolist() for weight in training.model.parameters()]],
        "counted": training.counted(),
        "warnings": [str(one.message) for one in caught if one.category is MemoryWarning],
        "patches": [
            f"{module.__name__}.{name}"
            for module, before in STARTS
            for name, value in vars(module).items()
            if before.get(name) is not value and callable(value)
        ],
        "is_profiler_on": torch_private.is_profiler_on(),
    }


def main(file):
    torch.set_num_threads(1)
    for name in PROGRAMS:
        for is_recorded in (False, True):
            child = os.fork()
            if child == 0:
                try:
                    said = run(name, is_recorded)
                except BaseException:
                    said = {"failed": traceback.format_exc()[-2000:]}
                with Path(file).open("a") as lines:
                    lines.write(json.dumps([name, is_recorded, said]) + "\n")
                os._exit(0)
            os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1])
