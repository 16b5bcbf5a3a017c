"""Read and set the batch size of data loaders."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

#: The attribute, or the hyperparameter, of a module or data module that says how many samples there
#: are in a batch.
NAME = "batch_size"


def batch_size_of(loaders: object) -> int:
    """How many samples a batch of training loaders has."""
    sizes = {_size_of(loader) for loader in leaves(loaders)}
    if len(sizes) > 1:
        raise ValueError(
            f"The training loaders have batches of {' and '.join(map(str, sorted(sizes)))} samples, and one size is looked for. Give them one "
            "batch size, or set theirs by hand."
        )
    if not sizes:
        raise ValueError(
            "There is no training loader, so there is no batch size to look for. Give train_dataloaders=DataLoader(...)."
        )
    return sizes.pop()


def num_samples(loaders: object) -> int | None:
    """Samples in an epoch of the smallest loader, on this rank alone; None if none of them has an
    end that is known.
    """
    known = [length for loader in leaves(loaders) if (length := _length_of(loader)) is not None]
    return min(known, default=None)


def resized(loaders: Any, batch_size: int | None) -> Any:
    """Copies of loaders whose batches have another size; with the same dataset, the same sampler
    and its generator, and all else.
    """
    if hasattr(loaders, "flattened"):  # Lightning's CombinedLoader
        combined = copy.copy(loaders)
        combined.flattened = [_resized(one, batch_size) for one in loaders.flattened]
        return combined
    return pytree.tree_map(lambda one: _resized(one, batch_size), loaders)


def leaves(loaders: Any) -> list[object]:
    """The loaders in a nesting."""
    return list(loaders.flattened if hasattr(loaders, "flattened") else pytree.tree_leaves(loaders))


def check_can_be_read_again(loaders: object) -> None:
    """See that reading from the loaders changes nothing that a second reading depends on."""
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
        f"The dataset {name} {why}: the samples that a trial reads would be missing in training. Make the iterator in its __iter__, or use "
        "worker processes (num_workers=1), which have a copy of the dataset."
    )


def _size_of(loader: Any) -> int:
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"A training loader is a {type(loader).__name__}, whose batch size cannot be set. Give a torch.utils.data.DataLoader with batch_size=..."
        )
    if loader.batch_size is not None:
        return int(loader.batch_size)
    if loader.batch_sampler is None:
        raise ValueError(
            "The training DataLoader has batch_size=None: its dataset gives whole batches, whose size it does not know. Let the dataset give "
            "samples, and the DataLoader make batches of them (batch_size=32)."
        )
    size = getattr(loader.batch_sampler, NAME, None)
    if not isinstance(size, int) or isinstance(size, bool):
        raise ValueError(
            f"The training DataLoader has a batch sampler of class {type(loader.batch_sampler).__name__} without a number as its batch_size. "
            "Give it the attribute batch_size and use that in its __iter__, or give the DataLoader a sampler and batch_size=32 instead."
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
    """A copy, rather than a new one from the same arguments: those of a subclass cannot be known."""
    if not isinstance(loader, DataLoader):
        return loader
    own = copy.copy(loader)
    # DataLoader refuses new values for these once it has been made; a copy that nobody has used has
    # no batches yet.
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
class Place:
    """Where a module or data module says its batch size.

    Attributes:
        label: As a person would write it, such as `datamodule.hparams.batch_size`.
        set: Sets it.
    """

    label: str
    set: Callable[[int], None]


def places(module: Any, datamodule: Any = None) -> list[Place]:
    """Every place in which a module and its data module say the batch size: the attribute, the
    hyperparameter.
    """
    return [
        place
        for owner, name in ((module, "module"), (datamodule, "datamodule"))
        if owner is not None
        for place in _places(owner, name)
    ]


def _places(owner: Any, name: str) -> Iterator[Place]:
    # A property without a setter shows what stands elsewhere.
    shown = getattr(type(owner), NAME, None)
    if hasattr(owner, NAME) and not (isinstance(shown, property) and shown.fset is None):
        yield Place(f"{name}.{NAME}", lambda size: setattr(owner, NAME, size))
    # Asking for `hparams` would make them.
    hparams = vars(owner).get("_hparams")
    if hparams is not None and NAME in hparams:
        yield Place(f"{name}.hparams.{NAME}", lambda size: hparams.__setitem__(NAME, size))
