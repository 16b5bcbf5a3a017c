"""The batch size of loaders and of what makes them."""

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from memcallback.integrations.lightning.fit.loaders import (
    batch_size_of,
    batch_size_settings,
    check_can_be_read_again,
    num_samples,
    resized,
)

DATA = TensorDataset(torch.arange(100))


def sizes(loader):
    return [len(batch[0]) for batch in loader]


def test_a_resized_loader_is_the_same_but_for_its_batches():
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(
        DATA, 8, shuffle=True, drop_last=True, collate_fn=list, generator=generator, timeout=0
    )
    larger = resized(loader, 30)
    assert batch_size_of(larger) == larger.batch_size == larger.batch_sampler.batch_size == 30
    assert batch_size_of(loader) == 8
    assert [len(batch) for batch in larger] == [30, 30, 30]
    for name in (
        "dataset",
        "sampler",
        "collate_fn",
        "generator",
        "drop_last",
        "num_workers",
        "persistent_workers",
    ):
        assert getattr(larger, name) is getattr(loader, name)


def test_the_order_of_samples_is_that_of_the_loader_before():
    def order(size, loader):
        generator.manual_seed(3)
        return [int(one) for batch in resized(loader, size) for one in batch[0]]

    generator = torch.Generator()
    loader = DataLoader(DATA, 8, sampler=RandomSampler(DATA, generator=generator))
    assert order(None, loader) == order(25, loader) != sorted(order(25, loader))


def test_a_loader_of_a_class_of_ones_own_is_copied_without_its_arguments():
    class Own(DataLoader):
        def __init__(self, path, size):
            super().__init__(DATA, size)
            self.path = path

    larger = resized(Own("somewhere", 8), 50)
    assert type(larger) is Own
    assert larger.path == "somewhere"
    assert sizes(larger) == [50, 50]


def test_loaders_with_batch_samplers_are_resized_too():
    class Buckets(BatchSampler):
        pass

    for kind in (BatchSampler, Buckets):
        loader = DataLoader(DATA, batch_sampler=kind(SequentialSampler(DATA), 8, False))
        assert batch_size_of(loader) == 8
        larger = resized(loader, 60)
        assert sizes(larger) == [60, 40]
        assert type(larger.batch_sampler) is kind
        assert loader.batch_sampler.batch_size == 8


def test_several_loaders_are_resized_together():
    nested = {"a": DataLoader(DATA, 8), "b": [DataLoader(DATA, 8)]}
    larger = resized(nested, 20)
    assert batch_size_of(larger) == 20
    assert sizes(larger["b"][0]) == [20] * 5
    combined = CombinedLoader(nested, "min_size")
    assert batch_size_of(resized(combined, 20)) == 20
    assert batch_size_of(combined) == 8


def test_samples_are_those_of_the_sampler():
    assert num_samples(DataLoader(DATA, 8)) == 100
    assert num_samples(DataLoader(DATA, 8, sampler=SubsetRandomSampler(range(10)))) == 10
    assert (
        num_samples({"a": DataLoader(DATA, 8), "b": DataLoader(TensorDataset(torch.ones(7)), 8)})
        == 7
    )
    assert num_samples(DataLoader(Fresh(), 8)) is None


class Fresh(IterableDataset):
    """Begins anew whenever it is iterated."""

    def __iter__(self):
        return iter(range(10))


class Once(IterableDataset):
    """Goes on where it was."""

    def __init__(self):
        self.stream = iter(range(10))

    def __iter__(self):
        return self.stream


class Itself(IterableDataset):
    def __iter__(self):
        return self

    def __next__(self):
        return 1


def test_a_stream_that_begins_anew_can_be_tried():
    loader = DataLoader(Fresh(), 2)
    check_can_be_read_again(loader)
    assert [len(batch) for batch in resized(loader, 4)] == [4, 4, 2]


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (
            Once(),
            r"The dataset Once keeps a running iterator in its attribute 'stream', so training "
            r"would miss the samples that a trial reads",
        ),
        (
            Itself(),
            r"The dataset Itself is its own iterator.*Create the iterator in its __iter__, or use "
            r"worker processes \(num_workers=1\)",
        ),
    ],
)
def test_a_stream_that_can_be_read_once_is_refused(dataset, text):
    with pytest.raises(ValueError, match=text):
        check_can_be_read_again([DataLoader(dataset, 2)])
    check_can_be_read_again(DataLoader(dataset, 2, num_workers=1))


class NoSize:
    def __iter__(self):
        return iter([[0], [1]])


@pytest.mark.parametrize(
    ("loaders", "text"),
    [
        (
            DataLoader(DATA, batch_size=None),
            r"has batch_size=None: its dataset returns whole batches.*make batches of them "
            r"\(batch_size=32\)",
        ),
        (
            DataLoader(DATA, batch_sampler=NoSize()),
            r"a batch sampler of class NoSize without a number as its batch_size. Give it the "
            r"attribute",
        ),
        (
            [DataLoader(DATA, 8), DataLoader(DATA, 9)],
            r"batches of 8 and 9 samples, but the search is for one batch size",
        ),
        (
            [torch.ones(3)],
            r"A training loader is a Tensor, so its batch size cannot be set. Give a "
            r"torch.utils.data.DataLoader",
        ),
        ([], r"There is no training loader"),
    ],
)
def test_what_has_no_batch_size_is_refused_in_words(loaders, text):
    with pytest.raises(ValueError, match=text):
        batch_size_of(loaders)


def test_the_batch_size_is_set_by_attributes_and_hyperparameters_of_module_and_data_module():
    class Module(LightningModule):
        def __init__(self, batch_size):
            super().__init__()
            self.save_hyperparameters()

    class Data(LightningDataModule):
        def __init__(self):
            super().__init__()
            self.batch_size = 8

    module, data = Module(8), Data()
    found = batch_size_settings(module, data)
    assert [setting.label for setting in found] == [
        "module.hparams.batch_size",
        "datamodule.batch_size",
    ]
    for setting in found:
        setting.set(77)
    assert (module.hparams.batch_size, data.batch_size) == (77, 77)
    assert "_hparams" not in vars(data)


def test_a_property_without_a_setter_is_no_setting():
    class Module(LightningModule):
        def __init__(self, batch_size):
            super().__init__()
            self.save_hyperparameters()

        @property
        def batch_size(self):
            return self.hparams.batch_size

    module = Module(8)
    (setting,) = batch_size_settings(module)
    setting.set(77)
    assert module.batch_size == 77


def test_without_a_setting_there_is_none():
    assert batch_size_settings(LightningModule(), LightningDataModule()) == []
