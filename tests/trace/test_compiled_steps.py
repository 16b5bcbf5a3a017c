"""Compiled steps, which are compiled for the card in the process that predicts."""

from dataclasses import replace

import lightning
import pytest
import rank_cases
import torch
import torch._dynamo
from attending import Attending
from needs import needs_compilation
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memcallback as mc
from memcallback.core.tensors import torch_version
from memcallback.devices.catalogue import find_device
from memcallback.prediction import predict_here
from memcallback.prediction.predict_here import Traces
from memcallback.trace.patches.generated_code import module_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
    needs_compilation,
]
#: With the workspaces of the PyTorch that ran on the devices.
CARD = replace(find_device("NVIDIA H200"), torch_version=(2, 11))
#: Whether PyTorch compiles the forward pass of its own classes in place.
COMPILES_ITS_OWN = torch_version() >= (2, 14)
COMPILED = "Compiled code is predicted from what Inductor of PyTorch"
AS_EAGER = "Compiled code ran as it would without compilation"


@pytest.fixture(autouse=True)
def in_a_child(monkeypatch):
    monkeypatch.delenv("MEMCALLBACK_ISOLATE", raising=False)


def perceptron():
    return nn.Sequential(
        nn.Linear(1024, 4096), nn.GELU(), nn.LayerNorm(4096), nn.Linear(4096, 1024)
    )


def squares(model, batch):
    return model(batch).square().mean()


def predict(model, batch_size=4096, **options):
    batch = torch.zeros(batch_size, 1024)
    step = mc.TrainingStep(model, batch, loss=squares, optimizer=torch.optim.AdamW)
    return mc.predict(step, device=CARD, **options)


def said(prediction, start):
    return [caveat for caveat in prediction.caveats if caveat.startswith(start)]


@pytest.mark.parametrize("options", [{}, {"fullgraph": True}], ids=str)
def test_a_compiled_module_is_predicted_as_it_ran_on_a_device(options):
    prediction = predict(torch.compile(perceptron(), **options))
    # Measured with PyTorch 2.11 on a virtual H200, in a process that found its code in the cache.
    assert prediction.peak_allocated_bytes == 403_895_296
    assert prediction.peak_reserved_bytes == 406_847_488
    assert len(said(prediction, COMPILED)) == 1
    assert not said(prediction, AS_EAGER)
    assert not said(prediction, "A compiled module was traced as it would run without")


class Network(nn.Module):
    """A perceptron in a module of the user's own class."""

    def __init__(self):
        super().__init__()
        self.layers = perceptron()

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(
    ("make_model", "allocated_bytes"),
    [(Network, 353_563_648), (perceptron, 353_563_648 if COMPILES_ITS_OWN else 445_875_200)],
)
def test_compiling_in_place_and_autocast_are_predicted_as_they_ran_on_a_device(
    make_model, allocated_bytes
):
    model = make_model()
    model.compile()
    step = mc.TrainingStep(
        model,
        torch.zeros(4096, 1024),
        loss=lambda model, batch: model(batch).float().square().mean(),
        optimizer=torch.optim.AdamW,
        precision="bf16-mixed",
    )
    assert mc.predict(step, device=CARD).peak_allocated_bytes == allocated_bytes


@pytest.mark.skipif(COMPILES_ITS_OWN, reason="PyTorch 2.14 passes over nothing there")
def test_what_torch_compile_passes_over_is_said():
    model = perceptron()
    model.compile()
    prediction = predict(model, 64)
    assert prediction.peak_allocated_bytes == predict(perceptron(), 64).peak_allocated_bytes
    (sentence,) = said(prediction, "torch.compile compiles no operator of this step")
    assert "module.forward = torch.compile(module.forward)" in sentence
    assert not said(prediction, COMPILED)


