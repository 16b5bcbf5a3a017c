"""The savings that are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from memcallback.core.allocation_trace import Event
from memcallback.core.tensors import tensors_in
from memcallback.core.validation import MIN_SEQUENCE_LENGTH
from memcallback.savings.checkpointing import checkpoint, is_checkpointed
from memcallback.savings.segments import (
    NUM_TRIED,
    LayerBytes,
    layer_bytes,
    segments_together,
    sensible_segments,
)
from memcallback.step.model import has_blocks, is_sequential, layer_containers
from memcallback.step.training_step import TrainingStep

Optimizers = Sequence[torch.optim.Optimizer]
_SAME = "nothing"
_LR = 1e-3
#: Of what containers hold; an nn.Sequential with more has several numbers of segments tried for it
#: alone.
_LARGE_SHARE = 0.3


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A way to need less memory.

    Attributes:
        name: Its name.
        kind: What it changes; of each kind there can be one.
        apply: Gives the step with it.
        changes: What it changes in the numbers that come out.
        line: What to write in a program to have it.
        num_parts: Into how many forward passes it divides the batch.
        is_same_training: Whether the same model is trained by the same rule on the same data, but
            for rounding.
        expandable_segments: Whether it is a setting of the allocator and not of the step.
    """

    name: str
    kind: str
    apply: Callable[[TrainingStep], TrainingStep]
    changes: str
    line: str
    num_parts: int = 1
    is_same_training: bool = True
    expandable_segments: bool = False


def savings_for(step: TrainingStep, batch_size: int, events: Sequence[Event]) -> Iterator[Saving]:
    """What can be tried on a step, in the order in which people think of it."""
    yield from _accumulation(step, batch_size)
    yield from _precision(step)
    yield from _checkpointing(step, events)
    yield from _inplace(step)
    yield from _optimizer(step)
    yield from _gradients(step)
    yield Saving(
        name="expandable_segments",
        kind="allocator",
        apply=lambda one: one,
        changes=_SAME,
        line="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py",
        expandable_segments=True,
    )
    yield from _layout(step)
    yield from _freezing(step)
    yield from _smaller_input(step)


def left_out(step: TrainingStep) -> Iterator[str]:
    """Which savings were not tried, and why, one sentence each."""
    if is_checkpointed(step.model):
        yield "Checkpointing is in use already, so nothing else was tried of that kind."


def together(*savings: Saving) -> Saving:
    """Several savings at once."""

    def apply(step: TrainingStep) -> TrainingStep:
        for saving in savings:
            step = saving.apply(step)
        return step

    num_parts = 1
    for saving in savings:
        num_parts *= saving.num_parts
    return Saving(
        name=" + ".join(saving.name for saving in savings),
        kind=" + ".join(saving.kind for saving in savings),
        apply=apply,
        changes="; ".join(
            dict.fromkeys(saving.changes for saving in savings if saving.changes != _SAME)
        )
        or _SAME,
        line="\n".join(saving.line for saving in savings),
        num_parts=num_parts,
        is_same_training=all(saving.is_same_training for saving in savings),
        expandable_segments=any(saving.expandable_segments for saving in savings),
    )


def _accumulation(step: TrainingStep, batch_size: int) -> Iterator[Saving]:
    if len(step.losses) > 1 or (
        step.lightning is not None and not step.model.automatic_optimization
    ):
        return
    # What stands in the line.
    is_ours = step.lightning is None
    for num_parts in (2, 4):
        if batch_size % num_parts:
            continue
        accumulate = step.accumulate * num_parts
        yield Saving(
            name=f"accumulate {num_parts} batches",
            kind="accumulation",
            apply=lambda one, accumulate=accumulate: one.varied(
                accumulate=accumulate, has_accumulation=is_ours
            ),  # type: ignore[misc]
            changes="batch norm sees smaller batches; else the gradients to rounding",
            line=(
                f"Trainer(accumulate_grad_batches={accumulate})  # and a batch size {num_parts} times smaller"
                if step.lightning is not None
                else f"memcallback.accumulate({accumulate}, model, optimizer)  # batches {num_parts} times smaller"
            ),
            num_parts=num_parts,
        )


def _precision(step: TrainingStep) -> Iterator[Saving]:
    if any(parameter.dtype is not torch.float32 for parameter in step.model.parameters()):
        return
    is_lightning = step.lightning is not None
    for precision, changes, plain in (
        (
            "bf16-mixed",
            "matrix products, convolutions and attention in bfloat16, of 8 bits of precision",
            'memcallback.amp("bf16-mixed")',
        ),
        (
            "16-mixed",
            "matrix products, convolutions and attention in half precision; a step whose gradients overflow is skipped",
            'memcallback.amp("16-mixed")',
        ),
    ):
        if precision != step.precision:
            yield Saving(
                name=precision,
                kind="precision",
                apply=lambda one, precision=precision: one.varied(precision=precision),  # type: ignore[misc]
                changes=changes,
                line=f'Trainer(precision="{precision}")' if is_lightning else plain,
            )
    for precision, dtype, changes in (
        (
            "bf16-true",
            torch.bfloat16,
            "weights and optimizer state too are in bfloat16: updates smaller than 1/256 of a weight are lost",
        ),
        (
            "16-true",
            torch.float16,
            "weights and optimizer state too are in half precision: updates smaller than 1/2048 of a weight are lost, and gradients over- and "
            "underflow, which no scaler prevents",
        ),
    ):
        if precision != step.precision:
            yield Saving(
                name=precision,
                kind="precision",
                apply=lambda one, precision=precision, dtype=dtype: one.varied(
                    precision=precision, prepare=partial(_cast, dtype)
                ),  # type: ignore[misc]
                changes=changes,
                line=f'Trainer(precision="{precision}")' if is_lightning else f"model.to({dtype})",
                is_same_training=False,
            )


