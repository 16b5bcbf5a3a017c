"""Ranks of a job on several CUDA devices, real or virtual: each predicts itself, trains, and finds
what it predicted.
"""

import json

import own_process
import pytest
import rank_cases
import torch
from needs import needs_ranks

pytestmark = [pytest.mark.cuda, needs_ranks]
#: For how many ranks there are devices here.
NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
#: All of them for other models are in benchmarks/ranks.py.
OF_TWO = [
    *rank_cases.of_transformer(),
    *rank_cases.of_lists(),
    *rank_cases.of_norms(),
    *rank_cases.of_libraries(),
    "convolutional, ddp",
    "convolutional, fsdp2",
    "recurrent, fsdp2 in bf16",
    "encoder, tensor parallel",
    "transformer, pipeline 1F1B",
    "convolutional, pipeline GPipe",
    "perceptron, pipeline Interleaved1F1B",
]
OF_FOUR = [
    *rank_cases.of_mesh(),
    "transformer, ddp",
    "transformer, fsdp2",
    "perceptron, pipeline 1F1B",
]
needs_2 = pytest.mark.skipif(NUM_DEVICES < 2, reason="needs two CUDA devices")
needs_4 = pytest.mark.skipif(NUM_DEVICES < 4, reason="needs four CUDA devices")


def run(folder, world_size, names, predicts=True):
    """What each rank found: predicted and measured, by case."""
    own_process.start(
        rank_cases.run, (world_size, str(folder), list(names), predicts), nprocs=world_size
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run(tmp_path_factory.mktemp("two"), 2, OF_TWO)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Of processes that found their code in Inductor's cache, where others have left it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MEMCALLBACK_ISOLATE", raising=False)
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        names = rank_cases.of_compiled()
        run(tmp_path_factory.mktemp("cold"), 2, names, predicts=False)
        return run(tmp_path_factory.mktemp("warm"), 2, names)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return run(tmp_path_factory.mktemp("four"), 4, OF_FOUR)


def check(ranks, case):
    for rank, found in enumerate(ranks):
        predicted, measured = found[case]["predicted"], found[case]["measured"]
        assert [window["label"] for window in predicted] == [window["label"] for window in measured]
        for ours, theirs in zip(predicted, measured, strict=True):
            assert ours["allocated"] == pytest.approx(theirs["allocated"], rel=0.01), (
                rank,
                ours,
                theirs,
            )
            assert ours["reserved"] == pytest.approx(theirs["reserved"], rel=0.04), (
                rank,
                ours,
                theirs,
            )


@needs_2
@pytest.mark.parametrize("case", OF_TWO)
def test_each_of_two_ranks_predicts_its_own_peaks(two, case):
    check(two, case)


@needs_2
@pytest.mark.parametrize("case", rank_cases.of_compiled())
def test_ranks_predict_their_compiled_blocks(compiled, case):
    check(compiled, case)
    assert any(
        caveat.startswith("Compiled code is predicted from")
        for caveat in compiled[0][case]["caveats"]
    )


@needs_4
@pytest.mark.parametrize("case", OF_FOUR)
def test_each_of_four_ranks_predicts_its_own_peaks(four, case):
    check(four, case)
