"""`MemoryTrainerCallback` in the Trainer of transformers, on a CPU and on a CUDA device, real or
virtual.
"""

import copy
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from event_files import curves_of
from needs import needs_compiled_trainers
from torch._dynamo.utils import counters

import memcallback as mc
from memcallback import MemoryWarning, Phase
from memcallback.diagnose.health.monitor import HealthMonitor

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

pytestmark = [
    pytest.mark.usefixtures("without_pictures"),  # `trained` draws its own
    # Of the Trainer about its machine; not in our hands.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true"),
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning"),
]
F, B, O = "forward", "backward", "optimizer step"  # noqa: E741
VOCABULARY, LENGTH = 500, 32


def model(num_layers=2):
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=num_layers,
        n_head=2,
        n_embd=64,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def data(num_samples=24):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (num_samples, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def train(
    folder,
    callback=None,
    *,
    trained=None,
    kind=Trainer,
    samples=None,
    num_devices=1,
    trainer_options=None,
    **options,
):
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = TrainingArguments(**(arguments | options))
    args._n_gpu = min(num_devices, args.n_gpu)  # of several the Trainer makes a DataParallel
    trainer = kind(
        model=trained or model(),
        args=args,
        train_dataset=samples or data(),
        callbacks=callback if isinstance(callback, list) else [callback] if callback else [],
        **(trainer_options or {}),
    )
    trainer.train()
    return trainer


def labels(callback):
    return [[window.label for window in step.windows] for step in callback.recorder.steps]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    callback = mc.MemoryTrainerCallback()
    trainer = train(folder, callback)
    return callback, trainer, folder


def test_each_step_has_its_phases_batch_size_and_update(trained):
    callback, _, _ = trained
    assert labels(callback) == [[F, B, O]] * 6
    assert [step.batch_size for step in callback.recorder.steps] == [4] * 6
    assert [step.num_optimizer_updates for step in callback.recorder.steps] == [1] * 6
    assert [step.is_warm_up for step in callback.recorder.steps] == [True] + [False] * 5


# PyTorch's compiler warns so without us too.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@needs_compiled_trainers
def test_a_model_that_the_trainer_compiles_is_recorded_and_compiled_as_often(tmp_path):
    counted = []
    # The first training in a process compiles more than later ones.
    for callback in (None, None, mc.MemoryTrainerCallback()):
        torch._dynamo.reset()
        counters.clear()
        train(
            tmp_path,
            callback,
            trained=model(num_layers=1),
            torch_compile=True,
            torch_compile_backend="aot_eager",
            eval_strategy="epoch",
            trainer_options={"eval_dataset": data(8)},
        )
        counted.append({name: dict(counts) for name, counts in counters.items()})
    torch._dynamo.reset()
    assert labels(callback) == [[F, B, O]] * 6
    assert [step.batch_size for step in callback.recorder.steps] == [4] * 6
    assert isinstance(callback.prediction, mc.Prediction)
    assert any("without compilation" in caveat for caveat in callback.prediction.caveats)
    assert isinstance(callback.evaluation, mc.Prediction)  # of the model as it is
    _, without, with_it = counted
    assert with_it == without
    assert without["stats"]["unique_graphs"] >= 1


class Wrapper(torch.nn.Module):
    """Calls the model, as DistributedDataParallel does."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class Wrapping(Trainer):
    def _wrap_model(self, model, training=True, dataloader=None):
        return torch.compile(Wrapper(model), backend="aot_eager")


# PyTorch's compiler warns so without us too.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@needs_compiled_trainers
def test_a_wrapper_that_the_trainer_compiles_is_predicted_without_compilation(tmp_path):
    callback = mc.MemoryTrainerCallback()
    train(tmp_path, callback, trained=model(num_layers=1), kind=Wrapping)
    torch._dynamo.reset()
    assert labels(callback) == [[F, B, O]] * 6
    assert any("together with a wrapper around it" in note for note in callback.report.notes)
    assert callback.report.prediction is not None


def test_no_more_is_suggested_than_the_training_set_has(trained):
    callback, trainer, _ = trained
    assert callback.report.advice.bounds.dataset_size == len(trainer.train_dataset)
    assert callback.report.advice.has_whole_dataset


def test_the_step_is_predicted_before_it_first_runs_and_is_what_is_measured(trained):
    callback, _, _ = trained
    assert isinstance(callback.prediction, mc.Prediction)
    measured, predicted = callback.report.measured, callback.report.prediction
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        # Beyond it are the loss that the Trainer logs and the number of tokens that it counts, and
        # little of the CPU's operators.
        assert predicted.phases[phase].peak_allocated_bytes == pytest.approx(
            measured.phases[phase].peak_allocated_bytes, rel=0.001
        )


def test_the_curves_go_to_a_run_under_the_output_folder(trained):
    _, trainer, folder = trained
    curves = curves_of(folder / "memcallback" / "version_0")
    assert list(curves[""]["memory_gib/peak_backward"]) == [1, 2, 3, 4, 5, 6]
    assert next(iter(curves["predicted"]["memory_gib/peak_backward"])) == 1
    assert trainer.state.global_step == 6


def test_nothing_is_left_behind(trained):
    _, trainer, _ = trained
    assert not any((trainer.model._forward_pre_hooks, trainer.model._forward_hooks))
    assert not trainer.optimizer.optimizer._optimizer_step_pre_hooks
    assert not hasattr(torch.autograd.backward, "__wrapped__")


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 3}, {"bf16": True}], ids=str
)
def test_training_leaves_the_same_bits_with_and_without_the_callback(tmp_path, options):
    def run(callback):
        trainer = train(tmp_path, callback, **options)
        logged = [
            {name: value for name, value in row.items() if "loss" in name or "norm" in name}
            for row in trainer.state.log_history
        ]
        return list(trainer.model.parameters()), torch.get_rng_state(), logged

    callback = mc.MemoryTrainerCallback()
    with_it, state_with, logged_with = run(callback)
    without, state_without, logged_without = run(None)
    assert all(torch.equal(left, right) for left, right in zip(with_it, without, strict=True))
    assert torch.equal(state_with, state_without)
    assert logged_with == logged_without
    assert callback.recorder.steps
    assert callback.prediction is not None


def test_an_optimizer_that_is_none_of_pytorchs_leaves_a_true_report(tmp_path, capsys):
    class OfAnotherLibrary(mc.MemoryTrainerCallback):
        def on_train_begin(self, args, state, control, **parts):
            super().on_train_begin(args, state, control, **parts | {"optimizer": object()})

    callback = OfAnotherLibrary(predict=False)
    train(tmp_path, callback)
    assert labels(callback) == [[F, B]] * 6
    assert [step.is_warm_up for step in callback.recorder.steps] == [True] + [False] * 5
    printed = capsys.readouterr().out
    assert "it sees no update: each step with a backward" in " ".join(printed.split())
    assert "No optimizer update" not in printed
    assert "memcallback: 6 steps" in printed


def test_memory_that_grows_is_held_against_the_batches_that_are_left(tmp_path, monkeypatch):
    left = []

    class Health(HealthMonitor):
        def __init__(self, *args, progress, **options):
            self.ask = progress
            super().__init__(*args, progress=progress, **options)

        def on_step(self, record, batch=None):
            left.append(self.ask().steps_left)
            super().on_step(record, batch)

    monkeypatch.setattr("memcallback.diagnose.health.monitor.HealthMonitor", Health)
    callback = mc.MemoryTrainerCallback(predict=False, warnings=True)
    train(tmp_path, callback, gradient_accumulation_steps=3)
    assert left == [6, 6, 6, 3, 3, 3]


def test_an_accumulation_window_is_a_step_for_each_batch(tmp_path):
    callback = mc.MemoryTrainerCallback()
    train(tmp_path, callback, gradient_accumulation_steps=3)
    assert labels(callback) == [[F, B], [F, B], [F, B, O]] * 2
    assert callback.report.measured.num_optimizer_updates in (0, 1)
    assert callback.recorder.num_updates == 2
    assert callback.prediction.phases[Phase.OPTIMIZER_STEP].peak_allocated_bytes > 0


def test_evaluation_between_steps_is_no_step(tmp_path):
    callback = mc.MemoryTrainerCallback(predict=False)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
    )
    Trainer(
        model=model(),
        args=arguments,
        train_dataset=data(),
        eval_dataset=data(4),
        callbacks=[callback],
    ).train()
    assert labels(callback) == [[F, B, O]] * 3


class OwnLoss(Trainer):
    """A Trainer that computes its loss itself, of inputs without labels."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        loss = torch.nn.functional.cross_entropy(
            model(**inputs).logits.flatten(0, 1), labels.flatten()
        )
        return loss


