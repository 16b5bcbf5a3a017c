"""Small training steps, each named for what its user code does, and the same loop run for real.

`STEPS` has functions that make a `TrainingStep`, by name; those in `NEEDS_CUDA` do not run on a
CPU.

    python tests/user_code.py [NAME ...]

On a machine with a CUDA device it records what they, or some, request at every boundary.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import sys
from collections import namedtuple
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from memcallback.step.training_step import TrainingStep
from memcallback.trace.loops.loop import run_window
from memcallback.trace.loops.passes import Training

STEPS = {}
NEEDS_CUDA = set()


def case(make=None, *, cuda_only=False):
    """Put a function that makes a step on the list."""
    if make is None:
        return partial(case, cuda_only=cuda_only)
    STEPS[make.__name__] = make
    if cuda_only:
        NEEDS_CUDA.add(make.__name__)
    return make


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def rows(count=16, width=32):
    return torch.randn(count, width)


def classes(count=16):
    return torch.randint(0, 10, (count,))


def batch_of_vectors():
    return [rows(), classes()]


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def mlp():
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)
    )


def plain(model, *, batch=None, loss=cross_entropy, optimizer=adamw, **options):
    """A step of vectors and classes, with what is given in place of the usual."""
    return TrainingStep(
        model,
        batch_of_vectors() if batch is None else batch,
        loss=loss,
        optimizer=optimizer,
        **options,
    )


class Net(nn.Module):
    """A network whose forward pass is given by a function of the input and the module."""

    def __init__(self, run, **members):
        super().__init__()
        self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 10)
        self.run = run
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x):
        return self.head(self.run(self, self.body(x)))


# --- devices --------------------------------------------------------------------------------------


class HasDevice(nn.Module):
    def __init__(self):
        super().__init__()
        self.device = torch.device("cpu")
        self.linear = nn.Linear(32, 10)

    def forward(self, x):
        return self.linear(x + torch.zeros(32, device=self.device))


@case
def a_device_as_attribute():
    return plain(HasDevice())


def makes_tensors(self, x):
    x = x + torch.randn(x.shape, device=x.device, generator=None, dtype=x.dtype)
    x = (
        x
        + x.new_zeros(x.shape)
        + x.new_tensor([1.0] * 32)
        + x.new_full((32,), 2.0)
        + x.new_ones(1, 32)
    )
    x = x + torch.tensor([1.0] * 32, device=x.device) + torch.as_tensor([2.0] * 32, device=x.device)
    positions = torch.arange(x.shape[1], device=x.device).type_as(x)
    mask = torch.ones(x.shape, dtype=torch.bool, device=x.device).tril()
    return (
        x + positions + torch.zeros(32).to(x) + torch.zeros(32).to(x.device, non_blocking=True)
    ).masked_fill(mask, 0.0)


@case
def tensors_made_in_forward():
    return plain(Net(makes_tensors))


def says_cuda(self, x):
    x = (
        x
        + torch.arange(32, device="cuda:0")
        + torch.zeros(32).cuda()
        + torch.ones(32, device="cuda").float()
    )
    x = (
        x
        + torch.zeros(32).to("cuda", dtype=torch.float32)
        + torch.full((32,), 1.0, device=0)
        + torch.rand(32).to(0)
    )
    x = x + torch.eye(32, device=torch.device("cuda"))[0] + torch.linspace(0, 1, 32, device="cuda")
    return (
        x
        + torch.tensor(1.0).cuda(non_blocking=True)
        + torch.zeros(32, pin_memory=True).to(x.device, non_blocking=True)
    )


@case(cuda_only=True)
def cuda_by_name():
    return plain(Net(says_cuda))


def asks_about_cuda(self, x):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert x.is_cuda
    assert x.get_device() == 0
    assert self.head.weight.device.type == device == x.device.type
    assert next(self.parameters()).device == x.device
    torch.cuda.synchronize()
    with torch.cuda.nvtx.range("block"), torch.cuda.stream(torch.cuda.current_stream()):
        x = torch.relu(x)
    torch.cuda.nvtx.range_push("more")
    torch.cuda.current_stream().synchronize()
    torch.cuda.nvtx.range_pop()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    end.record()
    torch.cuda.synchronize(x.device)
    start.elapsed_time(end)
    torch.cuda.memory_allocated()
    torch.cuda.max_memory_allocated(x.device)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory_reserved()
    torch.cuda.mem_get_info()
    properties = torch.cuda.get_device_properties(x.device)
    assert properties.total_memory > properties.L2_cache_size > 0
    with torch.cuda.device(x.device), torch.cuda.device_of(x):
        return x.to(torch.cuda.current_device())


@case(cuda_only=True)
def questions_to_cuda():
    return plain(Net(asks_about_cuda))


def side_stream(self, x):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda.current_stream().wait_stream(stream)
    event = torch.cuda.current_stream().record_event()
    stream.wait_event(event)
    x.record_stream(torch.cuda.current_stream())
    return torch.relu(x)


@case(cuda_only=True)
def streams():
    return plain(Net(side_stream))


@case(cuda_only=True)
def a_generator_of_the_device():
    def run(self, x):
        return x + torch.randn(
            x.shape, device=x.device, generator=torch.Generator(device=x.device).manual_seed(3)
        )

    return plain(Net(run))


def under_default_device(model, batch):
    with torch.device(batch[0].device):
        offset = torch.zeros(16, 32) + torch.arange(32) + torch.tensor([1.0])
    return F.cross_entropy(model(batch[0] + offset), batch[1])


@case
def a_default_device():
    return plain(mlp(), loss=under_default_device)


def sets_default_device(model, batch):
    torch.set_default_device(batch[0].device)
    try:
        return F.cross_entropy(model(batch[0] + torch.zeros(16, 32)), batch[1])
    finally:
        torch.set_default_device(None)
        # With None for one, PyTorch 2.6 fails where it is asked for the default device.
        del torch._GLOBAL_DEVICE_CONTEXT.device_context


@case
def a_default_device_that_is_set():
    return plain(mlp(), loss=sets_default_device)


@case
def a_metric_on_the_host():
    def loss(model, batch):
        output = model(batch[0])
        output.detach().cpu().argmax(1).float().mean()
        return F.cross_entropy(output, batch[1])

    return plain(mlp(), loss=loss)


@case
def a_module_moved_to_its_own_device_in_forward():
    def run(self, x):
        self.extra.to(x.device)
        return self.extra(x)

    return plain(Net(run, extra=nn.Linear(32, 32)))


# --- values ---------------------------------------------------------------------------------------


def reads_values(model, batch):
    output = model(batch[0])
    loss = F.cross_entropy(output, batch[1])
    text = f"{loss.item():.3f} {loss} {float(loss):.2f} {output.tolist()[0][0]:.1f}"
    assert text
    if torch.isnan(loss).any() or not torch.isfinite(loss).all() or loss > 1e6:
        raise ValueError("the loss is not finite")
    assert batch[1].max() < 10
    assert (batch[1] >= 0).all()
    return loss


@case
def values_that_are_read():
    return plain(mlp(), loss=reads_values)


@case
def a_metric_in_numpy():
    def loss(model, batch):
        output = model(batch[0])
        (output.argmax(1).cpu().numpy() == batch[1].detach().cpu().numpy()).mean()
        return F.cross_entropy(output, batch[1])

    return plain(mlp(), loss=loss)


# --- modules --------------------------------------------------------------------------------------


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("table", torch.zeros(16, 32), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.linear = nn.Linear(32, 10)

    def forward(self, x):
        with torch.no_grad():
            self.mean = self.mean * 0.9 + x.mean(0) * 0.1
            self.count += 1
            self.table.copy_(x)
        return self.linear(x - self.mean + self.table)


@case
def buffers_updated_in_forward():
    return plain(Buffers())


class Ema(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = mlp()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False).eval()

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            ):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            target = self.teacher(x)
        return self.student(x) + target


@case
def an_ema_copy():
    return plain(Ema())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 32)
        self.head = nn.Linear(32, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x).mean(1))


@case
def tied_weights():
    return plain(Tied(), batch=[torch.randint(0, 10, (16, 5)), classes()])


@case
def frozen_parts():
    model = mlp()
    for parameter in model[:3].parameters():
        parameter.requires_grad = False
    return plain(
        model,
        optimizer=lambda parameters: torch.optim.Adam([p for p in parameters if p.requires_grad]),
    )


class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, 4, bias=False),
            nn.Linear(4, base.out_features, bias=False),
        )

    def forward(self, x):
        return self.base(x) + self.up(self.down(F.dropout(x, 0.1, self.training))) * 2.0


@case
def adapters():
    return plain(nn.Sequential(LoRA(nn.Linear(32, 32)), nn.GELU(), LoRA(nn.Linear(32, 10))))


@case
def weight_norm_and_spectral_norm():
    return plain(
        nn.Sequential(
            parametrizations.weight_norm(nn.Linear(32, 32)),
            nn.ReLU(),
            parametrizations.spectral_norm(nn.Linear(32, 32)),
            nn.Linear(32, 10),
        )
    )


@case
def orthogonal_weights():
    return plain(nn.Sequential(parametrizations.orthogonal(nn.Linear(32, 32)), nn.Linear(32, 10)))


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


@case
def a_parametrization():
    linear = nn.Linear(32, 32)
    parametrize.register_parametrization(linear, "weight", Symmetric())
    return plain(nn.Sequential(linear, nn.Linear(32, 10)))


@case
def pruned_weights():
    linear = nn.Linear(32, 32)
    nn.utils.prune.random_unstructured(linear, "weight", 0.3)
    return plain(nn.Sequential(linear, nn.Linear(32, 10)))


@case
def a_bfloat16_model():
    return plain(mlp().bfloat16(), batch=[rows().bfloat16(), classes()], precision="bf16-true")


@case
def a_model_compiled_by_function():
    return plain(torch.compile(mlp()))


@case
def a_model_compiled_in_place():
    model = mlp()
    model.compile()
    return plain(model)


@case
def a_model_with_a_compiled_part():
    return plain(
        nn.Sequential(
            nn.Linear(32, 32),
            torch.compile(nn.Sequential(nn.Linear(32, 32), nn.ReLU())),
            nn.Linear(32, 10),
        )
    )


def _gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x**3)))


@case
def a_compiled_function():
    compiled = torch.compile(_gelu)
    return plain(Net(lambda self, x: compiled(x)))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn, self.head = kind(32, 24, batch_first=True), nn.Linear(24, 10)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


@case
def an_lstm():
    return plain(Recurrent(nn.LSTM), batch=[torch.randn(16, 5, 32), classes()])


@case
def a_gru():
    return plain(Recurrent(nn.GRU), batch=[torch.randn(16, 5, 32), classes()])


@case
def an_lstm_cell_in_a_loop():
    def run(self, x):
        hidden, cell = torch.zeros_like(x), torch.zeros_like(x)
        for _ in range(3):
            hidden, cell = self.cell(x, (hidden, cell))
        return hidden

    return plain(Net(run, cell=nn.LSTMCell(32, 32)))


@case
def attention():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = layer, nn.Linear(32, 10)

        def forward(self, x):
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
            return self.head(self.layer(x, src_mask=mask).mean(1))

    return plain(Model(), batch=[torch.randn(16, 5, 32), classes()])


@case
def a_model_in_evaluation_mode():
    return plain(
        nn.Sequential(
            nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 10)
        ).eval()
    )


# --- autograd -------------------------------------------------------------------------------------


@case
def checkpoints_of_both_kinds():
    def run(self, x):
        x = checkpoint(self.first, x, use_reentrant=True)
        x = checkpoint(
            lambda y: self.second(y + torch.ones(32, device=y.device)), x, use_reentrant=False
        )
        return checkpoint_sequential(self.third, 2, x, use_reentrant=False)

    def block():
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32))

    return plain(Net(run, first=block(), second=block(), third=nn.Sequential(block(), block())))


@case
def a_checkpoint_under_autocast():
    def run(self, x):
        return checkpoint(
            self.first, checkpoint(self.first, x, use_reentrant=False), use_reentrant=True
        )

    return plain(
        Net(run, first=nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))),
        precision="bf16-mixed",
    )


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.factor = 2.0
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x * ctx.factor + torch.zeros(1, device=gradient.device)


@case
def a_custom_function():
    return plain(Net(lambda self, x: Square.apply(x)))


class SaysCuda(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient * torch.full((32,), 2.0, device="cuda")


@case(cuda_only=True)
def a_custom_function_that_says_cuda():
    return plain(Net(lambda self, x: SaysCuda.apply(x * 1)))


class Cast(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


@case(cuda_only=True)
def a_custom_function_under_autocast():
    return plain(Net(lambda self, x: Cast.apply(x, self.body.weight).float()), precision="16-mixed")


@case
def autocast_in_the_model():
    def run(self, x):
        assert not torch.is_autocast_enabled(x.device.type)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            assert torch.is_autocast_enabled(x.device.type)
            assert torch.get_autocast_dtype(x.device.type) is torch.bfloat16
            x = self.extra(x)
            with torch.autocast(x.device.type, enabled=False):
                x = self.extra(x.float())
            x = self.extra(x)
        return x.float()

    return plain(Net(run, extra=nn.Linear(32, 32)))


@case(cuda_only=True)
def the_old_autocast():
    def run(self, x):
        with torch.cuda.amp.autocast():
            assert torch.is_autocast_enabled()
            x = self.extra(x)
            assert x.dtype is torch.get_autocast_gpu_dtype() is torch.float16
        return x.float()

    return plain(Net(run, extra=nn.Linear(32, 32)))


def gradient_penalty(model, batch):
    x = batch[0].clone().requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return F.cross_entropy(output, batch[1]) + (gradient.norm(2, dim=1) - 1).pow(2).mean()


@case
def a_gradient_penalty():
    return plain(mlp(), loss=gradient_penalty)


@case
def a_gradient_penalty_under_autocast():
    return plain(mlp(), loss=gradient_penalty, precision="bf16-mixed")


@case
def a_double_backward():
    def loss(model, batch):
        value = cross_entropy(model, batch)
        gradients = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        return value + sum(gradient.square().sum() for gradient in gradients)

    return plain(mlp(), loss=loss)


@case
def a_backward_pass_in_the_loss():
    def loss(model, batch):
        F.mse_loss(model(batch[0]), torch.zeros(16, 10, device=batch[0].device)).backward()
        return cross_entropy(model, batch)

    return plain(mlp(), loss=loss)


@case
def functional_calls():
    def loss(model, batch):
        parameters = dict(model.named_parameters())
        return F.cross_entropy(torch.func.functional_call(model, parameters, (batch[0],)), batch[1])

    return plain(mlp(), loss=loss)


@case
def vmap():
    return plain(Net(lambda self, x: torch.func.vmap(lambda row: row.tanh() * row.sum())(x)))


@case
def a_jacobian():
    def loss(model, batch):
        jacobian = torch.func.vmap(torch.func.jacrev(lambda row: model(row)))(batch[0])
        return cross_entropy(model, batch) + jacobian.square().mean()

    return plain(nn.Linear(32, 10), loss=loss)


@case
def functional_gradients():
    def loss(model, batch):
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def inner(parameters):
            return F.cross_entropy(
                torch.func.functional_call(model, parameters, (batch[0],)), batch[1]
            )

        gradients = torch.func.grad(inner)(parameters)
        adapted = {
            name: parameter - 0.1 * gradients[name] for name, parameter in model.named_parameters()
        }
        return inner(adapted)

    return plain(mlp(), loss=loss)


@case
def a_jvp():
    def loss(model, batch):
        value, tangent = torch.func.jvp(
            lambda x: model(x), (batch[0],), (torch.ones_like(batch[0]),)
        )
        return F.cross_entropy(value, batch[1]) + tangent.square().mean()

    return plain(mlp(), loss=loss)


@case
def in_place_operations():
    def run(self, x):
        x = x.clone()
        x.mul_(0.5).add_(1)
        x[:, :4] = 0
        x[x < 0] = 0.1
        x.masked_fill_(x > 5, 5.0)
        x = F.leaky_relu(x, inplace=True) + 1
        return x.index_add_(1, torch.zeros(2, dtype=torch.long, device=x.device), x.new_ones(16, 2))

    return plain(Net(run))


@case
def blocks_without_gradients():
    def run(self, x):
        with torch.no_grad():
            y = self.body(x)
        with torch.inference_mode():
            z = (x * 2).mean()
        with torch.set_grad_enabled(False):
            y = y + z.clone()
        return x + y.detach()

    return plain(Net(run))


@case
def saved_tensor_hooks():
    def run(self, x):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor.bfloat16(), lambda tensor: tensor.float()
        ):
            return torch.tanh(self.extra(x))

    return plain(Net(run, extra=nn.Linear(32, 32)))


@case
def saved_tensors_on_the_host():
    def run(self, x):
        with torch.autograd.graph.save_on_cpu():
            return torch.tanh(self.extra(x))

    return plain(Net(run, extra=nn.Linear(32, 32)))


# --- hooks ----------------------------------------------------------------------------------------


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.kept, self.gradients = [], []
        self.body[0].register_forward_hook(lambda module, args, output: self.keep(output))
        self.body[2].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.body[2].register_full_backward_hook(
            lambda module, inputs, outputs: self.gradients.append(outputs[0])
        )
        self.body[4].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,))

    def keep(self, output):
        self.kept = [*self.kept, output.detach()][-2:]

    def forward(self, x):
        self.gradients = []
        x = x * 1
        x = self.body(x)
        x.register_hook(lambda gradient: gradient * 2)
        return x


@case
def hooks():
    return plain(Hooked())


class InBackward(nn.Module):
    """The optimizer runs in hooks of the gradients, and frees them at once."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.optimizers = None

    def forward(self, x):
        if self.optimizers is None:
            self.optimizers = {
                parameter: torch.optim.Adam([parameter]) for parameter in self.parameters()
            }
            for parameter in self.parameters():
                parameter.register_post_accumulate_grad_hook(self.update)
        return self.body(x)

    def update(self, parameter):
        self.optimizers[parameter].step()
        self.optimizers[parameter].zero_grad()