@pytest.mark.parametrize("mode", ["inference_mode", "no_grad", "grad"])
def test_a_compiled_forward_pass_is_predicted_compiled(mode):
    def forward_pass(model):
        return mc.predict(mc.InferenceStep(model, torch.zeros(4096, 1024), mode=mode), device=CARD)

    compiled = forward_pass(torch.compile(perceptron()))
    assert said(compiled, COMPILED)
    assert not said(compiled, AS_EAGER)
    assert compiled.peak_allocated_bytes < forward_pass(perceptron()).peak_allocated_bytes


def test_what_compiled_autograd_would_change_is_said():
    with torch._dynamo.config.patch(compiled_autograd=True):
        with_it = predict(torch.compile(perceptron()), 64)
    without = predict(torch.compile(perceptron()), 64)
    said_of_it = "Compiled autograd is on"
    assert [len(said(each, said_of_it)) for each in (with_it, without)] == [1, 0]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_flex_attention_inside_of_compiled_code_is_compiled_with_it(precision):
    step = mc.TrainingStep(
        torch.compile(Attending(1024), fullgraph=True),
        torch.zeros(1024, 1024),
        loss=squares,
        optimizer=torch.optim.AdamW,
        precision=precision,
    )
    prediction = mc.predict(step, device=CARD)
    assert said(prediction, COMPILED)
    assert not said(prediction, AS_EAGER)
    assert not said(prediction, "flex_attention is predicted as torch.compile runs it")


class Halved(torch.autograd.Function):
    """Halves its input, in the dtype of autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, x):
        return (x / 2).to(torch.get_autocast_dtype("cuda"))

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, gradient):
        return gradient / 2


class Halving(nn.Module):
    """Calls a function that asks for autocast's dtype."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1024, 1024)

    def forward(self, x):
        return Halved.apply(self.layer(x))


def test_code_that_asks_for_the_dtype_of_autocast_is_compiled():
    prediction = predict(torch.compile(Halving(), fullgraph=True), 64)
    assert said(prediction, COMPILED)
    assert not said(prediction, AS_EAGER)


class AsksForTheCard(nn.Module):
    """What Dynamo answers while it compiles."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1024, 1024)

    def forward(self, x):
        hidden = self.layer(x)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            hidden = hidden.relu()
        if torch.cuda.get_device_capability() >= (9, 0) and torch.cuda.current_device() == 0:
            hidden = hidden.tanh()
        num_multiprocessors = torch.cuda.get_device_properties(hidden.device).multi_processor_count
        return hidden * num_multiprocessors * (torch.cuda.current_stream() is not None)


def test_code_that_asks_for_the_card_is_compiled():
    prediction = predict(torch.compile(AsksForTheCard(), fullgraph=True), 64)
    assert said(prediction, COMPILED)
    assert not said(prediction, AS_EAGER)


class Broken(nn.Module):
    """Cannot be compiled as a whole."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1024, 1024)

    def forward(self, x):
        torch._dynamo.graph_break()
        return self.layer(x).relu()


def test_what_cannot_be_compiled_is_predicted_without_compilation():
    compiled = predict(torch.compile(Broken(), fullgraph=True), 64)
    eager = predict(Broken(), 64)
    assert compiled.peak_allocated_bytes == eager.peak_allocated_bytes
    (sentence,) = said(compiled, AS_EAGER)
    assert "Broken.forward (compiling it failed with Unsupported: " in sentence


def test_a_module_with_a_graph_break_is_compiled_in_parts():
    prediction = predict(torch.compile(Broken()), 64)
    assert said(prediction, COMPILED)
    assert not said(prediction, AS_EAGER)


def scores_and_loss(model, batch):
    """A product whose rows Inductor pads, as 5000 numbers are no multiple of 128 bytes."""
    labels = torch.zeros(batch.shape[0], dtype=torch.long, device=batch.device)
    return F.cross_entropy(model(batch), labels)


@pytest.mark.parametrize(
    ("precision", "reserved_bytes"), [("32-true", 174_063_616), ("bf16-mixed", 132_120_576)]
)
def test_a_compiled_loss_is_predicted_as_it_ran_on_a_device(precision, reserved_bytes):
    step = mc.TrainingStep(
        nn.Linear(256, 5000),
        torch.zeros(2048, 256),
        loss=torch.compile(scores_and_loss),
        optimizer=torch.optim.AdamW,
        precision=precision,
    )
    prediction = mc.predict(step, device=CARD)
    assert prediction.peak_reserved_bytes == reserved_bytes
    assert said(prediction, COMPILED)
    assert not said(prediction, AS_EAGER)


