"""`MemoryCallback` in real Trainers on a CPU: every way in which a loop can run is recorded as it
ran.
"""

import gc
import re
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import training
from event_files import curves_of, events_of
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loggers.logger import DummyLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader

from memcallback import (
    MemoryCallback,
    MemoryRecorder,
    MemoryWarning,
    Phase,
    Prediction,
    TextbookPrediction,
)
from memcallback.core.allocation_trace import Alloc
from memcallback.core.types import Category, Kind
from memcallback.devices.catalogue import find_device
from memcallback.record.monitor import Monitor
from memcallback.record.publisher import Publisher
from memcallback.report.tags import PEAK_IMAGE_TAG, flat

pytestmark = pytest.mark.usefixtures("without_pictures")
F, B, O = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP  # noqa: E741


def fit(tmp_path, module=None, *, num_batches=4, data=None, callback=None, **options):
    callback = callback or MemoryCallback()
    module = module or training.Automatic()
    training.trainer(tmp_path, [callback], **options).fit(
        module, data if data is not None else training.loader(num_batches)
    )
    return callback


def record(tmp_path, module=None, **options):
    """A fit without a prediction."""
    return fit(tmp_path, module, callback=MemoryCallback(predict=False), **options)


def windows(step):
    return [window.covers for window in step.windows]


def test_automatic_optimization_has_three_phases_in_every_step(tmp_path):
    callback = record(tmp_path)
    assert [windows(step) for step in callback.recorder.steps] == [[(F,), (B,), (O,)]] * 4
    assert [step.is_warm_up for step in callback.recorder.steps] == [True, False, False, False]
    assert [step.num_optimizer_updates for step in callback.recorder.steps] == [1, 1, 1, 1]
    assert [step.batch_size for step in callback.recorder.steps] == [8] * 4


def test_gradients_live_through_the_forward_pass_and_are_gone_when_backward_begins(tmp_path):
    callback = record(tmp_path)
    steady = callback.recorder.steps[2].phases
    gradients = [steady[F].end, steady[B].start, steady[B].end]
    parameters = steady[F].end.by_category[Category.PARAMETER]
    assert [stats.by_category[Category.GRADIENT] for stats in gradients] == [
        parameters,
        0,
        parameters,
    ]


class Augmented(Mapping):
    """A batch that draws its items as they are read."""

    def __init__(self, x):
        self.x, self.num_read = x, 0

    def __getitem__(self, name):
        self.num_read += 1
        return self.x + torch.rand_like(self.x)

    def __iter__(self):
        return iter(["x"])

    def __len__(self):
        return 1

    def to(self, device, **options):
        return self


def test_a_batch_that_computes_its_items_is_read_by_the_training_alone(tmp_path):
    num_read = []

    class Module(training.Automatic):
        def training_step(self, batch, batch_idx):
            return self.network(batch["x"]).sum()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            num_read.append(batch.num_read)

    data = DataLoader(
        torch.ones(16, training.NUM_FEATURES), batch_size=4, collate_fn=lambda x: Augmented(x[0])
    )
    record(tmp_path, Module(), data=data)
    assert num_read == [1, 1, 1, 1]


def test_an_accumulation_window_has_its_update_in_the_last_batch_and_the_partial_one_too(tmp_path):
    callback = record(tmp_path, num_batches=5, accumulate_grad_batches=2)
    assert [windows(step) for step in callback.recorder.steps] == [
        [(F,), (B,)],
        [(F,), (B,), (O,)],
        [(F,), (B,)],
        [(F,), (B,), (O,)],
        [(F,), (B,), (O,)],
    ]
    assert [step.is_warm_up for step in callback.recorder.steps] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_an_update_that_the_grad_scaler_skips_is_a_step_without_update(tmp_path):
    from lightning.pytorch.plugins import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0))
    callback = record(tmp_path, training.OverflowsOnce(), plugins=[plugin])
    assert [step.num_optimizer_updates for step in callback.recorder.steps] == [1, 0, 1, 1]
    assert [windows(step) for step in callback.recorder.steps] == [[(F,), (B,), (O,)]] * 4


def test_two_optimizers_by_hand_are_two_cycles_in_one_step(tmp_path):
    callback = record(tmp_path, training.ManualTwoOptimizers())
    assert [windows(step) for step in callback.recorder.steps] == [[(F,), (B,), (O,)] * 2] * 4
    assert [step.num_optimizer_updates for step in callback.recorder.steps] == [2] * 4


def test_two_backward_passes_by_hand_have_a_forward_pass_each(tmp_path):
    callback = record(tmp_path, training.ManualTwoBackwards())
    assert [windows(step) for step in callback.recorder.steps] == [
        [(F,), (B,), (F,), (B,), (O,)]
    ] * 4


def test_a_bare_backward_by_hand_is_recorded_as_one_window_of_two_phases(tmp_path):
    callback = record(tmp_path, training.ManualRaw())
    assert [windows(step) for step in callback.recorder.steps] == [[(F, B), (O,)]] * 4
    assert callback.recorder.steps[-1].phases[B].label == "forward + backward"
    assert F not in callback.recorder.steps[-1].phases


def test_lbfgs_calls_its_closure_again_inside_the_optimizer_step(tmp_path):
    def lbfgs(parameters, lr):
        return torch.optim.LBFGS(
            parameters, lr=lr, max_iter=3, tolerance_grad=0, tolerance_change=0
        )

    callback = fit(tmp_path, training.Automatic(lbfgs))
    again = [(O, F), (B,)]
    assert windows(callback.recorder.steps[1]) == [(F,), (B,), *again, *again, (O,)]


