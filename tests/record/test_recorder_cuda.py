"""On a CUDA device, real or virtual: the recorded figures against torch's own.

A virtual device computes zeros, so a GradScaler sees no overflow there; the test that needs one
makes it itself.
"""

import gc
from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch
import training
from observer import differences, run
from torch import nn

import memcallback as mc
from memcallback import MemoryCallback, MemoryRecorder, Phase
from memcallback.core.types import Category
from memcallback.core.units import MiB
from memcallback.devices.memory import device_memory
from memcallback.devices.meters import AllocatorMeter, _flat_value

pytestmark = pytest.mark.cuda

F, B, O = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP  # noqa: E741

CUDA = torch.device("cuda")


class Convolutions(training.Automatic):
    """Large enough for the large pool and for workspaces."""

    def __init__(self, **options):
        super().__init__(**options)
        self.network = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.Dropout(0.1),
            nn.Flatten(),
            nn.Linear(32 * 32 * 32, 100),
        )


def images(num_batches=4, batch_size=16):
    batch = (torch.randn(batch_size, 3, 32, 32), torch.randint(0, 100, (batch_size,)))
    return torch.utils.data.DataLoader([batch] * num_batches, batch_size=None)


def fit(tmp_path, module=None, *, data=None, callbacks=(), callback=None, **options):
    callback = callback or MemoryCallback()
    # Spies stand before the callback, so that they see each hook at the same figures as it does.
    loop = training.trainer(tmp_path, [*callbacks, callback], accelerator="gpu", **options)
    loop.fit(module or Convolutions(), data or images())
    return callback


@pytest.fixture
def reads(monkeypatch):
    """Every read of the allocator that the callback makes, as torch.cuda.memory_stats() gives it at
    the same moment.
    """
    taken = []
    original = AllocatorMeter.read

    def spy(meter, held):
        taken.append(
            (
                torch.cuda.memory_stats(),
                torch.cuda.memory_allocated(),
                torch.cuda.memory_reserved(),
                torch.cuda.memory._snapshot(),
            )
        )
        original(meter, held)

    monkeypatch.setattr(AllocatorMeter, "read", spy)
    # Garbage is not to go between the two reads.
    gc.disable()
    yield taken
    gc.enable()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_every_figure_is_that_of_torch_cuda_memory_stats(tmp_path, reads, precision):
    callback = fit(tmp_path, precision=precision)
    steps = callback.recorder.steps
    assert len(steps) == 4
    position = 0
    for step in steps:
        assert [window.covers for window in step.windows] == [(F,), (B,), (O,)]
        # Five reads a step: forward start and end, backward start and end, optimizer end.
        of_step = reads[position : position + 5]
        position += 5
        boundaries = [
            step.windows[0].start,
            step.windows[0].end,
            step.windows[1].start,
            step.windows[1].end,
            step.windows[2].end,
        ]
        assert step.windows[2].start == step.windows[1].end
        for stats, (raw, allocated, reserved, snapshot) in zip(boundaries, of_step, strict=True):
            assert stats.allocated_bytes == raw["allocated_bytes.all.current"] == allocated
            assert stats.reserved_bytes == raw["reserved_bytes.all.current"] == reserved
            assert stats.active_bytes == raw["active_bytes.all.current"]
            assert stats.inactive_split_bytes == raw["inactive_split_bytes.all.current"]
            assert stats.requested_bytes == raw["requested_bytes.all.current"]
            assert stats.peak_allocated_bytes == raw["allocated_bytes.all.peak"]
            assert (stats.num_alloc_retries, stats.num_ooms) == (
                raw["num_alloc_retries"],
                raw["num_ooms"],
            )
            segments = snapshot["segments"]
            assert stats.reserved_bytes == sum(segment["total_size"] for segment in segments)
            assert stats.allocated_bytes == sum(segment["allocated_size"] for segment in segments)
        peaks = [raw["allocated_bytes.all.peak"] for raw, *_ in of_step]
        assert [w.peak_allocated_bytes for w in step.windows] == [peaks[1], peaks[3], peaks[4]]
    assert position == len(reads)


