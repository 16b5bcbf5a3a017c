"""A step recorded by module while it runs: what is read, that nothing of the training changes, and
that nothing stays behind.
"""

import copy
import gc
import pickle
import threading
import weakref
from contextlib import nullcontext
from functools import partial
from typing import ClassVar

import module_models
import own_process
import pytest
import torch
import training
from module_models import CASES, Perceptron, Transformer, loss_of, record, tokens, vectors
from observer import differences, run
from torch import nn
from torch._dynamo.utils import counters

import memcallback as mc
from memcallback import MemoryCallback, MemoryRecorder, Phase
from memcallback.devices.meters import CpuMeter

FIGURES = ("num_runs", "start_allocated_bytes", "end_allocated_bytes", "change_bytes")


def has_hooks(model):
    kinds = (
        "_forward_pre_hooks",
        "_forward_hooks",
        "_forward_hooks_always_called",
        "_backward_hooks",
        "_backward_pre_hooks",
    )
    return any(getattr(module, kind) for module in model.modules() for kind in kinds)


@pytest.mark.parametrize("case", CASES)
def test_measured_and_predicted_modules_agree_on_a_cpu(case):
    make, make_batch = CASES[case]
    measured, predicted = (
        record(make(), make_batch()).modules,
        module_models.predict(make, make_batch, device="cpu").modules,
    )
    for module in measured.modules:
        theirs = predicted[module.name]
        assert (module.kind, module.parameter_bytes) == (theirs.kind, theirs.parameter_bytes)
        for ours, other in ((module.forward, theirs.forward), (module.backward, theirs.backward)):
            assert (ours is None) == (other is None), module.name
            if ours is not None:
                assert [getattr(ours, name) for name in FIGURES] == [
                    getattr(other, name) for name in FIGURES
                ], module.name
                # A kernel of a CPU takes memory for itself besides, which no trace says.
                assert ours.peak_allocated_bytes >= other.peak_allocated_bytes


def test_the_whole_is_as_without_the_modules():
    make, make_batch = CASES["perceptron"]
    plain, with_modules = (
        record(make(), make_batch(), per_module=per_module).steps for per_module in (False, True)
    )
    for one, other in zip(plain, with_modules, strict=True):
        for window, theirs in zip(one.windows, other.windows, strict=True):
            assert (window.covers, window.peak_allocated_bytes) == (
                theirs.covers,
                theirs.peak_allocated_bytes,
            )
            assert (window.start.allocated_bytes, window.end.allocated_bytes) == (
                theirs.start.allocated_bytes,
                theirs.end.allocated_bytes,
            )
            assert window.start.by_category == theirs.start.by_category


def test_the_root_is_the_step_and_a_module_that_is_not_called_has_no_figures():
    recorder = record(Perceptron(), vectors())
    table, phases = recorder.modules, recorder.steps[-1].phases
    assert table[""].forward.peak_allocated_bytes == phases[Phase.FORWARD].peak_allocated_bytes
    assert table[""].backward.peak_allocated_bytes == phases[Phase.BACKWARD].peak_allocated_bytes
    assert (table["idle"].forward, table["idle"].backward) == (None, None)
    assert (table["layers"].kind, table["layers"].forward.num_runs) == ("ModuleList", 2)


def test_a_shared_module_has_its_calls_added_up():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.again = nn.Linear(64, 64), nn.ModuleList()
            self.again.append(self.one)

        def forward(self, x):
            return self.one(self.again[0](self.one(x)))

    table = record(Shared(), vectors()).modules
    assert [module.name for module in table.modules] == ["", "one", "again"]
    assert (table["one"].forward.num_runs, table["one"].backward.num_runs) == (3, 1)
    assert table["one"].kept_bytes == 3 * 128 * 64 * 4


def test_several_models_are_told_apart_by_their_numbers():
    encoder, decoder = nn.Linear(64, 32), nn.Sequential(nn.Linear(32, 10))
    features, classes = vectors()
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    recorder = MemoryRecorder([encoder, decoder], optimizer, per_module=True)
    for _ in range(2):
        with recorder.step((features, classes)):
            with recorder.phase(Phase.FORWARD):
                loss = nn.functional.cross_entropy(decoder(encoder(features).relu()), classes)
            with recorder.phase(Phase.BACKWARD):
                loss.backward()
            with recorder.phase(Phase.OPTIMIZER_STEP):
                optimizer.step()
    names = [module.name for module in recorder.modules.ran]
    assert names == ["", "0", "1", "1.0"]
    assert recorder.modules[""].parameter_bytes == 4 * (64 * 32 + 32 + 32 * 10 + 10)
    # What the loop does between the models, the relu and the loss, is the root's alone.
    assert (
        recorder.modules[""].kept_bytes
        > recorder.modules["0"].kept_bytes + recorder.modules["1"].kept_bytes
    )
    assert recorder.modules["0"].backward.num_runs == recorder.modules["1"].backward.num_runs == 1


