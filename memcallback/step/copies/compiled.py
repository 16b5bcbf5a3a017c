"""Compiles the copy of a module as the module itself is compiled."""

from __future__ import annotations

from typing import Any

from torch import nn

from memcallback.step.forward_hooks import compiled_call, is_compiled_in_place

#: Where and of which methods Lightning keeps what `torch.compile` made (utilities/compile.py).
_LIGHTNING_CONTEXT = "_compiler_ctx"
_LIGHTNING_METHODS = ("forward", "training_step", "validation_step", "test_step", "predict_step")


def is_compiled_function(function: object) -> bool:
    """Whether `torch.compile` has made a function."""
    return hasattr(function, "_torchdynamo_orig_callable")


def is_compiled(module: nn.Module) -> bool:
    """Whether the forward pass of a module is compiled, and its hooks are not."""
    return is_compiled_function(vars(module).get("forward"))


def has_compiled_code(module: nn.Module) -> bool:
    """Whether a module is, or wraps, one that `torch.compile` or `Module.compile` has compiled."""
    return (
        "_orig_mod" in module._modules
        or is_compiled_in_place(module)
        or vars(module).get(_LIGHTNING_CONTEXT) is not None
    )


class CompiledAs:
    """Compiles a module as another one is compiled, by `torch.compile` or by `Module.compile`."""

    def __init__(self, module: Any) -> None:
        own = vars(module)
        self._context = own.get("dynamo_ctx")
        self._in_place = self._context is None
        if self._in_place:
            self._context = _context_of(compiled_call(module))

    def __call__(self, module: Any) -> Any:
        """Compile a module."""
        if self._context is None:
            return module
        if not self._in_place:
            return self._context(module)
        module._compiled_call_impl = self._context(module._call_impl)
        return module

    def __repr__(self) -> str:
        """The function that compiles."""
        return "torch.compile"


def compile_as(copy: nn.Module, module: Any) -> None:
    """Compile a copy as `module` is, which `torch.compile` or `Module.compile` has compiled.

    Of what `torch.compile` has compiled, only the forward pass is: hooks of a copy tell which
    module runs, and would be compiled. Of a LightningModule the Trainer runs its steps compiled
    too.
    """
    own = vars(module)
    by_lightning = own.get(_LIGHTNING_CONTEXT)
    if by_lightning is not None:  # the Trainer has replaced the methods by those of the original
        context = by_lightning["dynamo_ctx"]
        for name in _LIGHTNING_METHODS:
            method = by_lightning[f"original_{name}"]
            setattr(copy, name, context(getattr(method, "__func__", method).__get__(copy)))
        return
    context = own.get("dynamo_ctx")
    if context is not None and hasattr(copy, "training_step"):
        for name in _LIGHTNING_METHODS:
            setattr(copy, name, context(getattr(copy, name)))
        return
    if context is not None:
        copy.forward = context(copy.forward)
    else:
        # PyTorch does not compile a forward pass of its own classes so, such as nn.Sequential's.
        CompiledAs(module)(copy)


def _context_of(function: Any) -> Any:
    """The context of `torch.compile`, which a function that it made keeps as its `self`."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or not cells:
        return None
    cell = dict(zip(code.co_freevars, cells, strict=True)).get("self")
    return None if cell is None else cell.cell_contents
