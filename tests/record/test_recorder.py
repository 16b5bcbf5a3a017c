"""`MemoryRecorder` in a loop without Lightning, on a CPU."""

import gc
import weakref

import pytest
import torch
from torch import nn

from memcallback import MemoryRecorder, Phase
from memcallback.core.types import Category, Kind

BATCH = torch.ones(16, 50)


@pytest.fixture
def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 70), nn.ReLU(), nn.Linear(70, 30))
    return model, torch.optim.Adam(model.parameters())


def train_step(recorder, model, optimizer, batch=BATCH, batch_size=None):
    with recorder.step(batch, batch_size=batch_size):
        with recorder.phase(Phase.FORWARD):
            loss = model(batch).square().mean()
        optimizer.zero_grad()
        with recorder.phase(Phase.BACKWARD):
            loss.backward()
        with recorder.phase(Phase.OPTIMIZER_STEP):
            optimizer.step()


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_batch_is_gone_after_its_step(parts, is_dropped):
    recorder, batch = MemoryRecorder(*parts, per_module=True), torch.ones(16, 50)
    gone = weakref.ref(batch)
    if is_dropped:
        recorder.begin_step(batch)
        recorder.drop_step()
    else:
        train_step(recorder, *parts, batch=batch)
    del batch
    assert gone() is None


def test_a_container_that_only_the_recorder_has_is_recorded():
    first, second = nn.Linear(50, 50), nn.Linear(50, 50)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
    recorder = MemoryRecorder(nn.ModuleList([first, second]), optimizer)
    for _ in range(3):
        train_step(recorder, lambda batch: second(first(batch)), optimizer)
    end = recorder.steady.windows[-1].end
    assert end.by_category[Category.PARAMETER] == 2 * (50 * 50 + 50) * 4


@pytest.mark.parametrize("ending", ["drop_step", "close"])
def test_an_interrupt_while_a_step_begins_leaves_nothing_on_the_model(parts, ending):
    class Interrupting(nn.Linear):
        def register_forward_pre_hook(self, *args, **kwargs):
            raise KeyboardInterrupt

    model = nn.Sequential(nn.Linear(50, 30), Interrupting(30, 1))
    recorder = MemoryRecorder(model, per_module=True)
    with pytest.raises(KeyboardInterrupt):
        recorder.begin_step(BATCH)
    getattr(recorder, ending)()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    # PyTorch's profiler, of which there is one, is free.
    other = MemoryRecorder(*parts)
    train_step(other, *parts)
    assert [window.phase for window in other.steps[-1].windows] == list(Phase)


def test_a_step_has_its_phases_with_start_end_and_peak(parts):
    model, optimizer = parts
    recorder = MemoryRecorder(model, optimizer)
    for _ in range(2):
        train_step(recorder, model, optimizer)
    warm_up, steady = recorder.steps
    assert warm_up.is_warm_up
    assert not steady.is_warm_up
    assert steady.kind is Kind.MEASURED
    assert steady.device_name == "CPU"
    assert list(steady.phases) == list(Phase)
    for window in steady.windows:
        assert window.start.allocated_bytes <= window.peak_allocated_bytes
        assert window.end.allocated_bytes <= window.peak_allocated_bytes
    assert steady.num_optimizer_updates == 1


def test_the_split_by_category_follows_the_step(parts):
    model, optimizer = parts
    recorder = MemoryRecorder(model, optimizer)
    for _ in range(2):
        train_step(recorder, model, optimizer)
    parameters = sum(p.numel() for p in model.parameters()) * 4
    warm_up, steady = (step.phases for step in recorder.steps)
    assert warm_up[Phase.FORWARD].end.by_category[Category.GRADIENT] == 0
    assert warm_up[Phase.FORWARD].end.by_category[Category.OPTIMIZER_STATE] == 0
    assert steady[Phase.FORWARD].start.by_category == {
        Category.PARAMETER: parameters,
        Category.BUFFER: 0,
        Category.GRADIENT: parameters,
        Category.OPTIMIZER_STATE: 2 * parameters + 4 * 4,
        Category.INPUT: 16 * 50 * 4,
    }
    assert steady[Phase.BACKWARD].start.by_category[Category.GRADIENT] == 0
    # What the backward pass needs: the ReLU's output, the result and its mean.
    assert steady[Phase.FORWARD].end.rest_bytes == (16 * 70 + 16 * 30 + 1) * 4


def test_the_batch_size_comes_from_the_batch_unless_it_is_given(parts):
    recorder = MemoryRecorder(*parts)
    train_step(recorder, *parts)
    train_step(recorder, *parts, batch_size=1234)
    assert [step.batch_size for step in recorder.steps] == [16, 1234]


def test_only_sampled_steps_are_recorded_on_a_cpu(parts):
    recorder = MemoryRecorder(*parts, sample_every_n_steps=5)
    for _ in range(12):
        train_step(recorder, *parts)
    assert [step.index for step in recorder.steps] == [0, 1, 2, 5, 10]
    assert [step.index for step in recorder.steps[-2:]] == [5, 10]


