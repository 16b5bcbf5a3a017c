"""Larger operators of Liger-Kernel's benchmarks: attention, rotary embedding, experts, a head.

Each is what the benchmark compares its kernels with, in plain PyTorch, written from the formulas.
Beside it are the weights of Liger-Kernel's own layer, which the scripts make as well.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from published.philox import normal_numbers
from published.repeated import Built, Repeated, empty

_BF16 = torch.bfloat16


class _Kept(Repeated):
    """The result stays while its backward pass runs; the graph is retained."""

    def forward(self, given: tuple[Tensor, ...] | Tensor) -> None:
        result = self.operator(*self.make())
        result.backward(given, retain_graph=True)


class _Loss(Repeated):
    """A loss, with inputs that get no gradient."""

    def forward(self, given: tuple[Tensor, ...] | Tensor) -> None:
        loss = self.operator(*self.make(), *given)
        loss.backward()


class _NeighborhoodAttention(nn.Module):
    """Each token attends to its neighbors, by a mask over all scores."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, device="meta") for _ in range(4))
        self.others = nn.ModuleList(nn.Linear(width, width, device="meta") for _ in range(4))
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        to_query, to_key, to_value, out = self.layers
        query, key, value = to_query(x), to_key(x), to_value(x)
        shape = (batch, length, self.num_heads, width // self.num_heads)
        query, key, value = (t.view(shape).transpose(1, 2) for t in (query, key, value))
        scores = torch.matmul(query, key.transpose(-2, -1)) * (1 / math.sqrt(shape[-1]))
        # Which entries are true does not matter to the memory.
        mask = torch.zeros(length, length, device=x.device, dtype=torch.bool)
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        found = torch.matmul(weights, value)
        found = found.transpose(1, 2).contiguous().view(batch, length, width)
        result: Tensor = out(found)
        return result


def neighborhood_attention(case: dict[str, Any]) -> Built:
    """Neighborhood attention."""
    config = case["config"]
    shape = (config["batch_size"], case["x"], config["hidden_size"])
    attention = _NeighborhoodAttention(config["hidden_size"], config["num_heads"])
    return _Kept({"x": empty(*shape)}, attention), (empty(*shape),)


class _MultiTokenAttention(nn.Module):
    """Masked scores, their softmax or sparsemax, and a convolution over both dimensions."""

    def __init__(self, channels: int, kernel: int, dtype: torch.dtype, *, is_sparse: bool) -> None:
        super().__init__()
        shapes = [(channels, channels, kernel, kernel), (channels,)] * 2
        self.weights = nn.ParameterList(empty(*shape, dtype=dtype) for shape in shapes)
        self.padding = kernel // 2
        self.normalize = self._sparsemax if is_sparse else self._softmax

    @staticmethod
    def _softmax(scores: Tensor) -> Tensor:
        return F.softmax(scores, dim=-1)

    @staticmethod
    def _sparsemax(z: Tensor) -> Tensor:
        ordered, _ = torch.sort(z, dim=-1, descending=True)
        sums = torch.cumsum(ordered, dim=-1)
        numbers = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype).view(1, 1, 1, -1)
        is_seen = ordered > -1e8
        support = (1 + numbers * ordered > sums) & is_seen
        size = torch.sum(support, dim=-1, keepdim=True)
        at_least_one = torch.max(size, torch.ones_like(size))
        chosen = torch.gather(sums, dim=-1, index=at_least_one.long() - 1)
        threshold = (chosen - 1) / at_least_one.to(z.dtype)
        threshold = torch.where(size == 0, torch.full_like(threshold, float("inf")), threshold)
        return torch.clamp(z - threshold, min=0)

    def forward(self, scores: Tensor) -> Tensor:
        length = scores.shape[-1]
        options: dict[str, Any] = {"device": scores.device, "dtype": scores.dtype}
        ones = torch.ones(length, length, dtype=torch.bool, device=scores.device)
        mask = torch.tril(ones).view(1, 1, length, length)
        del ones
        low, zero = torch.tensor(-1e9, **options), torch.tensor(0.0, **options)
        masked = scores.masked_fill(~mask, low)
        weights = self.normalize(masked)
        result = F.conv2d(weights, self.weights[0], self.weights[1], padding=self.padding)
        return result.masked_fill(~mask, zero)


