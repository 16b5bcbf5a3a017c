"""Lightning's strategies for several CUDA devices, real or virtual: what the callback predicts of
each rank is what it measures.
"""

import json
import socket

import lightning_rank_cases
import own_process
import pytest
import torch
from needs import needs_ranks

pytestmark = [
    pytest.mark.cuda,
    needs_ranks,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.device_count() < 2,
        reason="needs two CUDA devices",
    ),
]
WORLD_SIZE = 2
SMALL_SEGMENT = 2 << 20


def train(strategy, folder, *, validates=False, predicts=True):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own_process.start(
        lightning_rank_cases.run,
        (WORLD_SIZE, str(folder), strategy, port, validates, predicts),
        nprocs=WORLD_SIZE,
    )


def run(strategy, folder, **options):
    """What each rank found."""
    train(strategy, folder, **options)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


@pytest.mark.parametrize(
    ("strategy", "validates"),
    [
        *((name, False) for name in lightning_rank_cases.STRATEGIES),
        ("fsdp", True),
        (lightning_rank_cases.GATHERED, False),
        (lightning_rank_cases.MANUAL, False),
        (lightning_rank_cases.GRADIENTS_SHARDED, False),
        (lightning_rank_cases.COMPRESSED, False),
        (lightning_rank_cases.UNUSED, False),
    ],
)
def test_the_callback_predicts_each_rank(strategy, validates, tmp_path):
    for found in run(strategy, tmp_path, validates=validates):
        for ours, theirs in zip(found["predicted"], found["measured"], strict=True):
            assert ours["label"] == theirs["label"]
            assert ours["allocated"] == pytest.approx(theirs["allocated"], rel=0.001)
            assert abs(ours["reserved"] - theirs["reserved"]) <= SMALL_SEGMENT


def test_the_callback_predicts_each_rank_of_a_compiled_module(tmp_path, monkeypatch):
    monkeypatch.delenv("MEMCALLBACK_ISOLATE", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    # The second training finds the code of the first.
    train(lightning_rank_cases.COMPILED, tmp_path, predicts=False)
    for found in run(lightning_rank_cases.COMPILED, tmp_path):
        assert any(one.startswith("Compiled code is predicted from") for one in found["caveats"])
        for ours, theirs in zip(found["predicted"], found["measured"], strict=True):
            assert ours["label"] == theirs["label"]
            assert ours["allocated"] == pytest.approx(theirs["allocated"], rel=0.001), (
                found["predicted"],
                found["measured"],
            )
            # In a job the Trainer has 512 bytes of its own on the device. Where they are decides
            # how blocks of up to 1 MiB fill their segments, of 2 MiB each.
            assert abs(ours["reserved"] - theirs["reserved"]) <= SMALL_SEGMENT