class Module(lightning.LightningModule):
    """Its loss is a part of its training step."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 5000)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        return F.cross_entropy(self(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


@pytest.mark.parametrize("is_in_a_trainer", [False, True])
def test_a_compiled_lightning_module_s_whole_training_step_is_predicted_compiled(is_in_a_trainer):
    module = torch.compile(Module())
    if is_in_a_trainer:
        module = lightning.pytorch.utilities.compile.from_compiled(module)
    batch = (torch.zeros(2048, 256), torch.zeros(2048, dtype=torch.long))
    prediction = mc.predict(mc.TrainingStep.from_lightning(module, batch), device=CARD)
    # What a Trainer with PyTorch 2.11 reserved on a virtual H200.
    assert prediction.peak_reserved_bytes == 243_269_632
    assert not said(prediction, AS_EAGER)


class CompiledAdamW(torch.optim.AdamW):
    """Compiles its update, which makes the state as it is compiled."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.step = torch.compile(self.step)


def test_a_compiled_optimizer_is_predicted_as_it_ran_on_a_device():
    step = mc.TrainingStep(
        nn.Linear(1024, 1024), torch.zeros(64, 1024), loss=squares, optimizer=CompiledAdamW
    )
    prediction = mc.predict(step, device=CARD)
    assert prediction.peak_allocated_bytes == 85_477_376
    assert prediction.peak_reserved_bytes == 92_274_688
    assert not said(prediction, AS_EAGER)


class Attention(nn.Module):
    """Attention whose weights are dropped at random, perhaps computed again for its gradients."""

    def __init__(self, *, is_checkpointed):
        super().__init__()
        self.project, self.is_checkpointed = nn.Linear(1024, 1024), is_checkpointed

    def attend(self, x):
        heads = self.project(x).sin().unflatten(-1, (16, 64)).transpose(0, 1)[None]
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)

    def forward(self, x):
        return (
            checkpoint(self.attend, x, use_reentrant=False)
            if self.is_checkpointed
            else (self.attend(x))
        )


def test_activation_checkpointing_inside_of_compiled_code_is_predicted_compiled():
    def step(*, is_checkpointed):
        model = torch.compile(Attention(is_checkpointed=is_checkpointed))
        prediction = predict(model, 512)
        assert said(prediction, COMPILED)
        assert not said(prediction, "Compiled code was traced as it would run without")
        return sum(live.block_bytes for live in prediction.saved)

    # Nothing is kept for the backward pass but what is the loss's own.
    assert step(is_checkpointed=True) < step(is_checkpointed=False)


def test_a_job_that_is_given_is_compiled_as_the_model_s_wrapper():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        model = torch.compile(nn.parallel.DistributedDataParallel(nn.Linear(64, 64)))
        step = mc.TrainingStep(
            model, torch.zeros(8, 64), optimizer=torch.optim.SGD, ranks=mc.Ranks(8, "ddp")
        )
        assert repr(step.ranks) == "Ranks(8, 'ddp', compile=torch.compile)"
    finally:
        torch.distributed.destroy_process_group()


def test_a_wrapper_that_is_no_module_is_refused():
    step = mc.TrainingStep(
        nn.Linear(64, 64),
        torch.zeros(8, 64),
        optimizer=torch.optim.SGD,
        ranks=mc.Ranks(2, "ddp", compile=lambda model: None),
    )
    with pytest.raises(mc.PredictionError, match="compile must return the compiled module"):
        mc.predict(step, device=CARD)