def test_a_loss_of_the_trainers_own_can_be_given(tmp_path):
    def loss(model, inputs):
        logits = model(**inputs).logits.flatten(0, 1)
        return torch.nn.functional.cross_entropy(
            logits, torch.zeros(logits.shape[0], dtype=torch.long)
        )

    callback = mc.MemoryTrainerCallback(loss=loss)
    train(tmp_path, callback, kind=OwnLoss)
    assert isinstance(callback.prediction, mc.Prediction)


def test_a_loss_of_the_trainers_own_is_found(tmp_path):
    callback = mc.MemoryTrainerCallback()
    train(tmp_path, callback, kind=OwnLoss)
    assert isinstance(callback.prediction, mc.Prediction)
    assert callback.recorder.steady.peak_allocated_bytes == pytest.approx(
        callback.prediction.peak_allocated_bytes, rel=0.001
    )
    assert labels(callback) == [[F, B, O]] * 6


def pairs(rows):
    """As a collator of preferences: what is chosen, then what is rejected."""
    tokens = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": torch.cat([tokens, tokens]), "labels": torch.cat([tokens, tokens])}


@pytest.mark.parametrize(("collator", "times"), [(None, 1), (pairs, 2)])
def test_samples_of_the_model_that_are_not_the_trainers_are_told(collator, times, tmp_path):
    callback = mc.MemoryTrainerCallback(predict=False)
    train(tmp_path, callback, trainer_options={"data_collator": collator})
    assert callback.report.measured.batch_size == 4 * times
    notes = " ".join(callback.report.notes)
    assert ("becomes 8 samples in the model" in notes) == (times == 2)


