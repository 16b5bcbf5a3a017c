"""`MemoryRecorder.watch`: unmarked loops, on a CPU and on a CUDA device, real or virtual."""

import copy
import gc
import pickle
import threading
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memcallback import MemoryRecorder, MemoryWarning, Phase
from memcallback.core.types import Category

F, B, O = "forward", "backward", "optimizer step"  # noqa: E741
ON_CPU_AND_CUDA = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)
BATCH = torch.ones(16, 50)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(50, 70), nn.ReLU(), nn.Dropout(0.1), nn.Linear(70, 30))


@pytest.fixture
def parts():
    model = network()
    return model, torch.optim.Adam(model.parameters())


@pytest.fixture(autouse=True)
def everything_is_taken_back():
    before = torch.autograd.backward
    yield
    gc.collect()
    assert torch.autograd.backward is before


def watched(model, optimizer=None, **options):
    recorder = MemoryRecorder(sample_every_n_steps=1)
    return recorder, recorder.watch(model, optimizer, **options)


def labels(recorder):
    return [[window.label for window in step.windows] for step in recorder.steps]


def train_step(model, optimizer, batch=BATCH):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_phases_of_a_plain_loop_mark_themselves(parts):
    recorder, watch = watched(*parts)
    with watch:
        for _ in range(3):
            train_step(*parts)
    assert labels(recorder) == [[F, B, O]] * 3
    assert [step.batch_size for step in recorder.steps] == [16] * 3
    assert [step.num_optimizer_updates for step in recorder.steps] == [1] * 3
    assert [step.is_warm_up for step in recorder.steps] == [True, False, False]
    assert not any(step.is_interrupted for step in recorder.steps)


@pytest.mark.parametrize("with_scaler", [False, True])
@ON_CPU_AND_CUDA
def test_every_figure_is_that_of_phases_marked_by_hand(device, with_scaler):
    def run(is_watched):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 30 * 30, 500),
        ).to(device)
        optimizer = torch.optim.Adam(model.parameters())
        scaler = torch.amp.GradScaler(device, enabled=with_scaler)
        recorder = MemoryRecorder(model, optimizer, sample_every_n_steps=1)
        if is_watched:
            recorder.watch()
        for size in (16, 16, 32, 16):
            step(
                recorder,
                is_watched,
                model,
                optimizer,
                scaler,
                torch.ones(size, 3, 32, 32, device=device),
            )
        recorder.close()
        return recorder.steps

    def step(recorder, is_watched, model, optimizer, scaler, batch):
        if is_watched:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            scaled = scaler.scale(loss)
            scaled.backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return
        with recorder.step(batch):
            with recorder.phase(Phase.FORWARD):
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                scaled = scaler.scale(loss)
            with recorder.phase(Phase.BACKWARD):
                scaled.backward()
            with recorder.phase(Phase.OPTIMIZER_STEP):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
        scaler.update()

    def figures(recorded):
        return [
            (
                window.label,
                moment.allocated_bytes,
                moment.reserved_bytes,
                window.peak_allocated_bytes,
                window.peak_reserved_bytes,
                moment.by_category,
            )
            for step in recorded
            for window in step.windows
            for moment in (window.start, window.end)
        ]

    def alone(is_watched):
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        return figures(run(is_watched))

    alone(False)  # what PyTorch allocates at its first use of anything
    by_hand = alone(False)
    assert alone(True) == by_hand
    assert len(by_hand) == 4 * 3 * 2


def test_the_input_is_counted_and_not_kept(parts):
    model, optimizer = parts
    recorder, _ = watched(model, optimizer)
    batch = torch.ones(16, 50)
    # Cut off from the batch, so that nothing but the recorder could keep it.
    loss = model(batch).detach().requires_grad_().square().mean()
    held = weakref.ref(batch)
    del batch
    assert held() is None
    loss.backward()
    optimizer.step()
    train_step(model, optimizer)
    recorder.close()
    assert recorder.steps[0].windows[1].end.by_category[Category.INPUT] == 0
    assert recorder.steps[1].windows[0].start.by_category[Category.INPUT] == 16 * 50 * 4


