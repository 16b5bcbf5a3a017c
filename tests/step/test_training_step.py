from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import training

from memcallback import TrainingStep
from memcallback.step.batch import BatchSize, infer_batch_size


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(7, 3), 7),
        ((torch.ones(7, 3), torch.ones(7)), 7),
        ({"image": torch.ones(7, 3), "name": ["a"] * 7, "scale": torch.tensor(2.0)}, 7),
        (UserDict(ids=torch.ones(7, 3)), 7),
        ([[{"deep": (torch.ones(7),)}]], 7),
        (SimpleNamespace(num_graphs=7, x=torch.ones(100, 3)), 7),
        (SimpleNamespace(batch_size=torch.Size([7, 2])), 7),
        (SimpleNamespace(batch_size=np.int64(7), x=torch.ones(100, 3)), 7),
        (SimpleNamespace(batch_size=torch.tensor(7), x=torch.ones(100, 3)), 100),
    ],
)
def test_the_batch_size_is_found_in_any_nesting(batch, size):
    assert infer_batch_size(batch) == BatchSize(batch_size=size)


def test_where_dimensions_differ_the_most_frequent_is_taken_and_said_to_be_a_guess():
    batch = (torch.ones(7, 3), torch.ones(7), torch.ones(50, 2))
    assert infer_batch_size(batch) == BatchSize(batch_size=7, is_ambiguous=True)


@pytest.mark.parametrize("batch", [None, 3, "text", torch.tensor(1.0), []])
def test_a_batch_without_first_dimensions_has_no_size(batch):
    assert infer_batch_size(batch) == BatchSize(batch_size=None)


def test_lightnings_optimizers_are_found_in_whatever_configure_optimizers_returns():
    module = training.Automatic()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    for returned in (
        sgd,
        [sgd],
        {"optimizer": sgd, "lr_scheduler": None},
        ([sgd], []),
        [{"optimizer": sgd}],
    ):
        module.configure_optimizers = lambda returned=returned: returned
        assert TrainingStep.from_lightning(module, torch.ones(2, 3)).optimizers_of(module) == (sgd,)
    module.configure_optimizers = lambda: None
    assert TrainingStep.from_lightning(module, torch.ones(2, 3)).optimizers_of(module) == ()


def test_a_trainer_clips_in_one_way():
    with pytest.raises(
        ValueError,
        match=r"clip_grad_norm is 1\.0 and clip_grad_value is 0\.5; a Trainer clips in one of "
        r"these ways: give one",
    ):
        TrainingStep.from_lightning(
            training.Automatic(), torch.ones(2, 3), clip_grad_norm=1.0, clip_grad_value=0.5
        )