def multi_token_attention(case: dict[str, Any], *, is_sparse: bool = False) -> Built:
    """Multi-token attention."""
    config = case["config"]
    dtype = getattr(torch, config["dtype"].removeprefix("torch."))
    shape = (config["B"], config["C_in"], case["x"], case["x"])
    attention = _MultiTokenAttention(config["C_in"], config["K"], dtype, is_sparse=is_sparse)
    return _Kept({"x": empty(*shape, dtype=dtype)}, attention), (empty(*shape, dtype=dtype),)


def sparse_multi_token_attention(case: dict[str, Any]) -> Built:
    """Multi-token attention with sparsemax."""
    return multi_token_attention(case, is_sparse=True)


class _Rotation(nn.Module):
    """Queries and keys as complex numbers, turned by the angle of their position."""

    def forward(self, query: Tensor, key: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
        query_, key_ = (
            torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2)) for t in (query, key)
        )
        turned = torch.view_as_real(query_ * turn[:, :, None, :]).flatten(3)
        turned_key = torch.view_as_real(key_ * turn[:, :, None, :]).flatten(3)
        return turned.type_as(query), turned_key.type_as(key)


class _Llama4Rope(Repeated):
    """The gradients are returned, not added up; the angles come from a product, made once."""

    frequencies: Tensor
    positions: Tensor

    def make(self) -> tuple[Tensor, ...]:
        with torch.no_grad():
            factors = self.frequencies[None, :, None], self.positions[:, None, :].float()
            angles = torch.matmul(*factors).transpose(1, 2)
            turn = torch.polar(torch.ones_like(angles), angles)
        return self.leaves["query"], self.leaves["key"], turn

    def forward(self, given: tuple[Tensor, ...] | Tensor) -> None:
        if self.made is None:
            self.made = self.make()
        results = self.operator(*self.made)
        torch.autograd.grad(results, self.made[:2], given, retain_graph=True)


