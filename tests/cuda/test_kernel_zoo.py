"""All calls of the kernel zoo, of which `test_kernels.py` compares a sample on each card."""

import gzip
import json
from pathlib import Path

import kernel_zoo
import pytest
import torch
from test_kernels import compare, said, spec_of

WHOLE = Path(__file__).parents[1] / "recorded" / "kernels" / "h200-whole.json.gz"
HEAD = json.loads(gzip.decompress(WHOLE.read_bytes()))
#: Calls that a device refuses (no kernel for the type), and those that take too many events to
#: write down.
NOT_RECORDED = 213
#: Of what is recorded, the calls that no rule claims to know to the byte.
NOT_SAID = 285


def test_all_calls_but_those_that_a_device_refuses_are_recorded():
    assert len(kernel_zoo.cases().keys() - HEAD["cases"].keys()) == NOT_RECORDED
    assert HEAD["cases"].keys() <= kernel_zoo.cases().keys()


def test_no_more_calls_than_these_are_left_out_of_the_comparison():
    assert sum(not said(name, HEAD) for name in HEAD["cases"]) == NOT_SAID


@pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_fused_rms_norm"),
    reason="recorded with PyTorch 2.11, which has operators that this one has not",
)
@pytest.mark.parametrize("part", range(4))
def test_every_call_of_the_zoo_asks_for_what_was_recorded(part):
    names = [name for name in sorted(HEAD["cases"]) if said(name, HEAD)][part::4]
    differ = {
        name: found
        for name in names
        if (found := compare(kernel_zoo.cases()[name], HEAD["cases"][name], spec_of(HEAD)))
    }
    assert differ == {}
