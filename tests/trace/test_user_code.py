"""What user code does in a training step: traced for a CPU and a card, against real runs and
recordings of them.
"""

import json
import warnings
from pathlib import Path

import pytest
import torch
from hand_made import boundaries
from needs import needs_fused_adagrad, needs_recorded_version
from user_code import NEEDS_CUDA, STEPS, run_on_cpu, steady

from memcallback.core.allocation_trace import Alloc
from memcallback.devices.catalogue import find_device
from memcallback.prediction.batch_trace import BatchTrace
from memcallback.trace.dispatch.placeholders import Bounds
from memcallback.trace.request import TraceRequest
from memcallback.trace.tracer import trace

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "user_code.json").read_text())
CARD = find_device(RECORDED["device"])
#: What is not compared with a real run on a CPU, and why.
NOT_ON_A_CPU = {
    "an_lstm": "oneDNN's layer keeps a workspace, which the trace does not have",
    "packed_sequences": "those of one length are run by oneDNN's layer",
    "bfloat16_autocast": "layer norm keeps its statistics in single precision there",
    "a_jvp": "operators that have no derivative forward for fakes are decomposed",
    "a_sparse_embedding_with_accumulation": "where sparse gradients are summed, equal elements "
    "next to each other become one there",
    "lbfgs": "its history is taken to be full",
    "lbfgs_with_line_search": "its history is taken to be full, and how far it searches depends on "
    "values",
    "lbfgs_in_lightning": "its history is taken to be full",
}
#: What has no recording to be compared with, and why.
NOT_RECORDED = {
    "values_that_are_read": "a virtual device reads zeros, where the loss is not finite",
    "optimizer_adagrad_fused": "the PyTorch of the recording has it for a CPU alone",
    "lbfgs_with_line_search": "how far it searches depends on values",
    "a_jvp": NOT_ON_A_CPU["a_jvp"],
}
#: What a version of PyTorch does not have, or its fake kernels tell otherwise.
MARKS = {
    "optimizer_adagrad_fused": needs_fused_adagrad,
    "jagged_attention_in_halves": needs_recorded_version,
}
ON_A_CARD = [pytest.param(name, marks=MARKS.get(name, ())) for name in STEPS]
#: A number that autograd keeps for the backward pass is a tensor of 8 bytes on the host.
MOST_BYTES_OF_NUMBERS = 24


@pytest.fixture(scope="module")
def real():
    """Real runs on this CPU, all in one profile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.compiler.set_stance("force_eager"):
            return run_on_cpu(
                [name for name in STEPS if name not in NEEDS_CUDA | NOT_ON_A_CPU.keys()]
            )


@pytest.mark.filterwarnings("ignore")  # of PyTorch, at what some of the user code does
@pytest.mark.parametrize(
    "name", [name for name in STEPS if name not in NEEDS_CUDA | NOT_ON_A_CPU.keys()]
)
def test_on_a_cpu_bytes_alive_are_those_of_the_real_run(name, real):
    traced = boundaries(trace(TraceRequest(STEPS[name](), None)))
    measured = real[name]
    assert [len(step) for step in traced] == [len(step) for step in measured]
    differences = {
        (size - measured[0][-1]) - (mine - traced[0][-1])
        for step, own in zip(measured, traced, strict=True)
        for size, mine in zip(step, own, strict=True)
    }
    # A plain attribute that is a tensor belongs to no category: what the model holds of those
    # before it trains does not count.
    differences -= {(measured[0][0] - measured[0][-1]) - (traced[0][0] - traced[0][-1])}
    assert all(
        0 <= difference <= MOST_BYTES_OF_NUMBERS and difference % 8 == 0
        for difference in differences
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ON_A_CARD)
def test_for_a_card_bytes_alive_are_those_that_were_recorded(name, as_the_virtual_device):
    traced = steady(boundaries(trace(TraceRequest(STEPS[name](), CARD))))
    if name not in NOT_RECORDED:
        assert traced == RECORDED["steps"][name]


RESIZED = [
    name for name in STEPS if name.startswith(("a_sparse_embedding", "a_jagged_batch", "jagged_"))
] + ["a_sparse_tensor_in_the_batch"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "device"),
    [
        (name, device)
        for name in RESIZED
        for device in (CARD, None)
        if device or name not in NEEDS_CUDA
    ],
)
def test_a_sparse_or_nested_step_at_another_batch_size_is_what_is_traced_there(name, device):
    step, bounds = STEPS[name](), Bounds()
    fitted = BatchTrace.fit(
        *(
            trace(TraceRequest(step, device, batch_size=size, bounds=bounds))
            for size in (16, 17, 23)
        )
    )
    assert fitted.at(32) == trace(TraceRequest(step, device, batch_size=32, bounds=bounds)).trace


@pytest.mark.filterwarnings("ignore")
def test_no_more_rows_than_there_are_have_sparse_gradients_once_these_are_coalesced():
    step = STEPS["a_sparse_embedding_with_sparse_adam"]()
    for batch_size, rows in ((16, 80), (100, 200)):
        traced = trace(TraceRequest(step, CARD, batch_size=batch_size))
        coalesced = {
            event.size_bytes
            for event in traced.trace.events
            if isinstance(event, Alloc) and event.operator == "aten::mul"
        }
        assert coalesced == {rows * 10 * 4}
        assert any(
            "aten::_coalesce has a shape that depends on values" in caveat
            for caveat in traced.caveats
        )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ON_A_CARD)
def test_what_operators_were_remembered_to_give_is_what_they_give(name, monkeypatch):
    step = STEPS[name]()
    # The first trace fills the memory of operators, the second is made from it, the third goes
    # without.
    trace(TraceRequest(step, CARD))
    remembered = trace(TraceRequest(step, CARD))
    monkeypatch.setattr("memcallback.trace.dispatch.output_cache.OutputCache._ask", lambda *_: None)
    assert trace(TraceRequest(step, CARD)) == remembered
