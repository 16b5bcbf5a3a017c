"""checkpoint(): activation checkpointing of a model in place, which can be undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from memcallback.core.tensors import tensors_in
from memcallback.savings.first_pass import AsInFirstPass
from memcallback.step.model import (
    is_sequential,
    layer_containers,
    listed,
    module_named,
    segment_starts,
)

#: `checkpoint=` of `MemoryCallback`: True for the layers that `checkpoint` finds, or a name of a
#: module, several names, or numbers of segments by name.
CheckpointOption = bool | str | Sequence[str] | Mapping[str, int]

#: Containers of blocks.
_BLOCKS = (nn.ModuleList, nn.ModuleDict)


def checkpoint(
    model: nn.Module | Sequence[nn.Module],
    name: str | Sequence[str] | Mapping[str, int] | None = None,
    segments: int | None = None,
) -> Checkpointing:
    """Checkpoint parts of a model in place: save fewer tensors, run these parts forward twice.

    Between its forward and its backward pass a segment keeps its input, and no tensor that it
    computed inside (`torch.utils.checkpoint`, non-reentrant). Gradients are bit-identical to those
    without checkpointing: the second forward pass draws the same random numbers, such as dropout
    masks, sees buffers as the first pass saw them, and leaves buffers (such as the running
    statistics of batch norm) and random number generators as it finds them. The generators are the
    global ones of PyTorch, Python and NumPy; a generator of a module's own (`torch.Generator`,
    `random.Random`, `numpy.random.default_rng()`) is not among them: it goes on, and what it draws
    the second time is other than before. Names of parameters, hooks, DistributedDataParallel and
    autocast work as before. Anything else that a module counts or stores in its forward pass
    happens twice: turn key-value caches off.

    - An `nn.Sequential` is cut into segments. If it is the model itself, the last segment is not
      checkpointed, as in `torch.utils.checkpoint.checkpoint_sequential`: it would be computed again
      right after it was computed.
    - Each block of an `nn.ModuleList`, of an `nn.ModuleDict`, or of a list is checkpointed.
    - Any other named module is checkpointed as one block.

    Copies of buffers, other than the running statistics of norm layers, are kept until the backward
    pass, since a module may change its buffers (spectral norm, codebooks).

    Args:
        model: The model, which may be wrapped by DistributedDataParallel; or a list of its blocks,
            or an `nn.ModuleList` or `nn.ModuleDict` of them.
        name: The name of a module, several names, or a mapping from names to numbers of segments;
            by default every outermost `nn.Sequential` of several layers and every outermost
            `nn.ModuleList` of several blocks; of a list every block.
        segments: Into how many segments an `nn.Sequential` is cut, as evenly as in-place layers
            allow. By default one for each child if any child has children of its own, else about
            the square root of the number of children (arXiv 1604.06174).

    Returns:
        The checkpointing; its `undo()` restores the model, and so does the end of a `with` block.

    Raises:
        ValueError: If there is no such module, or no layers are found; if a number of segments is
            out of range or the module cannot be cut; if a module is checkpointed already, or has no
            forward pass; if `name` or a list is empty.
        TypeError: If `name`, or a number of segments, is of another type.
        RuntimeError: In the forward pass, if a segment changes its own input in place.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        >>> with checkpoint(model, segments=2):
        ...     model(torch.ones(4, 8)).sum().backward()
    """
    root = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    root = root.module if isinstance(root, nn.parallel.DistributedDataParallel) else root
    if name is None and isinstance(root, _BLOCKS) and not _has_forward(root):
        name = ""
    segments_of = _segments_by_name(root, name, segments)
    forwards = list(
        chain.from_iterable(
            _forwards(root, *name_and_segments) for name_and_segments in segments_of.items()
        )
    )
    if len({id(forward.module) for forward in forwards}) < len(forwards):
        raise ValueError(
            f"name={list(segments_of)} has a module twice, perhaps as a block of another one. "
            "Name each once."
        )
    return Checkpointing(tuple(segments_of), forwards)


def is_checkpointed(model: nn.Module) -> bool:
    """Whether a part of the model is checkpointed by `checkpoint` now."""
    return any(isinstance(vars(module).get("forward"), _Forward) for module in model.modules())


def checkpoint_option(model: nn.Module, option: CheckpointOption) -> Checkpointing:
    """Call `checkpoint` with the option `checkpoint=` of `MemoryCallback`."""
    check_checkpoint(option)
    return checkpoint(model, None if isinstance(option, bool) else option)


def check_checkpoint(option: object) -> None:
    """Check the option `checkpoint=` of `MemoryCallback`."""
    names = [option] if isinstance(option, str) else option
    if option is not True and not (
        isinstance(names, (list, tuple, Mapping))
        and names
        and all(isinstance(name, str) for name in names)
    ):
        raise ValueError(
            "checkpoint must be True, the name of a module, a list of names, or a mapping from "
            f"names to numbers of segments, got {option!r}. Leave it out for none."
        )


def _segments_by_name(
    root: nn.Module, name: str | Sequence[str] | Mapping[str, int] | None, segments: int | None
) -> Mapping[str, int | None]:
    """The modules to checkpoint, with numbers of segments; None is for the default."""
    if name is not None:
        _check_name(name)
    if isinstance(name, Mapping):
        if segments is not None:
            raise ValueError(
                f"segments={segments} contradicts the numbers in name={dict(name)}. "
                "Leave segments out."
            )
        return name
    names = layer_containers(root) if name is None else [name] if isinstance(name, str) else name
    if segments is not None and len(names) > 1:
        raise ValueError(
            f"segments={segments} is for one nn.Sequential, and there are {len(names)} modules: "
            f"{listed(names)}. Leave it out, or give a mapping: name={{'...': 4}}."
        )
    return dict.fromkeys(names, segments)


def _check_name(name: object) -> None:
    """Check the type of `name`."""
    names = [name] if isinstance(name, str) else name
    hint = "Leave it out to find modules automatically."
    if not isinstance(names, (list, tuple, Mapping)) or not all(
        isinstance(module_name, str) for module_name in names
    ):
        raise TypeError(
            "name must be the name of a module, a list of names, or a mapping from names to "
            f"numbers of segments, got {name!r}. {hint}"
        )
    if not names:
        raise ValueError(f"name must have at least one name of a module, got {name!r}. {hint}")


class Checkpointing:
    """The checkpointing of a model by `checkpoint`, until it is undone.

    Attributes:
        names: The checkpointed modules; empty after `undo()`.
    """

    def __init__(self, names: tuple[str, ...], forwards: Sequence[_Forward]) -> None:
        self.names = names
        self._forwards = forwards
        self._apply()

    def __repr__(self) -> str:
        if not self.names:
            return "<Checkpointing of no modules>"
        return f"<Checkpointing of {listed(self.names) or 'the whole model'}>"

    def _apply(self) -> None:
        for forward in self._forwards:
            vars(forward.module)["forward"] = forward

    def _restore(self) -> None:
        for forward in self._forwards:
            if forward.original is None:
                del vars(forward.module)["forward"]
            else:
                vars(forward.module)["forward"] = forward.original

    def undo(self) -> None:
        """Restore the modules exactly; a second time nothing happens."""
        self._restore()
        self.names, self._forwards = (), ()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the context the modules are as they were without checkpointing."""
        self._restore()
        try:
            yield
        finally:
            self._apply()

    def __enter__(self) -> Checkpointing:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