class HasBaseline(Trainer):
    """Calls the model without gradients first, as for a divergence (KTO)."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        with torch.no_grad():
            baseline = model(**inputs).loss
        return super().compute_loss(model, inputs, *args, **kwargs) - baseline


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_autocast_keeps_ends_with_each_call_of_the_model(checkpointing, tmp_path):
    callback = mc.MemoryTrainerCallback(wait_for_prediction=True)
    options = {"bf16": True, "gradient_checkpointing": checkpointing}
    train(tmp_path, callback, kind=HasBaseline, **options)
    measured, predicted = callback.report.measured, callback.report.prediction.step
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP):
        assert predicted.phases[phase].peak_allocated_bytes == pytest.approx(
            measured.phases[phase].peak_allocated_bytes, rel=0.01
        )


class CountsNumbers(Trainer):
    """Counts at each step how many numbers of items of its steps so far are still there."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if type(num_items_in_batch) is torch.Tensor:  # and no fake one, of a trace
            vars(self).setdefault("numbers", []).append(weakref.ref(num_items_in_batch))
            alive = sum(number() is not None for number in self.numbers)
            vars(self).setdefault("num_alive", []).append(alive)
        return super().compute_loss(
            model, inputs, return_outputs, num_items_in_batch=num_items_in_batch
        )


@pytest.mark.usefixtures("pictures")
def test_no_tensor_of_a_step_is_kept_after_it(tmp_path):
    callback = mc.MemoryTrainerCallback(wait_for_prediction=True)
    assert train(tmp_path, callback, kind=CountsNumbers).num_alive == [1] * 6


