"""Figures of several ranks on CUDA devices, real or virtual, against what each rank reads of its
own allocator.
"""

import pickle

import own_process
import pytest
import rank_jobs_cuda
import torch
from rank_jobs import free_port

from memcallback import Phase

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("strategy", rank_jobs_cuda.STRATEGIES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_is_shown_of_each_rank_is_what_its_allocator_says(tmp_path, strategy, num_ranks):
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA devices")
    own_process.start(
        rank_jobs_cuda.run, (num_ranks, free_port(), str(tmp_path), strategy), nprocs=num_ranks
    )
    read = [pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(num_ranks)]
    ranks = read[0]["report"].ranks
    assert ranks.number == rank_jobs_cuda.NUM_STEPS
    assert [point.peak_allocated_bytes for point in ranks.points] == [
        rank["peak_allocated_bytes"] for rank in read
    ]
    assert [point.peak_reserved_bytes for point in ranks.points] == [
        rank["peak_reserved_bytes"] for rank in read
    ]
    assert all(
        set(point.phases) == set(Phase) and max(point.phases.values()) == point.peak_allocated_bytes
        for point in ranks.points
    )
    # What the driver keeps for itself is no memory of CUDA's.
    assert all(
        point.capacity_bytes >= rank["capacity_bytes"]
        for point, rank in zip(ranks.points, read, strict=True)
    )
    assert ranks.worst.peak_reserved_bytes == max(rank["peak_reserved_bytes"] for rank in read)
    assert all(rank["report"].ranks is None for rank in read[1:])