@case
def an_optimizer_in_backward():
    return plain(InBackward(), optimizer=None)


@case
def an_optimizer_in_backward_from_outside():
    model = mlp()
    optimizers = {parameter: torch.optim.Adam([parameter]) for parameter in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return plain(model, optimizer=None)


@case
def hooks_on_weights():
    def run(self, x):
        if not self.is_hooked:
            self.extra.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
            self.is_hooked = True
        return self.extra(x)

    return plain(Net(run, extra=nn.Linear(32, 32), is_hooked=False))


# --- sparse, complex ------------------------------------------------------------------------------


class SparseEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(200, 10, sparse=True)

    def forward(self, x):
        return self.embedding(x).mean(1)


def sparse(optimizer):
    return plain(
        SparseEmbedding(), batch=[torch.randint(0, 200, (16, 5)), classes()], optimizer=optimizer
    )


@case
def a_sparse_embedding_with_sgd():
    return sparse(lambda parameters: torch.optim.SGD(parameters, lr=0.1))


@case
def a_sparse_embedding_with_sparse_adam():
    return sparse(lambda parameters: torch.optim.SparseAdam(list(parameters)))


@case
def a_sparse_embedding_with_adagrad():
    return sparse(lambda parameters: torch.optim.Adagrad(parameters))


@case
def a_sparse_embedding_with_accumulation():
    return plain(
        SparseEmbedding(),
        batch=[torch.randint(0, 200, (16, 5)), classes()],
        optimizer=lambda p: torch.optim.SparseAdam(list(p)),
        accumulate=3,
    )


@case
def a_sparse_embedding_that_is_used_twice():
    def loss(model, batch):
        return F.cross_entropy(model(batch[0]) + model(batch[0] + 1), batch[1])

    return plain(
        SparseEmbedding(),
        batch=[torch.randint(0, 100, (16, 5)), classes()],
        loss=loss,
        optimizer=torch.optim.Adagrad,
    )


@case
def a_sparse_embedding_with_tied_weights():
    model = Tied()
    model.embedding.sparse = True
    return plain(
        model,
        batch=[torch.randint(0, 10, (16, 5)), classes()],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )


class KeepsGradient(SparseEmbedding):
    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x):
        if not self.kept:
            self.embedding.weight.register_hook(self.keep)
        self.kept = [None]
        return super().forward(x)

    def keep(self, gradient):
        self.kept = [gradient]


