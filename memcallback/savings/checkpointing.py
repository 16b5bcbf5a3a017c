"""checkpoint(): activation checkpointing, undoable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import checkpoint as torch_checkpoint

from memcallback.core.tensors import tensors_in
from memcallback.step.model import (
    is_sequential,
    layer_containers,
    listed,
    module_named,
    segment_starts,
)

#: What `checkpoint=` may be: True for whatever is found, or what is to be: a name, several, or
#: numbers of segments by name.
CheckpointOption = bool | str | Sequence[str] | Mapping[str, int]


def checkpoint(
    model: nn.Module | Sequence[nn.Module],
    name: str | Sequence[str] | Mapping[str, int] | None = None,
    segments: int | None = None,
) -> Checkpointing:
    """Checkpoint parts of a model in place: less memory for saved tensors, against a second forward
    pass of these parts.

    From its forward to its backward pass a segment keeps its input and nothing else
    (`torch.utils.checkpoint`, non-reentrant). Gradients are to the bit those of the model as it
    was: dropout draws the same masks again, the recomputation sees buffers as the forward pass saw
    them, and leaves them (so the running statistics of batch norm) and the random number generators
    as it finds them. Names of parameters, hooks, DistributedDataParallel and autocast work as
    before. What else a module counts or keeps in its forward pass, it does twice: turn caches of
    keys and values off.

    - An `nn.Sequential` is cut into segments. Where it is the model itself, the last one is not
      checkpointed, as in
      `torch.utils.checkpoint.checkpoint_sequential`: it would be computed again as soon as it was
      computed.
    - Of an `nn.ModuleList`, or a list, each block is checkpointed.
    - Any other module that is named is checkpointed as one block.

    Buffers other than the running statistics of norm layers are kept a second time until the
    backward pass, since a module may change its own (spectral norm, codebooks).

    Args:
        model: The model, which may be wrapped by DistributedDataParallel; or a list of its blocks.
        name: The name of a module, several, or a mapping from names to numbers of segments; by
            default every outermost `nn.Sequential` of several layers and every outermost
            `nn.ModuleList` of several blocks.
        segments: Into how many segments an `nn.Sequential` is cut, as evenly as layers that work in
            place allow. By default one for each child if one of them has children of its own, else
            about the square root of their number (arXiv 1604.06174).

    Returns:
        What was done; `undo()` restores the model, and so does the end of a `with` block.

    Raises:
        ValueError: If there is no such module, or none to be found; if a number of segments is out
            of range or the module has none; if a module is checkpointed already; if `name` is
            empty.
        TypeError: If `name` is nothing of the kind, or a number of segments is none.
        RuntimeError: In the forward pass, if a segment changes its own input in place.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> with checkpoint(model, segments=2):
        ...     model(torch.ones(4, 8)).sum().backward()
    """
    root = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    root = root.module if isinstance(root, nn.parallel.DistributedDataParallel) else root
    wanted = _wanted(root, name, segments)
    stand_ins = list(
        chain.from_iterable(_stand_ins(root, one, number) for one, number in wanted.items())
    )
    if len({id(stand_in.module) for stand_in in stand_ins}) < len(stand_ins):
        raise ValueError(
            f"name={list(wanted)} has a module twice, perhaps as a block of another one. Name each once."
        )
    return Checkpointing(tuple(wanted), stand_ins)


def is_checkpointed(model: nn.Module) -> bool:
    """Whether a part of the model is checkpointed by `checkpoint` at this moment."""
    return any(isinstance(vars(module).get("forward"), _StandIn) for module in model.modules())


def checkpoint_option(model: nn.Module, option: CheckpointOption) -> Checkpointing:
    """`checkpoint` as an option says."""
    check_checkpoint(option)
    return checkpoint(model, None if isinstance(option, bool) else option)


def check_checkpoint(option: object) -> None:
    """See that an option is one."""
    names = [option] if isinstance(option, str) else option
    if option is not True and not (
        isinstance(names, (list, tuple, Mapping))
        and names
        and all(isinstance(name, str) for name in names)
    ):
        raise ValueError(
            f"checkpoint must be True, the name of a module, several, or numbers of segments by name, got {option!r}. Leave it out for none."
        )


def _wanted(
    root: nn.Module, name: str | Sequence[str] | Mapping[str, int] | None, segments: int | None
) -> Mapping[str, int | None]:
    """Names of modules, with their numbers of segments."""
    if name is not None:
        _check_name(name)
    if isinstance(name, Mapping):
        if segments is not None:
            raise ValueError(
                f"segments={segments} cannot hold beside those in name={dict(name)}. Leave segments out."
            )
        return name
    names = layer_containers(root) if name is None else [name] if isinstance(name, str) else name
    if segments is not None and len(names) > 1:
        raise ValueError(
            f"segments={segments} is for one nn.Sequential, and there are {len(names)} modules: {listed(names)}. Leave it out, or give a "
            "mapping: name={'...': 4}."
        )
    return dict.fromkeys(names, segments)


def _check_name(name: object) -> None:
    """See that `name` names modules."""
    names = [name] if isinstance(name, str) else name
    hint = "Leave it out to have modules found."
    if not isinstance(names, (list, tuple, Mapping)) or not all(
        isinstance(one, str) for one in names
    ):
        raise TypeError(
            f"name must be the name of a module, a list of several, or numbers of segments by name, got {name!r}. {hint}"
        )
    if not names:
        raise ValueError(f"name must have at least one name of a module, got {name!r}. {hint}")


class Checkpointing:
    """What `checkpoint` did to a model, until it is undone.

    Attributes:
        names: The modules that are checkpointed; none once that is undone.
    """

    def __init__(self, names: tuple[str, ...], stand_ins: Sequence[_StandIn]) -> None:
        self.names = names
        self._stand_ins = stand_ins
        self._apply()

    def _apply(self) -> None:
        for stand_in in self._stand_ins:
            vars(stand_in.module)["forward"] = stand_in

    def _restore(self) -> None:
        for stand_in in self._stand_ins:
            if stand_in.original is None:
                del vars(stand_in.module)["forward"]
            else:
                vars(stand_in.module)["forward"] = stand_in.original

    def undo(self) -> None:
        """Restore the modules exactly; a second time nothing happens."""
        self._restore()
        self.names, self._stand_ins = (), ()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The modules as they are without checkpointing, inside the context."""
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
class _StandIn:
    """In place of a module's `forward`. It refers to the module as an attribute, so that a copy of
    the model has one of its own.

    Attributes:
        module: The module.
        name: Its name.
        original: What stood in place of the class's own `forward` before, if anything did.
    """

    module: Any
    name: str
    original: Callable[..., Any] | None