class CountsSigns(Trainer):
    """Makes a tensor of a length that only values on the device tell."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        signs = (model.lm_head.weight.flatten()[:2] > 0).long()
        assert len(torch.bincount(signs)) > 0
        return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)


def test_where_the_trainers_loss_cannot_be_traced_the_models_own_is(tmp_path):
    callback = mc.MemoryTrainerCallback(wait_for_prediction=True)
    with pytest.warns(MemoryWarning, match="The prediction uses the loss that the model"):
        train(tmp_path, callback, kind=CountsSigns)
    assert isinstance(callback.prediction, mc.Prediction)
    assert labels(callback) == [[F, B, O]] * 6


class Distilling(Trainer):
    """Has a teacher, as trainers of preferences have a reference model."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = model()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with torch.no_grad():
            targets = self.teacher(inputs["input_ids"]).logits.argmax(-1)
        logits = model(inputs["input_ids"]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_a_second_model_of_the_trainer_is_on_the_device(tmp_path):
    def parameter_bytes(step):
        return step.phases[Phase.FORWARD].start.by_category[mc.Category.PARAMETER]

    callback = mc.MemoryTrainerCallback()
    trainer = train(tmp_path, callback, kind=Distilling)
    measured, predicted = callback.recorder.steady, callback.prediction.step
    models = (trainer.model, trainer.teacher)
    size_bytes = sum(4 * tensor.numel() for one in models for tensor in one.parameters())
    assert parameter_bytes(predicted) == parameter_bytes(measured) == size_bytes
    assert measured.peak_allocated_bytes == pytest.approx(predicted.peak_allocated_bytes, rel=0.001)


class FailsOnce(Trainer):
    """An exception in the second forward pass."""

    num_steps_before = 1

    def training_step(self, model, *args, **kwargs):
        is_due = self.state.global_step == self.num_steps_before
        hook = model.lm_head.register_forward_hook(self.fail) if is_due else None
        try:
            return super().training_step(model, *args, **kwargs)
        finally:
            if hook:
                hook.remove()

    def fail(self, *_):
        raise ZeroDivisionError("the user's own")


class FailsAtOnce(FailsOnce):
    """An exception in the first forward pass, once the model has been called."""

    num_steps_before = 0


@pytest.mark.parametrize(("kind", "count"), [(FailsOnce, "Only 1"), (FailsAtOnce, "No")])
def test_an_exception_of_the_training_goes_on_and_is_reported(kind, count, tmp_path, capsys):
    callback = mc.MemoryTrainerCallback(predict=False)
    with (
        pytest.warns(MemoryWarning, match=f"{count} optimizer update was made"),
        pytest.raises(ZeroDivisionError, match="the user's own"),
    ):
        train(tmp_path, callback, kind=kind)
    assert callback.recorder.steps[-1].is_interrupted
    assert "The last step ended with ZeroDivisionError." in " ".join(
        capsys.readouterr().out.split()
    )
    assert not hasattr(torch.autograd.backward, "__wrapped__")


class FailsToLoad(list):
    """A data set with a sample that cannot be loaded."""

    def __init__(self, samples, kind):
        super().__init__(samples)
        self.kind = kind
        self.excepthook = None

    def __getitem__(self, index):
        if self.excepthook is None:
            self.excepthook = sys.excepthook
        if len(self) == index + 1:
            raise self.kind("the user's own")
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", [LookupError, KeyboardInterrupt])
def test_an_error_between_two_steps_leaves_nothing_behind(kind, tmp_path):
    hook, trained = sys.excepthook, model()
    callback = mc.MemoryTrainerCallback(predict=False)
    samples = FailsToLoad(data(), kind)
    try:
        train(tmp_path, callback, trained=trained, samples=samples)
    except kind:
        assert sys.excepthook is samples.excepthook is not hook, "an uncaught error is seen"
    assert sys.excepthook is hook
    assert not any((trained._forward_pre_hooks, trained._forward_hooks))
    assert not hasattr(torch.autograd.backward, "__wrapped__")
    assert len(callback.recorder.steps) == 3
    train(tmp_path, callback, trained=trained)
    assert labels(callback) == [[F, B, O]] * 6


def test_steps_after_an_error_that_somebody_keeps_are_not_recorded(tmp_path):
    trained, callback = model(), mc.MemoryTrainerCallback(predict=False)
    with pytest.raises(LookupError) as kept:
        train(tmp_path, callback, trained=trained, samples=FailsToLoad(data(), LookupError))
    assert trained._forward_pre_hooks
    trained(**{name: row[None] for name, row in data(1)[0].items()}).loss.backward()
    assert not any((trained._forward_pre_hooks, trained._forward_hooks))
    assert len(callback.recorder.steps) == 3
    del kept


def test_an_error_of_ours_does_not_stop_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr("memcallback.record.point_log.step_curves", None)
    callback = mc.MemoryTrainerCallback(predict=False)
    with pytest.warns(
        MemoryWarning, match="MemoryTrainerCallback has stopped recording: TypeError"
    ):
        trainer = train(tmp_path, callback)
    assert trainer.state.global_step == 6
    assert not trainer.model._forward_pre_hooks


def test_a_second_training_is_recorded_anew(tmp_path):
    callback = mc.MemoryTrainerCallback(predict=False)
    train(tmp_path, callback)
    first = callback.recorder
    train(tmp_path, callback)
    assert callback.recorder is not first
    assert labels(callback) == [[F, B, O]] * 6


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        mc.MemoryTrainerCallback(batch_size=0)
    with pytest.raises(ValueError, match="headroom"):
        mc.MemoryTrainerCallback(headroom=1.5)


def test_without_transformers_the_way_out_is_named():
    script = (
        "import sys; sys.modules['transformers'] = None\n"
        "import memcallback\n"
        "try:\n    memcallback.MemoryTrainerCallback\n"
        "except ModuleNotFoundError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert (
        done.stdout
        == "MemoryTrainerCallback needs transformers and accelerate, the extra `huggingface` of "
        "this package: pip install transformers accelerate.\n"
    )


@pytest.mark.cuda
@pytest.mark.parametrize(
    "options", [{}, {"bf16": True}, {"fp16": True}, {"gradient_accumulation_steps": 2}], ids=str
)
def test_on_a_device_the_prediction_is_off_by_the_trainers_own_scalars(tmp_path, options):
    callback = mc.MemoryTrainerCallback()
    train(tmp_path, callback, use_cpu=False, **options)
    measured, predicted = callback.report.measured, callback.report.prediction.step
    for phase in measured.phases:
        off = (
            measured.phases[phase].peak_allocated_bytes
            - predicted.phases[phase].peak_allocated_bytes
        )
        assert abs(off) <= 32 * 512, (phase, off)
    assert measured.peak_reserved_bytes == predicted.peak_reserved_bytes


@pytest.fixture
def precision_as_before():
    """A Trainer that compiles turns TF32 on in a way that Lightning cannot read afterwards."""
    backends = torch.backends
    settings = [backends, backends.cuda.matmul, backends.cudnn, backends.cudnn.conv]
    settings += [backends.cudnn.rnn]
    before = [setting.fp32_precision for setting in settings]
    yield
    for setting, value in zip(settings, before, strict=True):
        setting.fp32_precision = value


@pytest.mark.cuda
@pytest.mark.usefixtures("precision_as_before")
# All three are PyTorch's, without us too.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_on_a_device_a_model_that_the_trainer_compiles_is_predicted_compiled(tmp_path, monkeypatch):
    monkeypatch.delenv("MEMCALLBACK_ISOLATE", raising=False)
    callback = mc.MemoryTrainerCallback(wait_for_prediction=True)
    train(tmp_path, callback, use_cpu=False, torch_compile=True, bf16=True)
    torch._dynamo.reset()
    measured, predicted = callback.report.measured, callback.report.prediction.step
    assert any(caveat.startswith("Compiled code is") for caveat in callback.prediction.caveats)
    for phase in measured.phases:
        off = (
            measured.phases[phase].peak_allocated_bytes
            - predicted.phases[phase].peak_allocated_bytes
        )
        assert abs(off) <= 32 * 512, (phase, off)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_on_several_devices_in_one_process_each_step_is_recorded_on_the_first(tmp_path):
    callback = mc.MemoryTrainerCallback(predict=False)
    train(tmp_path, callback, use_cpu=False, num_devices=2)
    torch._C._cuda_clearCublasWorkspaces()  # of the replicas' threads
    assert labels(callback) == [[F, B, O]] * 3
    # Of a batch of eight half of the samples are on each device.
    assert [step.batch_size for step in callback.recorder.steps] == [4] * 3
    assert any("DataParallel" in note for note in callback.report.notes)


@pytest.mark.parametrize("device", ["NVIDIA H200", "cpu"])
@pytest.mark.parametrize(("num_packed", "is_masked"), [(0, False), (1, False), (2, True)])
def test_a_mask_is_predicted_where_the_positions_of_a_batch_say_that_rows_are_packed(
    device, num_packed, is_masked
):
    from transformers import LlamaConfig, LlamaForCausalLM

    def loss(model, batch):
        def look(module, args, kwargs):
            assert (kwargs["attention_mask"] is not None) is is_masked

        hook = model.model.layers[0].self_attn.register_forward_pre_hook(look, with_kwargs=True)
        value = model(**batch, use_cache=False).loss  # as with gradient checkpointing
        hook.remove()
        return value

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens}
    if num_packed:
        batch["position_ids"] = torch.arange(16 // num_packed).repeat(2, num_packed)
    mc.predict(mc.TrainingStep(LlamaForCausalLM(config), batch, loss=loss), device=device)


@pytest.mark.parametrize(
    "way", [copy.copy, copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))]
)
def test_a_callback_is_copied_at_any_moment_and_a_copy_trains_on_its_own(way, tmp_path):
    class Copying(TrainerCallback):
        def __init__(self, copied):
            self.copies = []
            for hook in ("on_train_begin", "on_step_begin", "on_step_end", "on_train_end"):
                setattr(self, hook, lambda *_, **__: self.copies.append(way(copied)))

    callback = mc.MemoryTrainerCallback(predict=False)
    copying = Copying(callback)
    train(tmp_path, [callback, copying])
    num_steps = len(callback.recorder.steps)
    assert num_steps > 0
    last, during = copying.copies[-1], copying.copies[2]
    assert last.report == callback.report
    assert last.recorder.steps == callback.recorder.steps
    assert not during.recorder.models
    train(tmp_path, during)
    assert len(during.recorder.steps) == num_steps