def llama4_rope(case: dict[str, Any]) -> Built:
    """The rotary embedding of Llama 4."""
    config = case["config"]
    width, length = (config.get(name, case["x"]) for name in ("hidden_size", "seq_len"))
    head = width // config["num_q_heads"]
    shapes = [(1, length, config[f"num_{name}_heads"], head) for name in ("q", "kv")]
    query, key = (empty(*shape, dtype=_BF16) for shape in shapes)
    step = _Llama4Rope({"query": query, "key": key}, _Rotation())
    step.register_buffer("frequencies", empty(head // 2))
    step.register_buffer("positions", empty(1, length, dtype=torch.long))
    return step, (empty(*shapes[0], dtype=_BF16), empty(*shapes[1], dtype=_BF16))


class _HeadAndDivergence(nn.Module):
    """The heads of a student and a teacher, and the Jensen-Shannon divergence in float32."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "device": "meta", "dtype": _BF16}
        self.student = nn.Linear(width, vocabulary, **options)
        self.teacher = nn.Linear(width, vocabulary, **options)
        self.divergence = nn.KLDivLoss(reduction="none", log_target=True)

    def _loss(self, log_q: Tensor, log_p: Tensor) -> Tensor:
        log_p, log_q = log_p.to(torch.float), log_q.to(torch.float)
        mean = torch.lerp(torch.exp(log_q), torch.exp(log_p), 0.5)
        loss = 0.5 * self.divergence(torch.log(mean), log_p).sum(dim=-1) + 0.5 * self.divergence(
            torch.log(mean), log_q
        ).sum(dim=-1)
        total: Tensor = (loss / log_q.shape[0]).sum().to(_BF16)
        return total

    def forward(self, x: Tensor, of_teacher: Tensor) -> Tensor:
        logits, teacher_logits = self.student(x), self.teacher(of_teacher)
        log_q = torch.log_softmax(logits / 1.0, dim=-1)
        log_p = torch.log_softmax(teacher_logits / 1.0, dim=-1)
        return self._loss(log_q, log_p)


def fused_linear_jsd(case: dict[str, Any]) -> Built:
    """A head and the Jensen-Shannon divergence."""
    config = case["config"]
    x, of_teacher = (empty(case["x"], config["H"], dtype=_BF16) for _ in range(2))
    return _Loss({"x": x}, _HeadAndDivergence(config["H"], config["V"])), (of_teacher,)


class _Experts(nn.Module):
    """A mixture of experts, one after the other, each with the tokens that chose it."""

    def __init__(self, num_tokens: list[int]) -> None:
        super().__init__()
        self.num_tokens = num_tokens

    def forward(self, x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, by: Tensor) -> Tensor:
        result, device = torch.zeros_like(x), x.device
        shape = (*chosen.shape, len(self.num_tokens))
        mask = torch.zeros(shape, dtype=torch.long, device=device)  # as `one_hot` makes it
        hit = torch.empty(sum(map(bool, self.num_tokens)), dtype=torch.long, device=device)
        for expert, number in enumerate(self.num_tokens):
            if not number:
                continue
            # As `where` makes them of the mask: one tensor, two views.
            place, token = torch.empty(2, number, dtype=torch.long, device=device).unbind()
            current = x[token]
            gate, value = F.linear(current, up[expert]).chunk(2, dim=-1)
            current = F.silu(gate) * value
            current = F.linear(current, down[expert])
            current = current * by[token, place, None]
            result.index_add_(0, token, current.to(result.dtype))
        del mask, hit
        return result


class _Moe(Repeated):
    """Forward, backward or both; the weights are products, whose gradients are kept, too."""

    chosen: Tensor
    mode = "full"

    def make(self) -> tuple[Tensor, ...]:
        leaves = self.leaves
        made = (leaves["x"], leaves["up"] * 0.02, leaves["down"] * 0.02, self.chosen, leaves["by"])
        if self.mode == "forward":
            # The thread of the backward pass has a workspace of what ran before.
            small = torch.empty(2, 2, device=self.chosen.device, requires_grad=True)
            torch.mm(small, small).sum().backward()
        if self.mode == "backward":
            self.result = self.operator(*made)
            self.gradient = torch.empty_like(self.result)
        return made

    def forward(self, given: tuple[Tensor, ...] | Tensor) -> None:
        if self.made is None:
            self.made = self.make()
        if self.mode == "forward":
            self.operator(*self.made)
        elif self.mode == "backward":
            self.result.backward(self.gradient, retain_graph=True)
        else:
            result = self.operator(*self.made)
            result.backward(torch.empty_like(result), retain_graph=True)


def _tokens_of_experts(case: dict[str, Any], num_tokens: int, num_experts: int) -> list[int]:
    """How many tokens choose each expert: the largest of random scores, drawn with seed 42."""
    config = case["config"]
    width, hidden = config["H"], config["intermediate_dim"]
    of_down = num_experts * width * hidden
    before = [num_tokens * width, 2 * of_down, of_down]
    scores = normal_numbers(42, before, num_tokens * num_experts).reshape(num_tokens, num_experts)
    chosen = np.argpartition(-scores, config["K"] - 1, axis=1)[:, : config["K"]]
    return [int(number) for number in np.bincount(chosen.ravel(), minlength=num_experts)]


def fused_moe(case: dict[str, Any]) -> Built:
    """A mixture of experts."""
    config = case["config"]
    num_tokens, num_experts = (
        case["x"] if config["sweep_dim"] == name else config[name] for name in ("T", "E")
    )
    width, hidden, num_chosen = config["H"], config["intermediate_dim"], config["K"]
    leaves = {
        "x": empty(num_tokens, width, dtype=_BF16),
        "up": empty(num_experts, 2 * hidden, width, dtype=_BF16),
        "down": empty(num_experts, width, hidden, dtype=_BF16),
        "by": empty(num_tokens, num_chosen, dtype=_BF16),
    }
    step = _Moe(leaves, _Experts(_tokens_of_experts(case, num_tokens, num_experts)))
    step.mode = case["mode"]
    step.register_buffer("chosen", empty(num_tokens, num_chosen, dtype=torch.int32))
    return step, ()
