"""Predictions at other sequence lengths are those of a step whose batch has that length."""

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler

from memcallback.batch_size.sequence_lengths import sequence_lengths_of
from memcallback.batch_size.suggest import suggest_batch_size
from memcallback.core.units import GiB
from memcallback.devices.catalogue import find_device
from memcallback.prediction.batch_trace import BatchTrace
from memcallback.prediction.length_trace import UnknownSequenceLength
from memcallback.prediction.predict import predict
from memcallback.prediction.prediction import Prediction
from memcallback.step.training_step import TrainingStep
from memcallback.trace.request import TraceRequest
from memcallback.trace.tracer import trace

CARD = "NVIDIA A100-SXM4-80GB"
#: The card with so little memory that a search for the batch size is short.
SMALL = replace(find_device(CARD), capacity_bytes=GiB)
WORDS, WIDTH, HEADS, LONGEST = 96, 32, 2, 2048


class Block(nn.Module):
    def __init__(self, *, fused):
        super().__init__()
        self.fused = fused
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            mixed = (q @ k.transpose(-2, -1) / 4).masked_fill(hidden, float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class Gpt(nn.Module):
    def __init__(self, *, fused):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.Sequential(Block(fused=fused), Block(fused=fused))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        return self.head(
            self.blocks(
                self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
            )
        )


def next_word(model, batch):
    return F.cross_entropy(model(batch["words"]).flatten(0, 1), batch["next"].flatten())


def make_step(length, count=4, *, model=None, fused=True, precision="32-true", **changes):
    batch = {name: torch.randint(0, WORDS, (count, length)) for name in ("words", "next")}
    model = model or Gpt(fused=fused)
    return TrainingStep(
        model, batch, loss=next_word, optimizer=torch.optim.AdamW, precision=precision, **changes
    )


def traced(step, device=CARD):
    """The prediction from a trace of this very step."""
    spec = find_device(device)
    return Prediction.of(
        BatchTrace.single(trace(TraceRequest(step, None if device == "cpu" else spec))), spec
    )


@cache
def of_all_lengths(fused=True, precision="32-true", device=CARD):
    """A prediction from sequences of length 64."""
    step = make_step(64, fused=fused, precision=precision, sequence_length=64)
    return predict(step, device=device)


def check(predicted, expected):
    assert [step.windows for step in predicted.steps] == [step.windows for step in expected.steps]
    assert predicted.at_peak == expected.at_peak


@pytest.mark.parametrize("device", [CARD, "cpu"])
@pytest.mark.parametrize(
    ("fused", "precision"), [(True, "32-true"), (True, "bf16-mixed"), (False, "32-true")]
)
def test_another_length_comes_out_as_if_it_had_been_traced(fused, precision, device):
    predicted = of_all_lengths(fused, precision, device)
    assert predicted.sequence_length == 64
    for length, count in ((96, 4), (96, 9), (200, 2), (40, 4)):
        there = predicted.at(count, sequence_length=length)
        assert (there.batch_size, there.sequence_length) == (count, length)
        check(there, traced(make_step(length, count, fused=fused, precision=precision), device))
    assert (
        predicted.at(sequence_length=96).at(sequence_length=64).peak_allocated_bytes
        == predicted.peak_allocated_bytes
    )


def test_where_more_indices_are_sorted_they_are_so_at_other_sizes_too():
    predicted = predict(make_step(128, sequence_length=128), device=CARD)
    for length, count in ((128, 24), (128, 25), (896, 4), (1152, 9)):
        check(predicted.at(count, sequence_length=length), traced(make_step(length, count)))


def test_a_length_that_kernels_pad_tells_of_others():
    predicted = predict(make_step(100, sequence_length=100), device=CARD)
    for length in (60, 132, 300):
        check(predicted.at(3, sequence_length=length), traced(make_step(length, 3)))


def test_a_length_can_be_asked_for_to_be_traced():
    predicted = predict(
        make_step(64, sequence_length=64), device=CARD, sequence_length=77, batch_size=3
    )
    assert (predicted.batch_size, predicted.sequence_length) == (3, 77)
    check(predicted, traced(make_step(77, 3)))


class ChunkedHead(Gpt):
    """A program that does something else with longer sequences."""

    def forward(self, words):
        return super().forward(words) if words.shape[1] <= 40 else super().forward(words).tanh()


def test_where_the_path_depends_on_the_length_that_is_said():
    predicted = predict(
        make_step(64, model=ChunkedHead(fused=True), sequence_length=64), device=CARD
    )
    (caveat,) = (caveat for caveat in predicted.caveats if "sequence length" in caveat)
    assert caveat.startswith(
        "Only sequence length 64 is predicted. Any other length needs its own traces. The reason: "
        "the step does something else at another sequence length: at sequence length "
    )
    check(predicted.at(7), traced(make_step(64, 7, model=ChunkedHead(fused=True))))
    with pytest.raises(UnknownSequenceLength, match="traced at sequence length 64 only"):
        predicted.at(sequence_length=96)


class OddBatches(Gpt):
    def forward(self, words):
        return super().forward(words).tanh() if words.shape[0] % 2 else super().forward(words)


def test_other_lengths_are_known_where_other_batch_sizes_are_not():
    predicted = predict(
        make_step(64, model=OddBatches(fused=True), sequence_length=64), device=CARD
    )
    check(predicted.at(sequence_length=96), traced(make_step(96, model=OddBatches(fused=True))))
    assert not predicted.at(sequence_length=96).trace.is_any_batch_size_known


def test_a_prediction_says_how_long_its_sequences_are():
    predicted = of_all_lengths().at(8, sequence_length=128)
    assert "(batch size 8, sequence length 128) on" in str(predicted)
    assert predicted.to_dict()["sequence_length"] == 128
    without = predict(make_step(64), device="cpu")
    assert "sequence length" not in str(without)
    assert without.to_dict()["sequence_length"] is None
    with pytest.raises(
        UnknownSequenceLength,
        match=r"sequence length 96 is unknown: .* Give it to the step: sequence_length=",
    ):
        without.at(sequence_length=96)


def test_a_length_that_cannot_be_is_refused():
    with pytest.raises(
        ValueError,
        match=r"sequence_length 63 must be the size of a dimension .* other than the first\. Those "
        r"sizes are 64\. Give",
    ):
        make_step(64, sequence_length=63)
    with pytest.raises(ValueError, match=r"There is no such dimension\."):
        TrainingStep(nn.Linear(2, 2), torch.ones(2), sequence_length=8)
    with pytest.raises(
        ValueError,
        match=r"sequence_length must be at least 4, got 3. To predict other lengths, shorter "
        r"sequences are traced too. Give",
    ):
        make_step(3, sequence_length=3)
    with pytest.raises(ValueError, match="sequence_length must be at least 4, got 2"):
        predict(make_step(64, sequence_length=64), device=CARD, sequence_length=2)
    with pytest.raises(
        ValueError,
        match="sequence_length 96 was asked for, and the step does not say how long its sequences "
        "are",
    ):
        predict(make_step(64), device=CARD, sequence_length=96)


class Sentences(Dataset):
    """Sequences of different lengths."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.zeros(self.lengths[index], dtype=torch.int64)


def padded(sentences):
    words = nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    return {"words": words, "next": words}


def loader_of(lengths, generator=None):
    return DataLoader(
        Sentences(lengths), batch_size=4, collate_fn=padded, shuffle=True, generator=generator
    )


class Drawing(Sampler):
    """Draws indices with generators of its own."""

    def __init__(self, number):
        self.number = number
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)
        self.torch = torch.Generator()

    def __iter__(self):
        for _ in range(self.number):
            drawn = self.python.random() + self.numpy.random() + torch.rand(1, generator=self.torch)
            yield int(drawn * self.number) % self.number

    def state(self):
        return (
            self.python.getstate(),
            self.numpy.bit_generator.state,
            self.torch.get_state().tolist(),
        )


def test_generators_of_samplers_stay_as_they_are():
    sentences, own, inner = Sentences([17, 64, 32, 64]), torch.Generator(), Drawing(4)
    loader = DataLoader(
        sentences,
        batch_sampler=BatchSampler(RandomSampler(sentences, generator=own), 2, drop_last=False),
        collate_fn=padded,
    )
    before = own.get_state()
    drawing = DataLoader(sentences, batch_size=2, sampler=inner, collate_fn=padded)
    state = inner.state()
    step = make_step(64, sequence_length=64)
    for one in (loader, drawing):
        assert sequence_lengths_of(one, step)[1]
    assert torch.equal(own.get_state(), before)
    assert inner.state() == state


def test_a_data_loader_tells_how_long_its_batches_are():
    step = make_step(64, sequence_length=64)
    generator = torch.Generator()
    states = torch.get_rng_state(), generator.get_state()
    advice = suggest_batch_size(
        step, device=SMALL, sequence_lengths=loader_of([17, 200, 64] * 8, generator)
    )
    assert all(
        torch.equal(*pair)
        for pair in zip(states, (torch.get_rng_state(), generator.get_state()), strict=True)
    )
    # In 24 samples of three lengths, drawn four at a time, one batch at least has a longest one.
    assert (
        advice.batch_size
        == suggest_batch_size(step, device=SMALL, sequence_lengths=[200]).batch_size
    )
    assert max(advice.by_sequence_length) == 200
    assert advice.by_sequence_length[200] == advice.batch_size


def test_the_lengths_of_batches_are_put_into_at_most_eight_buckets():
    step = make_step(64, sequence_length=64)
    batches = [make_step(length).batch for length in (*range(16, 512, 3), 512)]
    sizes = suggest_batch_size(step, device=SMALL, sequence_lengths=batches).by_sequence_length
    assert list(sizes) == [64, 128, 192, 256, 320, 384, 448, 512]
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    assert (
        sizes[128]
        == suggest_batch_size(step, device=SMALL, sequence_lengths=[128, 512]).by_sequence_length[
            128
        ]
    )


@pytest.mark.parametrize(
    ("lengths", "batches", "text"),
    [
        (64, [], "sequence_lengths is empty. Give the lengths"),
        (
            None,
            [make_step(32).batch],
            r"sequence_lengths has batches \(.*\), and the step does not say .* Give "
            r"the step sequence_length=",
        ),
        (
            64,
            [torch.zeros(4, 32)],
            r"has tensors of shapes \(4, 32\), and that of the step \(4, 64\), \(4, 64\)",
        ),
    ],
    ids=["empty", "unknown", "another batch"],
)
def test_lengths_that_cannot_be_read_are_told_of(lengths, batches, text):
    with pytest.raises(ValueError, match=text):
        suggest_batch_size(
            make_step(64, sequence_length=lengths), device=SMALL, sequence_lengths=batches
        )


def test_one_number_is_no_list_of_lengths():
    with pytest.raises(
        TypeError,
        match=r"sequence_lengths must be lengths or a data loader, got .*5.*\. Give one length as "
        r"\[512\]\.",
    ):
        suggest_batch_size(make_step(64, sequence_length=64), device=SMALL, sequence_lengths=5)
