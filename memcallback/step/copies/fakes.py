"""Make fake tensors of real ones."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from memcallback.core.tensors import dense_parts, fake_with_values, jagged_like, sparse_tensor
from memcallback.core.torch_private import FakeTensor, FakeTensorMode, no_dispatch, storage_id

_CPU = torch.device("cpu")
#: The fake modes of all copies that are alive.
_modes: weakref.WeakSet[FakeTensorMode] = weakref.WeakSet()


class CannotBeFake(ValueError):
    """A tensor that cannot be made fake."""


class FakeFactory:
    """Makes fakes; tensors that share a storage get fakes that share a storage."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self._mode = fake_mode
        _modes.add(fake_mode)
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._numbers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        refuse_unless_known(tensor)
        if tensor.layout is torch.sparse_coo:
            indices, values = map(self, dense_parts(tensor))
            return sparse_tensor(
                indices, values, tensor.shape, is_coalesced=tensor.is_coalesced()
            ).requires_grad_(tensor.requires_grad)
        if tensor.layout is torch.jagged:
            values, offsets = dense_parts(tensor)
            return jagged_like(tensor, self(values), self._with_values(offsets)).requires_grad_(
                tensor.requires_grad
            )
        storage = tensor.untyped_storage()
        with no_dispatch(), torch.no_grad():
            if storage_id(storage) not in self._storages:
                self._storages[storage_id(storage)] = torch.UntypedStorage(
                    storage.nbytes(), device="meta"
                )
            shape = torch.empty(0, dtype=tensor.dtype, device="meta")
            shape.set_(
                self._storages[storage_id(storage)],
                tensor.storage_offset(),
                tensor.size(),
                tensor.stride(),
            )
            fake = FakeTensor(self._mode, shape, _CPU)
        return fake.requires_grad_(tensor.requires_grad)

    def _with_values(self, numbers: torch.Tensor) -> torch.Tensor:
        """A fake with known values; nested tensors that share it have the same shape."""
        if id(numbers) not in self._numbers:
            self._numbers[id(numbers)] = numbers, fake_with_values(self(numbers), numbers.tolist())
        return self._numbers[id(numbers)][1]


def live_modes() -> weakref.WeakSet[FakeTensorMode]:
    """The fake modes of copies that something still refers to."""
    return weakref.WeakSet(_modes)


def refuse_unless_known(tensor: torch.Tensor) -> None:
    """Raise `CannotBeFake` for a tensor of which no fake can be made."""
    kind = type(tensor)
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        raise CannotBeFake(
            f"A {kind.__name__} of a lazy module has no shape yet, so no fake tensor can replace "
            "it. Run the model once on a real batch first."
        )
    lengths = getattr(tensor, "_lengths", None)
    is_jagged = tensor.layout is torch.jagged and lengths is None
    own_dispatch = (
        kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        and not isinstance(tensor, FakeTensor)
    )
    is_other = (
        own_dispatch
        or tensor.layout not in (torch.strided, torch.sparse_coo)
        or tensor.is_nested
        or tensor.is_quantized
    )
    if is_other and not is_jagged:
        raise CannotBeFake(
            f"A {kind.__module__}.{kind.__qualname__} of shape {_shape_text(tensor)} and layout "
            f"{tensor.layout} cannot become a fake tensor. These can: strided tensors with their "
            "own storage, sparse COO tensors, and torch.jagged tensors without gaps. Convert it "
            "first, for instance with .to_sparse_coo(), .to_dense(), "
            "torch.nested.nested_tensor(..., layout=torch.jagged), .contiguous(), .dequantize() or "
            ".to_local(), or leave it out of the model and the batch."
        )


def _shape_text(tensor: torch.Tensor) -> str:
    return "unknown" if tensor.is_nested else str(tuple(tensor.shape))