def evaluating(tmp_path, **options):
    callback = mc.MemoryTrainerCallback(wait_for_prediction=True, **options.pop("ours", {}))
    arguments = {"eval_strategy": "epoch", "per_device_eval_batch_size": 8} | options
    metrics = arguments.pop("compute_metrics", None)
    train(
        tmp_path,
        callback,
        trainer_options={"eval_dataset": data(64), "compute_metrics": metrics},
        **arguments,
    )
    return callback


def test_the_worst_moment_of_a_run_that_evaluates_is_said(tmp_path):
    without = evaluating(tmp_path)
    assert without.evaluation.batch_size == 8
    assert without.evaluation.step.stage is mc.Stage.VALIDATION
    (note,) = [note for note in without.report.notes if note.startswith("Worst moment")]
    assert note.startswith("Worst moment of the run: the training step, ")

    grows = evaluating(tmp_path, compute_metrics=lambda _: {})
    # The logits of 8 batches are concatenated: there twice, less those of the last batch.
    logits = 8 * LENGTH * VOCABULARY * 4
    more = grows.evaluation.peak_allocated_bytes - without.evaluation.peak_allocated_bytes
    assert more > 10 * logits
    (note,) = [note for note in grows.report.notes if note.startswith("Worst moment")]
    assert note.startswith("Worst moment of the run: evaluation, ")


def test_an_evaluation_that_does_not_fit_is_warned_of(tmp_path):
    with pytest.warns(MemoryWarning, match="Evaluation does not fit: it needs "):
        evaluating(tmp_path, compute_metrics=lambda _: {}, ours={"device": "8MiB"})


def test_a_trainer_that_does_not_evaluate_has_no_evaluation(tmp_path):
    assert evaluating(tmp_path, eval_strategy="no").evaluation is None
