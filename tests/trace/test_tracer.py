"""What a traced step allocates: against the allocation events of the real CPU run, and what CUDA
would do otherwise.
"""

import gc
import re
from functools import partial

import pytest
import torch
from hand_made import boundaries
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import flop_counter
from torch.utils.checkpoint import checkpoint

import memcallback as mc
from memcallback.core.allocation_trace import Alloc, Free, PhaseStart, StepEnd, StepStart
from memcallback.core.errors import PredictionError
from memcallback.core.types import Category, Phase
from memcallback.devices.blas import CUBLASLT_WORKSPACE_BYTES
from memcallback.devices.catalogue import find_device
from memcallback.record.recorder import MemoryRecorder
from memcallback.step.training_step import TrainingStep
from memcallback.trace.dispatch.ledger import Ledger
from memcallback.trace.dispatch.mode import TraceMode
from memcallback.trace.request import TraceRequest
from memcallback.trace.tracer import trace

CARD = find_device("NVIDIA A100-SXM4-80GB")


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def images(size=8, channels=3, count=4):
    return [torch.randn(count, channels, size, size), torch.randint(0, 10, (count,))]


def vectors(count=16, width=32):
    return [torch.randn(count, width), torch.randint(0, 10, (count,))]


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.head = nn.Linear(32, 10)
        self.head.weight = nn.Parameter(self.head.weight)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)).mean(1))


def mlp():
    return nn.Sequential(
        nn.Linear(32, 64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, 64),
        nn.GELU(),
        nn.LayerNorm(64),
        nn.Linear(64, 10),
    )


def residual():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = (
                nn.Linear(32, 32),
                nn.Linear(32, 32),
                nn.Linear(32, 10),
            )

        def forward(self, x):
            for _ in range(3):
                x = x + torch.tanh(self.first(x)) * torch.sigmoid(self.second(x))
            return self.last(x)

    return Residual()


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def tokens():
    return [torch.randint(0, 50, (4, 12)), torch.randint(0, 10, (4,))]


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p),
    "adam, foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "adam, fused": lambda p: torch.optim.Adam(p, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


def measured(model, batch, make_optimizer, clip):
    """The boundaries of a real training on this CPU, from PyTorch's own allocation events: of two
    steps.
    """
    optimizer = make_optimizer(model.parameters())
    recorder = MemoryRecorder(model, optimizer, device="cpu")
    steps = []
    for _ in range(2):
        fresh = [tensor.clone() for tensor in batch]
        recorder.begin_step(fresh)
        optimizer.zero_grad()
        with recorder.phase(Phase.FORWARD):
            loss = cross_entropy(model, fresh)
        with recorder.phase(Phase.BACKWARD):
            loss.backward()
        with recorder.phase(Phase.OPTIMIZER_STEP):
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        del loss, fresh
        gc.collect()
        step = recorder.end_step()
        steps.append(
            [
                bytes_
                for window in step.windows
                for bytes_ in (window.start.allocated_bytes, window.end.allocated_bytes)
            ]
        )
    recorder.close()
    return steps


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("model", "batch"), [(mlp, vectors), (residual, vectors), (cnn, images), (Transformer, tokens)]
)
def test_on_a_cpu_bytes_alive_at_every_boundary_are_those_of_the_real_run(model, batch, optimizer):
    made, data = model(), batch()
    traced = trace(
        TraceRequest(
            TrainingStep(
                made, data, loss=cross_entropy, optimizer=OPTIMIZERS[optimizer], clip_grad_norm=1.0
            ),
            None,
        )
    )
    assert boundaries(traced) == measured(made, data, OPTIMIZERS[optimizer], 1.0)


def on_card(model, batch, loss=cross_entropy, optimizer=None, **options):
    return trace(
        TraceRequest(
            TrainingStep(
                model, batch, loss=loss, optimizer=optimizer or OPTIMIZERS["adamw"], **options
            ),
            CARD,
        )
    )


def allocations(traced):
    return [event for event in traced.trace.events if isinstance(event, Alloc)]


def test_on_cuda_dropout_keeps_a_mask_of_one_byte_for_each_value():
    traced = on_card(mlp(), vectors())
    masks = [
        event
        for event in allocations(traced)
        if event.operator == "aten::native_dropout" and event.size_bytes == 16 * 64
    ]
    assert [mask.category for mask in masks] == [Category.ACTIVATION] * 2


