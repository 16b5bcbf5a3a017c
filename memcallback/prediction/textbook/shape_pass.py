"""layers(): a table of a model's layers, from a forward pass on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memcallback.core.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    is_mkldnn_on,
    set_mkldnn,
)
from memcallback.isolation.isolated import TIMEOUT_S
from memcallback.prediction.apart import predict_apart
from memcallback.prediction.textbook.layer_recorder import FunctionRows, LayerRecorder
from memcallback.prediction.textbook.layer_table import LayerTable
from memcallback.step.copies.functions import untouched_variables
from memcallback.step.copies.modes import untouched_globals
from memcallback.step.copies.objects import fake_copy


def layers(
    model: nn.Module,
    *inputs: Any,
    input_size: Sequence[int] | Sequence[Sequence[int]] | None = None,
    autocast_dtype: torch.dtype | None = None,
    isolate: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> LayerTable:
    """Tabulate the layers of a model without running it: a copy runs on fake tensors.

    Args:
        model: The model, in training or evaluation mode as wanted. It is not changed.
        *inputs: The model's inputs: tensors (on any device, also `meta`), containers of tensors, or
            anything else.
        input_size: Instead of inputs, the size of a tensor such as (1, 3, 224, 224), or a list of
            sizes, one for each input. The tensors have the dtype of the model's first
            floating-point parameter.
        autocast_dtype: Run under autocast with this dtype, such as torch.bfloat16.
        isolate: As for `predict`.
        timeout_s: As for `predict`.

    Returns:
        One row for each call of a layer, and the sums.

    Raises:
        ValueError: If both or neither of inputs and `input_size` are given, a size is invalid, or
            the model reads the values of a tensor.

    Examples:
        >>> table = layers(nn.Linear(3, 4), input_size=(2, 3))
        >>> table.num_parameters, table.output_bytes, table.num_multiply_adds
        (16, 32, 24)
    """
    if bool(inputs) == (input_size is not None):
        got = "both" if inputs else "neither"
        raise ValueError(
            f"layers() takes either example inputs or input_size, got {got}. "
            "Write layers(model, batch) or layers(model, input_size=(1, 3, 224, 224))."
        )
    if input_size is not None:
        inputs = tuple(
            torch.empty(size, dtype=input_dtype(model), device="meta")
            for size in _sizes(input_size)
        )
    return predict_apart(
        lambda _: _layers(model, inputs, autocast_dtype), isolate=isolate, timeout_s=timeout_s
    )


def _layers(
    model: nn.Module, inputs: tuple[Any, ...], autocast_dtype: torch.dtype | None
) -> LayerTable:
    with untouched_globals(), untouched_variables(model, ()):
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        fake_model, fake_inputs = fake_copy((model, inputs), fake_mode)
        with fake_mode, torch.enable_grad():
            return shape_pass(
                fake_model, lambda: fake_model(*fake_inputs), autocast_dtype=autocast_dtype
            )


def input_dtype(model: nn.Module) -> torch.dtype:
    """The likely dtype of a model's input: that of its first floating-point parameter."""
    return next(
        (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()),
        torch.float32,
    )


def shape_pass(
    model: nn.Module, forward: Callable[[], object], *, autocast_dtype: torch.dtype | None = None
) -> LayerTable:
    """Run a forward pass on fake tensors and tabulate it; a loss in it has rows too."""
    recorder = LayerRecorder(model)
    autocast = (
        torch.autocast("cpu", dtype=autocast_dtype) if autocast_dtype else contextlib.nullcontext()
    )
    saved_hooks = torch.autograd.graph.saved_tensors_hooks(recorder.on_save, lambda tensor: tensor)
    try:
        with (
            recorder.hooks(),
            _without_onednn(),
            autocast,
            saved_hooks,
            recorder.flop_counter,
            recorder,
            FunctionRows(recorder),
        ):
            forward()
    except Exception as error:  # fake tensors have several errors for a read of values
        operator = _value_reader(error)
        if operator is None:
            raise
        raise ValueError(
            f"The operator {operator} in module {recorder.module_name!r} reads the values of a "
            "tensor, and fake tensors have none. Let the model skip this operator, for instance by "
            "an argument, or call layers() on submodules that do not contain the operator."
        ) from error
    return recorder.table()


def _value_reader(error: Exception) -> str | None:
    """The operator that failed because it reads values; None for another error."""
    if isinstance(
        error,
        (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException),
    ):
        return str(error.func)
    # The message of torch/_tensor.py and python_variable_methods.cpp for a fake tensor.
    return (
        "Tensor.numpy" if ".numpy() is not supported for tensor subclasses" in str(error) else None
    )


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    # With oneDNN, a recurrent layer on the CPU is one operator, which the FLOP counter does not
    # know. torch.backends.mkldnn.flags would also set the TF32 flag, and warn of it.
    was_enabled = is_mkldnn_on()
    set_mkldnn(False)
    try:
        yield
    finally:
        set_mkldnn(was_enabled)


def _sizes(input_size: Sequence[int] | Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    several = (
        [input_size] if all(isinstance(item, int) for item in input_size) else list(input_size)
    )
    for size in several:
        if (
            not isinstance(size, Sequence)
            or not size
            or not all(isinstance(item, int) and item >= 0 for item in size)
        ):
            raise ValueError(
                "input_size must be a size such as (1, 3, 224, 224) with whole numbers of at least "
                f"0, or a list of sizes, got {input_size!r}."
            )
    return [tuple(size) for size in several]  # type: ignore[arg-type]
