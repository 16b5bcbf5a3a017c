"""The enums everybody uses: Phase, Category, Kind."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """A part of a training step, in the order in which they run."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER_STEP = "optimizer_step"

    @property
    def label(self) -> str:
        """The phase as a person reads it, such as `optimizer step`."""
        return self.value.replace("_", " ")


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

    #: Each is one object; what `Enum` has is a function in Python, which a replay would call for
    #: every event.
    __hash__ = object.__hash__

    @property
    def label(self) -> str:
        """The category as a person reads it, such as `parameters` or `optimizer state`."""
        countable = (
            Category.PARAMETER,
            Category.BUFFER,
            Category.GRADIENT,
            Category.ACTIVATION,
            Category.WORKSPACE,
        )
        return self.value.replace("_", " ") + ("s" if self in countable else "")


#: What a running training can be asked for: the storages that its model, its optimizers and its
#: batch hold. What is allocated beyond them (activations, temporaries, workspaces) is known only as
#: the rest.
PERSISTENT_CATEGORIES = (
    Category.PARAMETER,
    Category.BUFFER,
    Category.GRADIENT,
    Category.OPTIMIZER_STATE,
    Category.INPUT,
)


class Kind(Enum):
    """Whether a figure was read from a running program or worked out without one."""

    MEASURED = "measured"
    PREDICTED = "predicted"