def test_under_gradient_accumulation_each_batch_is_a_step(parts):
    model, optimizer = parts
    recorder, watch = watched(model, optimizer)
    with watch:
        for position in range(5):
            model(BATCH).sum().backward()
            if position % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert labels(recorder) == [[F, B], [F, B, O], [F, B], [F, B, O], [F, B]]
    assert [step.num_optimizer_updates for step in recorder.steps] == [0, 1, 0, 1, 0]


def test_a_model_that_is_called_twice_before_its_backward_pass_has_one_step(parts):
    model, optimizer = parts
    recorder, watch = watched(model, optimizer)
    left, right = torch.ones(16, 50), torch.zeros(16, 50)
    with watch:
        for _ in range(2):
            (model(left) - model(right)).square().mean().backward()
            optimizer.step()
    assert labels(recorder) == [[F, B, O]] * 2
    assert recorder.steps[1].windows[0].end.by_category[Category.INPUT] == 2 * 16 * 50 * 4


def test_two_backward_passes_of_one_forward_pass_are_one_step(parts):
    model, optimizer = parts
    recorder, watch = watched(model, optimizer)
    with watch:
        for _ in range(2):
            output = model(BATCH)
            output.sum().backward(retain_graph=True)
            output.square().sum().backward()
            optimizer.step()
    assert labels(recorder) == [[F, B, B, O]] * 2


def test_a_backward_pass_inside_another_belongs_to_it(parts):
    model, optimizer = parts
    recorder, watch = watched(model, optimizer)
    with watch:
        # Reentrant checkpointing calls torch.autograd.backward, and the modules, inside the
        # backward pass.
        hidden = checkpoint(model[:3], BATCH.clone().requires_grad_(), use_reentrant=True)
        model[3](hidden).sum().backward()
        assert labels(recorder) == []
        batch = BATCH.clone().requires_grad_()
        checkpoint(model, model(batch).mean() + batch, use_reentrant=True).sum().backward()
        optimizer.step()
    assert labels(recorder) == [[F, B, O]]


def test_gradients_of_gradients_are_of_the_forward_pass(parts):
    model, optimizer = parts
    recorder, watch = watched(model, optimizer)
    batch = BATCH.clone().requires_grad_()
    with watch:
        (slope,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        slope.square().sum().backward()
        optimizer.step()
    assert labels(recorder) == [[F, B, O]]


def test_a_loop_that_only_asks_for_gradients_says_what_its_window_covers(parts):
    model, optimizer = parts
    recorder, watch = watched(model, optimizer)
    with watch:
        parameters = list(model.parameters())
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(model(BATCH).sum(), parameters), strict=True
        ):
            parameter.grad = gradient
        optimizer.step()
    assert labels(recorder) == [["forward + backward", O]]


def test_evaluation_between_steps_is_no_step(parts):
    model, optimizer = parts
    recorder, watch = watched(model, optimizer)
    with watch:
        for _ in range(2):
            train_step(model, optimizer)
            with torch.no_grad():
                model(BATCH)
            model.eval()
            model(BATCH)
            model.train()
    assert labels(recorder) == [[F, B, O]] * 2


def gan():
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(8, 50), nn.Linear(50, 1)
    optimizers = [
        torch.optim.SGD(generator.parameters(), lr=0.1),
        torch.optim.SGD(discriminator.parameters(), lr=0.1),
    ]

    def batch(noise):
        discriminator(generator(noise).detach()).sum().backward()
        optimizers[1].step()
        discriminator(generator(noise)).sum().backward()
        optimizers[0].step()

    return [generator, discriminator], optimizers, batch


def test_each_update_of_a_gan_is_a_step():
    models, optimizers, batch = gan()
    recorder, watch = watched(models, optimizers)
    with watch:
        for _ in range(2):
            batch(torch.ones(4, 8))
    assert labels(recorder) == [[F, B, O]] * 4
    assert [step.batch_size for step in recorder.steps] == [4] * 4


def test_a_gan_is_one_step_where_its_loop_says_so():
    models, optimizers, batch = gan()
    recorder, watch = watched(models, optimizers)
    with watch:
        for _ in range(2):
            noise = torch.ones(4, 8)
            with recorder.step(noise):
                batch(noise)
    assert labels(recorder) == [[F, B, O, F, B, O]] * 2
    assert [step.num_optimizer_updates for step in recorder.steps] == [2, 2]


