"""On a CUDA device, real or virtual: modules as measured and as predicted, and that the allocator
does the same with and without.
"""

import gc

import module_models
import pytest
import torch
import training
from module_models import CASES, Perceptron, record, vectors
from observer import differences, run

from memcallback import MemoryCallback, Phase
from memcallback.devices.meters import AllocatorMeter

pytestmark = pytest.mark.cuda

WINDOW_FIGURES = (
    "num_runs",
    "start_allocated_bytes",
    "end_allocated_bytes",
    "peak_allocated_bytes",
    "change_bytes",
)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("case", CASES)
def test_measured_and_predicted_modules_agree_to_the_byte(case, precision):
    make, make_batch = CASES[case]
    dtype = torch.bfloat16 if precision == "bf16-mixed" else None
    measured = record(make(), make_batch(), device="cuda", dtype=dtype).modules
    predicted = module_models.predict(make, make_batch, device=None, precision=precision).modules
    for module in measured.modules:
        theirs = predicted[module.name]
        for ours, other in ((module.forward, theirs.forward), (module.backward, theirs.backward)):
            assert (ours is None) == (other is None), module.name
            if ours is not None:
                assert [getattr(ours, name) for name in WINDOW_FIGURES] == [
                    getattr(other, name) for name in WINDOW_FIGURES
                ], module.name


@pytest.mark.parametrize("case", CASES)
def test_the_allocator_does_the_same_with_and_without_the_modules(case):
    make, make_batch = CASES[case]
    found = []
    for per_module in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        recorder = record(make(), make_batch(), device="cuda", per_module=per_module)
        windows = [window for step in recorder.steps for window in step.windows]
        found.append(
            [
                (
                    window.start.allocated_bytes - before,
                    window.end.allocated_bytes - before,
                    window.peak_allocated_bytes - before,
                    window.end.by_category,
                )
                for window in windows
            ]
        )
        del recorder
    assert (
        found[0][3:] == found[1][3:]
    )  # the workspaces of cuBLAS come with the first step of a process


def test_a_step_reads_the_allocator_five_times_more_where_it_is_not_sampled(monkeypatch):
    marks = []
    monkeypatch.setattr(
        AllocatorMeter, "mark", lambda meter: marks.append(None) or meter.read(None)
    )
    numbers = []
    record(
        Perceptron(),
        vectors(),
        device="cuda",
        num_steps=6,
        at_step=lambda _: numbers.append(len(marks)),
    )
    assert numbers[0] < numbers[1] < numbers[2] < numbers[3] == numbers[4] == numbers[5]


def test_without_resets_the_peak_of_the_process_stays():
    torch.cuda.reset_peak_memory_stats()
    recorder = record(Perceptron(), vectors(), device="cuda", reset_peaks=False)
    largest = max(
        window.peak_allocated_bytes or 0 for step in recorder.steps for window in step.windows
    )
    assert torch.cuda.max_memory_allocated() == largest
    peaks = [module.forward.peak_allocated_bytes for module in recorder.modules.ran]
    assert all(peak is None or peak <= largest for peak in peaks)
    assert None in peaks


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device():
    def strict(model, batch):
        torch.cuda.set_sync_debug_mode("error")
        return module_models.loss_of(model, batch)

    try:
        recorder = record(Perceptron(), vectors(), device="cuda", loss_of=strict)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert recorder.modules is not None


def test_training_leaves_the_same_bits_with_and_without_the_callback(tmp_path):
    callback = MemoryCallback(per_module=True)
    with_it = run(tmp_path, with_callback=True, accelerator="gpu", callback=callback)
    without = run(tmp_path, with_callback=False, accelerator="gpu")
    assert differences(with_it, without) == []
    assert callback.recorder.modules["network.0"].backward is not None


def test_the_callback_shows_measured_beside_predicted(tmp_path, capsys):
    callback = MemoryCallback(per_module=True, verbose=2)
    training.trainer(tmp_path, [callback], accelerator="gpu").fit(
        training.Automatic(), training.loader(6)
    )
    measured, predicted = callback.recorder.modules, callback.prediction.modules
    for module in measured.ran[1:]:  # in the root are the values that Lightning logs
        assert module.kept_bytes == predicted[module.name].kept_bytes
    assert (
        measured[""].backward.peak_allocated_bytes
        == callback.recorder.steps[-1].phases[Phase.BACKWARD].peak_allocated_bytes
    )
    assert "kept, predicted" in capsys.readouterr().out