class Curved(nn.Module):
    """Keeps more than the layer in it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        return self.inner(x).exp().sin()


def in_place(module):
    module.compile(backend="eager")
    return module


MODELS = {
    "layer": lambda: nn.Linear(64, 64),
    "model": Curved,
    "compiled in place": lambda: in_place(Curved()),
}


def first_of_two_models(name, *, marks_steps, watches):
    """What is recorded of the model that is called first."""
    features = torch.randn(4096, 64)
    encoder, decoder = MODELS[name](), nn.Linear(64, 64)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    recorder = MemoryRecorder([encoder, decoder], optimizer, per_module=True)

    def phase(phase):
        return nullcontext() if watches else recorder.phase(phase)

    with recorder.watch() if watches else nullcontext():
        for _ in range(3):
            with recorder.step(features) if marks_steps or not watches else nullcontext():
                with phase(Phase.FORWARD):
                    loss = decoder(encoder(features)).square().mean()
                with phase(Phase.BACKWARD):
                    loss.backward()
                with phase(Phase.OPTIMIZER_STEP):
                    optimizer.step()
            optimizer.zero_grad()
    return recorder.modules["0"]


def first_by_hand_and_watched(name, marks_steps):
    gc.disable()  # what is left from imports does not go while one of both runs
    return [
        first_of_two_models(name, marks_steps=marks_steps, watches=watches)
        for watches in (False, True)
    ]


@pytest.mark.parametrize("marks_steps", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_watch_sees_all_of_the_model_that_is_called_first(name, marks_steps):
    # In a process where nothing was compiled yet: beside compiled code, modules with hooks that
    # stay, such as a watch's, are not shown.
    by_hand, watched = own_process.result_of(first_by_hand_and_watched, name, marks_steps)
    assert None not in (by_hand.forward, by_hand.backward)
    assert watched == by_hand


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_checkpointing_computes_again_is_in_the_backward_pass_of_its_modules(use_reentrant):
    table = record(Transformer(use_reentrant=use_reentrant), tokens()).modules
    plain = record(Transformer(), tokens()).modules
    block, plain_block = table["blocks.1"], plain["blocks.1"]
    assert block.kept_bytes < plain_block.kept_bytes
    assert (
        block.backward.peak_allocated_bytes - block.backward.start_allocated_bytes
        > plain_block.kept_bytes
    )
    assert (block.forward.num_runs, table["blocks.1.mlp.1"].forward.num_runs) == (1, 1)
    assert table["blocks.1.mlp.1"].backward.num_runs == 2  # again, then its backward pass


@pytest.mark.parametrize("case", CASES)
def test_recording_by_module_leaves_the_same_bits(case):
    def train(per_module):
        torch.manual_seed(1234)
        make, make_batch = CASES[case]
        model, losses = make(), []
        recorder = record(
            model,
            make_batch(),
            per_module=per_module,
            at_step=lambda _: losses.append(torch.get_rng_state()),
        )
        assert (recorder.modules is not None) == per_module
        gradients = [parameter.grad for parameter in model.parameters()]
        return {"weights": model.state_dict(), "gradients": gradients, "random": losses}

    assert differences(train(per_module=True), train(per_module=False)) == []


@pytest.mark.parametrize(
    "options", [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 3}], ids=str
)
def test_training_leaves_the_same_bits_with_and_without_the_callback(tmp_path, options):
    callback = MemoryCallback(per_module=True)
    with_it = run(tmp_path, with_callback=True, accelerator="cpu", callback=callback, **options)
    without = run(tmp_path, with_callback=False, accelerator="cpu", **options)
    assert differences(with_it, without) == []
    assert callback.recorder.modules["network.0"].backward is not None


def test_there_are_no_hooks_outside_of_sampled_steps():
    model, seen = Perceptron(), []

    def look(number):
        seen.append(has_hooks(model))

    recorder = record(model, vectors(), num_steps=7, sample_every_n_steps=5, at_step=look)
    assert seen == [True, True, True, False, False, True, False]
    assert not has_hooks(model)
    assert recorder.modules is not None


def test_there_are_no_hooks_without_per_module():
    model, seen = Perceptron(), []
    recorder = record(
        model, vectors(), per_module=False, at_step=lambda _: seen.append(has_hooks(model))
    )
    assert seen == [False] * 3
    assert recorder.modules is None


class Kept(torch.autograd.Function):
    """Keeps a tensor for the backward pass, of which it tells when that is gone."""

    gone: ClassVar[list] = []

    @staticmethod
    def forward(ctx, x):
        ctx.kept = torch.zeros(3)
        weakref.finalize(ctx.kept, Kept.gone.append, "gone")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_no_graph_and_no_tensor_lives_longer():
    class Keeps(Perceptron):
        def forward(self, x):
            return Kept.apply(super().forward(x))

    def drops_one(model, batch):
        Kept.gone.clear()
        reference = weakref.ref(model(batch[0]))  # of which no loss is made
        assert (reference(), Kept.gone) == (None, ["gone"])
        loss = loss_of(model, batch)
        assert Kept.gone == ["gone"]
        return loss

    gc.disable()
    try:
        recorder = record(Keeps(), vectors(), loss_of=drops_one)
        assert Kept.gone == ["gone", "gone"]
    finally:
        gc.enable()
    assert recorder.modules["head"].forward.num_runs == 2


def test_a_dropped_output_gives_its_memory_back_at_once():
    class Two(Perceptron):
        def forward(self, x):
            return super().forward(x)

    def twice(model, batch):
        model(batch[0])
        return loss_of(model, batch)

    table = record(Two(), vectors(), loss_of=twice).modules
    once = record(Two(), vectors()).modules
    assert table[""].kept_bytes == once[""].kept_bytes
    assert table["head"].forward.num_runs == 2


def test_an_error_in_a_module_goes_on_and_leaves_no_hook():
    class Fails(Perceptron):
        def forward(self, x):
            raise ZeroDivisionError("the model's own")

    model = nn.Sequential(nn.Linear(64, 64), Fails())
    with pytest.raises(ZeroDivisionError, match="the model's own"):
        record(model, vectors())
    assert not has_hooks(model)


def test_a_module_goes_on_after_an_error_that_the_model_catches():
    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.bad, self.good = nn.Linear(3, 3), nn.Linear(64, 10)

        def forward(self, x):
            try:
                self.bad(x)
            except RuntimeError:
                return self.good(x)

    table = record(Tries(), vectors()).modules
    assert (table["bad"].forward.num_runs, table["bad"].backward) == (1, None)
    assert table["good"].kept_bytes == 128 * 10 * 4
    assert table["good"].backward.num_runs == 1


def test_an_error_of_ours_ends_the_recording_by_module_and_nothing_else(monkeypatch):
    def fails(meter):
        raise OSError("no reading.")

    monkeypatch.setattr(CpuMeter, "mark", fails)
    with pytest.warns(
        mc.MemoryWarning,
        match=r"Memory by module is not recorded in this step: OSError: no reading\. All else "
        r"is recorded\.",
    ):
        recorder = record(Perceptron(), vectors())
    assert recorder.modules is None
    assert recorder.steady.phases[Phase.BACKWARD].peak_allocated_bytes
    # Where warnings are errors, too.
    recorder = record(Perceptron(), vectors())
    assert len(recorder.steps) == 3


def test_a_copy_of_a_model_that_is_made_inside_a_step_is_not_followed():
    model, copies = Perceptron(), []

    def copied(number):
        copies.append(copy.deepcopy(model))
        copies.append(pickle.loads(pickle.dumps(model)))

    recorder = record(model, vectors(), at_step=copied)
    before = recorder.modules
    assert copies[0](torch.zeros(1, 64)).shape == copies[1](torch.zeros(1, 64)).shape == (1, 10)
    assert recorder.modules is before


def test_an_in_place_operation_on_what_a_module_returns_is_allowed():
    def in_place(model, batch):
        out = model(batch[0])
        out += 1
        return nn.functional.cross_entropy(out, batch[1])

    table = record(Perceptron(), vectors(), loss_of=in_place).modules
    assert table["head"].backward.num_runs == 1


def test_outputs_in_nested_containers_are_followed_into_the_backward_pass():
    class Nested(Perceptron):
        def forward(self, x):
            return {"outputs": [(super().forward(x),)], "none": None}

    table = record(
        Nested(),
        vectors(),
        loss_of=lambda m, b: nn.functional.cross_entropy(m(b[0])["outputs"][0][0], b[1]),
    ).modules
    assert table["layers.0.0"].backward.num_runs == 1


def test_a_retained_graph_is_gone_through_twice():
    def twice(model, batch):
        loss = loss_of(model, batch)
        loss.backward(retain_graph=True)
        return loss

    model = Perceptron()
    table = record(model, vectors(), loss_of=twice).modules
    # The first time inside the window of the forward pass.
    assert (table["head"].forward.num_runs, table["head"].backward.num_runs) == (2, 1)
    assert (table["layers.0.0"].forward.num_runs, table["layers.0.0"].backward.num_runs) == (2, 1)
    assert not has_hooks(model)


def test_without_resets_no_peak_is_made_up():
    table = record(Perceptron(), vectors(), reset_peaks=False).modules
    assert table["layers.0.0"].kept_bytes == 128 * 256 * 4


def test_forward_passes_of_other_threads_are_not_taken_for_the_trainings():
    model = Perceptron()

    def elsewhere(model, batch):
        thread = threading.Thread(target=lambda: model(batch[0].detach()))
        thread.start()
        thread.join()
        return loss_of(model, batch)

    assert record(model, vectors(), loss_of=elsewhere).modules["head"].forward.num_runs == 1


def test_a_compiled_model_is_recorded_as_a_whole():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    table = record(torch.compile(model, backend="eager"), vectors()).modules
    assert table[""].kind == "Sequential"
    assert table[""].forward.num_runs == table[""].backward.num_runs == 1
    assert [module.name for module in table.ran] == [""]
    assert table.notes == (
        "The submodules of these compiled modules cannot be shown: the root module.",
    )
    # A table without a row is not shown.
    assert str(table) == table.notes[0]


class Doubled(nn.Module):
    """Of PyTorch's own modules, `Module.compile()` compiles nothing."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return self.linear(x) * 2


