"""RealTensors: the tensors of a step that are no fakes: most get one, numbers for C++ stay real."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from memcallback.core.tensors import dense_parts, sparse_tensor
from memcallback.core.torch_private import FakeTensor, FakeTensorMode, no_dispatch
from memcallback.core.types import Category
from memcallback.cuda.op_call import OpCall, tensors_of
from memcallback.step.beside import tensors_of as all_tensors_of
from memcallback.step.copies.known import remember_values
from memcallback.trace.dispatch.collectives import InFlight, is_collective
from memcallback.trace.dispatch.entries import Entry
from memcallback.trace.dispatch.ledger import Ledger

_EMPTY = torch.ops.aten.empty.memory_format


def is_of_numbers(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether an operator makes an empty int32 tensor, or works on real tensors alone."""
    tensors = tensors_of((*args, *kwargs.values()))
    return not any(isinstance(tensor, FakeTensor) for tensor in tensors) and (
        bool(tensors) or kwargs.get("dtype") is torch.int32
    )


def addresses(it: object) -> list[int]:
    """Where the storages of a module or of tensors in containers lie; 0 for one without data."""
    return [part.untyped_storage().data_ptr() for part in owning_parts(it)]


def owning_parts(it: object) -> Iterator[torch.Tensor]:
    """The tensors of a module or of containers that own storages."""
    return (part for tensor in all_tensors_of(it) for part in dense_parts(tensor))


class RealTensors:
    """Makes one fake for each real tensor: an operator in place would change the user's tensor."""

    def __init__(self, mode: FakeTensorMode, in_flight: InFlight) -> None:
        self._mode, self._in_flight = mode, in_flight
        #: The real ones are kept, so that their ids are not given out again.
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        #: Of storages on a device that are in the ledger already, by the address of the real one.
        self._recorded: dict[int, Entry] = {}

    def are_recorded(
        self, real: Sequence[int], fakes: Sequence[torch.Tensor], ledger: Ledger
    ) -> None:
        """Know that the storages at some addresses, of which there are fakes, are in the ledger."""
        for address, part in zip(real, fakes, strict=True):
            if address and (entry := ledger.find(part)) is not None:
                self._recorded[address] = entry

    def run(self, call: OpCall, ledger: Ledger | None) -> object:
        """Run an operator on real host tensors; record those that are meant for the device."""
        if is_collective(call.operator):
            self._in_flight.begun(())
        with no_dispatch():
            outputs = call.op(*call.args, **call.kwargs)
        if ledger is not None and call.op is _EMPTY and call.kwargs.get("device") is not None:
            ledger.add(outputs, Category.TEMPORARY, call.operator)
        return outputs

    def fake_of(self, ledger: Ledger, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a tensor; the tensor itself if it is one, or has another layout."""
        if isinstance(tensor, FakeTensor) or tensor.layout not in (torch.strided, torch.sparse_coo):
            return tensor
        if id(tensor) not in self._fakes:
            if tensor.layout is torch.sparse_coo:
                indices, values = (self.fake_of(ledger, part) for part in dense_parts(tensor))
                fake = sparse_tensor(
                    indices, values, tensor.shape, is_coalesced=tensor.is_coalesced()
                )
            else:
                fake = self._fake_of_strided(tensor)
                is_host = tensor.device.type == "cpu"
                entry = None if is_host else self._recorded.get(tensor.untyped_storage().data_ptr())
                if entry is None:
                    ledger.add(fake, None, "", is_host=is_host)
                else:
                    ledger.share(fake, entry)
            self._fakes[id(tensor)] = tensor, fake
        return self._fakes[id(tensor)][1]

    def _fake_of_strided(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu" or not self._mode.may_turn_const(tensor):
            with self._mode:
                fake = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
            remember_values(fake, tensor)
            return fake
        with no_dispatch():
            values = tensor.clone()
        return self._mode.fake_tensor_converter.from_real_tensor(
            self._mode, values, make_constant=True
        )