def test_the_peak_of_a_phase_is_that_of_its_own_history(tmp_path):
    """Replays the allocator's own history between the boundaries of the last step."""
    marks = []

    class Marks(mc.MemoryCallback):
        def on_train_batch_start(self, *args):
            super().on_train_batch_start(*args)
            marks.append(("F", entries()))

        def on_before_zero_grad(self, *args):
            super().on_before_zero_grad(*args)
            marks.append(("f", entries()))

        def on_before_backward(self, *args):
            super().on_before_backward(*args)
            marks.append(("B", entries()))

        def on_after_backward(self, *args):
            super().on_after_backward(*args)
            marks.append(("b", entries()))

    def entries():
        return len(torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()])

    torch.cuda.memory._record_memory_history(context=None, stacks="python")
    try:
        callback = fit(tmp_path, callback=Marks(predict=False))
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    step = callback.recorder.steps[-1]
    last = dict(marks[-4:])
    for window, start, end in (
        (step.windows[0], last["F"], last["f"]),
        (step.windows[1], last["B"], last["b"]),
    ):
        alive = peak = 0
        for entry in trace[start:end]:
            if entry["action"] == "alloc":
                alive += entry["size"]
                peak = max(peak, alive)
            elif entry["action"] == "free_completed":
                alive -= entry["size"]
        # The history has requested sizes, the counters those of blocks: rounded up to 512 B, with
        # tails of up to 1 MiB not split off.
        num_allocs = sum(entry["action"] == "alloc" for entry in trace[start:end])
        above = window.peak_allocated_bytes - window.start.allocated_bytes
        assert peak <= above <= peak + num_allocs * MiB
        assert window.end.requested_bytes - window.start.requested_bytes == alive


def test_an_accumulation_window_is_recorded_as_it_ran(tmp_path):
    callback = fit(tmp_path, data=images(5), accumulate_grad_batches=2)
    assert [O in step.phases for step in callback.recorder.steps] == [
        False,
        True,
        False,
        True,
        True,
    ]
    assert [step.is_warm_up for step in callback.recorder.steps] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_an_update_that_the_grad_scaler_skips_is_seen(tmp_path, monkeypatch):
    found = iter([False, True, False, False])

    def step_or_skip(self, optimizer, optimizer_state, *args, **kwargs):
        return None if next(found) else optimizer.step(*args, **kwargs)

    monkeypatch.setattr(torch.amp.GradScaler, "_maybe_opt_step", step_or_skip)
    # A trace would ask the scaler too.
    callback = fit(tmp_path, precision="16-mixed", callback=MemoryCallback(predict=False))
    assert [step.num_optimizer_updates for step in callback.recorder.steps] == [1, 0, 1, 1]
    assert all(O in step.phases for step in callback.recorder.steps)


def test_an_oom_in_training_step_goes_on_unchanged_and_is_counted(tmp_path, capsys):
    class Greedy(Convolutions):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                torch.empty(2**45, dtype=torch.uint8, device=self.device)
            return super().training_step(batch, batch_idx)

    callback = MemoryCallback(predict=False)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 32768\.00 GiB"
    ):
        fit(tmp_path, Greedy(), callback=callback)
    last = callback.recorder.steps[-1]
    assert last.is_interrupted
    assert last.num_ooms == 1
    assert [window.covers for window in last.windows] == [(F,)]
    assert "The last step ended with OutOfMemoryError." in capsys.readouterr().out


