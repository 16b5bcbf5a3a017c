"""Savings under DistributedDataParallel: two processes on this CPU, which exchange gradients
through gloo.
"""

import pytest
import savings_ranks
import torch
from observer import differences
from savings_ranks import ACCUMULATE, MICRO_BATCH, NUM_RANKS, NUM_SAMPLES, loss_of, network, samples


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(savings_ranks.run, (str(folder),), nprocs=NUM_RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(NUM_RANKS)]


@pytest.fixture(scope="module")
def expected():
    """The gradients of each update of one process with the batches of all ranks."""
    model, seen = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first in range(0, NUM_SAMPLES, MICRO_BATCH * ACCUMULATE):
        window = slice(first, first + MICRO_BATCH * ACCUMULATE)
        of_ranks = [tuple(part[window] for part in samples(rank)) for rank in range(NUM_RANKS)]
        optimizer.zero_grad()
        loss_of(model, tuple(map(torch.cat, zip(*of_ranks, strict=True)))).backward()
        seen.append([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
    return seen


@pytest.mark.parametrize("case", ["with length", "without length"])
def test_the_gradients_are_those_of_the_large_batch_on_every_rank(found, expected, case):
    assert len(expected) == 2
    for rank in found:
        for gradients, others in zip(rank[case]["gradients"], expected, strict=True):
            for gradient, other in zip(gradients, others, strict=True):
                torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("case", ["with length", "without length"])
def test_ranks_exchange_gradients_once_a_window(found, case):
    assert [rank[case]["num_exchanges"] for rank in found] == [2, 2]


def test_checkpointing_leaves_the_same_bits_under_mixed_precision(found):
    for rank in found:
        assert differences(rank["plain"], rank["checkpointed"]) == []
        assert rank["checkpointed"]["state"]["blocks.0.1.num_batches_tracked"] == 6


def test_an_overflow_on_one_rank_skips_the_step_on_both(found):
    assert [rank["checkpointed"]["updates"] for rank in found] == [
        [False, True, False, False, False, True]
    ] * 2
    states = [rank["checkpointed"]["state"] for rank in found]
    assert all(
        torch.equal(states[0][name], states[1][name])
        for name in states[0]
        if "weight" in name or "bias" in name
    )


def test_counts_of_tokens_are_refused_where_ranks_count_the_same(found):
    assert found[0]["refusal"].startswith("num_samples cannot be given on several ranks")