def test_a_training_step_that_returns_none_has_no_backward_pass(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*returned `None`.*")
        callback = fit(tmp_path, training.SkipsOddBatches())
    assert [windows(step) for step in callback.recorder.steps] == [
        [(F,), (B,), (O,)],
        [(F,), (O,)],
    ] * 2


def test_a_training_step_that_returns_none_at_the_end_of_a_window_has_no_backward_pass_either(
    tmp_path,
):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*returned `None`.*")
        callback = fit(tmp_path, training.SkipsOddBatches(), accumulate_grad_batches=2)
    assert [windows(step) for step in callback.recorder.steps] == [[(F,), (B,)], [(F,), (O,)]] * 2


def test_sanity_validation_and_validation_in_between_are_not_steps(tmp_path):
    callback = MemoryCallback(predict=False)
    loop = training.trainer(
        tmp_path, [callback], num_sanity_val_steps=2, val_check_interval=2, max_epochs=2
    )
    loop.fit(training.Automatic(), training.loader(4), training.loader(2))
    assert [windows(step) for step in callback.recorder.steps] == [[(F,), (B,), (O,)]] * 8


def test_a_second_fit_starts_anew(tmp_path):
    callback = record(tmp_path)
    first = callback.recorder
    fit(tmp_path, callback=callback, num_batches=3)
    assert callback.recorder is not first
    assert [step.index for step in callback.recorder.steps] == [0, 1, 2]


def test_fast_dev_run_records_and_leaves_no_files(tmp_path, capsys):
    callback = fit(tmp_path, fast_dev_run=True)
    assert len(callback.recorder.steps) == 1
    assert callback.recorder.steps[0].is_warm_up
    assert list(tmp_path.iterdir()) == []
    assert "warm-up" in capsys.readouterr().out


def assert_boundaries_agree(predicted, measured, phases=tuple(Phase)):
    """To the byte but for what Lightning itself keeps of a step's loss, some bytes."""
    assert list(predicted.phases) == list(measured.phases)
    for window in measured.windows:
        if window.phase not in phases:
            continue
        of_phase = [one for one in measured.windows if one.phase is window.phase]
        theirs = [one for one in predicted.windows if one.phase is window.phase][
            of_phase.index(window)
        ]
        for moment in ("start", "end"):
            ours, other = getattr(window, moment), getattr(theirs, moment)
            assert ours.by_category == other.by_category, (window.label, moment)
            assert abs(ours.allocated_bytes - other.allocated_bytes) <= 64, (window.label, moment)


@pytest.mark.usefixtures("pictures")
def test_the_prediction_is_there_before_the_first_step_and_agrees_with_a_steady_one(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("memcallback.prediction.apart.TICK_S", float("inf"))
    callback = fit(tmp_path, callback=MemoryCallback(wait_for_prediction=True))
    assert isinstance(callback.prediction, Prediction)
    assert callback.prediction.batch_size == 8
    assert callback.report.measured.kind is Kind.MEASURED
    assert not callback.report.measured.is_warm_up
    assert_boundaries_agree(callback.prediction.step, callback.report.measured)
    printed = capsys.readouterr().out
    assert re.search(r"Traced the step in \d+\.\d s \(\d+ events\)\.", printed)
    assert printed.index("Traced the step") < printed.index("memcallback │")
    assert "traces after" not in printed


def test_a_trace_that_takes_long_says_report_progress_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("memcallback.prediction.apart.TICK_S", -1)
    fit(tmp_path, callback=MemoryCallback(wait_for_prediction=True))
    told = re.findall(
        r"Tracing the step: (\d) of 3 traces after \d+\.\d s\.",
        capsys.readouterr().out,
    )
    assert told == ["0", "1", "2"]


class Scheduled(training.Automatic):
    """A scheduler puts a step of its own in place of the optimizer's."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        }


MODES = {
    "accumulation": (training.Automatic, {"accumulate_grad_batches": 2}),
    "accumulation by a scheduler": (
        training.Automatic,
        {"callbacks": [GradientAccumulationScheduler({0: 3})]},
    ),
    "clipping by norm": (training.Automatic, {"gradient_clip_val": 0.5}),
    "clipping by value": (
        training.Automatic,
        {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
    ),
    "bf16-mixed": (training.Automatic, {"precision": "bf16-mixed"}),
    "16-mixed, which a CPU runs as bf16-mixed": (training.Automatic, {"precision": "16-mixed"}),
    "bf16-true": (training.Automatic, {"precision": "bf16-true"}),
    "64-true": (training.Automatic, {"precision": "64-true"}),
    "a scheduler": (Scheduled, {}),
    "two backward passes by hand": (training.ManualTwoBackwards, {}),
}


def test_the_report_is_not_of_a_step_after_validation_which_has_no_gradients_in_its_forward_pass(
    tmp_path,
):
    callback = MemoryCallback()
    loop = training.trainer(tmp_path, [callback], max_epochs=2, val_check_interval=2)
    loop.fit(training.Automatic(), training.loader(4), training.loader(2))
    assert callback.recorder.steps[-2].phases[F].end.by_category[Category.GRADIENT] == 0
    assert callback.report.measured.phases[F].end.by_category[Category.GRADIENT] > 0
    assert not any("The prediction is off" in line for line in callback.report.lines())


class ZeroedInPlace(training.Automatic):
    """Gradients stand throughout."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


class KeepsTheGraph(training.Automatic):
    """What the backward pass needed stands until the loss goes."""

    def backward(self, loss, *args, **kwargs):
        loss.backward(*args, retain_graph=True, **kwargs)


class KeepsTheGraphByHand(KeepsTheGraph):
    """The same by way of `manual_backward`."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        return loss


class LooksAtWhatIsClipped(training.Automatic):
    """A second of all gradients, for as long as the hook runs; of the Trainer's settings it hands
    on those with a name.
    """

    handed_on = ("gradient_clip_val", "gradient_clip_algorithm")

    def configure_gradient_clipping(self, optimizer, **settings):
        before = [parameter.grad.clone() for parameter in self.parameters()]
        self.clip_gradients(optimizer, **{name: settings[name] for name in self.handed_on})
        del before


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradients_that_a_module_zeroes_in_place_stand_throughout_the_trace(tmp_path, precision):
    callback = fit(tmp_path, ZeroedInPlace(), precision=precision)
    assert_boundaries_agree(callback.prediction.step, callback.report.measured)
    held = callback.prediction.step.phases[B].start.by_category
    assert held[Category.GRADIENT] == held[Category.PARAMETER] > 0


@pytest.mark.parametrize("limit", [0.5, None])
def test_a_modules_own_clipping_is_in_the_trace(tmp_path, limit):
    callback = fit(tmp_path, LooksAtWhatIsClipped(torch.optim.SGD), gradient_clip_val=limit)
    measured, predicted = callback.report.measured.phases[O], callback.prediction.step.phases[O]
    clones_bytes = predicted.start.by_category[Category.PARAMETER]
    assert predicted.peak_allocated_bytes >= predicted.start.allocated_bytes + clones_bytes
    assert abs(measured.peak_allocated_bytes - predicted.peak_allocated_bytes) <= 64


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("handed_on", [(), ("gradient_clip_val",)])
def test_what_a_modules_own_clipping_does_not_say_is_the_trainers_setting(
    tmp_path, algorithm, handed_on
):
    def events(names):
        module = LooksAtWhatIsClipped(torch.optim.SGD)
        module.handed_on = names
        settings = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": algorithm}
        callback = fit(tmp_path / "-".join(names), module, **settings)
        return [
            (event.operator, event.size_bytes)
            for event in callback.prediction.trace.traced.trace.events
            if isinstance(event, Alloc)
        ]

    assert events(handed_on) == events(LooksAtWhatIsClipped.handed_on)


@pytest.mark.parametrize("make", [KeepsTheGraph, KeepsTheGraphByHand])
def test_a_backward_of_the_modules_own_is_in_the_trace(tmp_path, make):
    callback = fit(tmp_path, make())
    usual = fit(tmp_path / "usual")
    measured, predicted = (
        callback.report.measured.phases[B].end,
        callback.prediction.step.phases[B].end,
    )
    assert predicted.allocated_bytes > usual.prediction.step.phases[B].end.allocated_bytes
    assert abs(measured.allocated_bytes - predicted.allocated_bytes) <= 64


@pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU")
@pytest.mark.parametrize("mode", MODES)
def test_the_trace_is_made_of_the_trainers_own_settings(tmp_path, mode):
    make, options = MODES[mode]
    callback = MemoryCallback()
    more = options.get("callbacks", [])
    training.trainer(
        tmp_path,
        [*more, callback],
        **{name: value for name, value in options.items() if name != "callbacks"},
    ).fit(make(), training.loader(12))
    assert isinstance(callback.prediction, Prediction)
    assert_boundaries_agree(callback.prediction.step, callback.report.measured)


def test_the_scaler_of_16_mixed_is_in_the_trace(tmp_path):
    from lightning.pytorch.plugins import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0))
    callback = fit(tmp_path, plugins=[plugin])
    assert_boundaries_agree(callback.prediction.step, callback.report.measured)


class Gan(training.Automatic):
    """Two networks and two optimizers by hand, no forward, and questions to the Trainer."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.network = nn.ModuleDict(
            {
                "generator": nn.Linear(16, training.NUM_FEATURES),
                "critic": nn.Linear(training.NUM_FEATURES, 1),
            }
        )

    forward = None

    def training_step(self, batch, batch_idx):
        of_generator, of_critic = self.optimizers()
        noise = torch.randn(len(batch[0]), 16)
        self.toggle_optimizer(of_critic)
        loss = (
            self.network["critic"](batch[0]).mean()
            - self.network["critic"](self.network["generator"](noise).detach()).mean()
        )
        of_critic.zero_grad()
        self.manual_backward(loss)
        of_critic.step()
        self.untoggle_optimizer(of_critic)
        if self.trainer.global_step >= 0:
            loss = -self.network["critic"](self.network["generator"](noise)).mean()
            of_generator.zero_grad()
            self.manual_backward(loss)
            of_generator.step()
        self.log("lr", of_critic.param_groups[0]["lr"])

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.network[name].parameters()) for name in ("generator", "critic")
        ]


