"""What the running frames show of a transformers Trainer: its callbacks do not get it."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from memcallback.core.code_lines import frames_of
from memcallback.diagnose.tensors.variables import call_after, stack, variables

#: Functions of a Trainer that have a step's inputs in a variable (transformers 4.40 to 5.23).
_STEP_FUNCTIONS = ("training_step", "_run_epoch", "_inner_training_loop")


def callbacks_here() -> Iterator[Any]:
    """The callbacks of the Trainer that is calling them."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "call_event":
            yield from getattr(variables(frame).get("self"), "callbacks", ())
            return
        frame = frame.f_back


def wrapped_by_trainer(model: torch.nn.Module) -> torch.nn.Module:
    """What the Trainer that begins to train a model here calls: the model, or a wrapper of it."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        found = variables(frame) if frame.f_code.co_name in _STEP_FUNCTIONS else {}
        wrapped = getattr(found.get("self"), "model_wrapped", None)
        if isinstance(wrapped, torch.nn.Module):
            return wrapped if any(part is model for part in wrapped.modules()) else model
        frame = frame.f_back
    return model


def training_step_here() -> tuple[Any, Mapping[str, Any], Any] | None:
    """The Trainer whose step calls the model, its inputs and their number of items; else None."""
    trainer, num_items = None, None
    inputs: dict[str, Any] = {}
    frame: Any = sys._getframe(1)
    while frame is not None:
        found = variables(frame) if frame.f_code.co_name in _STEP_FUNCTIONS else {}
        if trainer is None and _is_trainer(found.get("self")):
            trainer, num_items = found["self"], found.get("num_items_in_batch")
        if trainer is not None and found.get("self") is trainer:
            # What a loss takes out of its inputs is still in those that its caller has.
            own = found.get("inputs")
            inputs = {**own, **inputs} if isinstance(own, Mapping) else inputs
        frame = frame.f_back
    return None if trainer is None or not inputs else (trainer, inputs, num_items)


def inputs_in(error: BaseException) -> tuple[Mapping[str, Any] | None, Any]:
    """The inputs of the Trainer's frames in an error and their number of items; None if unknown."""
    found = [variables(frame) for frame, _ in frames_of(error.__traceback__)]
    candidates = (each.get("inputs") for each in found)
    inputs = next((inputs for inputs in candidates if isinstance(inputs, Mapping)), None)
    numbers = (each.get("num_items_in_batch") for each in found)
    return inputs, next((number for number in numbers if number is not None), None)


def call_after_train(
    method: Callable[[int], None],
) -> tuple[weakref.finalize[..., Any], Callable[[], bool]] | None:
    """Call a method after the `Trainer.train` that runs here; None if none does.

    The method gets the thread, and is not called if its object is gone. The second result says
    whether `train` has been left: somebody may keep its error, and with it the frame, as a notebook
    keeps the last one.
    """
    for frame in stack(sys._getframe(1)):
        if frame.f_code.co_name == "train" and _is_trainer(variables(frame).get("self")):
            thread = threading.get_ident()
            end = call_after(frame, partial(_call, weakref.WeakMethod(method), thread))
            return end, partial(_is_over, id(frame), thread)
    return None


def _is_trainer(candidate: object) -> bool:
    """Whether this is a Trainer, of transformers or of a library that has its own."""
    return callable(getattr(candidate, "compute_loss", None))


def _call(reference: weakref.WeakMethod[Callable[[int], None]], thread: int) -> None:
    """Call a method if its object exists."""
    if (method := reference()) is not None:
        method(thread)


def _is_over(frame_id: int, thread: int) -> bool:
    """Whether a thread has left a frame, which exists; another thread cannot tell."""
    here = threading.get_ident() == thread
    return here and all(id(frame) != frame_id for frame in stack(sys._getframe(1)))
