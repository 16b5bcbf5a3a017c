"""The observer changes nothing: bit by bit, with and without the callback."""

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from observer import differences, run

from memcallback import MemoryCallback


@pytest.mark.parametrize("case", ["fp32", "bf16-mixed", "16-mixed", "accumulation"])
def test_training_leaves_the_same_bits_with_and_without_the_callback(tmp_path, case):
    def options():
        return {
            "fp32": {},
            "bf16-mixed": {"precision": "bf16-mixed"},
            "16-mixed": {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]},
            "accumulation": {"accumulate_grad_batches": 3},
        }[case]

    callback = MemoryCallback()
    with_it = run(tmp_path, with_callback=True, accelerator="cpu", callback=callback, **options())
    without = run(tmp_path, with_callback=False, accelerator="cpu", **options())
    assert differences(with_it, without) == []
    assert callback.prediction is not None
    assert callback.recorder.steps
    assert with_it["calls"] == 12
    assert with_it["logged"]


def test_the_comparison_finds_a_single_changed_bit():
    tensor = torch.zeros(1000)
    changed = tensor.clone()
    changed[777] = 1e-45
    assert differences({"a": [tensor, 1]}, {"a": [changed, 1]}) == ["/a/0"]
    assert differences({"a": 1}, {"b": 1}) == [": keys"]
    assert differences([1, 2], [1]) == [": length"]