def test_training_leaves_the_same_bits_with_and_without_the_callback(tmp_path):
    callback = MemoryCallback()
    with_it = run(
        tmp_path, with_callback=True, accelerator="gpu", callback=callback, precision="16-mixed"
    )
    without = run(tmp_path, with_callback=False, accelerator="gpu", precision="16-mixed")
    assert differences(with_it, without) == []
    assert callback.prediction is not None
    assert len(callback.recorder.steps) == 12


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_makes_at_most_five_reads_and_nothing_waits_for_the_device(tmp_path, monkeypatch):
    calls = {"reads": 0, "waits": 0}

    def count(owner, name, what):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            calls[what] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for name in (
        "memory_stats",
        "memory_stats_as_nested_dict",
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
    ):
        count(torch.cuda, name, "reads")
    count(torch.cuda, "synchronize", "waits")
    count(torch.cuda.Stream, "synchronize", "waits")
    count(torch.cuda.Event, "synchronize", "waits")
    per_step = []

    class Counted(MemoryCallback):
        """Any operation inside a hook that waits for the device is an error too."""

        def __getattribute__(self, name):
            value = super().__getattribute__(name)
            if not (name.startswith("on_") and callable(value)):
                return value

            def watched(*args, **kwargs):
                mode = torch.cuda.get_sync_debug_mode()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    if name == "on_train_batch_start":
                        per_step.append(calls["reads"])
                    return value(*args, **kwargs)
                finally:
                    torch.cuda.set_sync_debug_mode(mode)

            return watched

    # Its own reading of torch's figures aside, Lightning waits nowhere in such a loop.
    callback = fit(tmp_path, data=images(8), callback=Counted(), max_epochs=1)
    assert len(callback.recorder.steps) == 8
    assert not callback._is_broken
    assert calls["waits"] == 0
    steps = [after - before for before, after in pairwise(per_step)]
    assert steps == [5] * 7


def test_without_resets_the_programs_own_peak_survives(tmp_path):
    torch.cuda.reset_peak_memory_stats()
    held = torch.empty(256 * MiB, dtype=torch.uint8, device="cuda")
    del held
    callback = fit(tmp_path, callback=MemoryCallback(reset_peaks=False))
    assert torch.cuda.max_memory_allocated() >= 256 * MiB
    steady = callback.recorder.steps[-1]
    # No phase came near the older peak, so their own peaks are unknown, and not zero.
    assert [window.peak_allocated_bytes for window in steady.windows] == [None] * 3
    assert steady.windows[0].end.allocated_bytes > 0
    assert callback.recorder.lifetime_peak_allocated_bytes == torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("options", [{}, {"per_module": True}])