@case
def a_sparse_embedding_whose_gradient_is_kept():
    batch = [torch.randint(0, 200, (16, 5)), classes()]
    return plain(KeepsGradient(), batch=batch, optimizer=lambda p: torch.optim.SparseAdam(list(p)))


@case
def a_sparse_embedding_bag():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(200, 10, mode="mean", sparse=True)

        def forward(self, x):
            return self.bag(x)

    return plain(
        Bag(),
        batch=[torch.randint(0, 200, (16, 5)), classes()],
        optimizer=lambda p: torch.optim.SparseAdam(list(p)),
    )


def graph():
    """A sparse matrix with three elements in each row."""
    indices = torch.stack([torch.arange(16).repeat(3), torch.randint(0, 16, (48,))])
    return torch.sparse_coo_tensor(indices, torch.ones(48), (16, 16), check_invariants=False)


@case
def a_sparse_buffer():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("graph", graph().coalesce())
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 10)

        def forward(self, x):
            return self.graph @ self.second(torch.relu(torch.sparse.mm(self.graph, self.first(x))))

    return plain(Graph())


@case
def a_sparse_tensor_in_the_batch():
    def loss(model, batch):
        return F.cross_entropy(torch.sparse.mm(batch["graph"], model(batch["x"])), batch["y"])

    return plain(mlp(), batch={"x": rows(), "graph": graph(), "y": classes()}, loss=loss)