class ByHand(training.ManualRaw):
    """A closure in Lightning's optimizer, then a bare backward pass and torch's own optimizer, and
    something after that.
    """

    def training_step(self, batch, batch_idx):
        optimizer, raw = self.optimizers(), self.optimizers(use_pl_optimizer=False)

        def closure():
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self.network(batch[0]), batch[1]))

        optimizer.step(closure)
        nn.functional.cross_entropy(self.network(batch[0]), batch[1]).backward()
        raw.step()
        self.log("mean", self.network(batch[0]).mean())


class RawClosure(training.ManualRaw):
    """A closure in torch's own optimizer."""

    def training_step(self, batch, batch_idx):
        def closure():
            self.network.zero_grad()
            nn.functional.cross_entropy(self.network(batch[0]), batch[1]).backward()

        self.optimizers(use_pl_optimizer=False).step(closure)


class TwoUpdatesAtOnce(training.ManualTwoOptimizers):
    """One backward pass, with something between it and two updates."""

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.zero_grad()
        self.manual_backward(loss)
        self.log("mean", self.network(batch[0]).mean())
        for optimizer in self.optimizers():
            optimizer.step()


class NoUpdate(training.ManualRaw):
    """A backward pass without an update."""

    def training_step(self, batch, batch_idx):
        self.zero_grad()
        nn.functional.cross_entropy(self.network(batch[0]), batch[1]).backward()

    def configure_optimizers(self):
        return None


BY_HAND = {
    Gan: [(F,), (B,), (O,)] * 2,
    training.ManualTwoOptimizers: [(F,), (B,), (O,)] * 2,
    training.ManualTwoBackwards: [(F,), (B,), (F,), (B,), (O,)],
    training.ManualRaw: [(F, B), (O,)],
    ByHand: [(F, B), (O, F), (B,), (O,), (O,)],
    RawClosure: [(F, B), (O,)],
    TwoUpdatesAtOnce: [(F,), (B,), (O,), (O,)],
    NoUpdate: [(F, B)],
}


@pytest.mark.usefixtures("pictures")
@pytest.mark.filterwarnings("ignore:.*configure_optimizers.*returned `None`")
@pytest.mark.parametrize("make", BY_HAND, ids=lambda make: make.__name__)
def test_a_loop_by_hand_is_predicted_in_the_windows_in_which_it_is_measured(tmp_path, make):
    callback = fit(tmp_path, make())
    predicted, measured = callback.prediction.step, callback.recorder.steps[-1]
    assert windows(measured) == windows(predicted) == BY_HAND[make]
    assert predicted.num_optimizer_updates == (measured.num_optimizer_updates or 0)
    assert_boundaries_agree(predicted, measured)


@pytest.mark.filterwarnings("ignore:.*configure_optimizers.*returned `None`")
def test_a_module_without_an_optimizer_has_none_in_the_report(tmp_path, capsys):
    fit(tmp_path, NoUpdate())
    (title,) = [line for line in capsys.readouterr().out.splitlines() if " │ " in line]
    assert "NoUpdate" in title
    assert "Optimizer" not in title


class OneBatchSize(training.Automatic):
    """Only the batch size of most batches can be traced."""

    def training_step(self, batch, batch_idx):
        features = batch[0].view(8, -1) if len(batch[0]) != 3 else batch[0]
        return nn.functional.cross_entropy(self.network(features), batch[1])


@pytest.mark.usefixtures("pictures")
def test_a_prediction_that_knows_only_its_own_batch_size_is_shown_for_that_alone(tmp_path):
    logged = []
    logger = DummyLogger()
    logger.log_metrics = lambda metrics, step: (
        logged.append(metrics) if "memory_gib/capacity" in metrics else None
    )
    sizes = [8, 8, 3]
    data = DataLoader(
        [
            (torch.ones(size, training.NUM_FEATURES), torch.zeros(size, dtype=torch.long))
            for size in sizes
        ],
        batch_size=None,
    )
    callback = fit(tmp_path, OneBatchSize(), data=data, logger=logger)
    assert any("Only batch size 8 is predicted" in caveat for caveat in callback.prediction.caveats)
    assert not callback._is_broken
    assert ["memory_gib/predicted/peak_forward" in metrics for metrics in logged] == [
        True,
        True,
        False,
    ]
    assert callback.report.prediction.batch_size == 8


def test_the_report_of_a_step_that_the_prediction_does_not_know_has_none_and_says_so(tmp_path):
    sizes = [8, 3, 3]
    data = DataLoader(
        [
            (torch.ones(size, training.NUM_FEATURES), torch.zeros(size, dtype=torch.long))
            for size in sizes
        ],
        batch_size=None,
    )
    callback = fit(tmp_path, OneBatchSize(), data=data)
    assert callback.report.prediction is None
    assert any(
        "No prediction for batch size 3: the step was traced at batch size 8 only" in note
        for note in callback.report.notes
    )