def test_two_recorders_of_one_device_record_the_same(options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    alone, one, other = (MemoryRecorder(device=d) for d in ("cuda", "cuda", "cuda:0"))

    def run(*recorders):
        batch = torch.ones(256, 512, device="cuda")
        with ExitStack() as stack:
            for recorder in recorders:
                stack.enter_context(recorder.watch(model, optimizer, **options))
            for _ in range(3):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [
            [window.peak_allocated_bytes for step in recorder.steps for window in step.windows]
            for recorder in recorders
        ]

    run()  # the workspaces and the optimizer's state are there before the first recorded step
    (expected,) = run(alone)
    assert run(one, other) == [expected, expected]


def test_without_resets_a_meter_has_the_peaks_that_another_one_resets():
    torch.cuda.reset_peak_memory_stats()
    plain, resetting = AllocatorMeter(CUDA, reset_peaks=False), AllocatorMeter(CUDA)
    for meter in (plain, resetting):
        meter.begin()
        meter.read(None)
    held = torch.empty(256 * MiB, dtype=torch.uint8, device="cuda")
    peak = torch.cuda.memory_allocated()
    del held
    resetting.read(None)
    plain.read(None)
    plain.read(None)
    assert [stats.peak_allocated_bytes for stats in plain.end()[1:]] == [peak, None]
    assert resetting.end()[1].peak_allocated_bytes == peak


def test_the_lifetime_peak_is_what_torch_would_have_said(tmp_path):
    class Validates(Convolutions):
        def validation_step(self, batch, batch_idx):
            torch.empty(512 * MiB, dtype=torch.uint8, device=self.device)

    def peak(callbacks):
        gc.collect()  # what other tests have left is not to go in one of the two
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        loop = training.trainer(
            tmp_path, callbacks, accelerator="gpu", max_epochs=2, num_sanity_val_steps=0
        )
        loop.fit(Validates(), images(), images(1))
        return torch.cuda.max_memory_allocated()

    callback = MemoryCallback(predict=False)
    peak([callback])
    assert callback.recorder.lifetime_peak_allocated_bytes == peak([])


def test_other_accelerators_are_read_the_same_through_torch_accelerator():
    if not hasattr(torch.accelerator, "memory_stats"):
        pytest.skip("torch.accelerator.memory_stats is of PyTorch 2.9")
    device = torch.device("cuda", torch.cuda.current_device())
    ours = AllocatorMeter(device, reset_peaks=False)
    generic = AllocatorMeter(device, reset_peaks=False)
    generic._read, generic._value = (
        torch.accelerator.memory_stats,
        _flat_value,
    )
    kept = torch.empty(3 * MiB, dtype=torch.uint8, device=device)
    for meter in (ours, generic):
        meter.begin()
        meter.read(None)
    (first,), (second,) = ours.end(), generic.end()
    assert first.allocated_bytes == second.allocated_bytes >= kept.nbytes
    assert first.peak_reserved_bytes == second.peak_reserved_bytes


def test_the_suggestion_comes_from_the_largest_step_even_if_its_holdings_were_not_counted(tmp_path):
    def batch(size):
        return torch.randn(size, 3, 32, 32), torch.randint(0, 100, (size,))

    data = torch.utils.data.DataLoader(
        [batch(4)] * 6 + [batch(64)] + [batch(4)] * 3, batch_size=None
    )
    callback = fit(tmp_path, data=data, log_every_n_steps=50)
    assert callback.recorder.steps[6].held_bytes is None
    assert callback.report.measured.held_bytes is not None
    advice = callback.report.advice
    assert advice.current_batch_size == 64
    assert dict(advice.curve)[64] >= callback.recorder.steps[6].peak_reserved_bytes


def test_a_suggested_batch_size_runs_within_its_budget_even_where_gradients_hide_the_activations():
    class Wide(nn.Module):
        """256 MiB of parameters with tiny outputs, then layers whose outputs grow with batches."""

        def __init__(self):
            super().__init__()
            self.wide = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(16)))
            self.body = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))

        def forward(self, x):
            return self.body(self.wide(x)[:, None, :512].expand(-1, 256, -1))

    def reserved_peak(model, optimizer, batch_size):
        recorder = MemoryRecorder(model, optimizer)
        for _ in range(3):
            batch = torch.zeros(batch_size, 2048, device="cuda")
            with recorder.step(batch):
                with recorder.phase(F):
                    loss = model(batch).sum()
                with recorder.phase(B):
                    loss.backward()
                del loss
                with recorder.phase(O):
                    optimizer.step()
                    optimizer.zero_grad()
        return recorder

    torch.cuda.empty_cache()
    model = Wide().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch_size in (4, 16, 64):
        advice = (
            reserved_peak(model, optimizer, batch_size).report(capacity_bytes=2 * 1024 * MiB).advice
        )
        assert advice.is_measured
        assert advice.batch_size > batch_size
        torch.cuda.empty_cache()
        assert (
            reserved_peak(model, optimizer, advice.batch_size).steps[-1].peak_reserved_bytes
            <= advice.budget_bytes
        )
        torch.cuda.empty_cache()


def test_memory_that_validation_left_in_the_cache_is_not_taken_for_somebody_elses(tmp_path):
    class Validates(Convolutions):
        def validation_step(self, batch, batch_idx):
            torch.empty(2**33, dtype=torch.uint8, device=self.device)

    callback = MemoryCallback(predict=False)
    loop = training.trainer(tmp_path, [callback], accelerator="gpu", num_sanity_val_steps=0)
    loop.fit(Validates(), images(), images(1))
    assert callback.report.device.reserved_bytes >= 2**33
    assert callback.report.device.non_pytorch_bytes < 2**31


def test_the_split_by_category_counts_what_is_on_the_device(tmp_path):
    callback = fit(tmp_path)
    start = callback.recorder.steps[2].windows[0].start
    parameters = sum(p.numel() for p in Convolutions().parameters()) * 4
    assert start.by_category[Category.PARAMETER] == parameters
    assert start.by_category[Category.GRADIENT] == parameters
    # Adam's step counters stay on the CPU.
    assert start.by_category[Category.OPTIMIZER_STATE] == 2 * parameters
    assert start.by_category[Category.INPUT] == 16 * 3 * 32 * 32 * 4 + 16 * 8
    predicted = callback.prediction.phases[F].start.by_category
    assert predicted == start.by_category


