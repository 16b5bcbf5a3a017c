"""Predicted against measured: a part of `benchmarks/accuracy.py compare` that needs neither a device nor cuDNN.

What was measured is recorded in benchmarks/results/accuracy, with device, versions and date.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from accuracy import predict, read_json
from accuracy_comparison import figures
from accuracy_configs import CONFIGS

from memcallback.cuda_convolution import workspaces_are_known

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "accuracy"
#: Card -> configurations without convolutions, whose workspaces only cuDNN knows.
CASES = {
    "h200": [
        "gpt2-adamw-bf16-mixed",
        "bert-adamw-fused-16-mixed",
        "llama-adamw-bf16-true",
        "t5-adafactor-32-true",
        "dlrm-adam-16-mixed-clip",
        "mlp-adam-amsgrad-32-true-accumulate4",
    ],
    "a100": ["gpt2-adamw-32-true", "gpt2-lora-adamw-bf16-mixed-accumulate2", "lstm-cell-adam-32-true-clip", "mlp-lbfgs-32-true"],
    "t4": ["gpt2-sgd-16-mixed-checkpoint-reentrant", "mlp-mixer-adamw-32-true", "graph-network-adam-32-true"],
}


def compared(card, name):
    document = read_json(RESULTS / f"nvidia-{card}-virtual.json.gz")
    config = next(config for config in CONFIGS if config.name == name)
    answer = predict(config, document["environment"]["device"])
    return figures(name, document["configs"][name]["windows"][-1], answer["steps"]), answer["caveats"]


@pytest.mark.parametrize(("card", "name"), [(card, name) for card, names in CASES.items() for name in names])
def test_a_steady_step_is_predicted_as_it_was_measured(card, name):
    found, _ = compared(card, name)
    assert found
    assert [figure for figure in found if not figure.is_within] == []


@pytest.mark.skipif(workspaces_are_known(), reason="cuDNN is installed, whose answers are exact")
def test_without_cudnn_a_convolutional_network_is_predicted_within_a_band_and_a_caveat_says_so():
    found, caveats = compared("h200", "resnet18-sgd-32-true")
    assert [figure for figure in found if figure.quantity in ("start", "end") and abs(figure.error_share) > 0.01] == []
    assert [figure for figure in found if figure.quantity == "peak allocated" and abs(figure.error_share) > 0.05] == []
    assert any("Convolution workspaces are estimates" in caveat for caveat in caveats)