@case
def a_sparse_matrix_with_trained_values():
    indices = torch.stack([torch.arange(16), torch.arange(16).flip(0)])

    def run(self, x):
        matrix = torch.sparse_coo_tensor(
            indices.to(x.device), self.values, (16, 16), is_coalesced=True, check_invariants=False
        )
        return torch.sparse.mm(matrix, x)

    return plain(Net(run, values=nn.Parameter(torch.ones(16))))


@case
def an_embedding_bag():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(50, 32, mode="mean"), nn.Linear(32, 10)

        def forward(self, x):
            return self.head(self.bag(x))

    return plain(Bag(), batch=[torch.randint(0, 50, (16, 5)), classes()])


@case
def a_sparse_matrix_product():
    def run(self, x):
        indices = torch.tensor([[0, 1, 2], [1, 2, 0]], device=x.device)
        adjacency = torch.sparse_coo_tensor(indices, torch.ones(3, device=x.device), (16, 16))
        return torch.sparse.mm(adjacency, x)

    return plain(Net(run))


@case
def a_fourier_transform():
    def run(self, x):
        spectrum = torch.fft.rfft(x)
        return torch.fft.irfft(spectrum * self.weight[None], n=32)

    return plain(Net(run, weight=nn.Parameter(torch.randn(17, dtype=torch.complex64))))