def test_compiled_blocks_on_a_rank_are_predicted_as_they_ran_on_two_devices():
    make_batch = rank_cases.MODELS["compiled transformer"][1]
    step = mc.TrainingStep(
        rank_cases.compiled_transformer(),
        make_batch(),
        loss=rank_cases.loss_of,
        optimizer=torch.optim.AdamW,
        ranks=mc.Ranks(2, "fsdp2"),
    )
    prediction = mc.predict(step, device=CARD)
    assert said(prediction, COMPILED)
    assert not said(prediction, AS_EAGER)
    # Measured with PyTorch 2.11 on two virtual H200, with the code in the cache.
    peaks = {window.label: window.peak_allocated_bytes for window in prediction.step.windows}
    assert peaks["forward"] == 153_903_616
    assert peaks["backward"] == 164_628_992
    assert prediction.peak_reserved_bytes == 226_492_416


@pytest.mark.parametrize(
    ("name", "options", "allocated_bytes", "reserved_bytes"),
    [
        ("decoder, compiled", {}, 982_197_248, 1_061_158_912),
        ("decoder", {"compile": torch.compile}, 982_197_248, 1_061_158_912),
        # PyTorch compiles nothing of it so.
        ("wide nn.Sequential", {"compile": torch.compile}, 1_604_654_592, 1_759_510_528),
    ],
)
def test_what_ddp_wraps_and_what_wraps_ddp_are_predicted_as_they_ran_on_two_devices(
    name, options, allocated_bytes, reserved_bytes
):
    make_model, make_batch = rank_cases.MODELS[name]
    is_sequence = "Sequential" in name
    step = mc.TrainingStep(
        make_model(),
        make_batch()[0] if is_sequence else make_batch(),
        loss=squares if is_sequence else rank_cases.loss_of,
        optimizer=torch.optim.AdamW,
        ranks=mc.Ranks(2, "ddp", **options),
    )
    prediction = mc.predict(step, device=CARD)
    # Measured with PyTorch 2.11 on two virtual H200, with the code in the cache. Inductor of 2.13
    # writes other code for the decoder.
    if is_sequence or torch_version() < (2, 12):
        assert prediction.peak_allocated_bytes == allocated_bytes
        assert prediction.peak_reserved_bytes == reserved_bytes
    assert not said(prediction, AS_EAGER)
    nothing = said(prediction, "torch.compile compiles no operator of this step")
    assert len(nothing) == is_sequence
    assert all("DistributedDataParallel(torch.compile(model))" in sentence for sentence in nothing)


def test_a_compiled_step_is_traced_at_its_own_batch_size_alone():
    seen = []
    prediction = predict(
        torch.compile(perceptron()), 64, progress=lambda done, num_all: seen.append(done)
    )
    assert not any(seen)  # traces that are done before the last one
    (sentence,) = said(prediction, "Only batch size 64 is predicted")
    assert "torch.compile writes other code for another batch size" in sentence
    with pytest.raises(ValueError, match="batch size 65"):
        prediction.at(65)


def test_a_suggestion_for_a_compiled_step_traces_each_size_once(monkeypatch):
    traced = []
    original = Traces.at

    def at(traces, batch_size, sequence_length):
        traced.append((batch_size, sequence_length))
        return original(traces, batch_size, sequence_length)

    monkeypatch.setattr(Traces, "at", at)
    monkeypatch.setattr(predict_here, "is_in_child", lambda: True)
    model = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU()))
    step = mc.TrainingStep(model, torch.zeros(8, 32, 64), loss=squares, sequence_length=32)
    options = {"device": CARD, "max_batch_size": 64, "isolate": False}
    mc.suggest_batch_size(step, **options)
    assert len(traced) == len(set(traced))
    by_length = mc.suggest_batch_size(step, sequence_lengths=[16, 32], **options)
    assert set(by_length.by_sequence_length) == {16, 32}


def test_another_length_of_a_compiled_step_is_not_tried():
    model = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU()))
    step = mc.TrainingStep(model, torch.zeros(8, 32, 64), loss=squares, sequence_length=32)
    prediction = mc.predict(step, device=CARD)
    (sentence,) = said(prediction, "Only sequence length 32 is predicted")
    assert "torch.compile writes other code for another length" in sentence


