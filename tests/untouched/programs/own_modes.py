"""A dispatch mode and a function mode of the user's around the training, which count calls."""

from contextlib import contextmanager

from parts import Small
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

NUM_CALLS = {"operators": 0, "functions": 0}


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        NUM_CALLS["operators"] += "addmm" in str(func)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        NUM_CALLS["functions"] += getattr(func, "__name__", "") == "linear"
        return func(*args, **(kwargs or {}))


@contextmanager
def around():
    with Operators(), Functions():
        yield


class Model(Small):
    pass
