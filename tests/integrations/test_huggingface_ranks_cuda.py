"""A Hugging Face Trainer on several CUDA devices, real or virtual: what the callback predicts of
each rank, with the job's DistributedDataParallel, is what it measures.
"""

import json
import socket

import huggingface_rank_cases
import own_process
import pytest
import torch
from needs import needs_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.cuda,
    needs_ranks,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.device_count() < 2,
        reason="needs two CUDA devices",
    ),
]
WORLD_SIZE = 2
#: What the Trainer itself has on the device: losses and numbers of tokens.
TRAINERS_OWN_BYTES = 32 * 512


def train(folder, options, *, predicts=True):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own_process.start(
        huggingface_rank_cases.run,
        (WORLD_SIZE, str(folder), options, port, predicts),
        nprocs=WORLD_SIZE,
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bf16": True},
        {"torch_compile": True},
        {"torch_compile": True, "bf16": True},
        {"is_stream": True, "max_steps": 5},
    ],
    ids=str,
)
def test_the_callback_predicts_each_rank(options, tmp_path, monkeypatch):
    monkeypatch.delenv("MEMCALLBACK_ISOLATE", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    is_compiled = "torch_compile" in options
    if is_compiled:  # the second training finds the code of the first
        train(tmp_path, options, predicts=False)
    train(tmp_path, options)
    for rank in range(WORLD_SIZE):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert not any("wrapper" in note for note in found["notes"])
        said = [one for one in found["caveats"] if one.startswith("Compiled code is predicted")]
        assert len(said) == is_compiled
        for ours, theirs in zip(found["predicted"], found["measured"], strict=True):
            assert ours["label"] == theirs["label"]
            assert abs(ours["allocated"] - theirs["allocated"]) <= TRAINERS_OWN_BYTES, ours
            assert ours["reserved"] == theirs["reserved"], ours
