"""Flex attention is predicted as `torch.compile` runs it: what its fused kernels make, and no
scores.
"""

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex

from memcallback import Category, TrainingStep, predict
from memcallback.core.allocation_trace import Alloc
from memcallback.devices.catalogue import find_device
from memcallback.trace.request import TraceRequest
from memcallback.trace.tracer import trace

HEADS, LENGTH, SIZE = 4, 256, 16
WIDTH = HEADS * SIZE


class Attention(nn.Module):
    def __init__(self, *, call=flex.flex_attention, score_mod=None, key_heads=HEADS, masked=False):
        super().__init__()
        self.project, self.join = (
            nn.Linear(WIDTH, (HEADS + 2 * key_heads) * SIZE),
            nn.Linear(WIDTH, WIDTH),
        )
        self.bias = nn.Parameter(torch.zeros(HEADS, LENGTH))
        self.call, self.score_mod, self.key_heads, self.masked = call, score_mod, key_heads, masked

    def forward(self, x):
        heads = self.project(x).unflatten(-1, (-1, SIZE)).transpose(1, 2)
        query, key, value = heads.split([HEADS, self.key_heads, self.key_heads], 1)
        mask = (
            flex.create_block_mask(causal, None, None, LENGTH, LENGTH, device=x.device)
            if self.masked
            else None
        )
        score_mod = self.relative if self.score_mod == "relative" else self.score_mod
        output = self.call(
            query,
            key,
            value,
            score_mod=score_mod,
            block_mask=mask,
            enable_gqa=self.key_heads != HEADS,
        )
        return self.join(output.transpose(1, 2).flatten(2))

    def relative(self, score, sample, head, query, key):
        return score + self.bias[head, (query - key).abs()]


def causal(sample, head, query, key):
    return query >= key


def alibi(score, sample, head, query, key):
    return torch.where(query >= key, score + (key - query) * torch.exp2(-head), -float("inf"))


class Captured(Attention):
    """Its functions read what a forward pass makes and nothing else keeps, each in a way of its
    own.
    """

    def __init__(self, *, in_score=None, in_mask=None):
        super().__init__()
        self.in_score, self.in_mask = in_score, in_mask

    def forward(self, x):
        query, key, value = self.project(x).unflatten(-1, (-1, SIZE)).transpose(1, 2).chunk(3, 1)
        table = x.new_zeros(LENGTH, LENGTH)
        mask = flex.create_block_mask(causal, None, None, LENGTH, LENGTH, device=x.device)
        if self.in_mask:
            mask.mask_mod = lambda sample, head, query, key: self.in_mask(table, query, key) >= 0
        score_mod = (
            (lambda score, sample, head, query, key: score + self.in_score(table, query, key))
            if self.in_score
            else None
        )
        output = flex.flex_attention(query, key, value, score_mod=score_mod, block_mask=mask)
        return self.join(output.transpose(1, 2).flatten(2))


def entry(table, query, key):
    return table[query, key]


def row_and_number(table, query, key):
    return table[query][1]


def transposed(table, query, key):
    return table.T[query, key]


def only_its_length(table, query, key):
    return query - key + table.shape[0] + table.size(1)


def step(model, precision="32-true", batch_size=4):
    return TrainingStep(
        model,
        torch.ones(batch_size, LENGTH, WIDTH),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        precision=precision,
    )


OPTIONS = {
    "plain": {},
    "masked": {"masked": True},
    "alibi": {"score_mod": alibi},
    "relative": {"score_mod": "relative"},
    "alibi, masked, shared keys": {"score_mod": alibi, "masked": True, "key_heads": 2},
}


def made(traced):
    """Bytes of what the attention's kernels make in a step, per sample."""
    events = [event for event in traced.trace.events if isinstance(event, Alloc)]
    return [
        event.size_bytes // traced.batch_size
        for event in events
        if event.operator in ("aten::new_empty", "aten::empty_like")
    ]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_it_is_predicted_at_every_batch_size(options, precision):
    prediction = predict(step(Attention(**options), precision), device="NVIDIA H200")
    assert any(
        "flex_attention is predicted as torch.compile runs it" in caveat
        for caveat in prediction.caveats
    )
    of_eight = predict(step(Attention(**options), precision, batch_size=8), device="NVIDIA H200")
    assert prediction.at(8).peak_allocated_bytes == of_eight.peak_allocated_bytes


@pytest.mark.parametrize(
    ("key_heads", "precision"), [(HEADS, "32-true"), (2, "32-true"), (2, "bf16-mixed")]
)
def test_the_kernels_make_outputs_gradients_and_figures_of_each_query(key_heads, precision):
    figures = HEADS * LENGTH * 4
    query, key = (
        heads * LENGTH * SIZE * (4 if precision == "32-true" else 2) for heads in (HEADS, key_heads)
    )
    traced = trace(
        TraceRequest(
            step(Attention(key_heads=key_heads), precision),
            find_device("NVIDIA H200"),
            num_updates=1,
        )
    )
    assert made(traced) == [figures, figures, query, figures, query, key, key]


def test_a_captured_parameter_gets_a_gradient():
    model = Attention(score_mod="relative")
    ends = [
        predict(step(one), device="NVIDIA H200").step.windows[-1].end
        for one in (model, Attention())
    ]
    gradients = [end.by_category[Category.GRADIENT] for end in ends]
    assert gradients[0] - gradients[1] == model.bias.numel() * 4


def held_after_forward(model):
    return predict(step(model), device="NVIDIA H200").step.windows[0].end.allocated_bytes


@pytest.mark.parametrize(
    "where", [("in_score",), ("in_mask",), ("in_score", "in_mask")], ids=" and ".join
)
@pytest.mark.parametrize(
    ("read", "kept_bytes"),
    [
        (entry, LENGTH * LENGTH * 4),
        (row_and_number, LENGTH * LENGTH * 4),
        (transposed, LENGTH * LENGTH * 4),
        (only_its_length, 0),
    ],
)
def test_captured_tensors_are_kept_until_the_backward_pass(where, read, kept_bytes):
    assert (
        held_after_forward(Captured(**dict.fromkeys(where, read))) - held_after_forward(Captured())
        == kept_bytes
    )


def test_what_is_captured_without_a_gradient_gets_none():
    gradients = [
        predict(step(model), device="NVIDIA H200")
        .step.windows[-1]
        .end.by_category[Category.GRADIENT]
        for model in (Captured(in_score=entry, in_mask=entry), Captured())
    ]
    assert gradients[0] == gradients[1]


def test_without_gradients_nothing_is_kept():
    class Frozen(nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.attention, self.head = attention, nn.Linear(WIDTH, 1)

        def forward(self, x):
            with torch.no_grad():
                x = self.attention(x)
            return self.head(x)

    assert held_after_forward(
        Frozen(Captured(in_score=entry, in_mask=entry))
    ) == held_after_forward(Frozen(Captured()))


def test_a_compiled_call_is_predicted_without_a_warning_and_leaves_the_module_as_it_was():
    operator = flex.flex_attention_hop
    compiled, plain = (
        predict(step(Attention(call=call)), device="NVIDIA H200")
        for call in (torch.compile(flex.flex_attention, backend="eager"), flex.flex_attention)
    )
    assert compiled.peak_allocated_bytes == plain.peak_allocated_bytes
    assert flex.flex_attention_hop is operator