# The compiler asks for it, without us too.
ASKS_FOR_GRADIENTS = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@ASKS_FOR_GRADIENTS
def test_compiled_parts_of_a_model_are_recorded_as_wholes():
    part = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), backend="eager")
    by_itself = Doubled()
    by_itself.compile(backend="eager")
    compiled = vars(by_itself)["_compiled_call_impl"]
    table = record(nn.Sequential(part, by_itself, nn.Linear(64, 10)), vectors()).modules
    assert [module.name for module in table.ran] == ["", "0", "1", "2"]
    assert table["1"].forward.num_runs == table["1"].backward.num_runs == 1
    assert vars(by_itself)["_compiled_call_impl"] is compiled
    assert table.notes == ("The submodules of these compiled modules cannot be shown: '0', '1'.",)


def counted(model, *, backend="eager", **options):
    """What was recorded with a compiled loss that calls a model, and what Dynamo counted."""
    torch._dynamo.reset()
    counters.clear()

    @partial(torch.compile, backend=backend)
    def loss(model, batch):
        hidden = model[0](batch[0])
        torch._dynamo.graph_break()
        return loss_of(model, (hidden, batch[1]))

    recorder = record(model, vectors(), loss_of=loss, num_steps=4, **options)
    return recorder.modules, {name: dict(counts) for name, counts in counters.items()}