def _cast(dtype: torch.dtype, model: nn.Module, batch: Any) -> Any:
    model.to(dtype)
    return _map_tensors(
        batch, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
    )


def _checkpointing(step: TrainingStep, events: Sequence[Event]) -> Iterator[Saving]:
    if is_checkpointed(step.model):
        return
    try:
        names = layer_containers(step.model)
    except ValueError:
        return
    containers = {name: step.model.get_submodule(name) for name in names}
    made = {name: layer_bytes(events, name, [*one._modules]) for name, one in containers.items()}
    sequentials = {
        name: made[name]
        for name, one in containers.items()
        if is_sequential(one) and not has_blocks(one)
    }
    blocks = {
        f"{name}.{child}".lstrip("."): block
        for name, one in containers.items()
        if name not in sequentials
        for child, block in one.named_children()
    }
    if blocks:
        yield _checkpointed(step, f"checkpoint {len(blocks)} blocks", [*containers])
    if len(blocks) > 3:
        second = [*blocks][::2]
        are_cut = all(is_sequential(blocks[name]) for name in second)
        yield _checkpointed(
            step, "checkpoint every second block", dict.fromkeys(second, 1) if are_cut else second
        )
    large = _large(sequentials, sum(map(_held_bytes, made.values())), at_least_one=not blocks)
    for name in large:
        of = f" of {name}" if len(containers) > 1 else ""
        # Of a model itself the last segment is not checkpointed, so there are at least two.
        num_tried = NUM_TRIED if len(large) == 1 else NUM_TRIED // len(large) + 1
        for segments in sensible_segments(
            sequentials[name], least=1 if name else 2, num_tried=num_tried
        ):
            number = f"{segments} segment{'' if segments == 1 else 's'}"
            yield _checkpointed(step, f"checkpoint_sequential{of}, {number}", {name: segments})
    if len(sequentials) > 1 and not blocks:
        yield _checkpointed(
            step, f"checkpoint {len(sequentials)} sequentials", segments_together(sequentials)
        )


def _large(
    sequentials: Mapping[str, Sequence[LayerBytes]], all_bytes: int, *, at_least_one: bool
) -> list[str]:
    """Those that hold a good part of all that is held, the largest first."""
    by_size = sorted(sequentials, key=lambda name: _held_bytes(sequentials[name]), reverse=True)
    large = [name for name in by_size if _held_bytes(sequentials[name]) > _LARGE_SHARE * all_bytes]
    return large or by_size[:at_least_one]


def _held_bytes(layers: Sequence[LayerBytes]) -> int:
    return sum(layer.held_bytes for layer in layers)


def _checkpointed(step: TrainingStep, name: str, parts: list[str] | dict[str, int]) -> Saving:
    def prepare(model: nn.Module, batch: Any) -> Any:
        checkpoint(model, parts)
        return batch

    return Saving(
        name=name,
        kind="checkpointing",
        apply=lambda one: one.varied(prepare=prepare),
        changes=_SAME,
        line=f"MemoryCallback(checkpoint={parts})"
        if step.lightning is not None
        else f"memcallback.checkpoint(model, {parts})",
    )


def _inplace(step: TrainingStep) -> Iterator[Saving]:
    found = [module for module in step.model.modules() if getattr(module, "inplace", None) is False]
    if not found:
        return
    names = ", ".join(sorted({type(module).__name__ for module in found}))
    yield Saving(
        name="inplace activations",
        kind="inplace",
        apply=lambda one: one.varied(prepare=_made_inplace),
        changes=f"nothing, if nobody else reads what goes into the {len(found)} modules ({names})",
        line='for module in model.modules():\n    if hasattr(module, "inplace"): module.inplace = True',
    )


def _made_inplace(model: nn.Module, batch: Any) -> Any:
    for module in model.modules():
        if getattr(module, "inplace", None) is False:
            module.inplace = True  # type: ignore[assignment]
    return batch


