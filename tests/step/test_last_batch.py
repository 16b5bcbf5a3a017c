"""The last batch of an epoch, where a data loader shows that it is smaller."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from memcallback.step.batch import last_batch_size


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.zeros(100, 2)


class OwnBatches(BatchSampler):
    """May make batches of any sizes."""


class Failing(SequentialSampler):
    def __len__(self):
        raise RuntimeError("unknown")


DATA = torch.zeros(100, 2)


@pytest.mark.parametrize(
    ("loader", "batch_size", "last"),
    [
        (DataLoader(DATA, batch_size=16), 16, 4),
        (DataLoader(DATA, batch_size=16, shuffle=True), 16, 4),
        # Pairs: each sample of the loader is two of the model.
        (DataLoader(DATA, batch_size=16), 32, 8),
        (DataLoader(DATA, batch_size=16), 24, None),
        (DataLoader(DATA, batch_size=16), None, None),
        (DataLoader(DATA, batch_size=16), 4, None),
        (DataLoader(DATA, batch_size=16, drop_last=True), 16, None),
        (DataLoader(DATA, batch_size=20), 20, None),
        # All of it is one batch.
        (DataLoader(DATA, batch_size=128), 128, None),
        (DataLoader(Stream(), batch_size=16), 16, None),
        (DataLoader(DATA, batch_size=16, sampler=Failing(DATA)), 16, None),
        (
            DataLoader(DATA, batch_sampler=OwnBatches(SequentialSampler(DATA), 16, False)),
            16,
            None,
        ),
        (DataLoader(DATA, batch_size=None), 2, None),
        ([DATA], 16, None),
    ],
)
def test_a_smaller_last_batch_is_known_from_the_loader(loader, batch_size, last):
    assert last_batch_size(loader, batch_size) == last