def test_an_exception_in_a_phase_goes_on_and_the_step_is_marked(parts):
    model, optimizer = parts
    recorder = MemoryRecorder(model, optimizer)
    with pytest.raises(ZeroDivisionError), recorder.step(BATCH), recorder.phase(Phase.FORWARD):
        _ = 1 / 0
    train_step(recorder, model, optimizer)
    broken, whole = recorder.steps
    assert broken.is_interrupted
    assert list(broken.phases) == [Phase.FORWARD]
    assert not whole.is_interrupted
    assert whole.is_warm_up


def test_a_step_whose_update_is_skipped_says_so(parts):
    model, optimizer = parts
    recorder = MemoryRecorder(model, optimizer)
    with recorder.step(BATCH):
        with recorder.phase(Phase.FORWARD):
            model(BATCH)
        with recorder.phase(Phase.OPTIMIZER_STEP):
            pass
    (skipped,) = recorder.steps
    assert skipped.num_optimizer_updates == 0


def test_without_an_optimizer_each_optimizer_step_is_taken_for_an_update(parts):
    model, optimizer = parts
    recorder = MemoryRecorder(model)
    for _ in range(2):
        train_step(recorder, model, optimizer)
    assert [step.is_warm_up for step in recorder.steps] == [True, False]
    assert [step.num_optimizer_updates for step in recorder.steps] == [None, None]


def test_an_accumulation_window_is_a_step_for_each_batch(parts):
    model, optimizer = parts
    recorder = MemoryRecorder(model, optimizer, sample_every_n_steps=1)
    for position in range(6):
        with recorder.step(BATCH):
            with recorder.phase(Phase.FORWARD):
                loss = model(BATCH).square().mean()
            with recorder.phase(Phase.BACKWARD):
                loss.backward()
            if position % 3 == 2:
                with recorder.phase(Phase.OPTIMIZER_STEP):
                    optimizer.step()
                    optimizer.zero_grad()
    assert [Phase.OPTIMIZER_STEP in step.phases for step in recorder.steps] == [
        False,
        False,
        True,
    ] * 2
    assert [step.is_warm_up for step in recorder.steps] == [True] * 3 + [False] * 3


def test_a_phase_may_come_twice_in_a_step(parts):
    model, optimizer = parts
    recorder = MemoryRecorder(model, optimizer)
    with recorder.step(BATCH):
        for _ in range(2):
            with recorder.phase(Phase.FORWARD):
                loss = model(BATCH).square().mean()
            with recorder.phase(Phase.BACKWARD):
                loss.backward()
    (step,) = recorder.steps
    assert [window.phase for window in step.windows] == [Phase.FORWARD, Phase.BACKWARD] * 2
    assert list(step.phases) == [Phase.FORWARD, Phase.BACKWARD]


def test_without_a_model_a_cpu_run_has_the_resident_size_alone():
    recorder = MemoryRecorder(device="cpu")
    with recorder.step(batch_size=1), recorder.phase(Phase.FORWARD):
        torch.ones(10)
    (step,) = recorder.steps
    assert step.peak_allocated_bytes is None
    assert step.peak_resident_bytes > 0


def test_the_lifetime_peak_is_the_largest_of_all_steps(parts):
    recorder = MemoryRecorder(*parts)
    train_step(recorder, *parts)
    train_step(recorder, *parts, batch=torch.ones(512, 50))
    train_step(recorder, *parts)
    assert recorder.lifetime_peak_allocated_bytes == max(
        step.peak_allocated_bytes for step in recorder.steps
    )
    assert recorder.lifetime_peak_allocated_bytes > recorder.steps[-1].peak_allocated_bytes


def test_a_phase_outside_a_step_is_refused(parts):
    recorder = MemoryRecorder(*parts)
    with (
        pytest.raises(
            RuntimeError,
            match=r"The phase 'forward' is outside a step. Put it inside `with recorder.step",
        ),
        recorder.phase(Phase.FORWARD),
    ):
        pass


def test_a_step_inside_a_step_is_refused_and_the_outer_one_survives(parts):
    recorder = MemoryRecorder(*parts)
    with (
        recorder.step(BATCH),
        pytest.raises(RuntimeError, match="A step is open already"),
        recorder.step(BATCH),
    ):
        pass
    assert len(recorder.steps) == 1


def test_what_is_not_a_phase_is_refused(parts):
    recorder = MemoryRecorder(*parts)
    with (
        recorder.step(BATCH),
        pytest.raises(TypeError, match=r"must be a memcallback.Phase, got 'forward'"),
        recorder.phase("forward"),
    ):
        pass


