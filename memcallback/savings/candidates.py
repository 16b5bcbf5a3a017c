"""The ways to need less memory that `what_if` tries on a step.

A new one is a function here that yields a `Saving`, called in `savings_for`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from memcallback.core.allocation_trace import Event
from memcallback.core.tensors import tensors_in
from memcallback.core.torch_private import tree_map_only
from memcallback.core.validation import MIN_SEQUENCE_LENGTH
from memcallback.core.visible import visible_name
from memcallback.savings.checkpointing import checkpoint, is_checkpointed
from memcallback.savings.compilation import compilation
from memcallback.savings.plan import SavingGroup
from memcallback.savings.saving import SAME, Saving
from memcallback.savings.segments import CheckpointParts, checkpoint_choices
from memcallback.step.training_step import TrainingStep

Optimizers = Sequence[torch.optim.Optimizer]
#: Columns of a line to paste.
_LINE_WIDTH = 88
#: Layers that are named one by one; more are written as a range.
_LEAST_RANGE = 3
#: Of optimizers that are tried; no size depends on it.
_LR = 1e-3


def savings_for(step: TrainingStep, batch_size: int, events: Sequence[Event]) -> Iterator[Saving]:
    """The savings to try on a step, in the order in which people think of them."""
    yield from _accumulation(step, batch_size)
    yield from _precision(step)
    yield from _checkpointing(step, events)
    yield from compilation(step)
    yield from _inplace(step)
    yield from _optimizer(step)
    yield from _gradients(step)
    yield Saving(
        name="expandable_segments",
        kind="allocator",
        group=SavingGroup.SAME_RESULT,
        apply=lambda step: step,
        changes=SAME,
        line="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py",
        expandable_segments=True,
    )
    yield from _layout(step)
    yield from _freezing(step)
    yield from _smaller_input(step)


def left_out(step: TrainingStep) -> Iterator[str]:
    """Which savings are not tried, and why, one sentence each."""
    if is_checkpointed(step.model):
        yield "Checkpointing is in use already, so nothing else was tried of that kind."


def _accumulation(step: TrainingStep, batch_size: int) -> Iterator[Saving]:
    is_lightning = step.lightning is not None
    cannot_accumulate = len(step.losses) > 1 or step.compile_update is not None
    if cannot_accumulate or (is_lightning and not step.model.automatic_optimization):
        return
    for num_parts in (2, 4):
        if batch_size % num_parts:
            continue
        accumulate = step.accumulate * num_parts
        yield Saving(
            name=f"accumulate {num_parts} batches",
            kind="accumulation",
            group=SavingGroup.CHANGES_NUMBERS,
            apply=partial(
                TrainingStep.varied, accumulate=accumulate, has_accumulation=not is_lightning
            ),
            changes="rounding of the gradients; batch norm sees smaller batches",
            line=f"Trainer(accumulate_grad_batches={accumulate})  "
            f"# and a batch size {num_parts} times smaller"
            if is_lightning
            else f"memcallback.accumulate({accumulate}, model, optimizer)  "
            f"# batches {num_parts} times smaller",
            num_parts=num_parts,
        )


def _precision(step: TrainingStep) -> Iterator[Saving]:
    """Autocast, which keeps weights in float32, and whole models in a smaller type."""
    if any(parameter.dtype is not torch.float32 for parameter in step.model.parameters()):
        return
    operators = "matrix products, convolutions and attention run in"
    state, lost = "weights and optimizer state are kept in", "of its weight is lost"
    for precision, dtype, changes in (
        ("bf16-mixed", None, f"{operators} bfloat16, which has 8 bits of precision"),
        (
            "16-mixed",
            None,
            f"{operators} half precision; a step whose gradients overflow is skipped",
        ),
        (
            "bf16-true",
            torch.bfloat16,
            f"{state} bfloat16, so an update smaller than 1/512 {lost}",
        ),
        (
            "16-true",
            torch.float16,
            f"{state} half precision, so an update smaller than 1/4096 {lost}; there is no scaler, "
            "so gradients can overflow and underflow",
        ),
    ):
        if precision == step.precision:
            continue
        apply = partial(TrainingStep.varied, precision=precision)
        group, own_line = SavingGroup.CHANGES_NUMBERS, f'memcallback.amp("{precision}")'
        if dtype is not None:
            apply = partial(apply, prepare=partial(_cast, dtype))
            group, own_line = SavingGroup.CHANGES_TRAINING, f"model.to({dtype})"
        yield Saving(
            name=precision,
            kind="precision",
            group=group,
            apply=apply,
            changes=changes,
            line=own_line if step.lightning is None else f'Trainer(precision="{precision}")',
        )


def _cast(dtype: torch.dtype, model: nn.Module, batch: Any) -> Any:
    model.to(dtype)
    return _map_tensors(
        batch, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
    )


def _checkpointing(step: TrainingStep, events: Sequence[Event]) -> Iterator[Saving]:
    if is_checkpointed(step.model):
        return
    for name, parts in checkpoint_choices(step.model, events):
        yield Saving(
            name=name,
            kind="checkpointing",
            group=SavingGroup.SAME_RESULT,
            apply=partial(TrainingStep.varied, prepare=partial(_checkpointed, parts)),
            changes=SAME,
            line=_checkpoint_line(parts, is_lightning=step.lightning is not None),
        )


def _checkpoint_line(parts: CheckpointParts, *, is_lightning: bool) -> str:
    """The call, each argument in lines of its own where one line were too long."""
    if is_lightning:
        call = "MemoryCallback"
        arguments = [f"checkpoint={'True' if parts is None else parts_text(parts)}"]
    elif isinstance(parts, dict) and [*parts] == [""]:
        call, arguments = "memcallback.checkpoint", ["model", f"segments={parts['']}"]
    else:
        named = [] if parts is None else [parts_text(parts)]
        call, arguments = "memcallback.checkpoint", ["model", *named]
    line = f"{call}({', '.join(arguments)})"
    if len(line) <= _LINE_WIDTH:
        return line
    inner = [textwrap.fill(argument, _LINE_WIDTH - 4) + "," for argument in arguments]
    return "\n".join([f"{call}(", textwrap.indent("\n".join(inner), "    "), ")"])


def parts_text(parts: Sequence[str] | Mapping[str, int]) -> str:
    """The parts as Python; layers at equal distances as a range."""
    split = [name.rpartition(".") for name in parts]
    numbers = [int(number) for _, _, number in split if number.isdigit()]
    prefixes = {prefix for prefix, _, _ in split}
    steps = {after - before for before, after in pairwise(numbers)}
    if (
        isinstance(parts, Mapping)
        or len(numbers) < len(split)
        or len(numbers) < _LEAST_RANGE
        or len(prefixes) > 1
        or len(steps) > 1
    ):
        return str(parts)
    (prefix,), (step,) = prefixes, steps
    name = f"{prefix}.{{n}}" if prefix else "{n}"
    return f"[f'{name}' for n in range({numbers[0]}, {numbers[-1] + 1}, {step})]"


def _checkpointed(parts: CheckpointParts, model: nn.Module, batch: Any) -> Any:
    checkpoint(model, parts)
    return batch


def _inplace(step: TrainingStep) -> Iterator[Saving]:
    modules = [module for module in step.model.modules() if _could_be_inplace(module)]
    if not modules:
        return
    names = ", ".join(sorted({type(module).__name__ for module in modules}))
    yield Saving(
        name="inplace activations",
        kind="inplace",
        group=SavingGroup.SAME_RESULT,
        apply=partial(TrainingStep.varied, prepare=_made_inplace),
        changes="changes nothing, as long as no other code uses the inputs of these "
        f"{len(modules)} modules ({names})",
        line="for module in model.modules():\n"
        '    if hasattr(module, "inplace"): module.inplace = True',
    )


def _could_be_inplace(module: nn.Module) -> bool:
    return getattr(module, "inplace", None) is False


def _made_inplace(model: nn.Module, batch: Any) -> Any:
    for module in filter(_could_be_inplace, model.modules()):
        module.inplace = True  # type: ignore[assignment]
    return batch


def _optimizer(step: TrainingStep) -> Iterator[Saving]:
    parameters = "model.parameters()" if step.lightning is None else "self.parameters()"
    optimizers: tuple[tuple[str, Any, dict[str, Any]], ...] = (
        ("SGD", torch.optim.SGD, {}),
        ("SGD with momentum", torch.optim.SGD, {"momentum": 0.9}),
        ("Adam", torch.optim.Adam, {}),
        ("Adafactor", torch.optim.Adafactor, {}),
    )
    for name, kind, options in optimizers:
        arguments = "".join(f", {option}={value}" for option, value in options.items())
        make: Callable[..., torch.optim.Optimizer] = partial(kind, lr=_LR, **options)
        yield Saving(
            name=name,
            kind="optimizer",
            group=SavingGroup.CHANGES_TRAINING,
            apply=partial(TrainingStep.varied, change_optimizers=partial(_remade, make)),
            changes="another update rule, which needs its own learning rate",
            line=f"torch.optim.{kind.__name__}({parameters}, lr=...{arguments})",
        )
    yield Saving(
        name="fused optimizer",
        kind="optimizer",
        group=SavingGroup.CHANGES_NUMBERS,
        apply=partial(TrainingStep.varied, change_optimizers=_fused),
        changes="rounding in the update",
        line="fused=True to the optimizer",
    )


def _remade(make: Callable[..., torch.optim.Optimizer], optimizers: Optimizers) -> Optimizers:
    return [
        make([{"params": group["params"]} for group in optimizer.param_groups])
        for optimizer in optimizers
    ]


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
        group=SavingGroup.SAME_RESULT,
        apply=partial(TrainingStep.varied, zero_grad_before_forward=True),
        changes=SAME,
        line="optimizer.zero_grad()  # before the forward pass"
        if step.lightning is None
        else "def on_train_batch_start(self, batch, batch_idx):\n    self.zero_grad()",
    )


def _layout(step: TrainingStep) -> Iterator[Saving]:
    if not any(isinstance(module, nn.Conv2d) for module in step.model.modules()):
        return
    yield Saving(
        name="channels_last",
        kind="layout",
        group=SavingGroup.CHANGES_NUMBERS,
        apply=partial(TrainingStep.varied, prepare=_channels_last),
        changes="rounding, because convolutions may use other kernels",
        line="model = model.to(memory_format=torch.channels_last)\n"
        "images = images.to(memory_format=torch.channels_last)",
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
    if len(_trained_modules(step.model)) < 2:
        return
    last = visible_name(_last_layer(step.model))
    yield Saving(
        name="freeze all but the last layer",
        kind="freezing",
        group=SavingGroup.CHANGES_TRAINING,
        apply=partial(TrainingStep.varied, prepare=_frozen),
        changes=f"only module {last!r} is trained",
        line=f'model.requires_grad_(False)\nmodel.get_submodule("{last}").requires_grad_(True)',
    )


def _trained_modules(model: nn.Module) -> list[str]:
    """Names of the modules with trained parameters of their own."""
    return [
        name
        for name, module in model.named_modules()
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    ]


def _last_layer(model: nn.Module) -> str:
    """The last trained module with a matrix, not a norm after it; else the last trained one."""
    trained = _trained_modules(model)
    with_matrix = (
        name
        for name in reversed(trained)
        if not any(model.get_submodule(name).children())
        and any(
            weight.requires_grad and weight.dim() > 1
            for weight in model.get_submodule(name).parameters(recurse=False)
        )
    )
    return next(with_matrix, trained[-1])


def _frozen(model: nn.Module, batch: Any) -> Any:
    last = model.get_submodule(_last_layer(model))
    model.requires_grad_(False)
    last.requires_grad_(True)
    return batch


def _smaller_input(step: TrainingStep) -> Iterator[Saving]:
    """Images of half the side, or sequences of half the length."""
    tensors = list(tensors_in(step.batch))
    images = [tensor for tensor in tensors if tensor.dim() == 4 and tensor.is_floating_point()]
    tokens = [tensor for tensor in tensors if tensor.dim() == 2 and not tensor.is_floating_point()]
    length = step.sequence_length or next((tensor.shape[1] for tensor in tokens), 0)
    if images:
        halved = partial(_half_the_side, {tuple(image.shape[-2:]) for image in images})
        name, part = "images of half the side", "image"
        line = "torchvision.transforms.v2.Resize(...)"
    elif length >= 2 * MIN_SEQUENCE_LENGTH:
        halved = partial(_half_the_length, length)
        name, part = f"sequences of {length // 2}", "sequence"
        line = f"tokens[:, :{length // 2}]"
    else:
        return
    yield Saving(
        name=name,
        kind="input",
        group=SavingGroup.CHANGES_TRAINING,
        apply=partial(
            TrainingStep.varied,
            sequence_length=None,
            prepare=lambda model, batch: _map_tensors(batch, halved),
        ),
        changes=f"the model sees less of each {part}",
        line=line,
    )


def _half_the_side(sides: set[tuple[int, ...]], tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() >= 3 and tuple(tensor.shape[-2:]) in sides:
        return tensor[..., ::2, ::2].contiguous()
    return tensor


def _half_the_length(length: int, tensor: torch.Tensor) -> torch.Tensor:
    for dim in range(1, tensor.dim()):
        if tensor.shape[dim] == length:
            tensor = tensor.narrow(dim, 0, length // 2)
    return tensor.contiguous()


def _map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return tree_map_only(torch.Tensor, function, batch)