def test_the_whole_device_has_capacity_and_memory_outside_pytorch():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.empty(1, device=device)
    memory = device_memory(device)
    assert memory.capacity_bytes == torch.cuda.get_device_properties(device).total_memory
    assert 0 < memory.non_pytorch_bytes < memory.capacity_bytes


def test_a_recorder_in_a_plain_loop_reads_the_models_device():
    model = nn.Linear(1000, 1000, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = MemoryRecorder(model, optimizer)
    batch = torch.ones(64, 1000, device="cuda")
    for _ in range(2):
        with recorder.step(batch):
            with recorder.phase(F):
                loss = model(batch).sum()
            with recorder.phase(B):
                loss.backward()
            with recorder.phase(O):
                optimizer.step()
                optimizer.zero_grad()
    steady = recorder.steps[-1]
    assert steady.device_name == torch.cuda.get_device_name()
    assert steady.batch_size == 64
    assert steady.windows[-1].end.allocated_bytes == torch.cuda.memory_allocated()
    assert steady.windows[-1].end.reserved_bytes == torch.cuda.memory_reserved()


@pytest.mark.skipif("torch.cuda.device_count() < 2")
def test_a_model_on_two_devices_is_recorded_on_the_one_that_trains(tmp_path):
    class Elsewhere(mc.MemoryCallback):
        def on_train_start(self, trainer, pl_module):
            pl_module.elsewhere = nn.Linear(1000, 1000, device="cuda:1")
            super().on_train_start(trainer, pl_module)

    callback = Elsewhere()
    with (
        pytest.warns(
            mc.MemoryWarning,
            match=r"are on 2 devices \(cuda:0, cuda:1\); only the memory of cuda:0 is recorded",
        ),
        pytest.warns(
            mc.MemoryWarning, match=r"and a trace can have only one. The textbook estimate is used"
        ),
    ):
        fit(tmp_path, callback=callback, devices=1)
    parameters = sum(p.numel() for p in Convolutions().parameters()) * 4
    assert callback.recorder.steps[2].windows[0].start.by_category[Category.PARAMETER] == parameters


class Transformer(training.Automatic):
    """Layer norms, attention, dropout and matrix products."""

    def __init__(self, **options):
        super().__init__(**options)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
        self.network = nn.Sequential(
            nn.Embedding(500, 128),
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(128, 500),
        )

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.network(batch).flatten(0, 1), batch.flatten())
        self.log("loss", loss)
        return loss


def tokens(num_batches=6):
    return torch.utils.data.DataLoader(
        [torch.randint(0, 500, (16, 64))] * num_batches, batch_size=None
    )


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize(("make", "data"), [(Convolutions, images), (Transformer, tokens)])
def test_what_is_predicted_before_the_first_step_is_measured_in_a_steady_one(
    tmp_path, make, data, precision
):
    from lightning.pytorch.loggers.logger import DummyLogger

    logged = []
    logger = DummyLogger()
    logger.log_metrics = lambda metrics, step: (
        logged.append(metrics) if "memory_gib/capacity" in metrics else None
    )
    callback = fit(
        tmp_path,
        make(),
        data=data(),
        precision=precision,
        logger=logger,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
    )
    assert isinstance(callback.prediction, mc.Prediction)
    assert callback.prediction.device_name == torch.cuda.get_device_name()
    assert callback.prediction.capacity_bytes == torch.cuda.get_device_properties(0).total_memory
    peaks = ("peak_forward", "peak_backward", "peak_optimizer")
    predicted = max(logged[-1][f"memory_gib/predicted/{peak}"] for peak in peaks)
    measured = max(logged[-1][f"memory_gib/{peak}"] for peak in peaks)
    assert abs(predicted / measured - 1) <= 0.001
    reserved = logged[-1]["memory_gib/predicted/reserved"]
    assert abs(reserved / logged[-1]["memory_gib/reserved"] - 1) <= 0.02
    assert not any("The prediction is off" in line for line in callback.report.lines())
    assert callback.report.advice.current_batch_size == 16


def test_predict_without_a_device_is_for_the_one_that_is_here():
    step = mc.TrainingStep(nn.Linear(64, 64), torch.ones(8, 64), optimizer=torch.optim.SGD)
    assert mc.predict(step).device_name == torch.cuda.get_device_name()
