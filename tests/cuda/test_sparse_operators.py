"""Operators on sparse and nested tensors: what they ask of CUDA's allocator, against recordings
from PyTorch's CUDA build.
"""

import json

import pytest
import sparse_cases
import torch._dynamo
from needs import needs_recorded_version

from memcallback.core.allocation_trace import Alloc, Free
from memcallback.devices.catalogue import find_device
from memcallback.trace.dispatch.ledger import Ledger
from memcallback.trace.dispatch.mode import TraceMode
from memcallback.trace.patches.cuda import cuda_semantics

RECORDED = json.loads(sparse_cases.RECORDED.read_text())
CARD = find_device(RECORDED["device"])


def asked(make):
    """What a case asks of the allocator in a trace."""
    mode = TraceMode(Ledger(), CARD)
    mode.calibrate(is_threaded=True)
    with cuda_semantics(mode, CARD):
        mode.is_recording = True
        call = make()
        kept = call()
        start = len(mode.ledger.trace().events)
        kept = call()  # noqa: F841 - it stands until all is read
        mode.is_recording = False
        events = mode.ledger.trace().events[start:]
        mode.ledger.close()
    numbers, found = {}, []
    for event in events:
        if isinstance(event, Alloc) and event.size_bytes:
            numbers[event.id] = len(numbers)
            found.append(f"+{event.size_bytes}")
        elif isinstance(event, Free) and event.id in numbers:
            found.append(numbers[event.id])
    return sparse_cases.text(found)


# PyTorch's own fake kernel tells what flash attention gives, as that version has it.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_recorded_version if name.startswith("flash") else ())
        for name in sparse_cases.CASES
    ],
)
def test_operators_ask_for_what_they_ask_for_on_cuda(name):
    assert asked(sparse_cases.CASES[name]) == RECORDED["cases"][name]


def test_a_sparse_gradient_moves_to_its_parameter_while_compiled_code_runs():
    # Its frames make Python hold the arguments of each call once more than without.
    case = "bag of the sum"
    without = asked(sparse_cases.CASES[case])
    within = torch._dynamo.run(lambda: asked(sparse_cases.CASES[case]))()
    assert within == without == RECORDED["cases"][case]
