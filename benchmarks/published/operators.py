"""Single operators whose peaks Liger-Kernel published, as steps.

Each of its benchmarks makes tensors, then ten times restarts the peak, runs forward and backward
with the graph retained, and reads the peak. The facts are in `operators.csv`, from
`benchmark/data/all_benchmark_data.csv` of linkedin/Liger-Kernel; the programs are written from what
its scripts make.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memcallback as mc
from published import operators_of_layers as layers
from published.repeated import AfterOthers, Built, Repeated, WithOthers, empty

ROWS = Path(__file__).parent / "operators.csv"
SOURCE = "linkedin/Liger-Kernel benchmark/data/all_benchmark_data.csv"
#: What of a configuration differs between rows of one operator and card.
_VARIED = ("dtype", "sweep_dim", "seq_len", "batch_size", "hidden_size", "kernel_size", "dilation")
#: Operators whose rows are left out -> why.
_LEFT_OUT = {
    "distill_jsd_loss": "the program as it was published needs 19 to 37 % less; which version ran, "
    "and what an earlier run of the process left, is not known",
    "kto_loss": "each figure has 1.2 GiB that the batch does not explain, as much as the models of "
    "an earlier run of the process and their gradients",
}
#: Operators with a convolution: which version of cuDNN ran is not known.
_OF_CUDNN = ("multi_token_attention", "sparse_multi_token_attention")
#: A part of a card's name -> what larger runs of the same process left in the cache.
_CACHED_BYTES = {"H100": 60 << 30, "RTX 3090": 16 << 30}


class _OfProbabilities(Repeated):
    """A loss of one distribution beside a target, made of numbers by softmax."""

    target: Tensor

    def __init__(
        self, case: dict[str, Any], operator: nn.Module, *, logs: tuple[bool, bool]
    ) -> None:
        config = case["config"]
        shape = (config["B"] * config["T"], case["x"])
        super().__init__({"x": torch.empty(shape, device="meta")}, operator)
        self.logs = logs
        self.register_buffer("target", torch.empty(shape, device="meta"))

    def make(self) -> tuple[Tensor, ...]:
        """The distribution, with its graph."""
        softmax = torch.log_softmax if self.logs[0] else torch.softmax
        return (softmax(self.leaves["x"], -1),)

    def run(self, *made: Tensor) -> tuple[Tensor, ...]:
        """The loss."""
        result: Tensor = self.operator(*made, self.target)
        return (result,)


class _TotalVariation(nn.Module):
    def forward(self, p: Tensor, q: Tensor) -> Tensor:
        return torch.sum(torch.abs(p - q) / 2.0) / p.size(0)


class _JensenShannon(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.divergence = nn.KLDivLoss(reduction="none", log_target=True)

    def forward(self, log_q: Tensor, log_p: Tensor) -> Tensor:
        mean = torch.lerp(torch.exp(log_q), torch.exp(log_p), 0.5)
        loss: Tensor = 0.5 * self.divergence(torch.log(mean), log_p).sum(
            dim=-1
        ) + 0.5 * self.divergence(torch.log(mean), log_q).sum(dim=-1)
        return (loss / log_q.shape[0]).sum()


class _Sparsemax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        ordered, _ = torch.sort(x, dim=-1, descending=True)
        sums = torch.cumsum(ordered, dim=-1)
        numbers = torch.arange(1, x.size(-1) + 1, device=x.device, dtype=x.dtype).view(1, -1)
        bound = 1 + numbers * ordered
        support = bound > sums
        size = support.sum(dim=-1, keepdim=True).clamp(min=1)
        support_sum = (ordered * support).sum(dim=-1, keepdim=True)
        threshold = (support_sum - 1) / size
        return torch.clamp(x - threshold, min=0)


class _AddAndNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, device="meta"))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x = x.to(torch.float32)
        x = x + residual.to(torch.float32)
        residual = x
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x, residual


class _ManyResults(Repeated):
    """Several results are differentiated together; the graph is not retained."""

    def forward(self, given: tuple[Tensor, ...] | Tensor) -> None:
        results = self.operator(*self.make())
        torch.autograd.backward(results, given)


class _OfOnes(Repeated):
    """The gradient of the result is made anew each time."""

    def forward(self, given: tuple[Tensor, ...] | Tensor) -> None:
        result = self.operator(*self.make())
        result.backward(torch.ones_like(result), retain_graph=True)


class _SquaredReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.square(F.relu(x))


class _Summed(Repeated):
    """The sum of the result is differentiated; with `cleared` its gradients are freed before."""

    cleared = False

    def forward(self, given: tuple[Tensor, ...] | Tensor) -> None:
        leaves = self.make()
        if self.cleared:
            for leaf in leaves:
                leaf.grad = None
        result = self.operator(*leaves)  # it is live while the backward pass runs
        result.sum().backward()


class _ClearedSummed(_Summed):
    cleared = True


class _SwiGlu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.chunk(x, 2, -1)
        return F.silu(gate) * up


def _layer_norm(case: dict[str, Any]) -> Built:
    shape = (case["config"]["M"], case["x"])
    norm = nn.LayerNorm(case["x"], device="meta")
    return Repeated({"x": empty(*shape)}, WithOthers(norm, 2, case["x"])), (empty(*shape),)


def _fused_add_rms_norm(case: dict[str, Any]) -> Built:
    shape = (case["config"]["M"], case["x"])
    leaves = {"x": empty(*shape), "residual": empty(*shape)}
    norms = WithOthers(_AddAndNorm(case["x"]), 3, case["x"])
    return _ManyResults(leaves, norms), (empty(*shape), empty(*shape))


def _sparsemax(case: dict[str, Any]) -> Built:
    shape = (case["config"]["B"] * case["config"]["T"], case["x"])
    return Repeated({"x": empty(*shape)}, _Sparsemax()), (empty(*shape),)


def _megatron_rms_norm(case: dict[str, Any]) -> Built:
    shape = (case["config"]["S"], case["config"]["B"], case["x"])
    norm = nn.RMSNorm(case["x"], eps=1e-6, device="meta", dtype=torch.bfloat16)
    return _Summed({"x": empty(*shape, dtype=torch.bfloat16)}, norm), ()


def _megatron_swiglu(case: dict[str, Any]) -> Built:
    shape = (case["config"]["S"], case["config"]["B"], 2 * case["x"])
    return _ClearedSummed({"x": empty(*shape, dtype=torch.bfloat16)}, _SwiGlu()), ()


def _of_ones(operator: nn.Module) -> Callable[[dict[str, Any]], Built]:
    def build(case: dict[str, Any]) -> Built:
        dtype = getattr(torch, case["config"]["dtype"].removeprefix("torch."))
        x = empty(case["x"], dtype=dtype)
        return _OfOnes({"x": x}, operator), ()

    return build


_STEPS: dict[str, Callable[[dict[str, Any]], Built]] = {
    "layer_norm": _layer_norm,
    "fused_add_rms_norm": _fused_add_rms_norm,
    "sparsemax": _sparsemax,
    "megatron_rms_norm": _megatron_rms_norm,
    "megatron_swiglu": _megatron_swiglu,
    "softmax": _of_ones(nn.Softmax(dim=-1)),
    "relu_squared": _of_ones(_SquaredReLU()),
    "kl_div": lambda case: (
        _OfProbabilities(case, nn.KLDivLoss(reduction="batchmean"), logs=(True, False)),
        (),
    ),
    "jsd": lambda case: (_OfProbabilities(case, _JensenShannon(), logs=(True, True)), ()),
    "tvd": lambda case: (_OfProbabilities(case, _TotalVariation(), logs=(False, False)), ()),
    "fused_linear_jsd": layers.fused_linear_jsd,
    "fused_moe": layers.fused_moe,
    "fused_neighborhood_attention": layers.neighborhood_attention,
    "llama4_rope": layers.llama4_rope,
    "multi_token_attention": layers.multi_token_attention,
    "sparse_multi_token_attention": layers.sparse_multi_token_attention,
}


def operators() -> list[dict[str, Any]]:
    """All rows, with the fields that the other cases have."""
    with ROWS.open() as file:
        return [_case(row) for row in csv.DictReader(file)]


def _case(row: dict[str, str]) -> dict[str, Any]:
    config = json.loads(row["config"])
    card = row["gpu"].removeprefix("NVIDIA ").removeprefix("GeForce ")
    varied = [f"{name}={value}" for name, value in config.items() if name in _VARIED]
    return {
        **row,
        "id": "-".join(
            ["liger", row["operator"], row["mode"], f"{row['x_name']}{row['x']}", *varied, card]
        ).replace(" ", "_"),
        "source": SOURCE,
        "trust": "B" if row["operator"] in _OF_CUDNN else "A",
        "measured": "peak_allocated",
        "value": round(float(row["peak_mib"]) * 2**20),
        "batch": 1,
        "x": int(row["x"]),
        "config": config,
    }


def reason_left_out(case: dict[str, Any]) -> str | None:
    """Why a row is not compared; None if it is."""
    return _LEFT_OUT.get(case["operator"])


def step_of(case: dict[str, Any]) -> mc.InferenceStep:
    """The step that a row describes."""
    repeated, given = _STEPS[case["operator"]](case)
    cached_bytes = next(size for name, size in _CACHED_BYTES.items() if name in case["gpu"])
    model = AfterOthers(repeated, cached_bytes)
    return mc.InferenceStep(model, given or empty(1, 0), mode="grad", batch_size=1)