def plain_layers():
    return nn.Sequential(Doubled(), Doubled(), nn.Linear(64, 10))


def layers_in_place():
    model = plain_layers()
    for layer in model[:2]:
        layer.compile(backend="eager")
    return model


@ASKS_FOR_GRADIENTS
@pytest.mark.parametrize("make", [plain_layers, layers_in_place])
def test_a_compiled_loss_that_calls_the_model_is_compiled_as_often(make):
    _, counts = counted(make(), per_module=False)
    model = make()
    table, counts_by_module = counted(model, sample_every_n_steps=2)
    assert counts_by_module == counts
    assert counts["stats"]["unique_graphs"] == 2
    # What runs inside of compiled code counts for the root module.
    assert [module.name for module in table.ran] == [""]
    assert not has_hooks(model)


@ASKS_FOR_GRADIENTS
@pytest.mark.parametrize("skips_guards", [True, False])
def test_so_is_one_where_modules_have_hooks_of_their_own(skips_guards):
    def hooked():
        model = plain_layers()
        model[1].register_forward_hook(lambda module, args, output: output + 1)
        return model

    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=skips_guards):
        _, counts = counted(hooked(), per_module=False)
        table, counts_by_module = counted(hooked(), sample_every_n_steps=2)
    assert counts_by_module == counts
    named = "'1'" if skips_guards else "the root module, '0', '0.linear' and more"
    assert table.notes == (
        f"Beside compiled code, these modules with hooks of their own cannot be shown: {named}.",
    )