def test_on_cuda_the_first_matrix_products_of_forward_and_backward_take_a_workspace_that_stays():
    traced = on_card(mlp(), vectors())
    workspaces = [
        event.id for event in allocations(traced) if event.size_bytes == CARD.cublas_workspace_bytes
    ]
    freed = {event.id for event in traced.trace.events if isinstance(event, Free)}
    assert len(workspaces) == 2
    assert not freed & set(workspaces)


def test_autocast_runs_layer_norm_in_float32_and_keeps_half_copies_of_weights_until_it_ends():
    traced = on_card(mlp(), vectors(), precision="bf16-mixed")
    copies = [
        event
        for event in allocations(traced)
        if event.operator == "aten::_to_copy" and event.size_bytes == 2 * 64 * 64
    ]
    assert copies
    norms = [event for event in allocations(traced) if event.operator == "aten::native_layer_norm"]
    assert max(norm.size_bytes for norm in norms) == 4 * 16 * 64
    # The loss too: nll_loss gets the 16 x 10 logarithms in single precision.
    assert any(
        event.operator == "aten::_to_copy" and event.size_bytes == 4 * 160
        for event in allocations(traced)
    )


class AsksForDevices(nn.Module):
    """Does what user code does with devices."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 10)
        self.seen = []

    def forward(self, x):
        self.seen += [
            str(x.device),
            x.is_cuda,
            str(self.linear.weight.device),
            torch.cuda.is_available(),
        ]
        mask = torch.ones(16, 32, device="cuda") + torch.zeros(16, 32, device=x.device)
        on_host = torch.ones(1000)
        self.seen += [
            str(on_host.device),
            str(on_host.cuda().device),
            str(x.cpu().device),
            str(on_host.to(x).device),
        ]
        with torch.autocast("cuda", dtype=torch.float16):
            self.seen.append(self.linear(x).dtype)
        return self.linear(x * mask)


def test_user_code_that_asks_for_cuda_gets_it():
    model = AsksForDevices()
    traced = on_card(model, vectors())
    expected = ["cuda:0", True, "cuda:0", True, "cpu", "cuda:0", "cpu", "cuda:0", torch.float16]
    # The attribute is shared with the copy only if copying shares lists, which it must not.
    assert model.seen == []
    seen = []
    model.seen = seen
    model.__deepcopy__ = None
    del model.__deepcopy__

    class Keeps(AsksForDevices):
        def forward(self, x):
            result = super().forward(x)
            seen.extend(self.seen)
            return result

    on_card(Keeps(), vectors())
    assert seen[: len(expected)] == expected
    sizes = [event.size_bytes for event in allocations(traced) if event.size_bytes == 4000]
    assert (
        len(sizes) == 2 * 2
    )  # in each of two steps, by .cuda() and by .to(x); the tensor of the host is not there


def test_a_step_is_predicted_the_same_inside_of_the_callers_autocast():
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))

    def loss(model, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(x)
        return (out @ x.T.to(out.dtype)).float().sum()

    def predict():
        step = mc.TrainingStep(model, torch.zeros(16, 64), loss=loss, optimizer=torch.optim.AdamW)
        windows = mc.predict(step, device="NVIDIA H200", isolate=False).step.windows
        return [window.peak_allocated_bytes for window in windows]

    outside = predict()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu"):
        assert predict() == outside
        depth = torch.autocast_decrement_nesting() + 1
        torch.autocast_increment_nesting()
        assert torch.is_autocast_enabled("cpu")
    assert depth == 2


def test_a_product_with_a_matrix_on_the_host_is_told_of_where_a_device_refuses_it():
    on_host = torch.zeros(64, 8)

    def loss(model, x):
        return (model(x) @ on_host).sum()

    step = mc.TrainingStep(nn.Linear(64, 64), torch.zeros(16, 64), loss=loss)
    told = "aten::mm takes a matrix on the host and one on the device, which is an error"
    assert any(told in caveat for caveat in mc.predict(step, device="NVIDIA H200").caveats)
    assert not any(told in caveat for caveat in mc.predict(step, device="cpu").caveats)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 32))
            for _ in range(4)
        )
        self.head = nn.Linear(32, 10)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = x.clone().requires_grad_()
        for block in self.blocks:
            run = (
                block
                if self.use_reentrant is None
                else partial(checkpoint, block, use_reentrant=self.use_reentrant)
            )
            x = run(x)
        return self.head(x)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_checkpointing_keeps_the_inputs_of_segments_and_computes_the_rest_again(
    use_reentrant, precision
):
    batch = vectors(count=512)
    plain = boundaries(on_card(Checkpointed(None), batch, precision=precision))[1]
    saved = boundaries(on_card(Checkpointed(use_reentrant), batch, precision=precision))[1]
    hidden = 512 * 256 * (4 if precision == "32-true" else 2)
    assert plain[1] - saved[1] >= 4 * hidden
    # At the end of the backward pass nothing is left of either but the workspace of its thread,
    # where linear layers ran again.
    workspace_bytes = CUBLASLT_WORKSPACE_BYTES if CARD.cublaslt_workspace == "each handle" else 0
    assert abs(saved[3] - plain[3] - workspace_bytes) <= 4 * 512


@pytest.mark.parametrize(
    ("torch_version", "of_cublas", "of_cublaslt", "is_freed"),
    [
        ("2.8.0", 2, 4, True),  # two linear layers, two batches
        ("2.11.0", 2, 1, False),  # the backward pass adds no bias
        ("2.13.0", 2, 0, False),
    ],
)
def test_a_linear_layer_takes_the_workspaces_that_its_pytorch_takes(
    torch_version, of_cublas, of_cublaslt, is_freed, monkeypatch
):
    monkeypatch.setattr("torch.__version__", f"{torch_version}+cu130")
    traced = on_card(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 10)), vectors())
    workspaces = [e for e in allocations(traced) if e.category is Category.WORKSPACE]
    sizes = [event.size_bytes for event in workspaces]
    assert sizes.count(CARD.cublas_workspace_bytes) == of_cublas
    small = [e.id for e in workspaces if e.size_bytes == CUBLASLT_WORKSPACE_BYTES]
    freed = {event.id for event in traced.trace.events if isinstance(event, Free)}
    assert len(small) == of_cublaslt
    assert all((number in freed) == is_freed for number in small)


def test_modules_own_their_parameters_gradients_state_and_activations():
    traced = on_card(mlp(), vectors())
    owned = {event.category for event in allocations(traced) if event.module == "3"}
    assert {
        Category.PARAMETER,
        Category.GRADIENT,
        Category.OPTIMIZER_STATE,
        Category.ACTIVATION,
    } <= owned
    backward = [
        event for event in allocations(traced) if event.operator == "aten::threshold_backward"
    ]
    assert {event.module for event in backward} == {"1"}


class ReadsValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 10)

    def forward(self, x):
        y = self.linear(x)
        if torch.all(y > 0) and y.sum().item() < 1 and len(torch.nonzero(y > 1)) > 0:
            y = y[y[:, 0] > -1][:16]
        return y


def test_a_value_that_is_read_has_a_stand_in_and_is_listed():
    traced = on_card(ReadsValues(), vectors())
    assert any("reads a value of a tensor" in caveat for caveat in traced.caveats)
    assert any(
        "aten::nonzero has a shape that depends on values: the largest possible was assumed."
        in caveat
        for caveat in traced.caveats
    )


@pytest.mark.parametrize(
    ("stream_of_tensor", "stream_of_use"),
    [("own", "own"), ("own", "current"), ("current", "own"), ("current", "current")],
)
def test_memory_that_is_held_back_for_another_stream_than_its_own_is_listed(
    stream_of_tensor, stream_of_use
):
    def loss(model, batch):
        streams = {"own": torch.cuda.Stream(), "current": torch.cuda.current_stream()}
        with torch.cuda.stream(streams[stream_of_tensor]):
            x = batch[0] * 2
        x.record_stream(streams[stream_of_use])
        return cross_entropy(model, (x, batch[1]))

    caveats = trace(TraceRequest(TrainingStep(mlp(), vectors(), loss=loss), CARD)).caveats
    is_held_back = any("Tensor.record_stream holds memory back" in caveat for caveat in caveats)
    assert is_held_back is (stream_of_tensor != stream_of_use)


def test_the_backward_pass_runs_in_the_streams_of_the_forward_and_each_has_its_own_workspaces():
    def loss(model, batch):
        with torch.cuda.stream(torch.cuda.Stream()):
            hidden = model[0](batch[0])
        return F.cross_entropy(model[1](hidden), batch[1])

    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 10, bias=False))
    events = trace(
        TraceRequest(TrainingStep(model, vectors(), loss=loss), CARD, num_updates=1)
    ).trace.events
    workspaces = [
        event.stream
        for event in events
        if isinstance(event, Alloc) and event.category is Category.WORKSPACE
    ]
    assert workspaces == [1, 0, 0, 1]
    gradients = [
        event.stream
        for event in events
        if isinstance(event, Alloc) and event.category is Category.GRADIENT
    ]
    assert gradients == [0, 1]


class CallsAnotherLibrary(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 10))
        self.inner.register_forward_hook(
            lambda module, inputs, output: torch.utils.dlpack.to_dlpack(output.detach())
        )

    def forward(self, x):
        return self.inner(x)


def test_what_cannot_be_traced_gives_one_error_that_names_place_and_way_out():
    with pytest.raises(
        PredictionError,
        match=r"in the forward, in module 'inner'.*operator "
        r"aten::.*memcallback.TrainingStep\(model, batch, loss=",
    ) as caught:
        on_card(CallsAnotherLibrary(), vectors())
    text = str(caught.value)
    assert text.count("\n") == 0
    # PyTorch 2.6 detaches by another operator, with a longer name.
    assert len(text) - len(re.search(r"aten::\w+", text)[0]) < 450
    assert "which have shapes and no values" in caught.value.__notes__[0]


class FailsLater(nn.Linear):
    """Its first forward pass fails inside and goes on, the second one fails before anything ran."""

    def forward(self, x):
        if hasattr(self, "ran"):
            raise KeyError("later")
        self.ran = True
        return super().forward(x)


def test_an_operator_of_another_phase_is_not_what_failed():
    with pytest.raises(
        PredictionError,
        match=r"^The step could not be traced, in the forward, in module '0', "
        r"at tests/trace/test_tracer\.py:\d+ in forward: KeyError: 'later'\. If the training fails",
    ):
        on_card(nn.Sequential(FailsLater(32, 10)), vectors())


def test_what_ran_before_the_step_is_not_what_failed():
    class Module(LightningModule):
        def training_step(self, batch):
            return self(batch)

        def configure_optimizers(self):
            return 1 / 0

    with pytest.raises(
        PredictionError,
        match=r"^The step could not be traced, before the first phase, "
        r"at tests/trace/test_tracer\.py:\d+ in configure_optimizers: ZeroDivisionError: division "
        r"by zero\.",
    ):
        trace(TraceRequest(TrainingStep.from_lightning(Module(), vectors()), CARD))


def test_nothing_of_the_users_is_changed_and_nothing_stays_behind():
    model, batch = mlp(), vectors()
    optimizer = torch.optim.Adam(model.parameters())
    cross_entropy(model, batch).backward()
    optimizer.step()
    before = [
        tensor.clone()
        for tensor in (*model.state_dict().values(), *(p.grad for p in model.parameters()))
    ]
    random, kernels = torch.get_rng_state(), torch._C._dispatch_dump("aten::dropout")
    device, autocast = vars(type(torch.empty(0))).get("device"), torch.autocast
    trace(
        TraceRequest(
            TrainingStep(
                model, batch, loss=cross_entropy, optimizer=optimizer, precision="16-mixed"
            ),
            CARD,
        )
    )
    after = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert torch.equal(random, torch.get_rng_state())
    assert torch._C._dispatch_dump("aten::dropout") == kernels
    assert (device, autocast) == (vars(type(torch.empty(0))).get("device"), torch.autocast)
    assert len(optimizer.state) == len(list(model.parameters()))
    assert not torch.cuda.is_available()
    assert all(
        not module._forward_hooks and not module._forward_pre_hooks for module in model.modules()
    )


def test_an_optimizer_with_state_keeps_it_and_a_scheduler_of_it_does_not_run():
    model, batch = mlp(), vectors()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    cross_entropy(model, batch).backward()
    optimizer.step()
    scheduler.step()
    weights = [p.detach().clone() for p in model.parameters()]
    traced = trace(
        TraceRequest(TrainingStep(model, batch, loss=cross_entropy, optimizer=optimizer), CARD)
    )
    assert all(
        torch.equal(one, other) for one, other in zip(weights, model.parameters(), strict=True)
    )
    state = [event for event in allocations(traced) if event.category is Category.OPTIMIZER_STATE]
    first_step = traced.trace.events.index(StepStart())
    assert all(traced.trace.events.index(event) < first_step for event in state)
    assert sum(event.size_bytes for event in state) == 2 * sum(p.nbytes for p in model.parameters())


def test_gradient_accumulation_has_a_step_for_each_batch_and_one_update():
    traced = on_card(mlp(), vectors(), accumulate=3)
    assert traced.trace.events.count(StepStart()) == traced.trace.events.count(StepEnd()) == 6
    assert traced.trace.events.count(PhaseStart(Phase.OPTIMIZER_STEP)) == 2


def test_another_batch_size_is_traced_with_other_sizes_in_the_same_order():
    step = TrainingStep(mlp(), vectors(), loss=cross_entropy, optimizer=OPTIMIZERS["adamw"])
    small, large = trace(TraceRequest(step, CARD)), trace(TraceRequest(step, CARD, batch_size=64))
    assert large.batch_size == 64
    assert [e.operator for e in allocations(small)] == [e.operator for e in allocations(large)]
    assert sum(e.size_bytes for e in allocations(large)) > sum(
        e.size_bytes for e in allocations(small)
    )


def test_tensors_from_elsewhere_are_not_written_to():
    model, batch, elsewhere = mlp(), vectors(), torch.zeros(64)

    def loss(model, batch):
        elsewhere.mul_(0.9).add_(1)
        return cross_entropy(model, batch) + elsewhere.mean()

    for card in (CARD, None):
        trace(
            TraceRequest(TrainingStep(model, batch, loss=loss, optimizer=OPTIMIZERS["sgd"]), card)
        )
    assert torch.equal(elsewhere, torch.zeros(64))


def test_under_lightning_a_weight_used_twice_has_as_many_copies_as_lightnings_autocast_makes():
    class Twice(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 32, bias=False)

        def training_step(self, batch, batch_idx):
            return self.layer(self.layer(batch)).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters())

    def num_copies(step):
        in_forward, phase = [], None
        for event in trace(TraceRequest(step, CARD, num_updates=1)).trace.events:
            phase = event.phase if isinstance(event, PhaseStart) else phase
            if (
                isinstance(event, Alloc)
                and phase is Phase.FORWARD
                and event.operator == "aten::_to_copy"
            ):
                in_forward.append(event.size_bytes)
        return in_forward.count(32 * 32 * 2)

    batch = torch.ones(8, 32)
    is_cached = MixedPrecision("bf16-mixed", device="cpu").autocast_context_manager()._cache_enabled
    assert num_copies(TrainingStep.from_lightning(Twice(), batch, precision="bf16-mixed")) == (
        1 if is_cached else 2
    )
    module = Twice()
    plain = TrainingStep(
        module,
        batch,
        loss=lambda model, batch: model.layer(model.layer(batch)).sum(),
        precision="bf16-mixed",
    )
    assert num_copies(plain) == 1


def test_an_operator_on_tensors_of_other_tensors_that_failed_leaves_the_next_as_it_is():
    mode, add = TraceMode(Ledger(), None), torch.ops.aten.add.Tensor
    with mode:
        pair = TwoTensor(torch.zeros(2), torch.zeros(2))
    with pytest.raises(RuntimeError, match="missing value for argument 'other'"):
        mode.__torch_dispatch__(add, (TwoTensor,), (pair,))
    assert type(mode.__torch_dispatch__(add, (TwoTensor,), (pair, pair))) is TwoTensor


def test_arithmetic_of_attention_with_few_keys_and_values_is_that_with_all_heads():
    def counted(heads):
        def loss(model, batch):
            query = model(batch).unflatten(-1, (8, 32)).transpose(1, 2)
            return F.scaled_dot_product_attention(
                query, query[:, :heads], query[:, :heads], enable_gqa=True
            ).sum()

        return trace(
            TraceRequest(
                TrainingStep(
                    nn.Linear(256, 256).half(),
                    torch.zeros(2, 64, 256, dtype=torch.float16),
                    loss=loss,
                ),
                CARD,
            )
        ).num_flops

    assert counted(2) == counted(8) > 0


def test_a_formula_for_arithmetic_that_fails_stops_no_trace(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("shapes are incompatible")

    monkeypatch.setitem(flop_counter.flop_registry, torch.ops.aten.addmm, refuse)
    traced = trace(TraceRequest(TrainingStep(nn.Linear(8, 8), torch.zeros(4, 8)), CARD))
    assert traced.trace.events
