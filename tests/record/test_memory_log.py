"""`MemoryLog` in a plain loop."""

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from event_files import curves_of
from loop_parts import CLASSES, FEATURES, loss_of, network
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import memcallback as mc
from memcallback import MemoryWarning, Phase
from memcallback.core.units import MiB
from memcallback.devices.catalogue import find_device

BATCH = (torch.ones(16, FEATURES), torch.zeros(16, dtype=torch.long))


@pytest.fixture
def parts():
    model = network()
    return model, torch.optim.Adam(model.parameters())


def train(model, optimizer, num_steps=6):
    for _ in range(num_steps):
        loss_of(model, BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()


def step_of(model, optimizer):
    return mc.TrainingStep(model, BATCH, loss=loss_of, optimizer=optimizer)


def run_of(folder, version=0):
    return EventAccumulator(str(folder / f"version_{version}")).Reload()


def test_the_first_steady_step_and_the_end_are_reported_beside_the_prediction(
    tmp_path, parts, capsys
):
    recorder = mc.MemoryRecorder(*parts)
    recorder.watch()
    log = mc.MemoryLog(recorder, step_of(*parts), log_dir=tmp_path)
    assert isinstance(log.prediction, mc.Prediction)
    assert log.report is None
    train(*parts, num_steps=2)
    assert log.report.measured.batch_size == 16
    first = capsys.readouterr().out
    assert first.count("memcallback │ Sequential · batch 16 · Adam · 32-true · CPU") == 1
    assert re.search(
        rf"^  more +.*tensorboard.* --logdir {tmp_path / 'version_0'}$", first, re.MULTILINE
    )
    assert "Memory of one training step" not in first
    train(*parts)
    recorder.close()
    (last,) = capsys.readouterr().out.splitlines()
    closing = re.fullmatch(
        r"memcallback: 8 steps, peak [\d.]+ KiB allocated, 3 of 8 steps read; page: (.+)", last
    )
    page = Path(closing[1]).read_text(encoding="utf-8")
    assert Path(closing[1]).parent == tmp_path / "version_0"
    for title in ("One training step", "In memory at the peak", "Peaks over the training"):
        assert f"<h2>{title}" in page
    assert "<strong>Measured peak: " in page
    assert "measured peak of backward: " in page
    predicted, measured = log.report.prediction, log.report.measured
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        # The classes do not go through the model, and what is older than a step is not seen on a
        # CPU.
        assert (
            predicted.phases[phase].peak_allocated_bytes
            - measured.phases[phase].peak_allocated_bytes
            == 16 * 8
        )


@pytest.mark.parametrize(
    ("verbose", "is_brief", "is_long"), [(0, False, False), (1, True, False), (2, True, True)]
)
def test_verbose_says_how_much_is_printed(tmp_path, parts, capsys, verbose, is_brief, is_long):
    recorder = mc.MemoryRecorder(*parts)
    log = mc.MemoryLog(recorder, step_of(*parts), log_dir=None, verbose=verbose)
    with log, recorder.watch():
        assert log.prediction is not None
        train(*parts)
    output = capsys.readouterr().out
    assert ("  FITS   measured peak" in output) == is_brief
    assert ("memcallback: 6 steps" in output) == is_brief
    assert ("Memory of one training step (steady, batch size 16) on CPU" in output) == is_long
    assert ("What modules keep" in output) == is_long
    output = " ".join(output.split())
    assert all(caveat.split(":")[0] in output for caveat in log.prediction.caveats) == is_long
    assert bool(output) == (verbose > 0)


def test_where_few_steps_are_read_a_larger_batch_is_and_nothing_old_is_logged_at_a_later_step(
    tmp_path, parts, capsys
):
    model, optimizer = parts
    recorder = mc.MemoryRecorder(*parts)
    with mc.MemoryLog(recorder, log_dir=tmp_path), recorder.watch():
        for number in range(1, 41):
            num_samples = 16 if number < 20 else 1600
            model(torch.ones(num_samples, FEATURES)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [step.batch_size for step in recorder.steps] == [16, 16, 16, 1600]
    closing = capsys.readouterr().out.splitlines()[-1]
    assert re.match(
        r"memcallback: 40 steps, peak .+ allocated \(.+ in batch 20\), 4 of 40 steps read", closing
    )
    points = run_of(tmp_path).Scalars("memory_gib/peak_forward")
    assert [point.step for point in points] == [2, 20]
    assert points[1].value > 10 * points[0].value


def test_an_out_of_memory_error_prints_nothing_if_nothing_is_to_be_printed(tmp_path, parts, capfd):
    recorder = mc.MemoryRecorder(*parts)

    def loop():
        with mc.MemoryLog(recorder, log_dir=tmp_path, verbose=0), recorder.watch():
            train(*parts, num_steps=2)
            with recorder.step(BATCH):
                raise MemoryError

    with pytest.raises(MemoryError):
        loop()
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "Out of memory" not in printed.err
    assert list(tmp_path.rglob("out_of_memory*.md"))


@pytest.mark.parametrize("is_watched", [False, True])
def test_there_is_a_point_for_every_interval_of_updates_and_for_the_end(
    tmp_path, parts, is_watched
):
    model, optimizer = parts
    recorder = mc.MemoryRecorder(model, optimizer)
    if is_watched:
        recorder.watch()
    mc.MemoryLog(recorder, step_of(*parts), log_dir=tmp_path, log_every_n_steps=4)
    for _ in range(13):
        if is_watched:
            train(model, optimizer, 1)
            continue
        with recorder.step(BATCH):
            with recorder.phase(Phase.FORWARD):
                loss = loss_of(model, BATCH)
            with recorder.phase(Phase.BACKWARD):
                loss.backward()
            with recorder.phase(Phase.OPTIMIZER_STEP):
                optimizer.step()
    recorder.close()
    curves = curves_of(tmp_path / "version_0")
    # The second is the first steady one, which is reported.
    assert list(curves[""]["memory_gib/peak_backward"])[:4] == [2, 4, 8, 12]
    assert next(iter(curves["predicted"]["memory_gib/peak_backward"])) == 2
    assert "memory/report/text_summary" in run_of(tmp_path).Tags()["tensors"]


def test_of_an_accumulation_window_the_largest_step_is_logged_with_the_update(tmp_path, parts):
    model, optimizer = parts
    recorder = mc.MemoryRecorder(model, optimizer, sample_every_n_steps=1)
    with mc.MemoryLog(recorder, log_dir=tmp_path, log_every_n_steps=1), recorder.watch():
        for number in range(6):
            loss_of(model, BATCH).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    curves = curves_of(tmp_path / "version_0")
    assert list(curves[""]["memory_gib/peak_backward"]) == [1, 2, 3]


def test_without_a_folder_there_is_no_run(tmp_path, parts, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = mc.MemoryRecorder(*parts)
    recorder.watch()
    mc.MemoryLog(recorder, log_dir=None)
    train(*parts)
    recorder.close()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_predicted_is_recorded_and_told(tmp_path, parts):
    model, optimizer = parts
    recorder = mc.MemoryRecorder(model, optimizer)
    recorder.watch()
    step = mc.TrainingStep(
        model,
        torch.tensor(0.0),
        loss=lambda model, batch: loss_of(model, BATCH),
        optimizer=optimizer,
    )
    with pytest.warns(
        MemoryWarning,
        match=r"recorded but not predicted. The batch size cannot be "
        r"inferred.*MemoryLog\(recorder\)",
    ):
        log = mc.MemoryLog(recorder, step, log_dir=tmp_path)
    assert log.prediction is None
    train(*parts)
    recorder.close()
    assert log.report.measured is not None


def test_an_error_of_ours_does_not_stop_the_training(tmp_path, parts, monkeypatch):
    monkeypatch.setattr("memcallback.record.point_log.step_curves", None)
    recorder = mc.MemoryRecorder(*parts)
    recorder.watch()
    mc.MemoryLog(recorder, log_dir=tmp_path)
    with pytest.warns(MemoryWarning, match="MemoryLog has stopped recording: TypeError in on_step"):
        train(*parts)
    recorder.close()
    assert len(recorder.steps) == 3


def test_an_exception_in_the_loop_is_named_in_the_last_report(tmp_path, parts, capsys):
    recorder = mc.MemoryRecorder(*parts)

    def loop():
        with mc.MemoryLog(recorder, log_dir=None), recorder.watch():
            train(*parts, num_steps=3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert "The training ended with ZeroDivisionError." in capsys.readouterr().out


def test_only_rank_zero_writes_and_prints(tmp_path, parts, capsys, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    recorder = mc.MemoryRecorder(*parts)
    recorder.watch()
    log = mc.MemoryLog(recorder, step_of(*parts), log_dir=tmp_path)
    train(*parts)
    recorder.close()
    assert log.report is not None
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_card_to_plan_for_bounds_the_suggestion(parts):
    recorder = mc.MemoryRecorder(*parts)
    with (
        mc.MemoryLog(recorder, step_of(*parts), log_dir=None, device="64MiB") as log,
        recorder.watch(),
    ):
        train(*parts)
    assert log.report.device.capacity_bytes == 64 * 2**20
    assert CLASSES < log.report.advice.batch_size < 64 * 2**20 // (FEATURES * 4)


def test_of_a_card_nothing_is_said_where_a_cpu_trains(parts, capsys):
    recorder = mc.MemoryRecorder(*parts)
    with (
        mc.MemoryLog(recorder, step_of(*parts), log_dir=None, device="RTX 4060") as log,
        recorder.watch(),
    ):
        train(*parts)
    assert log.report.advice is None
    assert log.report.device.capacity_bytes != 8 * 2**30
    said = " ".join(capsys.readouterr().out.split())
    assert "batch size" not in said.split("note")[0]
    assert ", for NVIDIA" not in said
    assert 'memcallback.suggest_batch_size(step, device="NVIDIA GeForce RTX 4060")' in said


@pytest.mark.filterwarnings("ignore:A profile of PyTorch is running")
def test_under_a_profile_of_the_users_nothing_unknown_is_shown_as_0_or_as_predicted(
    tmp_path, parts, capsys
):
    recorder = mc.MemoryRecorder(*parts)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        log = mc.MemoryLog(recorder, step_of(*parts), log_dir=tmp_path, wait_for_prediction=True)
        with log, recorder.watch():
            train(*parts)
    assert log.report.measured.peak_allocated_bytes is None
    assert log.report.advice.outside_bytes == log.report.device.other_processes_bytes
    closing = capsys.readouterr().out.splitlines()[-1]
    assert closing.startswith("memcallback: 6 steps, peak ")
    assert "as predicted" not in closing
    page = (tmp_path / "version_0" / "memory.html").read_text()
    assert "Measured peak: 0 bytes" not in page
    assert re.search(r"Measured peak: [\d.]+ [MG]iB resident", page)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        (["no recorder"], {}, TypeError, "recorder must be a MemoryRecorder, got 'no recorder'"),
        ([None, "no step"], {}, TypeError, "step must be a TrainingStep, got 'no step'"),
        (
            [None],
            {"log_every_n_steps": 0},
            ValueError,
            "log_every_n_steps must be at least 1, got 0",
        ),
        ([None], {"headroom": 1}, ValueError, "headroom"),
        *(
            ([None], {"verbose": value}, ValueError, f"verbose must be 0, 1 or 2, got {value!r}")
            for value in (3, -1, True, None, "all", 1.0)
        ),
        ([None], {"device": "cpu"}, ValueError, "has no known memory size"),
    ],
)
def test_bad_arguments_are_refused(parts, arguments, options, error, text):
    first, *rest = arguments
    with pytest.raises(error, match=text):
        mc.MemoryLog(first or mc.MemoryRecorder(*parts), *rest, log_dir=None, **options)


def test_no_more_samples_are_suggested_than_the_dataset_has(parts, capsys):
    recorder = mc.MemoryRecorder(*parts)
    recorder.watch()
    mc.MemoryLog(recorder, step_of(*parts), log_dir=None, dataset_size=50)
    train(*parts, num_steps=2)
    assert "the whole training set (50) fits with 5 % kept free (now 16)" in capsys.readouterr().out
    recorder.close()


def test_a_dataset_that_is_smaller_than_a_batch_bounds_nothing(parts, capsys):
    recorder = mc.MemoryRecorder(*parts)
    recorder.watch()
    mc.MemoryLog(recorder, step_of(*parts), log_dir=None, dataset_size=15)
    train(*parts, num_steps=2)
    assert "is the largest that fits with 5 % kept free (now 16)" in capsys.readouterr().out
    recorder.close()


def test_two_optimizers_of_one_step_make_one_update(tmp_path, capsys):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    recorder = mc.MemoryRecorder(model, optimizers, sample_every_n_steps=1_000)
    with mc.MemoryLog(recorder, log_dir=tmp_path, log_every_n_steps=5), recorder.watch():
        for _ in range(10):
            model(torch.ones(2, 4)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert recorder.num_updates == 10
    assert "memcallback: 10 steps" in capsys.readouterr().out
    assert recorder.steps[0].num_optimizer_updates == 2
    # On a CPU the first steps are recorded, and those of the points at 5 and 10.
    assert [step.index + 1 for step in recorder.steps] == [1, 2, 3, 5, 10]
    curves = curves_of(tmp_path / "version_0")
    assert list(curves[""]["memory_gib/peak_backward"]) == [2, 5, 10]


def test_a_loop_is_reported_in_time_without_its_optimizer(tmp_path, parts, capsys):
    model, optimizer = parts
    recorder = mc.MemoryRecorder(model)
    log = mc.MemoryLog(recorder, log_dir=tmp_path, log_every_n_steps=5)
    with log, recorder.watch():
        train(model, optimizer, num_steps=4)
        told = "The recorder has no optimizer of PyTorch's, so it sees no update"
        assert log.report.notes[-1].startswith(told)
        train(model, optimizer, num_steps=6)
    printed = capsys.readouterr().out
    assert "No optimizer update" not in printed
    assert "memcallback: 10 steps" in printed
    curves = curves_of(tmp_path / "version_0")
    assert list(curves[""]["memory_gib/peak_backward"])[-2:] == [5, 10]


def test_a_size_that_is_unknown_at_the_end_is_no_change(parts, capsys):
    model, optimizer = parts
    recorder = mc.MemoryRecorder(model, optimizer)
    with mc.MemoryLog(recorder, log_dir=None) as log:
        for batch_size in (16, 16, None, None, None):
            with recorder.step(batch_size=batch_size):
                loss = loss_of(model, BATCH)
                with recorder.phase(Phase.BACKWARD):
                    loss.backward()
                with recorder.phase(Phase.OPTIMIZER_STEP):
                    optimizer.step()
    assert log.report.measured.batch_size is None
    assert capsys.readouterr().out.splitlines()[-1].startswith("memcallback: 5 steps, peak ")


@pytest.mark.parametrize(
    ("context_bytes", "word"), [(MiB, "FITS"), (64 * MiB - 1024, "DOES NOT FIT")]
)
def test_on_another_device_the_peak_must_fit_beside_the_context(context_bytes, word, parts):
    device = replace(find_device("24GiB"), capacity_bytes=64 * MiB, context_bytes=context_bytes)
    with (
        closing(mc.MemoryRecorder(*parts)) as recorder,
        mc.MemoryLog(recorder, step_of(*parts), log_dir=None, device=device) as log,
    ):
        recorder.watch()
        train(*parts)
    assert log.report.verdict.word == word
