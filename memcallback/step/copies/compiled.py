"""Compiles the copy of a module as the module itself is compiled."""

from __future__ import annotations

from typing import Any

from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Whether the forward pass of a module is compiled, and its hooks are not."""
    return hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


def compile_as(copy: nn.Module, module: Any) -> None:
    """Compile a copy as `module` is, which `torch.compile` or `Module.compile` has compiled.

    Only the forward pass is: hooks of a copy tell which module runs, and would be compiled.
    """
    context = vars(module).get("dynamo_ctx")
    if context is None:
        context = _context_of(vars(module).get("_compiled_call_impl"))
    if context is not None:
        copy.forward = context(copy.forward)


def _context_of(function: Any) -> Any:
    """The context of `torch.compile`, which a function that it made keeps as its `self`."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or not cells:
        return None
    cell = dict(zip(code.co_freevars, cells, strict=True)).get("self")
    return None if cell is None else cell.cell_contents
