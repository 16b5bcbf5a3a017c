"""KnownValues: the values of fake tensors that follow from the batch, the host and constants.

A value is known if it is in the batch, if the host has it (a number that is drawn, the count of an
optimizer's steps), or if code writes it (`torch.full`). What operators make of known values alone
is known too. What the device computes of parameters is not: `placeholders` has what is taken for
it, `patches/libraries` what is taken where NumPy and transformers read it.
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
from memcallback.step.copies.known import is_few, set_values, values_of

_aten = torch.ops.aten
#: Operators whose result depends only on the shape and the kind of their first argument.
_OF_SHAPES = frozenset(
    getattr(_aten, name).default
    for name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
)
#: Operators that select of their first argument what their second one says.
_SELECT = frozenset({_aten.index.Tensor, _aten.masked_select.default})
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
#: Operators that write a whole tensor, whatever was in it.
_FILLS = frozenset(
    getattr(getattr(_aten, name), overload)
    for name in ("fill_", "zero_", "copy_", "uniform_", "normal_", "random_", "exponential_")
    for overload in getattr(_aten, name).overloads()
    if overload != "out"
)
#: Larger numbers would make tensors that are not worth it.
_MAX_LENGTH = 10_000_000
#: A trace puts another class in its place.
_GENERATOR = torch.Generator
_CPU = torch.device("cpu")
_UNKNOWN = object()


class KnownValues:
    """Follows the values of small fake tensors through the operators of a trace.

    Attributes:
        num_reads: How often the program has read one.
        decide_shapes: Whether shapes are to follow from values: then more numbers are kept, such as
            those of a mask, but none of an optimizer.
    """

    def __init__(self) -> None:
        #: Storages that unknown values were written to, by number. Kept, so that no other gets it.
        self._overwritten: dict[int, torch.UntypedStorage] = {}
        self.num_reads = 0
        self.decide_shapes = False
        self._generators: dict[int, tuple[torch.Generator, torch.Generator]] = {}

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor, on the host; None if they are not known."""
        real = values_of(tensor)
        if real is None or storage_id(real.untyped_storage()) in self._overwritten:
            return None
        return real

    def read(self, call: OpCall) -> Any:
        """What an operator reads that returns a number; None if it is not known."""
        value = self._run(call)
        if value is _UNKNOWN:
            return None
        self.num_reads += 1
        return value

    def shaped(self, call: OpCall) -> Any:
        """Outputs of an operator whose shapes follow from known values; None if they do not."""
        first = call.inputs[0]
        for tensor in call.inputs:
            values = self.get(tensor)
            if values is not None and not values.is_floating_point():
                with no_dispatch():
                    if int(values.long().abs().sum()) > _MAX_LENGTH:
                        return None
        if call.op in _SELECT:
            shape = self._selected_shape(call)
            return None if shape is None else first.new_empty(shape)
        result = self._run(call)
        if result is _UNKNOWN:
            return None
        return tree_map_only(
            torch.Tensor, lambda real: first.new_empty(real.shape, dtype=real.dtype), result
        )

    def _selected_shape(self, call: OpCall) -> Sequence[int] | None:
        """The shape of what a mask or an index selects; None if their values are unknown."""
        tensor: Any = call.args[0]
        is_index = call.op is _aten.index.Tensor
        given: Any = call.args[1] if is_index else [call.args[1]]
        known = [None if one is None else self.get(one) for one in given]
        if any(
            values is None and one is not None for one, values in zip(given, known, strict=True)
        ):
            return None
        with suppress(Exception), DisableTorchFunction(), no_dispatch():
            shape = tuple(tensor.shape)
            places: list[Any] = []
            for values in known:
                if values is None:
                    places.append(slice(None))
                elif values.dtype in (torch.bool, torch.uint8):
                    if not is_index:
                        shape = torch.broadcast_shapes(shape, values.shape)
                        values = values.broadcast_to(shape)
                    places += [one.to("meta") for one in values.nonzero().unbind(1)]
                else:
                    places.append(values.to("meta"))
            return torch.empty(shape, device="meta")[tuple(places)].shape
        return None

    def follow(self, call: OpCall, *, is_host: bool) -> None:
        """Compute the values of a call's results where those of its arguments are known."""
        op, outputs, written = call.op, call.outputs, [*_written(call)]
        if not outputs and not written:
            return
        # PyTorch itself has changed these.
        if any(isinstance(t, FakeTensor) and t.constant is not None for t in written):
            return
        if op.namespace == "aten" and all(map(self._is_kept, outputs)):
            is_random = torch.Tag.nondeterministic_seeded in op.tags
            if (is_host or not (is_random or op in _OPEN)) and self._computed(call):
                for tensor in outputs if op in _OPEN else ():
                    self.overwrite(tensor)  # until the program has written to it
                return
        for tensor in written:
            self.overwrite(tensor)

    def _is_kept(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor are few enough."""
        has_more = self.decide_shapes and torch.is_grad_enabled()
        return is_few(tensor.numel(), torch.bool if has_more else tensor.dtype)

    def _of_shape(self, tensor: torch.Tensor) -> torch.Tensor:
        """A real tensor of the shape and kind of a fake one."""
        shape = tensor.shape if self._is_kept(tensor) else (0,)
        with no_dispatch():
            return torch.empty(shape, dtype=tensor.dtype)

    def _computed(self, call: OpCall) -> bool:
        """Whether the values of a call's results could be computed."""
        args = None
        if call.op in _OF_SHAPES or call.op in _OPEN:
            args = tree_map_only(torch.Tensor, self._of_shape, tuple(call.args))
        if call.op in _FILLS and (whole := self._whole(call.inputs[0])) is not None:
            args = (whole, *call.args[1:])
            if any(self.get(tensor) is None for tensor in call.inputs[1:]):
                return False
            self._overwritten.pop(storage_id(whole.untyped_storage()), None)
        result = self._run(call, args)
        if result is _UNKNOWN:
            return False
        results = [result] if isinstance(result, torch.Tensor) else list(result or ())
        fakes = [call.result] if isinstance(call.result, torch.Tensor) else list(call.result or ())
        if len(results) != len(fakes):
            return False
        for fake, real in zip(fakes, results, strict=True):
            if not (isinstance(fake, FakeTensor) and isinstance(real, torch.Tensor)):
                continue
            if fake.layout is not torch.strided or real.layout is not torch.strided:
                continue
            if fake.shape == real.shape and fake.dtype is real.dtype:
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
            return call.op(*self._on_host(args), **self._on_host(call.kwargs))
        return _UNKNOWN

    def _on_host(self, arguments: Any) -> Any:
        """Arguments with the values of tensors, the host for devices, and our own generators."""
        arguments = tree_map_only(FakeTensor, self.get, arguments)
        arguments = tree_map_only(_GENERATOR, self._own_generator, arguments)
        return tree_map_only(torch.device, lambda _: _CPU, arguments)

    def _own_generator(self, generator: torch.Generator) -> torch.Generator:
        """The trace's own generator, which starts from the state of the user's."""
        if id(generator) not in self._generators:
            self._generators[id(generator)] = generator, generator.clone_state()
        return self._generators[id(generator)][1]

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What a tensor keeps for its values, if it is all of its storage; else None."""
        real = values_of(tensor)
        if real is None or real.numel() * real.element_size() != real.untyped_storage().nbytes():
            return None
        return real

    def overwrite(self, tensor: torch.Tensor) -> None:
        """Unknown values are written to a tensor."""
        real = values_of(tensor)
        if real is not None:
            storage = real.untyped_storage()
            self._overwritten[storage_id(storage)] = storage


def _written(call: OpCall) -> Iterator[torch.Tensor]:
    """The fakes that an operator writes to."""
    schema = schema_of(call.op)
    if not schema.is_mutable:
        return
    for argument, value in zip(schema.arguments, call.arguments, strict=True):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (value,) if isinstance(value, torch.Tensor) else value or ()