@dataclass(eq=False)
class _Forward:
    """Replaces a module's `forward`.

    The module is an attribute, no closure, so that a deep copy of the model refers to the copy.

    Attributes:
        module: The module.
        name: Its name.
        original: The module's own `forward`, if it already replaced that of its class.
    """

    module: Any
    name: str
    original: Callable[..., Any] | None


@dataclass(eq=False)
class _Block(_Forward):
    """Checkpoints a module as a whole."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.original or partial(type(self.module).forward, self.module)
        return _recomputed(forward, [self.module], self.name, args, kwargs)


@dataclass(eq=False)
class _Segments(_Forward):
    """Checkpoints the segments of an `nn.Sequential`.

    Attributes:
        starts: Positions where segments begin; the layers before the first are not checkpointed.
        is_last_checkpointed: Whether the last segment is checkpointed.
    """

    starts: Sequence[int]
    is_last_checkpointed: bool

    def __call__(self, input: Any) -> Any:
        layers = list(self.module)
        cuts = [*self.starts, len(layers)]
        output = _run(layers[: cuts[0]], input)
        for start, end in pairwise(cuts):
            segment = layers[start:end]
            if end < len(layers) or self.is_last_checkpointed:
                output = _recomputed(
                    partial(_run, segment), segment, f"{self.name}[{start}:{end}]", (output,), {}
                )
            else:
                output = _run(segment, output)
        return output


def _run(layers: Sequence[nn.Module], output: Any) -> Any:
    for layer in layers:
        output = layer(output)
    return output


def _recomputed(
    forward: Callable[..., Any],
    modules: Sequence[nn.Module],
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run modules forward so that the backward pass runs them again."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    inputs = [tensor for tensor in tensors_in((args, kwargs)) if not tensor.is_inference()]
    versions = [tensor._version for tensor in inputs]
    names = tuple(kwargs)

    def run(*values: Any) -> Any:
        return forward(*values[len(names) :], **dict(zip(names, values, strict=False)))

    # By position alone: PyTorch finds the device whose autocast it restores by these.
    output = torch_checkpoint.checkpoint(
        run,
        *kwargs.values(),
        *args,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), AsInFirstPass(modules, inputs)),
    )
    if [tensor._version for tensor in inputs] != versions:
        raise RuntimeError(
            f"The checkpointed {name!r} changed its own input in place, so it cannot be computed "
            "again. Let its first layer work out of place (inplace=False), or checkpoint other "
            "modules: checkpoint(model, name=[...])."
        )
    return output


def _forwards(root: nn.Module, name: str, segments: int | None) -> Iterator[_Forward]:
    """The replacements for the `forward` of a module, or of its blocks."""
    module = module_named(root, name)
    if is_sequential(module) and _original(module, name) is None:
        yield _Segments(
            module,
            name,
            None,
            segment_starts(module, name, segments),
            is_last_checkpointed=bool(name),
        )
        return
    if segments is not None:
        raise ValueError(
            f"segments={segments} is for an nn.Sequential, and {name or 'the model'!r} is a "
            f"{type(module).__name__}. Leave segments out."
        )
    blocks = dict(module.named_children()) if isinstance(module, _BLOCKS) else {"": module}
    if not blocks:
        raise ValueError(
            f"{name or 'the list'!r} has no blocks. Give the blocks to checkpoint, or their names."
        )
    for block_name, block in blocks.items():
        full_name = f"{name}.{block_name}".strip(".")
        original = _original(block, full_name)
        if original is None and not _has_forward(block):
            raise ValueError(
                f"{full_name or 'the model'!r} is a {type(block).__name__} without a forward pass. "
                "Name the modules in it: name=[...]."
            )
        yield _Block(block, full_name, original)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _original(module: nn.Module, name: str) -> Callable[..., Any] | None:
    forward: Callable[..., Any] | None = vars(module).get("forward")
    if isinstance(forward, _Forward):
        raise ValueError(
            f"{name or 'the model'!r} is checkpointed already. "
            "First call undo() of what checkpoint() returned."
        )
    return forward