def test_a_batch_size_is_replayed_once(tmp_path, monkeypatch):
    replayed = []
    original = Prediction.at

    def spy(prediction, batch_size):
        replayed.append(batch_size)
        return original(prediction, batch_size)

    monkeypatch.setattr(Prediction, "at", spy)
    monkeypatch.setattr(MemoryRecorder, "report", lambda *_, **__: None)
    for name in ("first", "last"):
        monkeypatch.setattr(Publisher, name, lambda *_, **__: None)
    monkeypatch.setattr(Monitor, "_make_report", lambda *_: None)
    sizes = [8, 8, 5, 5, 8, 5, 8]
    data = DataLoader(
        [
            (torch.ones(size, training.NUM_FEATURES), torch.zeros(size, dtype=torch.long))
            for size in sizes
        ],
        batch_size=None,
    )
    fit(tmp_path, data=data, callback=MemoryCallback(verbose=0))
    assert replayed == [8, 5]


class CallsNumPy(training.Automatic):
    """Nothing of the kind can run on fakes."""

    def training_step(self, batch, batch_idx):
        of_weights = (next(self.parameters()).flatten()[:2] > 0).long()
        assert len(torch.bincount(of_weights)) > 0  # a length that only values tell
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("pictures")
def test_where_the_step_cannot_be_traced_the_textbook_law_stands_in_and_says_why(tmp_path):
    pattern = (
        r"could not be traced, in the forward, at \S+test_callback\.py:\d+ "
        r"in training_step, after or at operator aten::bincount: .*minlength, "
        r"which is used instead. The textbook estimate is used instead"
    )
    with pytest.warns(MemoryWarning, match=pattern) as warned:
        callback = fit(tmp_path, CallsNumPy())
    assert max(len(str(one.message)) for one in warned) < 400
    assert isinstance(callback.prediction, TextbookPrediction)
    for phase in (F, B):
        predicted, measured = (
            callback.prediction.phases[phase],
            callback.report.measured.phases[phase],
        )
        assert (
            predicted.low_bytes <= measured.peak_allocated_bytes <= predicted.peak_allocated_bytes
        )


def test_the_report_is_printed_once_and_one_line_at_the_end(tmp_path, capsys):
    fit(tmp_path, callback=MemoryCallback(wait_for_prediction=True))
    printed = capsys.readouterr().out
    title = "memcallback │ Automatic · batch 8 · Adam · 32-true · CPU ("
    assert printed.count(title) == 1
    assert printed.count("the whole training set (32) fits with 5 % kept free (now 8)") == 1
    assert printed.count("--logdir") == 1
    report = printed[printed.index(title) :].splitlines()
    assert len(report) - 1 <= 18
    assert report[-1].startswith("memcallback: 4 steps, peak ")


def test_with_all_tables_the_report_is_printed_early_and_at_the_end(tmp_path, capsys):
    fit(tmp_path, callback=MemoryCallback(wait_for_prediction=True, verbose=2))
    printed = capsys.readouterr().out
    assert (
        printed.count(
            "Memory of one training step (steady, batch size 8) on CPU\nmeasured by CPU allocation "
            "events"
        )
        == 2
    )
    assert printed.count("Largest batch size:") == 2
    assert "without scratch memory" in " ".join(printed.split())


def test_nothing_is_printed_if_nothing_is_to_be(tmp_path, capsys):
    callback = MemoryCallback(verbose=0, what_if=True, device="1GiB", amp="16-mixed")
    fit(tmp_path, callback=callback, num_batches=2)
    assert callback.report is not None
    assert callback.plan is not None
    assert "emory" not in capsys.readouterr().out


def test_other_values_of_verbose_are_refused():
    with pytest.raises(ValueError, match=r"verbose must be 0, 1 or 2, got 3\. Give 0 to print"):
        MemoryCallback(verbose=3)


def test_a_capacity_to_plan_for_takes_the_place_of_the_devices_own(tmp_path):
    callback = fit(tmp_path, callback=MemoryCallback(device="1GiB", headroom=0.5))
    advice = callback.report.advice
    assert advice.capacity_bytes == 2**30
    assert dict(advice.curve)[advice.batch_size] <= 2**29


def test_of_a_card_by_name_nothing_is_said_where_a_cpu_trains(tmp_path):
    callback = fit(tmp_path, callback=MemoryCallback(device="a100-80"))
    assert callback.report.advice is None
    first, second = (line for line in callback.report.lines() if "A100" in line)
    assert first.startswith("'a100-80' was read as NVIDIA A100-SXM4-80GB; it may also mean")
    assert second.startswith("No batch size is suggested for NVIDIA A100-SXM4-80GB: this training")
    callback = fit(tmp_path, callback=MemoryCallback(device=find_device("T4")))
    assert callback.report.advice is None
    assert sum("T4" in line for line in callback.report.lines()) == 1


def test_without_a_logger_it_writes_a_run_of_its_own(tmp_path):
    fit(tmp_path)
    assert [path.name for path in (tmp_path / "memcallback").iterdir()] == ["version_0"]
    fit(tmp_path)
    assert sorted(path.name for path in (tmp_path / "memcallback").iterdir()) == [
        "version_0",
        "version_1",
    ]


@pytest.mark.usefixtures("pictures")
def test_every_logger_gets_the_same_figures(tmp_path):
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    board, table = TensorBoardLogger(tmp_path / "board"), CSVLogger(tmp_path / "table")
    fit(tmp_path, logger=[board, table])
    curves = curves_of(Path(board.log_dir))
    ours = flat(
        {
            curve: {tag: value for tag, value in values.items() if tag.startswith("memory")}
            for curve, values in curves.items()
        }
    )
    header = (
        (tmp_path / "table" / "lightning_logs" / "version_0" / "metrics.csv")
        .read_text()
        .splitlines()[0]
        .split(",")
    )
    assert set(ours) == {name for name in header if name.startswith("memory")}
    assert not (tmp_path / "memcallback").exists()
    assert len(ours) == 8
    points = events_of(board.log_dir).Scalars("memory_gib/peak_backward")
    assert len({point.step for point in points}) == len(points)


@pytest.mark.usefixtures("pictures")
def test_a_picture_is_drawn_again_only_where_it_shows_something_else(tmp_path):
    callback = fit(tmp_path)
    (run,) = (tmp_path / "memcallback").iterdir()
    events = events_of(run)
    num_drawn = {tag: len(events.Images(tag)) for tag in events.Tags()["images"]}
    assert num_drawn[PEAK_IMAGE_TAG] == 1
    assert callback.recorder.num_updates == 4


def test_a_step_after_validation_is_not_drawn_as_a_dip(tmp_path):
    callback = MemoryCallback()
    loop = training.trainer(tmp_path, [callback], max_epochs=2)
    loop.fit(training.Automatic(), training.loader(), training.loader(1))
    # The fifth step begins without gradients, which Lightning clears.
    starts = [step.windows[0].start.allocated_bytes for step in callback.recorder.steps]
    assert starts[4] < min(starts[3], starts[5])
    (run,) = (tmp_path / "memcallback").iterdir()
    points = curves_of(run)[""]["memory_gib/peak_forward"]
    assert list(points) == [0, 1, 2, 3, 5, 6, 7]
    assert len({value for number, value in points.items() if number}) == 1
    assert 4 not in curves_of(run)["predicted"]["memory_gib/peak_forward"]


