"""LayerRecorder: assigns each operator of a forward pass to the layer that runs it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from memcallback.core.tensors import dense_parts
from memcallback.core.torch_private import (
    FakeTensor,
    TorchDispatchMode,
    storage_id,
    tree_leaves,
    tree_map_only,
)
from memcallback.core.visible import visible_name
from memcallback.prediction.textbook.layer_table import Layer, LayerTable


def _sdpa_flop(
    query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    flops: int = sdpa_flop_count(query, key, value)
    return flops


# torch.utils.flop_counter (2.13) knows CUDA's attention operators; the CPU's has their arguments.
_CPU_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _sdpa_flop}


class _Row:
    """A layer's call while it runs; it holds new storages, so that no address is reused."""

    def __init__(self, name: str, kind: str, num_flops_before: int) -> None:
        self.name = name
        self.kind = kind
        self.num_flops_before = num_flops_before
        self.new_storages: dict[int, torch.UntypedStorage] = {}
        self.read: dict[tuple[int, int, int], int] = {}
        self.changed: dict[tuple[int, int, int], int] = {}
        self.num_parameters = 0
        self.parameter_bytes = 0
        self.has_operators = False

    def finish(self, output: object, num_flops: int) -> Layer:
        tensors = _tensors(output)
        storages = {_address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        output_bytes = sum(
            num_bytes for address, num_bytes in storages.items() if address in self.new_storages
        )
        num_flops -= self.num_flops_before
        return Layer(
            name=self.name,
            kind=self.kind,
            output_shape=tuple(tensors[0].shape) if tensors else None,
            num_parameters=self.num_parameters,
            parameter_bytes=self.parameter_bytes,
            output_bytes=output_bytes,
            num_flops=num_flops,
            num_multiply_adds=num_flops // 2,
            read_bytes=sum(self.read.values()),
            written_bytes=output_bytes + sum(self.changed.values()),
        )


class LayerRecorder(TorchDispatchMode):
    """Assigns each operator to the layer that runs it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self.flop_counter = FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
        self._modules: list[tuple[str, _Row | None]] = [("", None)]
        self._rows: list[_Row] = []
        self._layers: list[Layer] = []
        self._uncounted = {_view_key(parameter) for parameter in model.parameters()}
        self._new_addresses: set[int] = set()
        self._saved: dict[int, torch.UntypedStorage] = {}
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # Held to the end: else a saved storage could reuse the address of an earlier output.
        self._outputs: dict[int, torch.UntypedStorage] = {}
        self._is_saving = False

    @property
    def module_name(self) -> str:
        return self._modules[-1][0]

    @property
    def in_row(self) -> bool:
        return bool(self._rows)

    def open(self, name: str, kind: str) -> _Row:
        row = _Row(name, kind, self.flop_counter.get_total_flops())
        self._rows.append(row)
        return row

    def close(self, row: _Row, output: object, *, keep: bool = True) -> None:
        del self._rows[self._rows.index(row) :]
        if keep:
            self._outputs.update(
                {
                    _address(t): t.untyped_storage()
                    for t in _tensors(output)
                    if _address(t) in row.new_storages
                }
            )
            self._layers.append(row.finish(output, self.flop_counter.get_total_flops()))

    def on_save(self, tensor: torch.Tensor) -> torch.Tensor:
        self._is_saving = True
        try:
            for part in dense_parts(tensor):
                if _address(part) in self._new_addresses:
                    self._saved[_address(part)] = part.untyped_storage()
            # An output saved by its own node would keep itself alive, so autograd gets an alias.
            return tensor.detach()
        finally:
            self._is_saving = False

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        handles = []
        for name, module in self._model.named_modules():
            handles.append(
                module.register_forward_pre_hook(self._enter(visible_name(name)), prepend=True)
            )
            handles.append(module.register_forward_hook(self._leave(visible_name(name))))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            # A user's module without children has a row for each function it calls instead.
            is_leaf = (
                next(module.children(), None) is None
                and type(module).__module__.partition(".")[0] == "torch"
            )
            row = self.open(name, type(module).__name__) if is_leaf else None
            self._modules.append((name, row))
            if row is not None:
                for parameter in module.parameters(recurse=False):
                    self._count(parameter, row)

        return hook

    def _leave(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # A module that raised is still on the stack if the model caught its exception.
            while self._modules[-1][0] != name:
                self._modules.pop()
            _, row = self._modules.pop()
            if row is not None:
                self.close(row, output)

        return hook

    def _count(self, tensor: torch.Tensor, row: _Row) -> None:
        if _view_key(tensor) in self._uncounted:
            self._uncounted.remove(_view_key(tensor))
            row.num_parameters += tensor.numel()
            row.parameter_bytes += _num_bytes(tensor)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_saving or func.namespace == "prim":
            return func(*args, **kwargs)
        if func is not torch.ops.aten._local_scalar_dense.default:
            args, kwargs = tree_map_only(torch.Tensor, self._fake_of, (args, kwargs))
        outside = not self._rows
        row = (
            self.open(f"{self.module_name}/{_operator_name(func)}", _operator_name(func))
            if outside
            else self._rows[-1]
        )
        output = func(*args, **kwargs)
        self._record(row, func, args, kwargs, output)
        if outside:
            self.close(row, output)
        return output

    def _fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake in place of a real tensor, such as a global one, which no operator may change."""
        if isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return tensor
        if id(tensor) not in self._fakes:
            # The real tensor is kept so that its id is not reused. The active fake mode makes the
            # new tensor a fake.
            self._fakes[id(tensor)] = (
                tensor,
                torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                ),
            )
        return self._fakes[id(tensor)][1]

    def _record(
        self, row: _Row, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        row.has_operators = True
        inputs = _tensors((args, kwargs))
        changed = _changed_arguments(func, args, kwargs)
        known = {_address(tensor) for tensor in inputs}
        new = [tensor for tensor in _tensors(output) if _address(tensor) not in known]
        for tensor in new:
            row.new_storages[_address(tensor)] = tensor.untyped_storage()
            self._new_addresses.add(_address(tensor))
        for tensor in inputs:
            self._count(tensor, row)
            is_read = new or changed
            if is_read and _address(tensor) not in row.new_storages:
                row.read[_view_key(tensor)] = _num_bytes(tensor)
        for tensor in changed:
            if _address(tensor) not in row.new_storages:
                row.changed[_view_key(tensor)] = _num_bytes(tensor)

    def table(self) -> LayerTable:
        """The recorded layers, and rows for parameters that no layer used."""
        for name, module in self._model.named_modules():
            row = _Row(
                visible_name(name), type(module).__name__, self.flop_counter.get_total_flops()
            )
            for parameter in module.parameters(recurse=False):
                self._count(parameter, row)
            if row.num_parameters:
                self._layers.append(row.finish(None, row.num_flops_before))
        saved_bytes = sum(storage.nbytes() for storage in self._saved.values())
        kept_bytes = sum(storage.nbytes() for storage in (self._outputs | self._saved).values())
        return LayerTable(
            layers=tuple(self._layers), saved_bytes=saved_bytes, kept_bytes=kept_bytes
        )


class FunctionRows(TorchFunctionMode):
    """Adds rows for functions called outside of layers: `torch.relu(x)`, `x.relu()`, `x + y`."""

    def __init__(self, recorder: LayerRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:
            # Only the forward pass counts; with manual optimization, the training step calls this.
            return None
        if self._recorder.in_row:
            return func(*args, **kwargs)
        kind = _function_name(func)
        row = self._recorder.open(f"{self._recorder.module_name}/{kind}", kind)
        output = func(*args, **kwargs)
        # Most calls, such as reading a shape, run no operator.
        self._recorder.close(row, output, keep=row.has_operators)
        return output


def _function_name(func: Any) -> str:
    name: str = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__"):
        name = getattr(func.__self__, "__name__", name)
    return name.strip("_") if name.startswith("_") else name


def _operator_name(func: Any) -> str:
    return func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)


def _changed_arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    names = [argument.name for argument in schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    is_written = {
        argument.name
        for argument in schema.arguments
        if argument.alias_info and argument.alias_info.is_write
    }
    return _tensors([value for name, value in arguments.items() if name in is_written])


def _tensors(tree: object) -> list[torch.Tensor]:
    return [
        part
        for leaf in tree_leaves(tree)
        if isinstance(leaf, torch.Tensor)
        for part in dense_parts(leaf)
    ]


def _address(tensor: torch.Tensor) -> int:
    address: int = storage_id(tensor.untyped_storage())
    return address


def _view_key(tensor: torch.Tensor) -> tuple[int, int, int]:
    return _address(tensor), int(tensor.storage_offset()), tensor.numel()


def _num_bytes(tensor: torch.Tensor) -> int:
    # An expanded tensor has more elements than bytes of its own.
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