def test_a_sampling_interval_below_one_is_refused(parts):
    with pytest.raises(ValueError, match="sample_every_n_steps must be at least 1, got 0"):
        MemoryRecorder(*parts, sample_every_n_steps=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("model",), "model must be a torch.nn.Module, or several of them, got 'model'"),
        (([nn.Linear(1, 1), 3],), "model must be a torch.nn.Module, or several of them, got 3"),
        ((nn.Linear(1, 1), "sgd"), "optimizer must be an optimizer, or several .* got 'sgd'"),
        ((nn.Linear(1, 1), torch.optim.SGD), "optimizer must be .* got the class SGD"),
    ],
)
def test_what_is_no_model_or_optimizer_is_refused(given, message):
    with pytest.raises(TypeError, match=message):
        MemoryRecorder(*given)
    with pytest.raises(TypeError, match=message):
        MemoryRecorder().watch(*given)


def test_a_loader_in_the_place_of_an_optimizer_is_not_loaded():
    loader = iter([torch.zeros(1), torch.ones(1)])
    with pytest.raises(TypeError, match="optimizer must be an optimizer"):
        MemoryRecorder(nn.Linear(1, 1), loader)
    assert next(loader) == 1


def test_closing_takes_back_the_hooks(parts):
    model, optimizer = parts
    recorder = MemoryRecorder(model, optimizer)
    recorder.close()
    assert not optimizer._optimizer_step_post_hooks


def test_recording_changes_neither_weights_nor_random_numbers(parts):
    def run(is_recorded):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(50, 70), nn.Dropout(0.5), nn.Linear(70, 30))
        optimizer = torch.optim.Adam(model.parameters())
        recorder = MemoryRecorder(model, optimizer) if is_recorded else None
        for _ in range(4):
            if recorder:
                train_step(recorder, model, optimizer)
            else:
                loss = model(BATCH).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return [p.detach().clone() for p in model.parameters()], torch.get_rng_state()

    (with_it, state_with), (without, state_without) = run(True), run(False)
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))
    assert torch.equal(state_with, state_without)


def recorded_of(parts, num_steps, is_logged=lambda number: True, accumulate=1):
    """Which of some steps are recorded because they are logged."""
    recorder = MemoryRecorder(*parts, sample_every_n_steps=10_000)
    recorded = []
    for number in range(num_steps):
        recorder.begin_step(BATCH, sample=is_logged(number))
        if number % accumulate == accumulate - 1:
            parts[1].step()
        if recorder.end_step() is not None:
            recorded.append(number)
    return recorded


def test_of_logged_steps_ever_fewer_are_recorded_on_a_cpu(parts):
    recorded = recorded_of(parts, 1200)
    assert recorded[:14] == [*range(11), 12, 14, 16]
    assert recorded[-3:] == [1050, 1100, 1150]  # one in fifty in the end
    assert len(recorded) < 100


@pytest.mark.parametrize("interval", [20, 30, 49])
def test_logged_steps_that_are_rare_are_recorded_down_to_one_in_fifty(parts, interval):
    recorded = recorded_of(parts, 3000, is_logged=lambda number: number % interval == interval - 1)
    assert sum(number > 1000 for number in recorded) >= 39


def test_without_an_optimizer_every_logged_step_is_recorded(parts):
    recorder = MemoryRecorder(parts[0], sample_every_n_steps=10_000)
    for _ in range(60):
        recorder.begin_step(BATCH, sample=True)
        assert recorder.end_step() is not None


def test_a_logged_accumulation_window_is_recorded_whole(parts):
    recorded = recorded_of(parts, 60, accumulate=3)
    assert len(recorded) == len({number // 3 for number in recorded}) * 3 < 60


def sizes_read(parts, sizes):
    recorder = MemoryRecorder(*parts)
    for size in sizes:
        recorder.begin_step(batch_size=size)
        parts[1].step()
        recorder.end_step()
    assert recorder.num_updates == len(sizes)
    assert recorder.num_read == len(recorder.steps)
    return [step.batch_size for step in recorder.steps]


def test_on_a_cpu_the_first_step_of_a_new_batch_size_is_recorded(parts):
    assert sizes_read(parts, [8] * 5 + [64] * 5 + [8] * 5 + [3] + [64] * 5) == [8, 8, 8, 64, 3]


def test_of_batch_sizes_that_never_repeat_few_are_recorded(parts):
    assert sizes_read(parts, range(1, 49)) == list(range(1, 11))


def test_a_device_that_does_not_exist_leaves_no_hook():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    before = {name: len(part) for name, part in vars(optimizer).items() if "hooks" in name}
    with pytest.raises(RuntimeError, match="nonsense"):
        MemoryRecorder(model, optimizer, device="nonsense")
    assert before == {name: len(part) for name, part in vars(optimizer).items() if "hooks" in name}


def test_steps_that_are_not_recorded_count_with_their_updates():
    recorder = MemoryRecorder(sample_every_n_steps=100)
    for number in range(10):
        with recorder.step(batch_size=2):
            with recorder.phase(Phase.BACKWARD):
                pass
            if number % 2:
                with recorder.phase(Phase.OPTIMIZER_STEP):
                    pass
    assert len(recorder.steps) < 10
    assert recorder.num_updates == 5