def _optimizer(step: TrainingStep) -> Iterator[Saving]:
    def saving(name: str, make: Callable[..., torch.optim.Optimizer], line: str) -> Saving:
        return Saving(
            name=name,
            kind="optimizer",
            apply=lambda one: one.varied(
                change_optimizers=lambda optimizers: [
                    _remade(optimizer, make) for optimizer in optimizers
                ]
            ),
            changes="another rule of update, with a learning rate of its own",
            line=line,
            is_same_training=False,
        )

    parameters = "self.parameters()" if step.lightning is not None else "model.parameters()"
    yield saving("SGD", torch.optim.SGD, f"torch.optim.SGD({parameters}, lr=...)")
    yield saving(
        "SGD with momentum",
        lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9),
        f"torch.optim.SGD({parameters}, lr=..., momentum=0.9)",
    )
    yield saving("Adam", torch.optim.Adam, f"torch.optim.Adam({parameters}, lr=...)")
    yield saving("Adafactor", torch.optim.Adafactor, f"torch.optim.Adafactor({parameters}, lr=...)")
    yield Saving(
        name="fused optimizer",
        kind="optimizer",
        apply=lambda one: one.varied(change_optimizers=_fused),
        changes="rounding in the update",
        line="fused=True to the optimizer",
    )


def _remade(
    optimizer: torch.optim.Optimizer, make: Callable[..., torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    return make([{"params": group["params"]} for group in optimizer.param_groups], lr=_LR)


def _fused(optimizers: Optimizers) -> Optimizers:
    for optimizer in optimizers:
        if "fused" not in optimizer.defaults:
            raise ValueError(f"{type(optimizer).__name__} has no fused form")
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = True, False
        # Its constructor sets this, for GradScaler (torch/optim/adam.py).
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return optimizers


def _gradients(step: TrainingStep) -> Iterator[Saving]:
    if step.zero_grad_before_forward or step.accumulate > 1:
        return
    yield Saving(
        name="zero_grad before forward",
        kind="zero_grad",
        apply=lambda one: one.varied(zero_grad_before_forward=True),
        changes=_SAME,
        line=(
            "def on_train_batch_start(self, batch, batch_idx):\n    self.zero_grad()"
            if step.lightning is not None
            else "optimizer.zero_grad()  # before the forward pass"
        ),
    )


def _layout(step: TrainingStep) -> Iterator[Saving]:
    if not any(isinstance(module, nn.Conv2d) for module in step.model.modules()):
        return
    yield Saving(
        name="channels_last",
        kind="layout",
        apply=lambda one: one.varied(prepare=_channels_last),
        changes="rounding, where convolutions use other kernels",
        line="model = model.to(memory_format=torch.channels_last)\nimages = images.to(memory_format=torch.channels_last)",
    )


def _channels_last(model: nn.Module, batch: Any) -> Any:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return _map_tensors(
        batch,
        lambda tensor: (
            tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
        ),
    )


def _freezing(step: TrainingStep) -> Iterator[Saving]:
    trained = _trained_modules(step.model)
    if len(trained) < 2:
        return
    yield Saving(
        name="freeze all but the last layer",
        kind="freezing",
        apply=lambda one: one.varied(prepare=_frozen),
        changes=f"only {trained[-1]} learns",
        line=f'model.requires_grad_(False)\nmodel.get_submodule("{trained[-1]}").requires_grad_(True)',
        is_same_training=False,
    )


def _trained_modules(model: nn.Module) -> list[str]:
    """Names of modules with parameters of their own that learn."""
    return [
        name
        for name, module in model.named_modules()
        if any(one.requires_grad for one in module.parameters(recurse=False))
    ]


def _frozen(model: nn.Module, batch: Any) -> Any:
    last = model.get_submodule(_trained_modules(model)[-1])
    model.requires_grad_(False)
    last.requires_grad_(True)
    return batch


def _smaller_input(step: TrainingStep) -> Iterator[Saving]:
    """Images of half the side; sequences of half the length."""
    tensors = list(tensors_in(step.batch))
    sides = {
        tuple(tensor.shape[-2:])
        for tensor in tensors
        if tensor.dim() == 4 and tensor.is_floating_point()
    }
    length = step.sequence_length or next(
        (
            tensor.shape[1]
            for tensor in tensors
            if tensor.dim() == 2 and not tensor.is_floating_point()
        ),
        0,
    )
    if sides:

        def halved(tensor: torch.Tensor) -> torch.Tensor:
            return (
                tensor[..., ::2, ::2].contiguous()
                if tensor.dim() >= 3 and tuple(tensor.shape[-2:]) in sides
                else tensor
            )

        name, what, line = (
            "images of half the side",
            "the model sees less of each image",
            "torchvision.transforms.v2.Resize(...)",
        )
    elif length >= 2 * MIN_SEQUENCE_LENGTH:

        def halved(tensor: torch.Tensor) -> torch.Tensor:
            for dim in range(1, tensor.dim()):
                if tensor.shape[dim] == length:
                    tensor = tensor.narrow(dim, 0, length // 2)
            return tensor.contiguous()

        name, what, line = (
            f"sequences of {length // 2}",
            "the model sees less of each sequence",
            f"tokens[:, :{length // 2}]",
        )
    else:
        return
    yield Saving(
        name=name,
        kind="input",
        apply=lambda one: one.varied(
            sequence_length=None, prepare=lambda model, batch: _map_tensors(batch, halved)
        ),
        changes=what,
        line=line,
        is_same_training=False,
    )


def _map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return tree_map_only(torch.Tensor, function, batch)