@case
def complex_numbers():
    def run(self, x):
        z = torch.complex(x, x.sin()) @ self.weight
        return (
            torch.view_as_real(z).sum(-1)
            + z.abs()
            + z.real
            + z.conj().imag
            + torch.polar(x.abs(), x).angle()
        )

    return plain(Net(run, weight=nn.Parameter(torch.randn(32, 32, dtype=torch.complex64))))


@case
def einsum_and_linear_algebra():
    def run(self, x):
        gram = torch.einsum("bi,bj->ij", x, x) / 16 + torch.eye(32, device=x.device)
        return (
            x @ torch.linalg.cholesky(gram)
            + torch.linalg.vector_norm(x, dim=1, keepdim=True)
            + torch.logsumexp(x, 1, keepdim=True)
        )

    return plain(Net(run))


# --- batches --------------------------------------------------------------------------------------


@dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor
    names: list[str]
    extra: object = None


Pair = namedtuple("Pair", ["x", "y"])


@case
def a_dataclass_batch():
    return plain(
        mlp(),
        batch=Sample(rows(), classes(), ["a"] * 16),
        loss=lambda model, batch: F.cross_entropy(model(batch.x), batch.y),
    )


@case
def a_named_tuple_batch():
    return plain(
        mlp(),
        batch=Pair(rows(), classes()),
        loss=lambda model, batch: F.cross_entropy(model(batch.x), batch.y),
    )


@case
def a_nested_batch():
    batch = {
        "inputs": [rows(), (rows(), None)],
        "labels": {"class": classes()},
        "ids": ["a"] * 16,
        "scale": 2.0,
        "empty": [],
        "flag": None,
    }

    def loss(model, batch):
        x = batch["inputs"][0] + batch["inputs"][1][0] * batch["scale"]
        return F.cross_entropy(model(x), batch["labels"]["class"])

    return plain(mlp(), batch=batch, loss=loss)


def jagged(width=32):
    """A nested tensor of 16 sequences."""
    return torch.nested.nested_tensor(
        [torch.randn(2 + index % 5, width) for index in range(16)], layout=torch.jagged
    )


@case
def a_jagged_batch():
    def loss(model, batch):
        return F.cross_entropy(
            torch.nested.to_padded_tensor(model(batch["x"]), 0.0).mean(1), batch["y"]
        )

    return plain(
        nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 10)),
        batch={"x": jagged(), "y": classes()},
        loss=loss,
    )


class JaggedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.head = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x):
        query, key, value = (
            part.unflatten(-1, [4, 8]).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2)
        )
        return self.head(torch.nested.to_padded_tensor(x, 0.0).mean(1))


@case(cuda_only=True)
def jagged_attention():
    return plain(JaggedAttention(), batch=[jagged(), classes()])


@case(cuda_only=True)
def jagged_attention_in_halves():
    return plain(JaggedAttention(), batch=[jagged(), classes()], precision="bf16-mixed")


@case
def a_jagged_tensor_that_is_made_in_forward():
    def run(self, x):
        nested = torch.nested.as_nested_tensor([x[:5], x[5:8], x[8:]], layout=torch.jagged)
        return torch.tanh(self.body(nested)).values()

    return plain(Net(run))


@case
def lists_of_samples():
    images = tuple(torch.randn(3, 8, 8) for _ in range(16))
    targets = tuple(
        {"boxes": torch.randn(1 + index % 4, 32), "labels": torch.randint(0, 10, (1 + index % 4,))}
        for index in range(16)
    )

    def loss(model, batch):
        images, targets = batch
        found = [F.cross_entropy(model(target["boxes"]), target["labels"]) for target in targets]
        return (
            torch.stack(found).mean()
            + model(torch.stack(images).flatten(1)[:, :32]).square().mean()
        )

    return plain(mlp(), batch=(images, targets), loss=loss, batch_size=16)