def test_where_each_step_follows_a_validation_steps_are_drawn(tmp_path):
    loop = training.trainer(tmp_path, [MemoryCallback()], val_check_interval=1)
    loop.fit(training.Automatic(), training.loader(6), training.loader(1))
    (run,) = (tmp_path / "memcallback").iterdir()
    assert len(curves_of(run)[""]["memory_gib/peak_forward"]) >= 3


def test_a_resumed_training_writes_on_in_the_same_runs(tmp_path):
    from lightning.pytorch.loggers import TensorBoardLogger

    def train(**options):
        logger = TensorBoardLogger(tmp_path / "board", version=0)
        loop = training.trainer(tmp_path, [MemoryCallback()], logger=logger, **options)
        path = tmp_path / "end.ckpt"
        loop.fit(training.Automatic(), training.loader(), ckpt_path=path if path.exists() else None)
        loop.save_checkpoint(path)
        return Path(logger.log_dir)

    run = train()
    before = {path: path.read_bytes() for path in run.rglob("events.out*")}
    assert train(max_epochs=2) == run
    assert all(path.read_bytes() == content for path, content in before.items())
    curves = curves_of(run)
    assert sorted(curves) == ["", "capacity", "predicted"]
    for curve, last in (("", 6), ("predicted", 0)):
        steps = list(curves[curve]["memory_gib/peak_forward"])
        assert steps[0] == 0
        assert steps[-1] >= last


def test_the_page_is_written_whatever_the_logger_is(tmp_path, capsys):
    from lightning.pytorch.loggers import CSVLogger

    for number in range(2):
        fit(tmp_path, logger=CSVLogger(tmp_path / "table"))
        page = tmp_path / "table" / "lightning_logs" / f"version_{number}" / "memory.html"
        assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
        assert f"page: {page}" in capsys.readouterr().out
    assert not (tmp_path / "memcallback").exists()


@pytest.mark.usefixtures("pictures")
def test_what_savings_would_buy_is_printed_and_logged_if_it_is_asked_for(tmp_path, capsys):
    callback = MemoryCallback(device="1GiB", what_if=True)
    fit(tmp_path, callback=callback, num_batches=2)
    by_hand = {row.saving: row for row in callback.plan.rows}
    assert (
        by_hand["zero_grad before forward"].peak_allocated_bytes
        <= callback.plan.current.peak_allocated_bytes
    )
    assert callback.plan.current.peak_allocated_bytes == callback.prediction.peak_allocated_bytes
    assert callback.plan.capacity_bytes == 2**30
    printed = capsys.readouterr().out
    assert callback.plan.to_text() not in printed
    assert "  to save " in printed
    written = EventAccumulator(str(tmp_path / "memcallback" / "version_0")).Reload().Tags()
    assert "memory_pictures/4_what_if" in written["images"]
    assert any(tag.startswith("memory/what_if") for tag in written["tensors"])


def test_savings_that_cannot_be_tried_are_a_warning(tmp_path):
    callback = MemoryCallback(what_if=True)
    with pytest.warns(MemoryWarning) as warned:
        fit(tmp_path, CallsNumPy(), callback=callback, num_batches=2)
    assert [str(one.message).startswith("No savings could be tried.") for one in warned].count(
        True
    ) == 1
    assert callback.plan is None
    assert callback.recorder.steps


def test_points_come_at_the_trainers_logging_interval_and_for_the_first_steady_step(tmp_path):
    logged = []

    class Spy:
        def __init__(self):
            self.logger = DummyLogger()
            self.logger.log_metrics = lambda metrics, step: (
                logged.append((step, metrics)) if "memory_gib/capacity" in metrics else None
            )

    fit(tmp_path, num_batches=12, logger=Spy().logger, log_every_n_steps=5)
    # On a CPU nothing is recorded after the last of them, so there is no point at the end.
    assert [step for step, _ in logged] == [1, 4, 9]
    assert all(isinstance(value, float) for _, metrics in logged for value in metrics.values())


def test_the_peak_of_a_checkpoint_is_not_that_of_the_next_training(tmp_path):
    callback = MemoryCallback(predict=False)
    callback.load_state_dict({"lifetime_peak_allocated_bytes": 2**50})
    for is_restored in (True, False):
        training.trainer(tmp_path, [callback]).fit(training.Automatic(), training.loader())
        assert (callback.recorder.lifetime_peak_allocated_bytes == 2**50) == is_restored


def test_a_checkpoint_carries_the_lifetime_peak_on(tmp_path):
    first = MemoryCallback()
    loop = training.trainer(tmp_path, [first])
    loop.fit(training.Automatic(), training.loader())
    loop.save_checkpoint(tmp_path / "end.ckpt")
    peak = first.recorder.lifetime_peak_allocated_bytes
    assert first.state_dict()["lifetime_peak_allocated_bytes"] == peak
    second = MemoryCallback()
    training.trainer(tmp_path, [second], max_epochs=2).fit(
        training.Automatic(), training.loader(batch_size=1), ckpt_path=tmp_path / "end.ckpt"
    )
    assert second.recorder.steps
    assert second.recorder.lifetime_peak_allocated_bytes >= peak


def test_the_hooks_on_the_optimizer_are_gone_after_training(tmp_path):
    seen = []

    class Keeps(training.Automatic):
        def configure_optimizers(self):
            seen.append(super().configure_optimizers())
            return seen[0]

    record(tmp_path, Keeps())
    assert not seen[0]._optimizer_step_post_hooks
    assert not seen[0]._optimizer_step_pre_hooks


def test_an_exception_in_training_goes_on_and_what_was_recorded_is_reported(tmp_path, capsys):
    class Breaks(training.Automatic):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise ZeroDivisionError("the user's own")
            return super().training_step(batch, batch_idx)

    callback = MemoryCallback()
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        fit(tmp_path, Breaks(), callback=callback)
    assert [step.is_interrupted for step in callback.recorder.steps] == [False, False, True]
    assert "The last step ended with ZeroDivisionError." in capsys.readouterr().out
    assert not torch.autograd._profiler_enabled()


def test_a_fit_that_fails_before_training_reports_nothing_of_the_one_before(tmp_path, capsys):
    class NeverStarts(training.Automatic):
        def on_train_start(self):
            pass

        def configure_optimizers(self):
            raise ZeroDivisionError("the user's own")

    callback = fit(tmp_path)
    capsys.readouterr()
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, NeverStarts(), callback=callback)
    assert "memcallback" not in capsys.readouterr().out


