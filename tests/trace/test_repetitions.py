"""Parts of a trace that repeat: those that were not traced follow from those that were."""

import pytest
import torch
from torch import nn

import memcallback as mc
from memcallback.devices.catalogue import HostSpec, find_device
from memcallback.trace.growth import num_to_trace
from memcallback.trace.request import TraceRequest
from memcallback.trace.tracer import trace


class Appends(nn.Module):
    """A cache of 1 KiB for each call, padded to a multiple of some calls; one output of before."""

    def __init__(self, multiple=1):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.multiple, self.calls, self.last = multiple, 0, None
        self.cache = None

    def forward(self, x):
        self.calls += 1
        padded = -(-self.calls // self.multiple) * self.multiple
        self.cache = x.new_zeros(256 * padded)
        output, self.last = self.last, x.new_zeros(self.calls)
        return output


def traced(num_batches, multiple=1):
    step = mc.InferenceStep(
        Appends(multiple), torch.zeros(2), num_batches=num_batches, keep_outputs="all"
    )
    return mc.predict(step, device=HostSpec(), isolate=False)


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("num_batches", [60, 61])
def test_repetitions_have_the_sizes_that_a_trace_of_all_has(monkeypatch, num_batches, multiple):
    grown = traced(num_batches, multiple)
    monkeypatch.setattr(
        "memcallback.trace.loops.inference.num_to_trace", lambda num_all, period: num_all
    )
    everything = traced(num_batches, multiple)
    assert grown.trace.traced.growths
    assert not everything.trace.traced.growths
    assert [step.windows for step in grown.steps] == [step.windows for step in everything.steps]


def test_the_rest_of_the_repetitions_is_whole_periods():
    assert num_to_trace(15, 1) == num_to_trace(1000, 1) == 14
    assert num_to_trace(4, 1) == 4
    assert num_to_trace(1000, 8) == 32
    assert (1000 - num_to_trace(1000, 8)) % 8 == 0
    assert num_to_trace(20, 8) == 20


class Wrapper(nn.Module):
    """A model around another one that generates, as those of PEFT."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def generate(self, **given):
        return self.base_model.generate(**given)


def llama():
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            vocab_size=50,
        )
    ).eval()


def growths(model, **options):
    generate = {"max_new_tokens": 50, "do_sample": False, "pad_token_id": 0, **options}
    step = mc.InferenceStep(model, {"input_ids": torch.ones(1, 4).long()}, generate=generate)
    return trace(TraceRequest(step=step, device=find_device("H200"))).growths


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"use_cache": False}])
def test_tokens_that_free_what_the_token_before_left_repeat(options):
    assert [growth.num_all for growth in growths(llama(), **options)] == [50, 50]


def test_a_model_around_the_one_that_generates_generates_as_many_tokens():
    assert [growth.num_all for growth in growths(Wrapper(llama()))] == [50, 50]


def test_a_model_that_generates_otherwise_is_not_predicted():
    class Own(Wrapper):
        def generate(self, **given):
            return given["input_ids"]

    with pytest.raises(mc.PredictionError, match="never called _has_unfinished_sequences"):
        growths(Own(llama()))