@case
def packed_sequences():
    class Packed(Recurrent):
        def forward(self, x):
            packed = nn.utils.rnn.pack_padded_sequence(
                x, torch.full((16,), 5), batch_first=True, enforce_sorted=False
            )
            _, (hidden, _) = self.rnn(packed)
            return self.head(hidden[-1])

    return plain(Packed(nn.LSTM), batch=[torch.randn(16, 5, 32), classes()])


class OfLengths(nn.Module):
    """Packs sequences whose lengths Python code knows, and pads what comes out."""

    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = kind(32, 24, batch_first=True, **options)
        self.head = nn.Linear(24 * (2 if options.get("bidirectional") else 1), 10)

    def forward(self, x):
        lengths = [5, 5, 4, 4, 4, 4, 4, 3, 3, 2, 2, 2, 2, 2, 1, 1]
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        output, lengths = nn.utils.rnn.pad_packed_sequence(
            self.rnn(packed)[0], batch_first=True, total_length=6
        )
        return self.head(output[torch.arange(16), lengths - 1])


@case
def packed_sequences_of_different_lengths():
    return plain(OfLengths(nn.LSTM), batch=[torch.randn(16, 5, 32), classes()])


@case
def a_packed_gru_in_both_directions():
    return plain(
        OfLengths(nn.GRU, bidirectional=True, num_layers=2),
        batch=[torch.randn(16, 5, 32), classes()],
    )


@case
def a_packed_lstm_with_projections():
    class Projected(OfLengths):
        def __init__(self):
            super().__init__(nn.LSTM, proj_size=12, bidirectional=True)
            self.head = nn.Linear(24, 10)

    return plain(Projected(), batch=[torch.randn(16, 5, 32), classes()])


@case
def a_sequence_of_tensors_that_is_packed():
    def loss(model, batch):
        packed = nn.utils.rnn.pack_sequence(
            [x[: 5 - index // 4] for index, x in enumerate(batch[0])]
        )
        return F.cross_entropy(model.head(model.rnn(packed)[1][-1]), batch[1])

    return plain(Recurrent(nn.RNN), batch=[torch.randn(16, 5, 32), classes()], loss=loss)


@case
def padded_sequences():
    def loss(model, batch):
        x = nn.utils.rnn.pad_sequence(list(batch[0]), batch_first=True)
        return F.cross_entropy(model(x), batch[1])

    return plain(mlp(), loss=loss)


@case
def a_split_batch():
    def loss(model, batch):
        parts = [
            F.cross_entropy(model(x), y)
            for x, y in zip(batch[0].chunk(4), batch[1].chunk(4), strict=True)
        ]
        return torch.stack(parts).mean()

    return plain(mlp(), loss=loss)


# --- optimizers -----------------------------------------------------------------------------------

OPTIMIZERS = {
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adam_for_loop": lambda p: torch.optim.Adam(p, foreach=False),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop_centered": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "sgd_nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "sgd_for_loop": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd_maximize": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam_fused": lambda p: torch.optim.Adam(p, fused=True),
    "adagrad_fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "adamw_tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
}
CUDA_OPTIMIZERS = {
    "adam_capturable": lambda p: torch.optim.Adam(p, capturable=True),
    "adamw_capturable_for_loop": lambda p: torch.optim.AdamW(p, capturable=True, foreach=False),
    "nadam_capturable": lambda p: torch.optim.NAdam(p, capturable=True),
    "rmsprop_capturable": lambda p: torch.optim.RMSprop(p, capturable=True),
    "rprop_capturable": lambda p: torch.optim.Rprop(p, capturable=True),
    "radam_capturable": lambda p: torch.optim.RAdam(p, capturable=True),
    "adadelta_capturable": lambda p: torch.optim.Adadelta(p, capturable=True),
    "adamax_capturable": lambda p: torch.optim.Adamax(p, capturable=True),
    "asgd_capturable": lambda p: torch.optim.ASGD(p, capturable=True),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon"] = lambda p: torch.optim.Muon([one for one in p if one.dim() == 2])
for _name, _make in {**OPTIMIZERS, **CUDA_OPTIMIZERS}.items():
    STEPS[f"optimizer_{_name}"] = partial(lambda make: plain(mlp(), optimizer=make), _make)
NEEDS_CUDA.update(f"optimizer_{_name}" for _name in CUDA_OPTIMIZERS)


@case
def parameter_groups():
    def make(parameters):
        decay, rest = [], []
        for parameter in parameters:
            (decay if parameter.dim() > 1 else rest).append(parameter)
        return torch.optim.AdamW(
            [
                {"params": decay, "weight_decay": 0.1},
                {"params": rest, "weight_decay": 0.0, "lr": 1e-2},
            ]
        )

    return plain(mlp(), optimizer=make)


#: LBFGS with these has all its iterations, whatever the values are.
ENDLESS = {"lr": 1e-3, "max_eval": 100, "tolerance_grad": -1.0, "tolerance_change": -1.0}


@case
def lbfgs():
    return plain(
        mlp(),
        optimizer=lambda parameters: torch.optim.LBFGS(
            parameters, **ENDLESS, max_iter=4, history_size=2
        ),
    )


@case
def lbfgs_with_line_search():
    return plain(
        mlp(),
        optimizer=lambda parameters: torch.optim.LBFGS(
            parameters, **ENDLESS, max_iter=2, history_size=1, line_search_fn="strong_wolfe"
        ),
    )


@case
def a_given_optimizer():
    model = mlp()
    return plain(model, optimizer=torch.optim.Adam(model.parameters(), amsgrad=True))


@case
def several_optimizers():
    model = nn.ModuleDict({"g": nn.Linear(32, 32), "d": nn.Linear(32, 10)})
    generator = torch.optim.Adam(model["g"].parameters())
    discriminator = torch.optim.SGD(model["d"].parameters(), lr=0.1, momentum=0.9)
    return plain(
        model,
        loss=[
            lambda model, batch: F.cross_entropy(model["d"](model["g"](batch[0])), batch[1]),
            lambda model, batch: F.cross_entropy(
                model["d"](model["g"](batch[0]).detach()), batch[1]
            ),
        ],
        optimizer=[generator, discriminator],
    )


@case
def averaged_weights():
    """The average is updated in a hook of the optimizer."""

    class Averaging(torch.optim.SGD):
        def __init__(self, parameters):
            super().__init__(list(parameters), lr=0.1, momentum=0.9)
            self.averages = [
                parameter.detach().clone() for parameter in self.param_groups[0]["params"]
            ]

        def step(self, closure=None):
            result = super().step(closure)
            with torch.no_grad():
                torch._foreach_lerp_(self.averages, self.param_groups[0]["params"], 0.1)
            return result

    return plain(mlp(), optimizer=Averaging)


@case
def accumulation_and_clipping():
    return plain(mlp(), accumulate=3, clip_grad_norm=1.0)


@case
def clipping_by_value():
    return plain(mlp(), clip_grad_value=0.5)


@case(cuda_only=True)
def half_precision_with_a_scaler():
    return plain(mlp(), precision="16-mixed", clip_grad_norm=1.0, accumulate=2)


@case
def bfloat16_autocast():
    return plain(
        nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10)),
        precision="bf16-mixed",
    )


# --- Lightning ------------------------------------------------------------------------------------


class Metric(nn.Module):
    """As torchmetrics keeps its states: attributes that are tensors, moved by `_apply`."""

    def __init__(self):
        super().__init__()
        self.total = torch.tensor(0.0)
        self.seen = []

    def _apply(self, fn, *args, **kwargs):
        super()._apply(fn, *args, **kwargs)
        self.total = fn(self.total)
        return self

    def forward(self, outputs, targets):
        value = (outputs.argmax(1) == targets).float().mean()
        self.total = self.total + value.detach()
        return value


class Module(LightningModule):
    """What Lightning modules do beside the loss."""

    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.network, self.metric = mlp(), Metric()

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch, batch_idx):
        output = self(batch[0] + torch.zeros(32, device=self.device))
        loss = F.cross_entropy(output, batch[1])
        accuracy = self.metric(output, batch[1])
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        self.log_dict({"accuracy": accuracy, "half": accuracy / 2}, on_epoch=True)
        if (
            self.trainer.is_global_zero
            and self.trainer.global_step % 50 == 0
            and batch_idx % 10 == 0
        ):
            self.log(
                "epoch",
                self.trainer.current_epoch
                + self.current_epoch
                + self.global_step
                + self.global_rank,
            )
        if self.logger is not None:
            self.logger.experiment.add_scalar("x", 1.0, self.global_step)
        return {"loss": loss, "accuracy": accuracy.detach()}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def lightning(module, **options):
    return TrainingStep.from_lightning(module, batch_of_vectors(), **options)


