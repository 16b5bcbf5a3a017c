"""Whatever was recorded on a device is replayed without one: no file of tests/recorded is there for
nobody.
"""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
RECORDED = TESTS / "recorded"
#: What was recorded -> the test that replays it, and the module that opens it.
READERS = {
    "allocator/*.json.gz": (
        "prediction/test_allocator_recorded.py",
        "prediction/test_allocator_recorded.py",
    ),
    "allocator_long/*.json.gz": (
        "prediction/test_allocator_recorded.py",
        "prediction/test_allocator_recorded.py",
    ),
    "allocator_h100/*.json.gz": (
        "prediction/test_allocator_recorded.py",
        "prediction/test_allocator_recorded.py",
    ),
    "convolutions_h200/*.json.gz": ("cuda/test_convolution.py", "cuda/test_convolution.py"),
    "convolutions_h100/*.json.gz": ("cuda/test_convolution.py", "cuda/test_convolution.py"),
    "convolutions/*.json.gz": ("cuda/test_convolution.py", "convolution_cases.py"),
    "plans/*.json.gz": ("cuda/test_convolution_plans.py", "convolution_plans.py"),
    "stream_k/*.json.gz": ("cuda/test_stream_k.py", "cuda/test_stream_k.py"),
    "recurrent/*.json.gz": ("cuda/test_recurrent_sizes.py", "cuda/test_recurrent_sizes.py"),
    "kernels/a100.json": ("cuda/test_kernels.py", "cuda/test_kernels.py"),
    "kernels/h200.json": ("cuda/test_kernels.py", "cuda/test_kernels.py"),
    "kernels/h200-whole.json.gz": ("cuda/test_kernel_zoo.py", "cuda/test_kernel_zoo.py"),
    "kernels/t4.json": ("cuda/test_kernels.py", "cuda/test_kernels.py"),
    "composites.json": ("cuda/test_decompositions.py", "cuda/test_decompositions.py"),
    "bfloat16.json": ("trace/test_bfloat16.py", "bfloat16_steps.py"),
    "user_code.json": ("trace/test_user_code.py", "trace/test_user_code.py"),
    "workspaces.json": ("trace/test_workspaces.py", "workspace_steps.py"),
    "sparse.json": ("cuda/test_sparse_operators.py", "sparse_cases.py"),
}


def test_every_recorded_file_is_replayed_by_a_test():
    files = [
        path
        for path in RECORDED.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".md", ".pyc")
    ]
    unread = [
        path for path in files if not any(path in RECORDED.glob(pattern) for pattern in READERS)
    ]
    assert unread == []


@pytest.mark.parametrize("pattern", READERS)
def test_each_reader_is_there_and_opens_what_is_there(pattern):
    test, opens = READERS[pattern]
    assert list(RECORDED.glob(pattern))
    folder, name = Path(pattern).parent.name, Path(pattern).stem
    assert (
        f'"{folder}"' in (TESTS / opens).read_text()
        if folder
        else f'"{name}.json"' in (TESTS / opens).read_text()
    )
    assert (
        opens == test
        or f"{Path(opens).stem} import" in (TESTS / test).read_text()
        or f"import {Path(opens).stem}" in (TESTS / test).read_text()
    )
