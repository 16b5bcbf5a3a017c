"""What operators along other dimensions and with other strides ask of the allocator, as recorded
with PyTorch 2.11 on a virtual H200.
"""

import pytest
import torch
from kernel_zoo import Case, T
from test_kernels import compare, load, spec_of

SORTS = [
    (
        Case("sort", (T((5000, 3)), 0), {}),
        (
            "+60000 +120000 +60000 +60000 +120000 +120000 +120000 +60000 +191999 -8 -7 +5631 "
            "-9 -6 -5 -4 -3 -2"
        ),
        "f32[5000,3]@0 i64[5000,3]@1",
    ),
    (
        Case("sort", (T((2, 5000, 3)), 1), {}),
        (
            "+120000 +240000 +120000 +120000 +240000 +240000 +240000 +120000 +375039 -8 -7 "
            "+8703 -9 -6 -5 -4 -3 -2"
        ),
        "f32[2,5000,3]@0 i64[2,5000,3]@1",
    ),
    (
        Case("sort", (T((3, 5000), layout="t"),), {}),
        (
            "+60000 +120000 +60000 +60000 +120000 +120000 +120000 +60000 +191999 -8 -7 +5631 "
            "-9 -6 -5 -4 -3 -2"
        ),
        "f32[3,5000]:1,3@0 i64[3,5000]:1,3@1",
    ),
    (
        Case("sort", (T((5000, 1)), 0), {}),
        "+20000 +40000 +40000 +70143 -3 -2",
        "f32[5000,1]@0 i64[5000,1]@1",
    ),
    (
        Case("sort", (T((5000, 3), layout=(8, 1)), 0), {}),
        (
            "+60000 +120000 +60000 +60000 +120000 +120000 +120000 +60000 +191999 -8 -7 +5631 "
            "-9 -6 -5 -4 -3 -2"
        ),
        "f32[5000,3]@0 i64[5000,3]@1",
    ),
    (
        Case("sort.stable", (T((5000, 3)),), {"stable": True, "dim": 0}),
        (
            "+60000 +120000 +60000 +60000 +120000 +120000 +120000 +60000 +191999 -8 -7 +5631 "
            "-9 -6 -5 -4 -3 -2"
        ),
        "f32[5000,3]@0 i64[5000,3]@1",
    ),
    (
        Case("argsort", (T((5000, 3)), 0), {}),
        (
            "+60000 +120000 +60000 +60000 +120000 +120000 +120000 +60000 +191999 -8 -7 +5631 "
            "-9 -6 -5 -4 -3 -2 -0"
        ),
        "i64[5000,3]@1",
    ),
    (
        Case("topk", (T((5000, 3)), 4500, 0), {}),
        (
            "+54000 +108000 +108000 +54000 +54000 +54000 +108000 +108000 +108000 +54000 "
            "+173823 -10 -9 +5631 -11 -8 -7 -6 -5 -4 +108000 -12 -3 -2"
        ),
        "f32[4500,3]@0 i64[4500,3]@1",
    ),
    (
        Case("topk", (T((3, 5000), layout="t"), 4500), {}),
        (
            "+54000 +108000 +60000 -2 +108000 +54000 +108000 +108000 +54000 +173823 -8 -7 "
            "+5631 -9 -6 -5 +108000 -10 -4 -3"
        ),
        "f32[3,4500]@0 i64[3,4500]@1",
    ),
    (
        Case("sort", (T((4096, 3)), 0), {}),
        "+49152 +98304 +32768 -2",
        "f32[4096,3]@0 i64[4096,3]@1",
    ),
]
RECORDED = SORTS


@pytest.mark.parametrize(
    ("case", "events", "outputs"), RECORDED, ids=lambda v: getattr(v, "name", "")
)
def test_an_operator_asks_for_what_was_recorded(case, events, outputs):
    assert compare(case, [events, outputs], spec_of(load("h200"))) is None


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("case", "events", "outputs"), RECORDED, ids=lambda v: getattr(v, "name", "")
)
def test_a_live_device_asks_for_what_was_recorded(case, events, outputs):
    from recorded import record_kernels

    if torch.cuda.get_device_name() != load("h200")["device"]:
        pytest.skip("recorded on an H200")
    assert record_kernels.record(case)[:2] == [events, outputs]
