"""Reads and sets the batch size of data loaders, modules and data modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from memcallback.core.torch_private import tree_leaves, tree_map

#: The attribute or hyperparameter of a module or data module that is the batch size.
NAME = "batch_size"


def batch_size_of(loaders: object) -> int:
    """The batch size of training loaders."""
    sizes = {_size_of(loader) for loader in leaves(loaders)}
    if len(sizes) > 1:
        raise ValueError(
            f"The training loaders have batches of {' and '.join(map(str, sorted(sizes)))} "
            "samples, but the search is for one batch size. Give all of them the same batch size, "
            "or leave out the search and keep theirs."
        )
    if not sizes:
        raise ValueError(
            "There is no training loader, so there is no batch size to search for. Give "
            "train_dataloaders=DataLoader(...)."
        )
    return sizes.pop()


def num_samples(loaders: object) -> int | None:
    """Samples per epoch of the smallest loader, on this rank; None if all are of unknown length."""
    known = [length for loader in leaves(loaders) if (length := _length_of(loader)) is not None]
    return min(known, default=None)


def resized(loaders: Any, batch_size: int | None) -> Any:
    """Copies of loaders with another batch size, but the same dataset, sampler and generator."""
    if hasattr(loaders, "flattened"):  # Lightning's CombinedLoader
        combined = copy.copy(loaders)
        combined.flattened = [_resized(loader, batch_size) for loader in loaders.flattened]
        return combined
    return tree_map(lambda loader: _resized(loader, batch_size), loaders)


def leaves(loaders: Any) -> list[object]:
    """The loaders in a nesting."""
    return list(loaders.flattened if hasattr(loaders, "flattened") else tree_leaves(loaders))


def check_can_be_read_again(loaders: object) -> None:
    """Check that a trial does not use up samples, as it would of a dataset with one iterator."""
    for loader in leaves(loaders):
        dataset = getattr(loader, "dataset", None)
        if not isinstance(dataset, IterableDataset) or getattr(loader, "num_workers", 0) > 0:
            continue
        name = type(dataset).__name__
        if hasattr(type(dataset), "__next__"):
            raise ValueError(_read_once(name, "is its own iterator"))
        for attribute, value in vars(dataset).items():
            if hasattr(type(value), "__next__"):
                raise ValueError(
                    _read_once(name, f"keeps a running iterator in its attribute {attribute!r}")
                )


def _read_once(name: str, why: str) -> str:
    return (
        f"The dataset {name} {why}, so training would miss the samples that a trial reads. Create "
        "the iterator in its __iter__, or use worker processes (num_workers=1), which have a copy "
        "of the dataset."
    )


def _size_of(loader: Any) -> int:
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"A training loader is a {type(loader).__name__}, so its batch size cannot be set. "
            "Give a torch.utils.data.DataLoader with batch_size=..."
        )
    if loader.batch_size is not None:
        return int(loader.batch_size)
    if loader.batch_sampler is None:
        raise ValueError(
            "The training DataLoader has batch_size=None: its dataset returns whole batches of "
            "unknown size. Let the dataset return samples, and the DataLoader make batches of them "
            "(batch_size=32)."
        )
    size = getattr(loader.batch_sampler, NAME, None)
    if not isinstance(size, int) or isinstance(size, bool):
        raise ValueError(
            "The training DataLoader has a batch sampler of class "
            f"{type(loader.batch_sampler).__name__} without a number as its batch_size. Give it "
            "the attribute batch_size and use that in its __iter__, or give the DataLoader a "
            "sampler and batch_size=32 instead."
        )
    return size


def _length_of(loader: Any) -> int | None:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    # A sampler can be shorter than its dataset: that of one rank, or of a subset.
    sources = (getattr(loader.batch_sampler, "sampler", None), loader.sampler, loader.dataset)
    return next((length for source in sources if (length := _length(source)) is not None), None)


def _length(source: Any) -> int | None:
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


def _resized(loader: Any, batch_size: int | None) -> Any:
    # Copied rather than made anew, because the arguments of a subclass are unknown.
    if not isinstance(loader, DataLoader):
        return loader
    own = copy.copy(loader)
    # DataLoader refuses to set these attributes, so we write to its dictionary. The copy has no
    # running iterator yet.
    vars(own)["_iterator"] = None
    if batch_size is not None and loader.batch_sampler is not None:
        vars(own)["batch_sampler"] = _resized_sampler(loader.batch_sampler, batch_size)
        if loader.batch_size is not None:
            vars(own)["batch_size"] = batch_size
    return own


def _resized_sampler(sampler: Any, batch_size: int) -> Any:
    if type(sampler) is BatchSampler:
        return BatchSampler(sampler.sampler, batch_size, sampler.drop_last)
    own = copy.copy(sampler)
    setattr(own, NAME, batch_size)
    return own


@dataclass(frozen=True)
class BatchSizeSetting:
    """An attribute or hyperparameter that is the batch size of a module or data module.

    Attributes:
        label: How to write it, such as `datamodule.hparams.batch_size`.
        set: Sets it.
    """

    label: str
    set: Callable[[int], None]


def batch_size_settings(module: Any, datamodule: Any = None) -> list[BatchSizeSetting]:
    """All attributes and hyperparameters of a module and its data module for the batch size."""
    return [
        setting
        for owner, name in ((module, "module"), (datamodule, "datamodule"))
        if owner is not None
        for setting in _settings_of(owner, name)
    ]


def _settings_of(owner: Any, name: str) -> Iterator[BatchSizeSetting]:
    # A property without a setter only shows another setting.
    shown = getattr(type(owner), NAME, None)
    if hasattr(owner, NAME) and not (isinstance(shown, property) and shown.fset is None):
        yield BatchSizeSetting(f"{name}.{NAME}", lambda size: setattr(owner, NAME, size))
    # Reading `hparams` would create them.
    hparams = vars(owner).get("_hparams")
    if hparams is not None and NAME in hparams:
        yield BatchSizeSetting(
            f"{name}.hparams.{NAME}", lambda size: hparams.__setitem__(NAME, size)
        )