def test_compiled_code_without_tensors_does_not_make_a_step_compiled():
    add_one = torch.compile(lambda number: number + 1)

    def loss(model, batch):
        return squares(model, batch) * add_one(1)

    step = mc.TrainingStep(nn.Linear(64, 64), torch.zeros(8, 64), loss=loss)
    prediction = mc.predict(step, device=CARD)
    assert not said(prediction, COMPILED)
    assert prediction.at(16).batch_size == 16


def test_a_step_of_which_only_the_optimizer_is_compiled_is_known_at_any_batch_size():
    step = mc.TrainingStep(
        nn.Linear(1024, 1024), torch.zeros(64, 1024), loss=squares, optimizer=CompiledAdamW
    )
    prediction = mc.predict(step, device=CARD)
    assert said(prediction, COMPILED)
    assert prediction.at(128).peak_allocated_bytes > prediction.peak_allocated_bytes


def test_other_compilers_are_not_run():
    prediction = predict(torch.compile(Broken(), backend="aot_eager"), 64)
    assert said(prediction, AS_EAGER)
    assert not said(prediction, COMPILED)
    assert not said(prediction, "A compiled module was traced as it would run without")


def test_in_the_training_s_process_nothing_is_compiled():
    prediction = predict(torch.compile(Broken()), 64, isolate=False)
    assert said(prediction, "A compiled module was traced as it would run without compilation")
    assert not said(prediction, COMPILED)


def test_what_counts_as_allocated_with_cuda_graphs_is_said():
    prediction = predict(torch.compile(Broken(), mode="reduce-overhead"), 64)
    (sentence,) = said(prediction, "CUDA graphs")
    assert "A steady step then counts less as allocated" in sentence
    assert sentence.endswith("compare reserved memory.")


@pytest.fixture
def broken_code(monkeypatch):
    """Compiled code that fails as it runs in a trace."""

    def broken(code, mode):
        module = module_of(code, mode)
        module.call = fails
        return module

    def fails(args):
        raise RuntimeError("no kernel")

    monkeypatch.setattr("memcallback.trace.patches.inductor.module_of", broken)


class Layer(nn.Sequential):
    """A layer with a forward pass of its own, which `compile()` compiles."""

    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_whose_compiled_code_fails_is_predicted_without_compilation(broken_code, rank):
    def stages(*, is_compiled):
        layers = [Layer(nn.Linear(64, 64), nn.GELU()) for _ in range(2)]
        for layer in layers if is_compiled else ():
            layer.compile()
        step = mc.TrainingStep(
            nn.Sequential(*layers),
            torch.zeros(32, 64),
            loss=squares,
            ranks=mc.Ranks(2, "pipeline", rank=rank, n_microbatches=2),
        )
        return mc.predict(step, device=CARD)

    compiled = stages(is_compiled=True)
    assert said(compiled, "Compiled code was traced as it would run without")
    assert compiled.peak_allocated_bytes == stages(is_compiled=False).peak_allocated_bytes


def test_a_step_whose_compiled_code_fails_keeps_the_largest_possible_shapes(broken_code):
    def of_some(model, batch):
        samples, classes = batch
        return model(samples[classes == 0]).sum()

    batch = torch.zeros(32, 64), torch.arange(32) % 10
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    step = mc.TrainingStep(torch.compile(model), batch, loss=of_some)
    said = " ".join(mc.predict(step, device="NVIDIA H200").caveats)
    assert "without compilation" in said
    assert "the largest possible was assumed" in said
    assert "that of this batch was taken" not in said


def test_the_training_s_own_compilation_and_its_cache_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = torch.compile(Broken(), backend="eager")

    def state():
        files = sorted(str(path) for path in tmp_path.rglob("*"))
        return files, {name: dict(counts) for name, counts in counters.items()}

    model(torch.zeros(2, 1024))
    before = state()
    assert before[1]["stats"]["unique_graphs"] > 0
    predict(torch.compile(Broken()), 64)
    model(torch.zeros(2, 1024))
    assert state() == before