@case
def a_lightning_module():
    return lightning(Module())


@case
def a_lightning_module_with_accumulation_and_clipping():
    return lightning(Module(), accumulate=2, clip_grad_norm=0.5, precision="bf16-mixed")


class Gan(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(32, 32), nn.Linear(32, 10)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = F.cross_entropy(self.discriminator(self.generator(batch[0])), batch[1])
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        with second.toggle_model():
            loss = F.cross_entropy(self.discriminator(self.generator(batch[0]).detach()), batch[1])
            second.zero_grad()
            self.manual_backward(loss)
            second.step()
        schedulers = self.lr_schedulers()
        schedulers[0].step()
        if self.trainer.is_last_batch:
            schedulers[1].step()
        self.log("loss", loss)

    def configure_optimizers(self):
        first, second = (
            torch.optim.Adam(self.generator.parameters()),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.1),
        )
        return [first, second], [
            torch.optim.lr_scheduler.StepLR(first, 1),
            torch.optim.lr_scheduler.StepLR(second, 1),
        ]


@case
def manual_optimization():
    return lightning(Gan())


class LightningLBFGS(Module):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), **ENDLESS, max_iter=3, history_size=2)


@case
def lbfgs_in_lightning():
    return lightning(LightningLBFGS())


class RawManual(Gan):
    """Torch's own calls under manual optimization."""

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers(use_pl_optimizer=False)
        loss = F.cross_entropy(self.discriminator(self.generator(batch[0])), batch[1])
        loss.backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()


@case
def raw_manual_optimization():
    return lightning(RawManual())


# --- lengths --------------------------------------------------------------------------------------


def ctc(model, batch, lengths, **options):
    """A CTC loss of texts with room for 9 letters, whose lengths the host has."""
    scores = model(batch[0]).log_softmax(-1).transpose(0, 1)
    targets = torch.ones(4, 9, dtype=torch.int64, device=scores.device)
    return F.ctc_loss(scores, targets, *lengths, **options)