@dataclass(eq=False)
class _Block(_StandIn):
    """For a module that is checkpointed as a whole."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.original or partial(type(self.module).forward, self.module)
        return _recomputed(forward, [self.module], self.name, args, kwargs)


@dataclass(eq=False)
class _Segments(_StandIn):
    """For an `nn.Sequential`.

    Attributes:
        starts: Where segments begin; the layers before the first one are not checkpointed.
        is_last_checkpointed: Whether the last segment is.
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
    """Run modules forward in such a way that the backward pass runs them again."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    inputs = [tensor for tensor in tensors_in((args, kwargs)) if not tensor.is_inference()]
    versions = [tensor._version for tensor in inputs]
    output = torch_checkpoint.checkpoint(
        forward,
        *args,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), _BuffersOfThen(modules)),
        **kwargs,
    )
    if [tensor._version for tensor in inputs] != versions:
        raise RuntimeError(
            f"The checkpointed {name!r} has changed its own input in place, so it cannot be computed again. Let its first layer work out of "
            "place (inplace=False), or checkpoint other modules: checkpoint(model, name=[...])."
        )
    return output


class _BuffersOfThen:
    """Inside the context, which may be entered several times, modules in training have copies of
    the buffers that they had when it was made.

    PyTorch's norm layers have copies of those of now: in training they do not read their running
    statistics, so none are kept.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        every = dict.fromkeys(chain.from_iterable(module.modules() for module in modules))
        self._modules = [module for module in every if module.training and module._buffers]
        self._then = {module: _copies(module) for module in self._modules if not _is_norm(module)}
        self._now: dict[nn.Module, dict[str, torch.Tensor | None]] = {}

    def __enter__(self) -> None:
        self._now = {module: dict(module._buffers) for module in self._modules}
        for module, then in self._then.items():
            module._buffers.update(then)
        for module in self._modules:
            module._buffers.update(_copies(module))

    def __exit__(self, *exception: object) -> None:
        # PyTorch ends a recomputation by an exception as soon as it has what it needs.
        for module, now in self._now.items():
            module._buffers.update(now)
        self._now = {}


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and type(module).__module__.startswith("torch.nn.")


def _copies(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: buffer.detach().clone()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }


def _stand_ins(root: nn.Module, name: str, segments: int | None) -> Iterator[_StandIn]:
    """What to put in place of the forward pass of a module, or of the blocks in it."""
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
            f"segments={segments} is for an nn.Sequential, and {name or 'the model'!r} is a {type(module).__name__}, which has blocks. Leave "
            "segments out."
        )
    blocks = dict(module.named_children()) if isinstance(module, nn.ModuleList) else {"": module}
    for block_name, block in blocks.items():
        full_name = f"{name}.{block_name}".strip(".")
        yield _Block(block, full_name, _original(block, full_name))


def _original(module: nn.Module, name: str) -> Callable[..., Any] | None:
    forward: Callable[..., Any] | None = vars(module).get("forward")
    if isinstance(forward, _StandIn):
        raise ValueError(
            f"{name or 'the model'!r} is checkpointed already. Undo that first: undo() of what checkpoint() returned."
        )
    return forward