def test_a_step_of_the_loops_own_has_the_same_values_by_module_and_not():
    def peaks(*, per_module):
        models, optimizers, batch = gan()
        recorder, watch = watched(models, optimizers, per_module=per_module)
        with watch:
            for _ in range(2):
                noise = torch.ones(4, 8)
                with recorder.step(noise):
                    batch(noise)
        return [
            (window.start.allocated_bytes, window.peak_allocated_bytes, window.end.allocated_bytes)
            for step in recorder.steps
            for window in step.windows
        ]

    known = peaks(per_module=False)
    assert len(known) == 12
    assert all(0 < start <= peak for start, peak, _ in known)
    assert peaks(per_module=True) == known


def test_a_step_of_two_optimizers_ends_with_the_second(parts):
    model, _ = parts
    optimizers = [
        torch.optim.SGD(model[0].parameters(), lr=0.1),
        torch.optim.Adam(model[3].parameters()),
    ]
    recorder, watch = watched(model, optimizers)
    with watch:
        for number in (1, 2):
            model(BATCH).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            assert len(recorder.steps) == number
    assert labels(recorder) == [[F, B, O, O]] * 2


def test_an_optimizer_that_calls_the_model_itself_has_its_updates_between_the_passes(parts):
    model, _ = parts
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=2, line_search_fn=None, tolerance_grad=0, tolerance_change=0
    )
    recorder, watch = watched(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = model(BATCH).square().mean()
        loss.backward()
        return loss

    with watch:
        for _ in range(3):
            optimizer.step(closure)
    assert labels(recorder) == [[F, B, O, F, B, O]] * 3
    assert [step.num_optimizer_updates for step in recorder.steps] == [1, 1, 1]


def test_an_update_that_a_scaler_skips_is_none(parts):
    model, optimizer = parts
    scaler = torch.amp.GradScaler("cpu")
    recorder, watch = watched(model, optimizer)
    with watch:
        for factor in (1.0, float("inf"), 1.0):
            scaler.scale(model(BATCH).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert labels(recorder) == [[F, B, O], [F, B], [F, B, O]]
    assert [step.num_optimizer_updates for step in recorder.steps] == [1, 0, 1]
    assert not any(step.is_interrupted for step in recorder.steps)


def test_a_model_inside_a_wrapper_is_watched(parts):
    model, optimizer = parts
    recorder, watch = watched(model, optimizer)
    wrapper = nn.Sequential(nn.Identity(), model)
    with watch:
        train_step(wrapper, optimizer)
    assert labels(recorder) == [[F, B, O]]


def test_a_wrapper_is_watched_and_has_the_models_batch_size(tmp_path, parts):
    model, optimizer = parts
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        replica = nn.parallel.DistributedDataParallel(model)
        recorder, watch = watched(replica, optimizer)
        with watch:
            for _ in range(2):
                train_step(replica, optimizer)
    finally:
        torch.distributed.destroy_process_group()
    assert labels(recorder) == [[F, B, O]] * 2
    assert recorder.steps[1].batch_size == 16
    assert (
        recorder.steps[1].windows[0].start.by_category[Category.PARAMETER]
        == sum(p.numel() for p in model.parameters()) * 4
    )


@pytest.mark.parametrize("place", ["forward", "backward", "optimizer step"])
def test_a_step_that_fails_is_marked_and_the_next_one_is_whole(parts, place):
    model, optimizer = parts
    recorder, watch = watched(model, optimizer)

    def fails(*_):
        raise ZeroDivisionError(place)

    hook = {
        "forward": lambda: model[3].register_forward_hook(fails),
        "backward": lambda: model[0].weight.register_hook(fails),
        "optimizer step": lambda: optimizer.register_step_pre_hook(fails),
    }[place]()
    with watch:
        with pytest.raises(ZeroDivisionError, match=place):
            train_step(model, optimizer)
        hook.remove()
        train_step(model, optimizer)
    assert [step.is_interrupted for step in recorder.steps] == [True, False]
    assert labels(recorder) == [[F, B, O][: [F, B, O].index(place) + 1], [F, B, O]]


def test_a_loop_inside_an_except_block_has_whole_steps(parts):
    recorder, watch = watched(*parts)
    with watch:
        try:
            raise ValueError
        except ValueError:
            train_step(*parts)
    assert [step.is_interrupted for step in recorder.steps] == [False]


def test_an_exception_in_the_loop_marks_the_step_and_ends_the_watch(parts):
    model, optimizer = parts
    recorder, watch = watched(model, optimizer)

    def loop():
        with watch:
            model(BATCH).sum().backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert [step.is_interrupted for step in recorder.steps] == [True]
    assert not model._forward_pre_hooks


def test_a_backward_pass_in_another_thread_is_not_of_the_step(parts):
    model, optimizer = parts
    recorder, watch = watched(model, optimizer)
    other = nn.Linear(4, 4)
    with watch:
        loss = model(BATCH).sum()
        thread = threading.Thread(target=lambda: other(torch.ones(1, 4)).sum().backward())
        thread.start()
        thread.join()
        loss.backward()
        optimizer.step()
    assert labels(recorder) == [[F, B, O]]
    assert other.weight.grad is not None


@pytest.mark.parametrize("is_given", [False, True])
def test_the_batch_size_is_that_of_what_the_model_is_called_with(is_given):
    class Model(nn.Linear):
        def forward(self, scale, *, features, mask=None):
            return super().forward(features) * scale

    model = Model(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder, watch = watched(model, optimizer, batch_size=1234 if is_given else None)
    with watch:
        model(2.0, features=torch.ones(7, 4), mask=torch.ones(7, 4)).sum().backward()
        optimizer.step()
    assert recorder.steps[0].batch_size == (1234 if is_given else 7)


def test_closing_leaves_nothing_behind(parts):
    model, optimizer = parts
    original = torch.autograd.backward
    recorder, _ = watched(model, optimizer)
    assert torch.autograd.backward is not original
    train_step(model, optimizer)
    recorder.close()
    assert torch.autograd.backward is original
    assert not any(
        (model._forward_pre_hooks, model._forward_hooks, model._forward_hooks_always_called)
    )
    assert not any((optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks))


def test_neither_model_nor_optimizer_keeps_the_recorder_and_its_end_takes_everything_back(parts):
    model, optimizer = parts
    original = torch.autograd.backward
    recorder, watch = watched(model, optimizer)
    train_step(model, optimizer)
    gone = weakref.ref(recorder), weakref.ref(watch)
    del recorder, watch
    assert [one() for one in gone] == [None, None]
    assert torch.autograd.backward is original
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks


def test_who_has_taken_the_place_since_keeps_it(parts, monkeypatch):
    calls = []
    recorder, watch = watched(*parts)
    ours = torch.autograd.backward

    def theirs(*args, **kwargs):
        calls.append(1)
        return ours(*args, **kwargs)

    before = ours.__wrapped__
    try:
        torch.autograd.backward = theirs
        train_step(*parts)
        watch.close()
        assert torch.autograd.backward is theirs
        train_step(*parts)
        again, second = watched(*parts)
        train_step(*parts)
        second.close()
    finally:
        torch.autograd.backward = before
    assert len(calls) == 3
    assert labels(recorder) == labels(again) == [[F, B, O]]


def test_two_recorders_watch_one_loop(parts):
    first, watch = watched(*parts)
    second, other = watched(*parts)
    # On a CPU one profile can run at a time, and the second recorder says so.
    with watch, other, pytest.warns(MemoryWarning, match="A profile of PyTorch is running"):
        train_step(*parts)
    assert labels(first) == labels(second) == [[F, B, O]]


def test_what_is_watched_once_more_is_watched_once(parts):
    recorder, _ = watched(*parts)
    recorder.watch()
    recorder.watch(*parts)
    train_step(*parts)
    recorder.close()
    assert labels(recorder) == [[F, B, O]]
    assert recorder.steps[0].num_optimizer_updates == 1


def test_copies_and_pickles_of_a_watched_model_are_not_watched(parts):
    model, optimizer = parts
    recorder, watch = watched(model, optimizer)
    with watch:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(BATCH).sum().backward()
        train_step(model, optimizer)
    assert labels(recorder) == [[F, B, O]]


# Newer versions of PyTorch, and Python 3.14.
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
def test_a_watched_model_is_scripted_as_without_a_watch_and_stays_watched(parts):
    model, _ = parts
    create, expected = torch.jit._recursive.create_script_module, model.eval()(BATCH)
    recorder, watch = watched(*parts)
    with watch:
        scripted = torch.jit.script(model)
        assert torch.equal(scripted(BATCH), expected)
        assert not any((scripted._forward_pre_hooks, scripted._forward_hooks))
        model.train()
        train_step(*parts)
    assert labels(recorder) == [[F, B, O]]
    assert torch.jit._recursive.create_script_module is create


class Frozen(nn.Module):
    """A frozen encoder layer in evaluation mode, whose operators PyTorch fuses, and a head."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(96, 4, 256, batch_first=True)
        self.encoder.requires_grad_(False)
        self.head = nn.Linear(96, 1)

    def train(self, mode=True):
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, x, is_padding):
        return self.head(self.encoder(x, src_key_padding_mask=is_padding)).square().mean()


def test_layers_whose_operators_pytorch_fuses_compute_the_same_while_watched(monkeypatch):
    calls, fused = [], torch._transformer_encoder_layer_fwd

    def counted(*args):
        calls.append(args)
        return fused(*args)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    is_padding = torch.arange(33).expand(8, 33) > 20

    def losses(watches):
        torch.manual_seed(0)
        model = Frozen().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        recorder = MemoryRecorder(model, optimizer)
        with recorder.watch(per_module=True) if watches else nullcontext():
            for _ in range(4):
                optimizer.zero_grad()
                loss = model(torch.randn(8, 33, 96), is_padding)
                loss.backward()
                optimizer.step()
                yield loss.item()

    assert list(losses(watches=False)) == list(losses(watches=True))
    assert len(calls) == 8


def test_a_compiled_model_is_compiled_as_before_and_watched(parts):
    model, optimizer = parts
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    recorder, watch = watched(compiled, optimizer)
    with watch:
        for _ in range(2):
            train_step(compiled, optimizer)
    assert labels(recorder) == [[F, B, O]] * 2


class Doubled(nn.Module):
    """Of PyTorch's own modules, `Module.compile()` compiles nothing."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


def test_a_model_that_is_compiled_in_place_is_watched(parts):
    model, optimizer = Doubled(parts[0]), parts[1]
    model.compile(backend="eager", fullgraph=True)
    compiled = vars(model)["_compiled_call_impl"]
    recorder, watch = watched(model, optimizer)
    with watch:
        for _ in range(2):
            train_step(model, optimizer)
        with pytest.raises(RuntimeError, match="must have same reduction dim"):
            model(torch.ones(2, 3))
    assert labels(recorder) == [[F, B, O], [F, B, O], [F]]
    assert recorder.steps[-1].is_interrupted
    assert vars(model)["_compiled_call_impl"] is compiled


def test_a_watched_model_with_hooks_of_its_own_is_compiled_once(parts):
    model, optimizer = Doubled(parts[0]), parts[1]
    model.register_forward_hook(lambda module, args, output: output + 1)
    called = []

    @partial(torch.compile, backend=lambda graph, inputs: called.append(graph) or graph.forward)
    def loss(batch):
        return model(batch).sum()

    recorder, watch = watched(model, optimizer)
    with watch:
        for _ in range(4):
            with recorder.step(BATCH):
                loss(BATCH).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert len(called) == 1


def test_a_watch_does_not_keep_a_model_that_is_compiled_in_place():
    model = Doubled(nn.Linear(4, 4))
    model.compile(backend="eager")
    recorder = MemoryRecorder()
    watch = recorder.watch(model, torch.optim.SGD(model.parameters()))
    gone = weakref.ref(model)
    del model, recorder
    gc.collect()
    assert gone() is None
    watch.close()


def test_a_model_that_is_compiled_anew_while_it_is_watched_stays_so(parts):
    model, optimizer = Doubled(parts[0]), parts[1]
    model.compile(backend="eager")
    _, watch = watched(model, optimizer)
    with watch:
        model.compile(backend="aot_eager")
        compiled = vars(model)["_compiled_call_impl"]
    assert vars(model)["_compiled_call_impl"] is compiled


def test_a_model_that_is_not_seen_is_told_of_once(parts):
    model, optimizer = Doubled(parts[0]), parts[1]
    recorder, watch = watched(model, optimizer)
    model.compile(backend="eager", fullgraph=True)
    with watch:
        with pytest.warns(
            MemoryWarning,
            match=r"no watched model was called in training mode.*with recorder.step\(batch\)",
        ):
            train_step(model, optimizer)
        train_step(model, optimizer)
        with recorder.step(BATCH):
            train_step(model, optimizer)
    assert labels(recorder) == [[B, O]]


def test_on_a_cpu_only_sampled_steps_are_recorded(parts):
    recorder = MemoryRecorder(sample_every_n_steps=5)
    with recorder.watch(*parts):
        for _ in range(12):
            train_step(*parts)
    assert [step.index for step in recorder.steps] == [0, 1, 2, 5, 10]


def test_an_error_of_ours_ends_the_watch_and_not_the_training(parts, monkeypatch):
    model, optimizer = parts
    recorder, _ = watched(model, optimizer)

    def fails(*_, **__):
        raise ZeroDivisionError("of ours.")

    monkeypatch.setattr(recorder, "open_phase", fails)
    with pytest.warns(
        MemoryWarning,
        match=r"Watch has stopped recording: ZeroDivisionError in _forward_begins: of ours\. "
        r"Training goes on",
    ):
        train_step(model, optimizer)
    train_step(model, optimizer)
    assert not model._forward_pre_hooks
    assert not recorder.steps


@ON_CPU_AND_CUDA
def test_training_leaves_the_same_bits_watched_and_not(device):
    def run(is_watched):
        model = network().to(device)
        optimizer = torch.optim.Adam(model.parameters())
        recorder = MemoryRecorder(sample_every_n_steps=1)
        if is_watched:
            recorder.watch(model, optimizer)
        losses = []
        for _ in range(6):
            loss = model(torch.randn(16, 50, device=device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        recorder.close()
        assert len(recorder.steps) == (6 if is_watched else 0)
        return [*model.parameters(), torch.get_rng_state(), torch.tensor(losses)]

    assert all(torch.equal(left, right) for left, right in zip(run(True), run(False), strict=True))


def test_there_must_be_a_model():
    with pytest.raises(
        ValueError, match=r"There is no model to watch. Give it: recorder.watch\(model, optimizer\)"
    ):
        MemoryRecorder().watch()


def test_a_batch_size_below_one_is_refused(parts):
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        MemoryRecorder().watch(*parts, batch_size=0)


def test_a_watch_whose_recorder_is_gone_says_so(parts):
    with (
        pytest.raises(RuntimeError, match="The recorder of this watch is gone"),
        MemoryRecorder().watch(*parts),
    ):
        pass


def test_a_model_that_compiles_its_parts_whole_is_watched():
    class Fast(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.fast = torch.compile(self.run, fullgraph=True, backend="eager")

        def run(self, x):
            return self.inner(x).exp()

        def forward(self, x):
            return self.fast(x)

    model = Fast()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = MemoryRecorder()
    with recorder.watch(model, optimizer):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert len(recorder.steps) == 2


def test_a_step_of_the_loops_own_follows_a_forward_pass_alone():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = MemoryRecorder()
    with recorder.watch(model, optimizer):
        model(torch.ones(2, 4))
        with recorder.step(torch.ones(3, 4)):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    assert [record.batch_size for record in recorder.steps] == [3]


def test_long_collections_among_the_arguments_are_not_looked_through():
    class Names(list):
        def __iter__(self):
            raise AssertionError("looked through")

    class Net(nn.Linear):
        def forward(self, x, names):
            return super().forward(x)

    model = Net(4, 4)
    recorder = MemoryRecorder()
    with recorder.watch(model, per_module=False):
        model(torch.ones(2, 4), Names(["name"] * 5000)).sum().backward()
    assert recorder.steps[-1].batch_size == 2


def test_who_is_told_of_the_first_call_and_of_steps_may_call_the_model():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder, called = MemoryRecorder(model, optimizer, device="cpu"), []

    def call(*_):
        with torch.no_grad():
            called.append(model(torch.ones(2, 4)).shape)

    class Listener:
        on_step = on_out_of_memory = call

        def wants_step(self):
            return True

        def close(self):
            pass

    recorder.listen(Listener())
    with recorder.watch(on_first_call=call):
        for _ in range(3):  # two batches an update: a step ends when the next one begins
            for _ in range(2):
                model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    assert len(called) == 1 + len(recorder.steps) == 7
    assert {step.batch_size for step in recorder.steps} == {3}