@ASKS_FOR_GRADIENTS
def test_layers_compiled_in_place_keep_their_own_compiler_within_other_compiled_code():
    def compilers_of(**options):
        called = []

        def compiler(name):
            return lambda graph, inputs: called.append(name) or graph.forward

        class Broken(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = Doubled()
                self.inner.compile(backend=compiler("inner"))

            def forward(self, x):
                try:  # Dynamo runs this as it is
                    torch._dynamo.graph_break()
                    return self.inner(x)
                finally:
                    pass

        model = nn.Sequential(Broken(), nn.Linear(64, 10))
        counted(model, backend=compiler("outer"), **options)
        return called.count("inner")

    assert compilers_of() == compilers_of(per_module=False) == 2


def test_a_recorder_that_is_dropped_in_a_step_does_not_keep_the_model():
    model = plain_layers()
    recorder = MemoryRecorder(model, torch.optim.SGD(model.parameters()), per_module=True)
    recorder.begin_step(vectors())
    model(vectors()[0]).sum().backward()
    gone = weakref.ref(model)
    del model, recorder
    gc.collect()
    assert gone() is None


def test_a_distributed_model_has_the_names_of_the_model_in_it():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        table = record(nn.parallel.DistributedDataParallel(Transformer()), tokens()).modules
    finally:
        torch.distributed.destroy_process_group()
    plain = record(Transformer(), tokens()).modules
    assert [module.name for module in table.ran] == [module.name for module in plain.ran]
    assert table["blocks.0.mlp"].kept_bytes == plain["blocks.0.mlp"].kept_bytes
    assert table["blocks.0.mlp"].backward.num_runs == 1


def test_the_table_is_of_a_steady_step_with_an_update(tmp_path):
    callback = MemoryCallback(per_module=True)
    training.trainer(tmp_path, [callback], accumulate_grad_batches=2).fit(
        training.Automatic(), training.loader(6)
    )
    measured = callback.recorder.modules
    predicted = callback.prediction.at(measured.batch_size).modules
    assert measured.batch_size == 8
    for name in ("network", "network.0", "network.2"):
        assert measured[name].kept_bytes == predicted[name].kept_bytes
        assert measured[name].backward.change_bytes == predicted[name].backward.change_bytes


def test_the_first_step_alone_gives_no_table():
    assert record(Perceptron(), vectors(), num_steps=1).modules is None


def test_by_hand_the_passes_of_one_window_are_told_apart(tmp_path):
    callback = MemoryCallback(per_module=True)
    training.trainer(tmp_path, [callback]).fit(training.ManualRaw(), training.loader(4))
    assert (Phase.FORWARD, Phase.BACKWARD) in [
        window.covers for window in callback.recorder.steps[-1].windows
    ]
    measured, predicted = (
        callback.recorder.modules["network.0"],
        callback.prediction.modules["network.0"],
    )
    assert (
        (measured.forward.num_runs, measured.backward.num_runs)
        == (predicted.forward.num_runs, predicted.backward.num_runs)
        == (1, 1)
    )
    assert measured.kept_bytes == predicted.kept_bytes == 8 * training.NUM_HIDDEN * 4
    assert measured.backward.change_bytes == predicted.backward.change_bytes


def test_the_callback_prints_the_modules_that_keep_most_and_logs_all(tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = MemoryCallback(per_module=True, verbose=2)
    training.trainer(tmp_path, [callback]).fit(training.Automatic(), training.loader(4))
    assert "What modules keep after their forward pass" in capsys.readouterr().out
    folder = next((tmp_path / "memcallback").glob("version_*"))
    run = EventAccumulator(str(folder), size_guidance={"tensors": 0, "images": 0}).Reload()
    text = run.Tensors("memory/modules/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "| network.0 | Linear | 1 |" in text
    assert "backward peak predicted | backward peak measured" in text
    assert run.Images("memory_pictures/5_modules")
