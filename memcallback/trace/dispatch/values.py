"""KnownValues: the values of fake tensors that follow from the batch, the host and constants.

A value is known if it is in the batch, if the host has it (a number that is drawn, the count of an
optimizer's steps), or if code writes it (`torch.full`). What operators make of known values alone
is known too. What the device computes of parameters is not: `placeholders` has what is taken for
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from memcallback.core.torch_private import (
    DisableTorchFunction,
    FakeTensor,
    no_dispatch,
    schema_of,
    storage_id,
    tree_map_only,
)
from memcallback.cuda.op_call import OpCall
from memcallback.step.copies.known import MAX_KNOWN, set_values, values_of

_aten = torch.ops.aten
#: Operators whose result depends only on the shape and the kind of their first argument.
_OF_SHAPES = frozenset(
    getattr(_aten, name).default
    for name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
)
#: Operators that leave the values open, which are known only once they are written.
_OPEN = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)
_CPU = torch.device("cpu")
_UNKNOWN = object()


class KnownValues:
    """Follows the values of small fake tensors through the operators of a trace."""

    def __init__(self) -> None:
        #: Storages that unknown values were written to, by number. Kept, so that no other gets it.
        self._overwritten: dict[int, torch.UntypedStorage] = {}

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor, on the host; None if they are not known."""
        real = values_of(tensor)
        if real is None or storage_id(real.untyped_storage()) in self._overwritten:
            return None
        return real

    def read(self, call: OpCall) -> Any:
        """What an operator reads that returns a number; None if it is not known."""
        value = self._run(call)
        return None if value is _UNKNOWN else value

    def shaped(self, call: OpCall) -> Any:
        """Outputs of an operator whose shapes follow from known values; None if they do not."""
        first = call.inputs[0]
        result = self._run(call)
        if result is _UNKNOWN:
            return None
        return tree_map_only(
            torch.Tensor, lambda real: first.new_empty(real.shape, dtype=real.dtype), result
        )

    def follow(self, call: OpCall, *, is_host: bool) -> None:
        """Compute the values of a call's results where those of its arguments are known."""
        op, outputs = call.op, call.outputs
        if not outputs and not schema_of(op).is_mutable:
            return
        if op.namespace == "aten" and all(o.numel() <= MAX_KNOWN for o in outputs):
            is_random = torch.Tag.nondeterministic_seeded in op.tags
            if (is_host or not (is_random or op in _OPEN)) and self._computed(call):
                return
        for tensor in _written(call):
            self.overwrite(tensor)

    def _computed(self, call: OpCall) -> bool:
        """Whether the values of a call's results could be computed."""
        args = None
        if call.op in _OF_SHAPES or call.op in _OPEN:
            args = tree_map_only(torch.Tensor, _of_shape, tuple(call.args))
        result = self._run(call, args)
        if result is _UNKNOWN:
            return False
        results = [result] if isinstance(result, torch.Tensor) else list(result or ())
        fakes = [call.result] if isinstance(call.result, torch.Tensor) else list(call.result or ())
        if len(results) != len(fakes):
            return False
        for fake, real in zip(fakes, results, strict=True):
            is_alike = isinstance(fake, FakeTensor) and isinstance(real, torch.Tensor)
            if is_alike and fake.shape == real.shape and fake.dtype is real.dtype:
                set_values(fake, real)
        return True

    def _run(self, call: OpCall, args: Sequence[Any] | None = None) -> Any:
        """Run an operator on known values, or on `args`; `_UNKNOWN` if that cannot be."""
        if args is None:
            if any(self.get(tensor) is None for tensor in call.inputs):
                return _UNKNOWN
            args = call.args
        # Bad values fail here, as they do in a training.
        with suppress(Exception), DisableTorchFunction(), no_dispatch(), torch.no_grad():
            return call.op(*_on_host(args, self), **_on_host(call.kwargs, self))
        return _UNKNOWN

    def overwrite(self, tensor: torch.Tensor) -> None:
        """Unknown values are written to a tensor."""
        real = values_of(tensor)
        if real is not None:
            storage = real.untyped_storage()
            self._overwritten[storage_id(storage)] = storage


def _on_host(arguments: Any, values: KnownValues) -> Any:
    """Arguments with the values of tensors, and the host for every device."""
    arguments = tree_map_only(torch.Tensor, values.get, arguments)
    return tree_map_only(torch.device, lambda _: _CPU, arguments)


def _of_shape(tensor: torch.Tensor) -> torch.Tensor:
    """A real tensor of the shape and kind of a fake one."""
    shape = tensor.shape if tensor.numel() <= MAX_KNOWN else (0,)
    with no_dispatch():
        return torch.empty(shape, dtype=tensor.dtype)


def _written(call: OpCall) -> Iterator[torch.Tensor]:
    """The fakes that an operator writes to."""
    schema = schema_of(call.op)
    if not schema.is_mutable:
        return
    for argument, value in zip(schema.arguments, call.arguments, strict=True):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (value,) if isinstance(value, torch.Tensor) else value or ()
