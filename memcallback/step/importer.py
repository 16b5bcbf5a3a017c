"""Load a model or a step from `package.module:name`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from memcallback.core.validation import kind_of

if TYPE_CHECKING:
    from torch import nn

    from memcallback.step.step import Step
    from memcallback.step.training_step import TrainingStep


TARGET_HELP = "a Python module or its file, a colon, and the name of an object in it"


class UsageError(Exception):
    """A mistake on the command line; printed as one line, after the lines of the user's code."""


def one_line(error: BaseException) -> str:
    """An error in one line without a full stop.

    Its class comes first, unless this package raised it with a message.
    """
    text = " ".join(str(error).split()).rstrip(".")
    raised_in, traceback = "", error.__traceback__
    while traceback is not None:
        raised_in, traceback = str(traceback.tb_frame.f_globals.get("__name__")), traceback.tb_next
    is_ours = raised_in.partition(".")[0] == "memcallback"
    if is_ours and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def load_model(target: str) -> nn.Module:
    """Load the model that a target names, or the result of the function that it names."""
    from torch import nn

    value = _load(target)
    verb = "is"
    if callable(value) and not isinstance(value, nn.Module):
        value, verb = _called(target, value, "torch.nn.Module"), "returned"
    if not isinstance(value, nn.Module):
        raise UsageError(
            f"{target} {verb} {kind_of(value)}, not a torch.nn.Module. Name a model, a class of "
            "models that needs no arguments, or a function that returns a model."
        )
    return value


def _called(target: str, make: Callable[[], Any], kind: str) -> Any:
    try:
        with redirect_stdout(sys.stderr):
            return make()
    except (Exception, SystemExit) as error:  # a user's function can fail in any way
        raise UsageError(
            f"{target} failed: {one_line(error)}. It is called without arguments and must return a "
            f"{kind}."
        ) from error


def _load(target: str) -> Any:
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise UsageError(
            f"{target!r} names nothing to load. Write {TARGET_HELP}, such as "
            "package.module:make_model."
        )
    folder = os.getcwd()
    if module_name.endswith(".py"):
        folder, module_name = _folder_and_module(module_name)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        with redirect_stdout(sys.stderr):
            value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"No module named {error.name!r}, on importing {module_name!r}. Run memcallback in the "
            "folder that has it, or install it."
        ) from error
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"Importing {module_name!r} failed: {one_line(error)}. It must import without running "
            "a training."
        ) from error
    for part in name.split("."):
        if not hasattr(value, part):
            raise UsageError(
                f"{module_name!r} has no attribute {name!r}. Name a function, class or model that "
                "is defined there."
            )
        value = getattr(value, part)
    return value


def _folder_and_module(file: str) -> tuple[str, str]:
    """The folder to import a file from, and its module's name there."""
    inside = os.path.relpath(file)
    if inside.startswith(os.pardir):
        folder, name = os.path.split(os.path.abspath(file))
        return folder, name.removesuffix(".py")
    return os.getcwd(), inside.removesuffix(".py").replace(os.sep, ".")


def load_step(target: str) -> Step:
    """Load the step that a target names."""
    value = _load(target)
    from torch import nn

    from memcallback.step.step import Step

    verb = "is"
    if callable(value) and not isinstance(value, nn.Module):
        value, verb = _called(target, value, "TrainingStep"), "returned"
    if isinstance(value, Step):
        return value
    if (
        isinstance(value, nn.Module)
        and hasattr(value, "training_step")
        and hasattr(value, "configure_optimizers")
    ):
        return _step_of_module(target, value)
    raise UsageError(
        f"{target} {verb} {kind_of(value)}, neither a TrainingStep nor an InferenceStep "
        "nor a LightningModule. Name a function that returns memcallback.TrainingStep(model, "
        "batch, loss=..., optimizer=...)."
    )


def _step_of_module(target: str, module: Any) -> TrainingStep:
    from memcallback.step.training_step import TrainingStep

    try:
        with redirect_stdout(sys.stderr):
            module.setup("fit")
            batch = next(iter(module.train_dataloader()))
            return TrainingStep.from_lightning(module, batch)
    except (Exception, SystemExit) as error:
        # A user's data can fail in any way, and a module without data raises Lightning's own error.
        failed, failure = error, one_line(error)
    example = getattr(module, "example_input_array", None)
    if example is None:
        raise UsageError(
            f"{target} has neither a train_dataloader that gives a batch ({failure}) nor an "
            "example_input_array. Name a function that returns "
            "memcallback.TrainingStep.from_lightning(module, batch)."
        ) from failed
    step = TrainingStep.from_lightning(module, example)
    sum_of_outputs = TrainingStep(module, example).loss
    step.losses = (lambda model, batch: sum_of_outputs(_Spread(model), batch),)
    step.keeps_losses = True
    print(
        f"memcallback: note: {target} has no train_dataloader that gives a batch ({failure}): its "
        "forward is predicted, on its example_input_array and without its loss.",
        file=sys.stderr,
    )
    return step


class _Spread:
    """Passes an `example_input_array` as Lightning does: unpacked if a tuple or mapping."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, example: Any) -> Any:
        if isinstance(example, tuple):
            return self._model(*example)
        return self._model(**example) if isinstance(example, Mapping) else self._model(example)
