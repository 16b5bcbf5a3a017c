"""Predicts a step by the textbook estimate: layer outputs from shapes, persistent memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from memcallback.core.errors import PredictionError, warn
from memcallback.core.interruptions import ENDS, raise_if_meant
from memcallback.core.tensors import is_on, own_bytes, storage_bytes, tensors_in, torch_version
from memcallback.core.torch_private import FakeTensorMode
from memcallback.core.types import Category
from memcallback.core.units import parse_bytes
from memcallback.devices.blas import cublas_workspace_bytes
from memcallback.prediction.predict_here import quietly
from memcallback.prediction.textbook.law import LinearBytes, TextbookPrediction
from memcallback.prediction.textbook.layer_table import LayerTable
from memcallback.prediction.textbook.optimizer_state import optimizer_state_bytes
from memcallback.prediction.textbook.shape_pass import shape_pass
from memcallback.step.copies.functions import untouched_variables
from memcallback.step.copies.modes import untouched_globals
from memcallback.step.copies.objects import fake_copy
from memcallback.step.copies.resizing import resize_batch
from memcallback.step.holdings import holdings
from memcallback.step.training_step import TrainingStep

SOURCE = "textbook estimate"


def predict(
    step: TrainingStep, *, device: str | int | None = None, device_name: str | None = None
) -> TextbookPrediction:
    """Bound the memory of a steady step, with copies on fake tensors: nothing else changes."""
    capacity = parse_bytes(device) if device is not None else None
    batch_size = step.check_predictable()
    caveats = [
        "Convolution workspaces, temporaries inside operators and the allocator's rounding are "
        "left out."
    ]
    if step.batch_size.is_ambiguous:
        caveats.append(step.batch_size.doubt)
    if not getattr(step.model, "automatic_optimization", True):
        caveats.append(
            "Manual optimization: all forward passes of one batch were assumed to be live at once."
        )
    if any(type(module).__name__ == "OptimizedModule" for module in step.model.modules()):
        caveats.append("A compiled module was predicted as it runs without compilation.")
    if step.autocast_dtype is not None:
        caveats.append(
            "Autocast used the CPU's lists of operators, which differ from CUDA's (layer norm, "
            "softmax, losses)."
        )
    here = _shape_pass(step, batch_size, caveats)
    if here is None:
        raise PredictionError(
            f"Neither the step nor its model's forward pass can run on fake tensors. {caveats[-1]}"
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
    """The line through sizes at two neighbouring batch sizes, or through one and the origin."""
    if more_bytes is None or not 0 <= more_bytes - here_bytes <= here_bytes:
        return LinearBytes(fixed_bytes=0, per_sample_bytes=-(-here_bytes // batch_size))
    per_sample = more_bytes - here_bytes
    return LinearBytes(
        fixed_bytes=here_bytes - batch_size * per_sample, per_sample_bytes=per_sample
    )


def _shape_pass(step: TrainingStep, batch_size: int, caveats: list[str]) -> LayerTable | None:
    """Run the step on fakes, else its model's forward alone; None and a caveat if both fail."""
    own_batch_size = step.batch_size.batch_size
    assert own_batch_size is not None
    failure = ""
    for is_whole_step in (True, False):
        with quietly(), untouched_globals(), untouched_variables(step.model, step.losses):
            fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
            try:
                model, batch = fake_copy((step.model, step.batch), fake_mode)
                batch = resize_batch(batch, own_batch_size, batch_size)
                forward = partial(step.loss if is_whole_step else _forward, model, batch)
                with fake_mode, torch.enable_grad():
                    table = shape_pass(model, forward, autocast_dtype=step.autocast_dtype)
            except ENDS as error:  # user code on fakes can fail, and end, in any way
                raise_if_meant(error)
                failure = (
                    failure
                    or f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                )
                continue
        if not is_whole_step:
            caveats.append(
                f"The step cannot run on fake tensors ({failure}): the model's forward pass was "
                "used instead, so the loss is left out."
            )
        return table
    if batch_size == own_batch_size:
        caveats.append(f"On fake tensors the step failed with {failure}.")
    else:
        caveats.append(
            f"The step cannot run on fake tensors at batch size {batch_size} ({failure}): all "
            "outputs were assumed to be proportional to the batch size."
        )
    return None


def _forward(model: torch.nn.Module, batch: Any) -> object:
    """Call the model with the batch, or with its first part, which usually is the input."""
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
    """Persistent bytes on the model's device by category, and temporary bytes of the update."""
    device = _device_of(step.model)
    now = holdings([step.model], (), None, device).by_category
    trainable = [p for p in step.model.parameters() if p.requires_grad and is_on(p.device, device)]
    gradient = storage_bytes(trainable)
    state, transient = 0, 0
    with untouched_globals(), quietly():
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        with fake_mode:
            optimizers = step.optimizers_of(fake_copy(step.model, fake_mode))
        states = [optimizer_state_bytes(each, device_type=device.type) for each in optimizers]
    for optimizer, steady in zip(optimizers, states, strict=True):
        if steady is None:
            text = (
                f"The state of the optimizer {type(optimizer).__name__} is unknown before its "
                "first step and counts as 0 bytes in the prediction. Predict again after a step."
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
    """Temporary bytes of an update.

    A foreach update holds one intermediate for each parameter at once (the default on CUDA,
    torch/optim/optimizer.py `_default_to_fused_or_foreach`). A loop over parameters holds at most
    two of the largest (the square root and its quotient in Adam), a fused update and plain SGD
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


#: Layers and functions that multiply matrices and so create a cuBLAS handle.
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
    return 2 * cublas_workspace_bytes(torch.cuda.get_device_capability(device), torch_version())
