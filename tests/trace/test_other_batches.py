"""Compiled steps of trainings whose batch size or sequence length changes."""

import pytest
import torch
from needs import needs_compilation
from torch import nn

import memcallback as mc

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
    needs_compilation,
]
CARD = "NVIDIA H200"
FOLLOWED = "The values are for the updates after one with a batch "
ONE_SIZE = "All batches are assumed to have the same size"


@pytest.fixture(autouse=True)
def in_a_child(monkeypatch):
    monkeypatch.delenv("MEMCALLBACK_ISOLATE", raising=False)


class Attention(nn.Module):
    """Attention between two layers."""

    def __init__(self):
        super().__init__()
        self.project, self.out = nn.Linear(192, 576), nn.Linear(192, 192)

    def forward(self, x):
        parts = self.project(x).unflatten(-1, (3, 6, -1)).transpose(1, 3).unbind(2)
        attended = nn.functional.scaled_dot_product_attention(*parts)
        return self.out(attended.transpose(1, 2).flatten(2))


def perceptron():
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))


def squares(model, batch):
    return model(batch).square().mean()


def step(model, batch=None, **options):
    batch = torch.zeros(64, 256) if batch is None else batch
    return mc.TrainingStep(model, batch, loss=squares, optimizer=torch.optim.AdamW, **options)


def said(prediction, start):
    return [caveat for caveat in prediction.caveats if caveat.startswith(start)]


def sizes(prediction):
    return [one.batch_size for one in prediction.steps]


def peaks(prediction):
    return [(one.peak_allocated_bytes, one.peak_reserved_bytes) for one in prediction.steps]


def test_updates_after_a_smaller_batch_are_predicted():
    before = mc.predict(step(torch.compile(perceptron())), device=CARD)
    after = mc.predict(step(torch.compile(perceptron()), other_batch_size=10), device=CARD)
    assert sizes(before) == [64, 64]
    assert sizes(after) == [64, 64, 10, 64, 64]
    assert peaks(after)[:2] == peaks(before)
    assert said(before, ONE_SIZE)
    assert not said(before, FOLLOWED)
    (sentence,) = said(after, FOLLOWED)
    assert "a batch of 10 samples," in sentence
    assert not said(after, ONE_SIZE)


def test_code_that_is_compiled_for_the_smaller_batch_runs_from_then_on():
    """With graphs: the first update after it warms up, the second is recorded."""
    model = torch.compile(Attention(), mode="reduce-overhead")
    batch = torch.zeros(8, 256, 192)
    prediction = mc.predict(
        step(model, batch, other_batch_size=5, precision="bf16-mixed"), device=CARD
    )
    assert sizes(prediction) == [8] * 4 + ([5] + [8] * 4) * 2
    allocated = [one.peak_allocated_bytes for one in prediction.steps]
    warm_up, recording, *replays = allocated[5:9]
    assert allocated[2] == allocated[3] == replays[0] == replays[1]
    assert min(warm_up, recording) > replays[0]
    assert allocated[10:] == [replays[0]] * 4


def test_code_for_all_sizes_is_compiled_once():
    model = torch.compile(perceptron(), dynamic=True, mode="reduce-overhead")
    prediction = mc.predict(step(model, other_batch_size=10), device=CARD)
    allocated = [one.peak_allocated_bytes for one in prediction.steps]
    # The graph of the larger batch is there.
    assert allocated[5] == allocated[3] < allocated[1]


def test_shorter_sequences_are_followed():
    batch = torch.zeros(4, 64, 256)
    model = torch.compile(perceptron())
    prediction = mc.predict(
        step(model, batch, sequence_length=64, other_sequence_length=24), device=CARD
    )
    assert len(prediction.steps) == 5
    (sentence,) = said(prediction, FOLLOWED)
    assert "a batch with sequences of length 24," in sentence
    both = step(
        torch.compile(perceptron()),
        batch,
        sequence_length=64,
        other_sequence_length=24,
        other_batch_size=3,
    )
    (sentence,) = said(mc.predict(both, device=CARD), FOLLOWED)
    assert "a batch of 3 samples with sequences of length 24," in sentence


@pytest.mark.parametrize(("batch_size", "other"), [(128, 10), (8, 7), (1, None)])
def test_at_another_batch_size_the_one_in_between_is_still_smaller(batch_size, other):
    compiled = step(torch.compile(perceptron()), other_batch_size=10)
    prediction = mc.predict(compiled, device=CARD, batch_size=batch_size)
    in_between = [] if other is None else [other, batch_size, batch_size]
    assert sizes(prediction) == [batch_size, batch_size, *in_between]


def test_a_training_before_a_forward_pass_has_its_batch_in_between():
    model = torch.compile(perceptron())
    validation = mc.InferenceStep(
        model, torch.zeros(64, 256), after=step(model, other_batch_size=10)
    )
    assert sizes(mc.predict(validation, device=CARD))[:5] == [64, 64, 10, 64, 64]


def test_steps_without_compiled_code_are_predicted_as_ever():
    eager = mc.predict(step(perceptron(), other_batch_size=10), device=CARD)
    assert peaks(eager) == peaks(mc.predict(step(perceptron()), device=CARD))
    assert not said(eager, FOLLOWED)
    assert not said(eager, ONE_SIZE)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_rank_of_a_job_has_the_batch_in_between(kind):
    # fully_shard of each layer leaves nothing to compile around them.
    model = nn.Sequential(*map(torch.compile, perceptron()))
    prediction = mc.predict(step(model, other_batch_size=10, ranks=mc.Ranks(2, kind)), device=CARD)
    assert sizes(prediction).count(10) == 1
    assert said(prediction, FOLLOWED)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"other_batch_size": 64}, "other_batch_size must be less than batch_size, 64, got 64"),
        ({"other_batch_size": 0}, "other_batch_size"),
        ({"other_sequence_length": 8}, "other_sequence_length=8 needs sequence_length"),
        (
            {"sequence_length": 256, "other_sequence_length": 300},
            "other_sequence_length must be less than sequence_length, 256, got 300",
        ),
    ],
)
def test_a_batch_in_between_is_smaller(options, message):
    with pytest.raises(ValueError, match=message):
        step(perceptron(), **options)


def test_a_changed_copy_of_a_step_keeps_the_batch_in_between():
    own = step(perceptron(), other_batch_size=10)
    assert own.varied(accumulate=2).other_batch_size == 10
    assert own.varied(other_batch_size=None).other_batch_size is None


class Normed(nn.Module):
    """Fails with one sample."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.GELU())

    def forward(self, x):
        return self.layers(x)


def test_where_the_batch_in_between_fails_the_rest_is_predicted_compiled():
    own = torch.compile(Normed())
    prediction = mc.predict(step(own, other_batch_size=1), device=CARD)
    assert peaks(prediction) == peaks(mc.predict(step(own), device=CARD))
    (sentence,) = said(prediction, "All batches are assumed to have the same size, because a batch")
    assert "a batch of 1 sample cannot be traced" in sentence
    assert "Expected more than 1 value per channel" in sentence
    assert not said(prediction, FOLLOWED)


def test_a_batch_of_one_sample_is_only_in_between_if_asked_for():
    own = step(torch.compile(Normed()), other_batch_size=10)
    assert sizes(mc.predict(own, device=CARD, batch_size=2)) == [2, 2]
