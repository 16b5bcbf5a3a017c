"""A Hugging Face Trainer on several CUDA devices, real or virtual: what the callback predicts of
each rank, with the job's DistributedDataParallel, is what it measures.
"""

import json
import socket

import huggingface_rank_cases
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


def run(folder, options):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(
        huggingface_rank_cases.run, (WORLD_SIZE, str(folder), options, port), nprocs=WORLD_SIZE
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


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
    for _ in range(2 if is_compiled else 1):  # the second finds the code of the first
        ranks = run(tmp_path, options)
    for found in ranks:
        assert not any("wrapper" in note for note in found["notes"])
        said = [one for one in found["caveats"] if one.startswith("Compiled code is predicted")]
        assert len(said) == is_compiled
        for ours, theirs in zip(found["predicted"], found["measured"], strict=True):
            assert ours["label"] == theirs["label"]
            assert abs(ours["allocated"] - theirs["allocated"]) <= TRAINERS_OWN_BYTES, ours
            assert ours["reserved"] == theirs["reserved"], ours
