"""Install CUDA's decompositions of composite operators for fake tensors.

Some composite operators choose their parts by the tensor's device. Fake tensors of device `cpu`
would be decomposed for a CPU; `registered` gives them CUDA's decompositions during a trace.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from memcallback.core.torch_private import (
    CompositeImplicitAutograd,
    FakeTensor,
    Meta,
    has_kernel,
    tree_iter,
)
from memcallback.cuda.aten_kernels import aten_kernels
from memcallback.cuda.decompositions import layers, rnn, sync_batch_norm
from memcallback.cuda.decompositions.attention import scaled_dot_product_attention
from memcallback.cuda.decompositions.ctc import ctc_loss
from memcallback.cuda.decompositions.layers import Composite, own_decomposition
from memcallback.cuda.decompositions.packed_sequences import packed_kernels
from memcallback.cuda.decompositions.sparse import sparse_decomposition
from memcallback.cuda.decompositions.transformer import transformer_decomposition
from memcallback.cuda.op_call import OpCall
from memcallback.devices.catalogue import DeviceSpec


def composite_kernels(device: DeviceSpec) -> Mapping[str, Composite]:
    """Name of an operator -> its decomposition on CUDA, where it differs from a CPU's."""

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        return scaled_dot_product_attention(*args, **kwargs, device=device)

    return {
        "dropout": layers.dropout,
        "scaled_dot_product_attention": attention,
        "softmax.int": layers.softmax("softmax.int", torch.ops.aten._softmax),
        "log_softmax.int": layers.softmax("log_softmax.int", torch.ops.aten._log_softmax),
        "rms_norm": layers.rms_norm,
        "_batch_norm_impl_index": layers.batch_norm_impl_index,
        "group_norm": layers.group_norm,
        "linear": layers.linear,
        "one_hot": layers.one_hot,
        **_of_lengths(),
        **rnn.rnn_kernels(device),
    }


def decomposition_of(call: OpCall, *, is_wrapped: bool) -> Composite | None:
    """The CUDA decomposition of a composite, fused or sparse operator; None for a primitive one."""
    composite = CompositeImplicitAutograd
    if not (is_wrapped and call.op.has_kernel_for_dispatch_key(composite)):
        return transformer_decomposition(call) or sparse_decomposition(call)
    overload = call.op._overloadname
    name = call.name if overload == "default" else f"{call.name}.{overload}"
    return _kernels_on(call.card).get(name) or own_decomposition(name)


def _kernels_on(card: DeviceSpec | None) -> Mapping[str, Composite]:
    return _of_lengths() if card is None else composite_kernels(card)


def _of_lengths() -> Mapping[str, Composite]:
    """Operators whose fake kernels would read lengths, on any device."""
    return {**packed_kernels(), "ctc_loss.IntList": ctc_loss, "ctc_loss.Tensor": ctc_loss}


@contextlib.contextmanager
def registered(device: DeviceSpec | None) -> Iterator[None]:
    """Decompose fake tensors of device `cpu` as CUDA tensors, inside the block.

    Real tensors, in any thread, keep PyTorch's own decomposition. Only one such block may be open
    in a process.
    """
    kernels: list[tuple[str, str, Composite]] = [
        (name, "AutogradCPU", _for_fakes_only(name, kernel))
        for name, kernel in _kernels_on(device).items()
    ]
    kernels += [
        (name, "Meta", shapes)
        for name, shapes in _MISSING_SHAPES.items()
        if not has_kernel(f"aten::{name}", "Meta")
    ]
    with aten_kernels(kernels):
        yield


#: Shapes of operators that PyTorch has only for CUDA, without a fake kernel.
_MISSING_SHAPES: dict[str, Composite] = {
    "_thnn_fused_gru_cell": rnn.gru_cell_meta,
    "_thnn_fused_gru_cell_backward": rnn.gru_cell_backward_meta,
    **sync_batch_norm.SHAPES,
}


#: Whether PyTorch compiles: its functional tensors hold fakes, and are none.
_compiles = False


@contextlib.contextmanager
def for_compiler(device: DeviceSpec) -> Iterator[None]:
    """Decompose what is compiled inside the block, whose tensors are of device `meta` for C++."""
    global _compiles
    kernels = composite_kernels(device)
    before, _compiles = _compiles, True
    try:
        with (
            aten_kernels((name, "AutogradMeta", kernel) for name, kernel in kernels.items()),
            _without_meta_kernels(_composites_with_meta_kernels()),
        ):
            yield
    finally:
        _compiles = before


@functools.cache
def _composites_with_meta_kernels() -> tuple[Any, ...]:
    """The composite operators for which PyTorch has a Python kernel on `meta` besides."""
    from memcallback.core.torch_private import decompositions  # imports much

    return tuple(
        op
        for op in decompositions["post_autograd"]
        if Meta in getattr(op, "py_kernels", ())
        and has_kernel(op.name(), "CompositeImplicitAutograd")
    )


@contextlib.contextmanager
def _without_meta_kernels(ops: Sequence[Any]) -> Iterator[None]:
    """Let composite operators decompose above autograd, as they do on a device.

    With a kernel of their own on `meta` they would be single operators there, without a derivative:
    `nll_loss`, `upsample_bilinear2d`, `where` with a number.
    """
    kernels = [op.py_kernels.pop(Meta) for op in ops]
    for op in ops:
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernel in zip(ops, kernels, strict=True):
            op.py_kernels[Meta] = kernel
            op._dispatch_cache.clear()


def is_compiling() -> bool:
    """Whether PyTorch compiles."""
    return _compiles


def _for_fakes_only(name: str, kernel: Composite) -> Composite:
    own = own_decomposition(name)

    def choose(*args: Any, **kwargs: Any) -> Any:
        if _compiles or any(isinstance(leaf, FakeTensor) for leaf in tree_iter((args, kwargs))):
            return kernel(*args, **kwargs)
        return own(*args, **kwargs)

    return choose
