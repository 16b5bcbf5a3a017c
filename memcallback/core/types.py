"""The enums that all folders use: Phase, Stage, Category, Kind."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """A part of a training step: `FORWARD`, `BACKWARD`, `OPTIMIZER_STEP`, in this order."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER_STEP = "optimizer_step"

    @property
    def label(self) -> str:
        """The phase in words, such as `optimizer step`."""
        return self.value.replace("_", " ")


class Stage(Enum):
    """The kind of run that a step belongs to: a training, or a run without a backward pass."""

    TRAINING = "training"
    INFERENCE = "inference"
    VALIDATION = "validation"
    TEST = "test"
    PREDICTION = "prediction"
    GENERATION = "generation"

    @property
    def label(self) -> str:
        """A step of it in words, such as `training step`."""
        return f"{self.value} step"


class Category(Enum):
    """What a byte of device memory is for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    INPUT = "input"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"
    WORKSPACE = "workspace"

    #: Members are singletons. `Enum`'s own hash is a Python function, too slow for every event of a
    #: replay.
    __hash__ = object.__hash__

    @property
    def label(self) -> str:
        """The category in words, such as `parameters` or `optimizer state`."""
        countable = (
            Category.PARAMETER,
            Category.BUFFER,
            Category.GRADIENT,
            Category.ACTIVATION,
            Category.WORKSPACE,
        )
        return self.value.replace("_", " ") + ("s" if self in countable else "")


#: The categories that can be counted in a running training: storages of its model, optimizers and
#: batch. Activations, temporaries and workspaces are measured only together, as the rest.
PERSISTENT_CATEGORIES = (
    Category.PARAMETER,
    Category.BUFFER,
    Category.GRADIENT,
    Category.OPTIMIZER_STATE,
    Category.INPUT,
)


class Kind(Enum):
    """Whether a value was measured in a running program or predicted."""

    MEASURED = "measured"
    PREDICTED = "predicted"
