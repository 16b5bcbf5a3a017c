"""Closed-form prediction from layer outputs and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memcallback.core.errors import PredictionError, warn
from memcallback.core.tensors import is_on, own_bytes, storage_bytes, tensors_in
from memcallback.core.types import Category
from memcallback.core.units import parse_bytes
from memcallback.devices.catalogue import cublas_workspace_bytes
from memcallback.prediction.predict import quietly
from memcallback.prediction.textbook.law import LinearBytes, TextbookPrediction
from memcallback.prediction.textbook.layer_table import LayerTable
from memcallback.prediction.textbook.optimizer_state import optimizer_state_bytes
from memcallback.prediction.textbook.shape_pass import shape_pass
from memcallback.step.copies.fakes import fake_copy, untouched_globals
from memcallback.step.copies.functions import untouched_variables
from memcallback.step.copies.resizing import resize_batch
from memcallback.step.holdings import holdings
from memcallback.step.training_step import TrainingStep

SOURCE = "textbook law"


def predict(
    step: TrainingStep, *, device: str | int | None = None, device_name: str | None = None
) -> TextbookPrediction:
    """Predict the memory of a steady training step, on a copy without data; nothing runs and
    nothing of the user's changes.

    Args:
        step: The step.
        device: The capacity of the device, as `24GiB` or in bytes; None if it does not matter.
        device_name: What to call it.

    Returns:
        The prediction, an upper estimate with a lower edge (see `TextbookPrediction`), and what was
        assumed in its `caveats`.

    Raises:
        PredictionError: If the step cannot be followed on shapes alone, or its batch size is
            unknown.
        ValueError: If `device` is not a size.
    """
    capacity = parse_bytes(device) if device is not None else None
    batch_size = step.check_predictable()
    caveats = [
        "Convolution workspaces, temporaries inside operators and the allocator's rounding are left out."
    ]
    if step.batch_size.is_ambiguous:
        caveats.append(
            f"The tensors of the batch differ in their first dimension; {batch_size}, the most frequent, was taken for the batch size."
        )
    if not getattr(step.model, "automatic_optimization", True):
        caveats.append(
            "Manual optimization: the forward passes of one batch were taken to stand at the same time."
        )
    if any(type(module).__name__ == "OptimizedModule" for module in step.model.modules()):
        caveats.append("A compiled module was followed as it would run without compilation.")
    if step.autocast_dtype is not None:
        caveats.append(
            "Autocast was followed by the CPU's lists of operators, which differ from CUDA's (layer norm, softmax, losses)."
        )
    here = _shape_pass(step, batch_size, caveats)
    if here is None:
        raise PredictionError(
            f"The step could not be followed on shapes alone, neither as a whole nor its model's forward. {caveats[-1]}"
        )
    more = _shape_pass(step, batch_size + 1, caveats)
    held, transient = _held(step, caveats)
    return TextbookPrediction(
        source=SOURCE,
        device_name=device_name or "any device",
        capacity_bytes=capacity,
        batch_size=batch_size,
        held=held,
        input=_law(own_bytes(tensors_in(step.batch)), None, batch_size),
        outputs=_law(here.output_bytes, more.output_bytes if more else None, batch_size),
        kept=_law(here.kept_bytes, more.kept_bytes if more else None, batch_size),
        saved=_law(here.saved_bytes, more.saved_bytes if more else None, batch_size),
        optimizer_transient_bytes=transient,
        workspace_bytes=_workspace_bytes(here, _device_of(step.model)),
        gradients_live_in_forward=not step.zero_grad_before_forward,
        caveats=tuple(dict.fromkeys(caveats)),
    )


def _law(here_bytes: int, more_bytes: int | None, batch_size: int) -> LinearBytes:
    """The line through the sizes at two neighbouring batch sizes; through the origin if there is
    only one.
    """
    if more_bytes is None or not 0 <= more_bytes - here_bytes <= here_bytes:
        return LinearBytes(fixed_bytes=0, per_sample_bytes=-(-here_bytes // batch_size))
    per_sample = more_bytes - here_bytes
    return LinearBytes(
        fixed_bytes=here_bytes - batch_size * per_sample, per_sample_bytes=per_sample
    )


def _shape_pass(step: TrainingStep, batch_size: int, caveats: list[str]) -> LayerTable | None:
    """Follow the step, or failing that its model's forward, on shapes at a batch size; None and a
    caveat if neither goes.
    """
    given = step.batch_size.batch_size
    assert given is not None
    failure = ""
    for attempt in ("training step", "forward"):
        with quietly(), untouched_globals(), untouched_variables(step.model, step.losses):
            fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
            try:
                model, batch = fake_copy((step.model, step.batch), fake_mode)
                batch = resize_batch(batch, given, batch_size)
                with fake_mode, torch.enable_grad():
                    if attempt == "training step":
                        table = shape_pass(
                            model,
                            partial(step.loss, model, batch),
                            autocast_dtype=step.autocast_dtype,
                        )
                    else:
                        table = shape_pass(
                            model,
                            partial(_forward, model, batch),
                            autocast_dtype=step.autocast_dtype,
                        )
            except Exception as error:  # user code on fakes can fail in any way
                failure = (
                    failure
                    or f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                )
                continue
        if attempt == "forward":
            caveats.append(
                f"The step could not be followed on shapes alone ({failure}): the model's forward was, so its loss is left out."
            )
        return table
    if batch_size == given:
        caveats.append(f"It failed with {failure}.")
    else:
        caveats.append(
            f"The step could not be followed at batch size {batch_size} ({failure}): all outputs were taken to be proportional to the batch size."
        )
    return None


def _forward(model: torch.nn.Module, batch: Any) -> object:
    """The model on a batch, or on the first part of it, which is its input."""
    if isinstance(batch, Sequence) and len(batch) > 0:
        with suppress(TypeError, AttributeError):
            return model(batch[0])
    if isinstance(batch, Mapping):
        with suppress(TypeError, AttributeError):
            return model(**batch)
    return model(batch)


def _device_of(model: torch.nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _held(step: TrainingStep, caveats: list[str]) -> tuple[dict[Category, int], int]:
    """Bytes of parameters, buffers, gradients and optimizer state on the model's device; and what
    the update needs for a moment.
    """
    device = _device_of(step.model)
    now = holdings([step.model], (), None, device).by_category
    trainable = [p for p in step.model.parameters() if p.requires_grad and is_on(p.device, device)]
    gradient = storage_bytes(trainable)
    state, transient = 0, 0
    with untouched_globals(), quietly():
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        with fake_mode:
            optimizers = step.optimizers_of(fake_copy(step.model, fake_mode))
        states = [optimizer_state_bytes(one, device_type=device.type) for one in optimizers]
    for optimizer, steady in zip(optimizers, states, strict=True):
        if steady is None:
            text = (
                f"The state of the optimizer {type(optimizer).__name__} is not known before its first step and counts as none in the "
                "prediction. Predict again after a step, when its own state can be read."
            )
            caveats.append(text)
            warn(text)
        else:
            state += steady.get(device.type, 0)
        transient = max(transient, _transient_bytes(optimizer, device))
    held = {
        Category.PARAMETER: now[Category.PARAMETER],
        Category.BUFFER: now[Category.BUFFER],
        Category.GRADIENT: gradient,
        Category.OPTIMIZER_STATE: state,
    }
    return held, transient


def _transient_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """What an update needs for a moment.

    A foreach update works on all parameters at once and holds one intermediate of each (the default
    on CUDA, torch/optim/optimizer.py `_default_to_fused_or_foreach`); a loop over parameters at
    most two of the largest (the square root and its quotient in Adam); a fused update and plain SGD
    none.
    """
    sizes = [
        p.numel() * p.element_size()
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad
    ]
    if not sizes:
        return 0
    group = optimizer.param_groups[0]
    if group.get("fused") or (
        isinstance(optimizer, torch.optim.SGD) and not group.get("weight_decay")
    ):
        return 0
    foreach = group.get("foreach")
    return sum(sizes) if foreach or (foreach is None and device.type == "cuda") else 2 * max(sizes)


#: Kinds of layers and functions that multiply matrices, for which CUDA has a cuBLAS handle.
_MATRIX_PRODUCTS = frozenset(
    {
        "Linear",
        "Bilinear",
        "MultiheadAttention",
        "linear",
        "matmul",
        "__matmul__",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "einsum",
    }
)


def _workspace_bytes(table: LayerTable, device: torch.device) -> int:
    """The cuBLAS workspaces of the forward thread and of the autograd thread, both persistent."""
    if device.type != "cuda" or not any(layer.kind in _MATRIX_PRODUCTS for layer in table.layers):
        return 0
    major, _ = torch.cuda.get_device_capability(device)
    return 2 * cublas_workspace_bytes(major)