@case
def a_ctc_loss_with_a_list_of_lengths():
    batch = [torch.randn(4, 20, 32), torch.zeros(4)]
    return plain(mlp(), batch=batch, loss=partial(ctc, lengths=([20] * 4, [3, 6, 4, 5])))


@case
def a_ctc_loss_with_a_tensor_of_lengths():
    batch = [torch.randn(4, 20, 32), torch.zeros(4)]
    lengths = torch.full((4,), 20), torch.tensor([3, 6, 4, 5])
    loss = partial(ctc, lengths=lengths, reduction="sum", zero_infinity=True)
    return plain(mlp(), batch=batch, loss=loss)


# --- the real run ---------------------------------------------------------------------------------

_BOUNDARY = "user_code::boundary"


class _Marks:
    """Calls a function at every boundary of a phase, and makes batches."""

    num_reads = 0  # Values are real: nobody counts who reads them.

    def __init__(self, batch, device, at_boundary):
        self.batch, self.device, self.at_boundary = batch, device, at_boundary
        self.steps, self.boundaries = [], []

    @contextmanager
    def step(self):
        self.steps.append([])
        yield
        gc.collect()

    def new_batch(self):
        return moved(self.batch, self.device)

    @contextmanager
    def phase(self, phase):
        self.steps[-1].append(self.at_boundary())
        yield
        self.steps[-1].append(self.at_boundary())

    def set_phase(self, phase):
        return phase

    def boundary(self):
        self.boundaries.append(self.at_boundary())

    def add_windows(self, windows):
        self.steps[-1] += [self.boundaries[number] for _, *both in windows for number in both]
        self.boundaries = []

    def label_states(self, optimizers):
        pass


def moved(batch, device):
    """A copy of a batch on a device."""
    if isinstance(batch, torch.Tensor) and batch.is_nested:
        parts, extremes = (
            (moved(part, device) for part in (batch.values(), batch.offsets())),
            (batch._min_seqlen, batch._max_seqlen),
        )
        return torch.nested.nested_tensor_from_jagged(
            *parts, min_seqlen=extremes[0], max_seqlen=extremes[1]
        )
    if isinstance(batch, torch.Tensor):
        return torch.empty_like(batch, device=device).copy_(batch)
    if isinstance(batch, dict):
        return {name: moved(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved(value, device) for value in batch)
    if isinstance(batch, Sample):
        return Sample(**{name: moved(value, device) for name, value in vars(batch).items()})
    return batch


def run(make_step, device, at_boundary, num_windows=2):
    """Train for real, with the loop that is traced.

    Returns:
        For each step, what `at_boundary` returned at the start and the end of each phase.
    """
    step = make_step()
    model = step.model.to(device)
    for module in model.modules():
        if isinstance(vars(module).get("device"), torch.device):
            module.device = torch.device(device)
    optimizers = step.optimizers_of(model)
    marks = _Marks(step.batch, device, at_boundary)
    training = Training(
        step=step,
        model=model,
        losses=step.losses,
        optimizers=optimizers,
        make_batches=lambda number: [marks.new_batch() for _ in range(number)],
        marks=marks,
        device_type=device,
        reads=(),
        assumed={},
    )
    for _ in range(num_windows):
        run_window(training)
    return marks.steps


def run_on_cpu(names):
    """Bytes alive at every boundary of real runs on this CPU, from PyTorch's own allocation events:
    for each name, for each step.
    """
    from torch._C._profiler import _EventType

    def mark(label):
        with torch.autograd.profiler.record_function(f"{_BOUNDARY} {label}"):
            pass

    def phase():
        mark("phase")
        return next(numbers)

    results = {}
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profiler:
        for name in names:
            gc.collect()
            gc.freeze()
            mark("begin")
            numbers = itertools.count()
            results[name] = run(STEPS[name], "cpu", phase)
    gc.unfreeze()
    pending, events = list(profiler.kineto_results.experimental_event_tree()), []
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        events.append(event)
    cases, alive, start = [], 0, 0
    for event in sorted(events, key=lambda event: event.start_time_ns):
        if event.tag == _EventType.Allocation:
            alive += event.extra_fields.alloc_size
        elif event.name == f"{_BOUNDARY} begin":
            start = alive
            cases.append([])
        elif event.name == f"{_BOUNDARY} phase":
            cases[-1].append(alive - start)
    for name, case in zip(names, cases, strict=True):
        results[name] = [[case[number] for number in step] for step in results[name]]
    return results


class _CurvatureIsPositive(TorchFunctionMode):
    """LBFGS keeps a direction if `ys > 1e-10`, which is false on a device that computes nothing."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return True if function is torch.Tensor.gt and args[1] == 1e-10 else result


def record(path, names):
    """Write the bytes that were requested of a CUDA device at every boundary of the second update,
    of these steps alone.
    """

    def requested():
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    results = json.loads(Path(path).read_text())["steps"] if names else {}
    for name in names or STEPS:
        try:
            with _CurvatureIsPositive(), torch.compiler.set_stance("force_eager"):
                results[name] = steady(run(STEPS[name], "cuda", requested))
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}")
        gc.collect()
    Path(path).write_text(
        json.dumps(
            {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "steps": results}
        )
        + "\n"
    )


def steady(steps):
    """The steps of the second update, each figure less the first of them."""
    window = steps[len(steps) // 2 :]
    return [[size - window[0][0] for size in step] for step in window]


if __name__ == "__main__":
    record(Path(__file__).parent / "recorded" / "user_code.json", sys.argv[1:])