def test_an_error_of_ours_in_an_optimizers_hook_does_not_reach_the_training(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise KeyError("ours")

    monkeypatch.setattr(MemoryRecorder, "close_phase", broken)
    with pytest.warns(MemoryWarning, match="MemoryCallback has stopped recording: KeyError"):
        callback = fit(tmp_path, training.ManualRaw())
    assert callback._is_broken
    assert callback.recorder.current_phase is None
    assert not torch.autograd._profiler_enabled()


def test_while_the_user_profiles_on_a_cpu_the_resident_size_is_recorded_and_the_profile_is_whole(
    tmp_path,
):
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with (
        profile as profiler,
        pytest.warns(
            MemoryWarning,
            match=r"A profile of PyTorch is running or prepared.*Train without the profiler",
        ),
    ):
        callback = fit(tmp_path)
    assert len(callback.recorder.steps) == 4
    assert not callback._is_broken
    assert callback.report.measured.peak_resident_bytes > 0
    assert callback.report.measured.peak_allocated_bytes is None
    assert (
        sum(
            event.count
            for event in profiler.key_averages()
            if event.key == "Optimizer.step#Adam.step"
        )
        == 4
    )


class Batches(Callback):
    """How many batches of earlier steps are alive when a step begins."""

    def __init__(self):
        self.seen, self.num_alive = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        # The one before is still held by the loop.
        self.num_alive.append(sum(ref() is not None for ref in self.seen[:-1]))
        self.seen.append(weakref.ref(batch[0]))


@pytest.mark.usefixtures("pictures")
def test_no_batch_of_an_earlier_step_is_kept_alive_not_even_by_the_report(tmp_path):
    watch = Batches()
    callback = MemoryCallback()
    training.trainer(tmp_path, [watch, callback]).fit(training.Automatic(), training.loader(8))
    assert callback.report is not None
    assert watch.num_alive == [0] * 8


@pytest.mark.usefixtures("pictures")
def test_after_the_fit_the_callback_keeps_neither_trainer_nor_model_alive(tmp_path):
    callback, module = MemoryCallback(), training.Automatic()
    trainer = training.trainer(tmp_path, [callback])
    trainer.fit(module, training.loader())
    gone = [weakref.ref(one) for one in (trainer, module, module.network)]
    del module, trainer
    gc.collect()
    assert callback.recorder.steps
    assert callback.report.measured is not None
    assert callback.prediction is not None
    assert [reference() for reference in gone] == [None, None, None]


@pytest.mark.parametrize("num_batches_in_window", [2, 4])
def test_the_report_of_an_accumulation_has_a_steady_window_with_its_update(
    tmp_path, num_batches_in_window
):
    callback = fit(
        tmp_path,
        num_batches=8 * num_batches_in_window,
        accumulate_grad_batches=num_batches_in_window,
        log_every_n_steps=50,
    )
    measured = callback.report.measured
    assert not measured.is_warm_up
    assert list(measured.phases) == [F, B, O]
    assert measured.held_bytes is not None
    assert callback.report.advice.basis.startswith(
        "The peaks were simulated from a trace; the measured step agrees"
    )


def test_a_warm_up_step_is_compared_with_nothing(tmp_path):
    callback = fit(tmp_path, fast_dev_run=True)
    assert callback.report.measured.is_warm_up
    assert callback.prediction is not None
    table = callback.report.table()
    assert table.columns[:2] == ("", "measured")
    assert not any(table.columns[2:])
    assert all(not any(cells[2:]) for cells in table.rows)


def test_an_epoch_that_a_module_ends_early_is_recorded_up_to_there_and_so_is_the_next_fit(tmp_path):
    class EndsEarly(training.Automatic):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    callback = record(tmp_path, EndsEarly(), max_epochs=2)
    assert [windows(step) for step in callback.recorder.steps] == [[(F,), (B,), (O,)]] * 4
    assert not torch.autograd._profiler_enabled()
    fit(tmp_path, callback=callback)
    assert len(callback.recorder.steps) == 4


def test_a_fit_after_one_that_failed_on_us_is_recorded(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("memcallback.record.point_log.step_curves", None)
        with pytest.warns(MemoryWarning, match="stopped recording"):
            callback = record(tmp_path)
    fit(tmp_path, callback=callback)
    assert len(callback.recorder.steps) == 4


@pytest.fixture
def collects():
    """A trainer holds its callbacks in a cycle, and a profile in one of them would be in the way of
    later tests.
    """
    yield
    gc.collect()


@pytest.mark.usefixtures("collects")
@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule will be overridden")
def test_lightnings_pytorch_profiler_and_the_callback_do_not_meet(tmp_path):
    callback = fit(tmp_path, profiler="pytorch")
    assert len(callback.recorder.steps) == 4
    assert callback.report.measured.peak_allocated_bytes is None
    assert callback.report.measured.peak_resident_bytes > 0


@pytest.mark.usefixtures("collects")
def test_a_scheduled_profiler_in_another_callback_and_the_callback_do_not_meet(tmp_path):
    class Profiles(Callback):
        def on_train_start(self, trainer, pl_module):
            schedule = torch.profiler.schedule(wait=1, warmup=1, active=2)
            self.profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule, acc_events=True
            )
            self.profiler.start()

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.profiler.step()

        def on_train_end(self, trainer, pl_module):
            self.profiler.stop()

    callback, profiles = MemoryCallback(), Profiles()
    with pytest.warns(MemoryWarning, match="A profile of PyTorch is running or prepared"):
        training.trainer(tmp_path, [profiles, callback]).fit(
            training.Automatic(), training.loader(8)
        )
    assert len(callback.recorder.steps) == 8
    assert not callback._is_broken
    assert any(event.key.startswith("Optimizer.step") for event in profiles.profiler.key_averages())


def test_a_profile_that_has_ended_is_in_nobodys_way(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as ended:
        torch.ones(10)
    callback = fit(tmp_path)
    assert callback.report.measured.peak_allocated_bytes > 0
    assert ended.key_averages()


def test_a_module_that_updates_twice_in_a_step_is_recorded(tmp_path):
    class Twice(training.Automatic):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.step(closure=optimizer_closure)
            optimizer.step(closure=optimizer_closure)

    callback = record(tmp_path, Twice())
    assert [windows(step)[:3] for step in callback.recorder.steps] == [[(F,), (B,), (O,)]] * 4
    assert [step.num_optimizer_updates for step in callback.recorder.steps] == [2] * 4


def test_a_closure_by_hand_ends_with_the_update(tmp_path):
    class Closure(training.ManualRaw):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers(use_pl_optimizer=False)

            def closure():
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)

    callback = record(tmp_path, Closure())
    assert windows(callback.recorder.steps[-1])[-2:] == [(B,), (O,)]
    assert [step.num_optimizer_updates for step in callback.recorder.steps] == [1] * 4


def test_a_module_without_optimizer_is_recorded_and_predicted(tmp_path):
    class NoOptimizer(training.Automatic):
        def configure_optimizers(self):
            return None

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*configure_optimizers.*returned `None`.*")
        callback = fit(tmp_path, NoOptimizer())
    assert callback.prediction is not None
    assert len(callback.recorder.steps) == 4


def test_a_batch_whose_own_batch_size_fails_is_taken_by_its_tensors(tmp_path):
    class Batch(dict):
        @property
        def batch_size(self):
            raise RuntimeError("not collated")

    class Uses(training.Automatic):
        def training_step(self, batch, batch_idx):
            return self.network(batch["x"]).sum()

    data = DataLoader(
        [Batch(x=torch.ones(8, training.NUM_FEATURES))] * 3,
        batch_size=None,
        collate_fn=lambda batch: batch,
    )
    callback = fit(tmp_path, Uses(), data=data)
    assert [step.batch_size for step in callback.recorder.steps] == [8, 8, 8]


def test_where_warnings_are_errors_an_error_of_ours_still_does_not_stop_training(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("memcallback.record.point_log.step_curves", None)
    module = training.Automatic()
    fit(tmp_path, module, callback=MemoryCallback())
    assert module.trainer.global_step == 4


# Bad input: a warning with value, rule and way out, and training goes on.


def test_a_dataloader_with_one_batch_has_no_steady_step_and_says_so(tmp_path):
    with pytest.warns(
        MemoryWarning, match=r"Only 1 optimizer update was made.*Train for at least 2 updates"
    ):
        callback = fit(tmp_path, num_batches=1)
    assert callback.report.measured.is_warm_up


@dataclass
class Sample:
    features: torch.Tensor
    extras: dict


def test_batches_of_nested_dicts_and_dataclasses_are_recorded_and_predicted(tmp_path):
    class Nested(training.Automatic):
        def training_step(self, batch, batch_idx):
            sample = batch["samples"][0]
            return nn.functional.cross_entropy(
                self.network(sample.features), sample.extras["classes"]["fine"]
            )

    batches = [
        {
            "samples": [
                Sample(
                    torch.ones(8, training.NUM_FEATURES),
                    {"classes": {"fine": torch.zeros(8, dtype=torch.long)}},
                )
            ],
            "name": "a",
        }
    ] * 3
    callback = fit(tmp_path, Nested(), data=DataLoader(batches, batch_size=None))
    assert callback.prediction.batch_size == 8
    assert (
        callback.report.measured.phases[F].start.by_category[Category.INPUT]
        == 8 * training.NUM_FEATURES * 4 + 8 * 8
    )


@pytest.mark.usefixtures("pictures")
def test_a_batch_whose_size_cannot_be_inferred_is_recorded_without_prediction(tmp_path):
    class NoBatch(training.Automatic):
        def training_step(self, batch, batch_idx):
            return self.network(torch.ones(3, training.NUM_FEATURES)).sum() * batch["scale"]

    data = DataLoader([{"scale": torch.tensor(1.0)}] * 3, batch_size=None)
    with pytest.warns(
        MemoryWarning,
        match=r"batch of type dict: no tensor in it has a first "
        r"dimension.*MemoryCallback\(batch_size=32\)",
    ):
        callback = fit(tmp_path, NoBatch(), data=data)
    assert callback.prediction is None
    assert callback.report.advice is None
    assert len(callback.recorder.steps) == 3


def test_a_batch_size_that_is_given_needs_no_inference(tmp_path):
    class NoBatch(training.Automatic):
        def training_step(self, batch, batch_idx):
            return self.network(torch.ones(3, training.NUM_FEATURES)).sum() * batch["scale"]

    callback = fit(
        tmp_path,
        NoBatch(),
        data=DataLoader([{"scale": torch.tensor(1.0)}] * 3, batch_size=None),
        callback=MemoryCallback(batch_size=3),
    )
    assert callback.recorder.steps[0].batch_size == 3
    assert callback.prediction.batch_size == 3


def test_an_ambiguous_batch_is_said_to_be_one(tmp_path):
    class Uneven(training.Automatic):
        def training_step(self, batch, batch_idx):
            return self.network(batch[0]).sum() + batch[1].sum()

    data = DataLoader([[torch.ones(8, training.NUM_FEATURES), torch.ones(5)]] * 3, batch_size=None)
    with pytest.warns(MemoryWarning, match=r"allow several batch sizes; 8, the likeliest"):
        fit(tmp_path, Uneven(), data=data)


@pytest.mark.usefixtures("pictures")
def test_a_logger_that_refuses_floats_is_left_out_and_the_others_are_not(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    class Picky(DummyLogger):
        num_calls = 0

        def log_metrics(self, metrics, step=None):
            if any(name.startswith("memory") for name in metrics):
                Picky.num_calls += 1
                raise TypeError("strings only")

    table = CSVLogger(tmp_path)
    with pytest.warns(
        MemoryWarning, match=r"could not log \d+ float metrics to Picky: TypeError: strings only"
    ):
        callback = fit(tmp_path, logger=[Picky(), table])
    assert Picky.num_calls == 1
    assert (
        "memory_gib/capacity"
        in (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    )
    assert len(callback.recorder.steps) == 4


@pytest.mark.usefixtures("pictures")
def test_a_folder_that_cannot_be_written_costs_the_curves_and_nothing_else(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(
        MemoryWarning, match=r"could not write to .*file.*default_root_dir of Lightning's Trainer"
    ):
        callback = fit(tmp_path / "file")
    assert len(callback.recorder.steps) == 4
    assert "memcallback │ Automatic" in capsys.readouterr().out


def test_an_optimizer_that_nobody_has_heard_of_is_predicted_with_its_state(tmp_path):
    class Unheard(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        def step(self, closure=None):
            loss = closure() if closure else None
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p].setdefault("memory", torch.zeros_like(p))
            return loss

    callback = fit(tmp_path, training.Automatic(Unheard))
    assert callback.report.measured.phases[F].start.by_category[Category.OPTIMIZER_STATE] > 0
    assert_boundaries_agree(callback.prediction.step, callback.report.measured)


def test_a_model_on_two_devices_is_said_to_be_one(tmp_path):
    class Elsewhere(Callback):
        def on_train_start(self, trainer, pl_module):
            pl_module.elsewhere = nn.Linear(3, 3, device="meta")

        def on_train_end(self, trainer, pl_module):
            del pl_module.elsewhere

    callback = MemoryCallback()
    with (
        pytest.warns(
            MemoryWarning,
            match=r"parameters are on 2 devices \(cpu, meta\); only the memory of cpu is recorded",
        ),
        pytest.warns(
            MemoryWarning,
            match=r"its model is on 2 devices \(cpu, meta\), and a trace can have only one\. "
            r"The textbook estimate is used instead",
        ),
    ):
        training.trainer(tmp_path, [Elsewhere(), callback]).fit(
            training.Automatic(), training.loader()
        )
    assert len(callback.recorder.steps) == 4
    parameters = sum(p.numel() for p in training.network().parameters()) * 4
    assert callback.prediction.held[Category.GRADIENT] == parameters


@pytest.mark.usefixtures("pictures")
def test_a_module_that_cannot_be_followed_on_fakes_is_recorded_all_the_same(tmp_path):
    class HasNoForward(CallsNumPy):
        def forward(self, batch):
            raise NotImplementedError

    pattern = (
        r"is recorded but not predicted. The step could not be traced, in the forward, "
        r".*MemoryCallback\(predict=False\) turns"
    )
    with pytest.warns(MemoryWarning, match=pattern) as warned:
        callback = fit(tmp_path, HasNoForward())
    assert max(len(str(one.message)) for one in warned) < 400
    assert callback.prediction is None
    assert len(callback.recorder.steps) == 4


def test_whatever_the_tracer_does_training_goes_on(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise KeyError("ours")

    monkeypatch.setattr("memcallback.trace.tracer.trace", broken)
    with pytest.warns(MemoryWarning, match="KeyError: 'ours'. The textbook estimate is used"):
        callback = fit(tmp_path)
    assert isinstance(callback.prediction, TextbookPrediction)
    assert len(callback.recorder.steps) == 4


def test_an_error_of_ours_ends_the_recording_and_not_the_training(tmp_path, monkeypatch):
    def broken(*_):
        raise KeyError("ours")

    monkeypatch.setattr("memcallback.record.point_log.step_curves", broken)
    with pytest.warns(
        MemoryWarning,
        match=r"MemoryCallback has stopped recording: KeyError in on_train_batch_end: 'ours'. "
        r"Training goes on",
    ):
        callback = fit(tmp_path)
    assert len(callback.recorder.steps) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"headroom": 1}, "headroom must be"),
        ({"device": "big"}, "'big' is not a known card"),
        ({"device": "-1GiB"}, "'-1GiB' is not a size: a size cannot be negative"),
        ({"device": 0}, "0 is neither a card nor a card's size"),
        (
            {"device": "cpu"},
            "'cpu' has no known memory size. Give a card or a size, such as '24GiB', or leave "
            "device out",
        ),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MemoryCallback(**options)


class ValidatesLargely(training.Automatic):
    """Its validation makes far more than its training step, and needs `num_extra` values more."""

    num_extra = 10_000_000

    def validation_step(self, batch, batch_idx):
        extra = torch.zeros(self.num_extra, device=self.device)
        return self(batch[0]).sum() + extra.sum()


def test_a_validation_that_needs_more_than_the_training_step_is_the_worst_moment(tmp_path):
    callback = MemoryCallback(wait_for_prediction=True)
    loop = training.trainer(tmp_path, [callback], num_sanity_val_steps=1)
    loop.fit(ValidatesLargely(), training.loader(4), training.loader(2))
    validation, trained = callback.validation, callback.prediction
    assert validation.batch_size == 8
    assert validation.peak_allocated_bytes >= 40_000_000
    assert validation.peak_allocated_bytes > trained.peak_allocated_bytes
    [note] = [note for note in callback.report.notes if "Worst moment" in note]
    assert note.startswith("Worst moment of the run: validation, 38.")
    assert "the training step reaches" in note


class ValidatesAndKeeps(training.Automatic):
    """Its validation keeps a million values of each batch until its epoch ends."""

    def __init__(self, keeps=True):
        super().__init__()
        self.keeps, self.kept = keeps, []

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        made = torch.zeros(1_000_000, device=self.device)
        if self.keeps:
            self.kept.append(made)

    def on_validation_epoch_end(self):
        self.kept.clear()


@pytest.mark.parametrize(
    ("num_batches", "limit"), [(2, 1.0), (40, 1.0), (40, 5)], ids=["few", "many", "limited"]
)
def test_what_a_validation_keeps_from_batch_to_batch_is_foreseen(tmp_path, num_batches, limit):
    def foreseen(module):
        callback = MemoryCallback(wait_for_prediction=True)
        loop = training.trainer(
            tmp_path, [callback], num_sanity_val_steps=1, limit_val_batches=limit
        )
        loop.fit(module, training.loader(4), training.loader(num_batches))
        return callback.validation.peak_allocated_bytes

    kept = foreseen(ValidatesAndKeeps()) - foreseen(ValidatesAndKeeps(keeps=False))
    num_run = min(num_batches, limit) if isinstance(limit, int) else num_batches
    assert kept == 4_000_000 * (num_run - 1)


def test_of_several_validation_loaders_nobody_knows_which_batches_are_kept(tmp_path):
    callback = MemoryCallback(wait_for_prediction=True)
    loop = training.trainer(tmp_path, [callback], num_sanity_val_steps=1)
    loop.fit(ValidatesAndKeeps(), training.loader(4), [training.loader(2), training.loader(40)])
    assert 2 * 4_000_000 <= callback.validation.peak_allocated_bytes < 4 * 4_000_000


def test_a_validation_of_unknown_length_is_predicted_too(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(training.loader(4).dataset)

    callback = MemoryCallback(wait_for_prediction=True)
    loop = training.trainer(tmp_path, [callback], num_sanity_val_steps=1)
    loop.fit(ValidatesAndKeeps(), training.loader(4), DataLoader(Stream(), batch_size=8))
    assert callback.validation.peak_allocated_bytes >= 2 * 4_000_000


def test_a_training_step_that_needs_more_is_the_worst_moment(tmp_path):
    callback = MemoryCallback(wait_for_prediction=True)
    loop = training.trainer(tmp_path, [callback], num_sanity_val_steps=1)
    loop.fit(training.Automatic(), training.loader(4), training.loader(2))
    assert callback.validation.peak_allocated_bytes < callback.prediction.peak_allocated_bytes
    assert any(
        note.startswith("Worst moment of the run: the training step")
        for note in callback.report.notes
    )


def test_without_a_sanity_check_no_validation_is_predicted(tmp_path):
    callback = MemoryCallback(wait_for_prediction=True)
    loop = training.trainer(tmp_path, [callback], num_sanity_val_steps=0)
    loop.fit(training.Automatic(), training.loader(4), training.loader(2))
    assert callback.validation is None
    assert not any("Worst moment" in note for note in callback.report.notes)


class ValidatesOther(training.Automatic):
    """Its validation reads nothing of its batch."""

    def validation_step(self, batch, batch_idx):
        return self(torch.zeros(8, training.NUM_FEATURES)).sum()


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor.*are deprecated")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(5, 2)]),
        lambda: torch.quantize_per_tensor(torch.ones(4, 2), 0.1, 0, torch.qint8),
    ],
    ids=["nested", "quantized"],
)
def test_a_training_is_recorded_after_a_validation_batch_without_a_fake(make, tmp_path):
    callback = MemoryCallback(predict=False)
    loop = training.trainer(tmp_path, [callback], num_sanity_val_steps=1)
    batches = DataLoader([make()], batch_size=None)
    loop.fit(ValidatesOther(), training.loader(4), batches)
    assert len(callback.recorder.steps) == 4
    assert callback.validation is None


def test_a_validation_that_does_not_fit_is_warned_of(tmp_path):
    callback = MemoryCallback(device=20_000_000, wait_for_prediction=True)
    loop = training.trainer(tmp_path, [callback], num_sanity_val_steps=1)
    with pytest.warns(MemoryWarning, match="Validation does not fit"):
        loop.fit(ValidatesLargely(), training.loader(4), training.loader(2))
