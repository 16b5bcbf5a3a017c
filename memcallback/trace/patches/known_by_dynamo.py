"""Has Dynamo know what a trace puts in place of PyTorch's functions.

Code that is compiled may ask for the device: `torch.cuda.get_device_properties(0)`. Dynamo knows
what to do with such functions by their identity. A function of ours in their place would cut the
code in two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from memcallback.trace.patches.cuda_api import DeviceProperties
from memcallback.trace.patches.patching import replacements

#: Functions of `torch.cuda` that Dynamo goes into, and finds to give a constant.
_INLINED = ("get_device_capability", "get_device_properties")


@contextmanager
def known_by_dynamo() -> Iterator[None]:
    """Have Dynamo take a function for the one that it replaces, which it knows by its identity."""
    variables = _of("variables.torch")
    rules = _of("trace_rules").get_torch_obj_rule_map()
    constants = variables.constant_fold_functions
    guarded = variables.constant_fold_functions_need_guards
    in_graph = variables.TorchInGraphFunctionVariable
    constant_types = _of("utils").common_constant_types
    added: list[tuple[dict[Any, Any], Any]] = []

    def add(table: dict[Any, Any], function: Any, value: Any) -> None:
        if function not in table:
            table[function] = value
            added.append((table, function))

    for function, original in replacements():
        if getattr(original, "__module__", None) == "torch.cuda" and original.__name__ in _INLINED:
            add(rules, function, in_graph)
            add(constants, function, None)
        for table in (rules, constants, guarded, in_graph._get_handlers()):
            if original in table:
                add(table, function, table[original])
    is_outermost = DeviceProperties not in constant_types
    constant_types.add(DeviceProperties)
    try:
        yield
    finally:
        if is_outermost:
            constant_types.discard(DeviceProperties)
        for table, function in added:
            del table[function]


def _of(name: str) -> Any:
    return import_module(f"torch._dynamo.{name}")
