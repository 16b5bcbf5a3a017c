"""Install CUDA's decompositions of composite operators for fake tensors.

Some composite operators choose their parts by the tensor's device. Fake tensors of device `cpu`
would be decomposed for a CPU; `registered` gives them CUDA's decompositions during a trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from memcallback.cuda.decompositions import rnn as cuda_rnn
from memcallback.cuda.decompositions.attention import scaled_dot_product_attention
from memcallback.cuda.decompositions.norms import batch_norm_impl_index, group_norm, rms_norm
from memcallback.cuda.decompositions.packed_sequences import packed_kernels
from memcallback.cuda.decompositions.sparse import sparse_decomposition
from memcallback.cuda.op_call import OpCall
from memcallback.devices.catalogue import DeviceSpec

aten = torch.ops.aten
Composite = Callable[..., Any]


def composite_kernels(device: DeviceSpec) -> Mapping[str, Composite]:
    """Name of an operator -> its decomposition on CUDA, where it differs from a CPU's."""

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        return scaled_dot_product_attention(*args, **kwargs, device=device)

    return {
        "dropout": dropout,
        "scaled_dot_product_attention": attention,
        "softmax.int": _softmax("softmax.int", aten._softmax),
        "log_softmax.int": _softmax("log_softmax.int", aten._log_softmax),
        "rms_norm": lambda *args: rms_norm(*args, own=own_decomposition("rms_norm")),
        "_batch_norm_impl_index": lambda *args: batch_norm_impl_index(
            *args, own=own_decomposition("_batch_norm_impl_index")
        ),
        "group_norm": lambda *args: group_norm(*args, own=own_decomposition("group_norm")),
        "linear": linear,
        "one_hot": one_hot,
        "ctc_loss.IntList": ctc_loss,
        "ctc_loss.Tensor": ctc_loss,
        **packed_kernels(),
        **cuda_rnn.rnn_kernels(device, own_decomposition),
    }


def decomposition_of(call: OpCall, *, is_wrapped: bool) -> Composite | None:
    """The CUDA decomposition of a composite or sparse operator; None for a primitive one."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    if not (is_wrapped and call.op.has_kernel_for_dispatch_key(composite)):
        return sparse_decomposition(call)
    overload = call.op._overloadname
    name = call.name if overload == "default" else f"{call.name}.{overload}"
    return _kernels_on(call.card).get(name) or own_decomposition(name)


def _kernels_on(card: DeviceSpec | None) -> Mapping[str, Composite]:
    return packed_kernels() if card is None else composite_kernels(card)


def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout that keeps a mask of one byte per element: `dropout` in ATen/native/Dropout.cpp
    (`is_fused_kernel_acceptable`).
    """
    if train and 0 < p < 1 and input.numel() > 0:
        output: torch.Tensor = aten.native_dropout(input, p, train)[0]
        return output
    kept: torch.Tensor = own_decomposition("dropout")(input, p, train)
    return kept


def linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """A linear layer: `linear` in ATen/native/Linear.cpp, which adds the bias out of place for
    tensor subclasses, such as fakes.
    """
    if bias is None or input.dim() <= 2 or input.is_contiguous() or bias.dim() != 1:
        output: torch.Tensor = own_decomposition("linear")(input, weight, bias)
        return output
    return aten.matmul(input, weight.t()).add_(bias)  # type: ignore[no-any-return]


def one_hot(self: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """One-hot vectors, scattered: `one_hot` in ATen/native/Onehot.cpp, which differs for fakes."""
    if num_classes < 1 or self.numel() == 0:
        unknown: torch.Tensor = own_decomposition("one_hot")(self, num_classes)
        return unknown
    return torch.zeros(*self.shape, num_classes, dtype=self.dtype, device=self.device).scatter_(
        -1, self.unsqueeze(-1), 1
    )


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """The CTC loss with PyTorch's own kernel: `ctc_loss_gpu_template` in
    ATen/native/cuda/LossCTC.cu.

    Assumes that the longest target is as long as `targets` allows, as data loaders pad it.
    """
    steps, batch = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    longest = (
        max(target_lengths) if isinstance(target_lengths, (list, tuple)) else targets.shape[-1]
    )
    loss: torch.Tensor = _CtcLoss.apply(log_probs, targets, batch, steps * (2 * longest + 1))  # type: ignore[no-untyped-call]
    if zero_infinity:
        loss = torch.where(
            loss == float("inf"), torch.zeros((), dtype=loss.dtype, device=loss.device), loss
        )
    if reduction == 1:
        lengths = torch.empty(batch, dtype=loss.dtype, device=loss.device).clamp_min(1)
        return (loss / lengths).mean()
    return loss.sum() if reduction == 2 else loss


class _CtcLoss(torch.autograd.Function):
    """The allocations of `_ctc_loss` and its backward; its fake kernel reads the lengths."""

    @staticmethod
    def forward(
        ctx: Any, log_probs: torch.Tensor, targets: torch.Tensor, batch: int, table: int
    ) -> torch.Tensor:
        loss, log_alpha = (
            log_probs.new_empty(batch if log_probs.dim() == 3 else ()),
            log_probs.new_empty(batch, table),
        )
        ctx.save_for_backward(log_probs, targets, loss, log_alpha)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        log_probs, _, _, log_alpha = ctx.saved_tensors
        log_beta = torch.empty_like(log_alpha)
        del log_beta
        return torch.empty_like(log_probs, memory_format=torch.contiguous_format), None, None, None


def _softmax(name: str, function: Any) -> Composite:
    # softmax in ATen/native/SoftMax.cpp: from float16 to float32 without a copy in between
    def kernel(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        if input.dtype == torch.float16 and dtype == torch.float32:
            return function(input, dim, True)
        return own_decomposition(name)(input, dim, dtype)

    return kernel


def own_decomposition(name: str) -> Composite:
    """PyTorch's own decomposition of a composite operator, in C++.

    `OpOverload.decompose` prefers Python decompositions for compilers, which draw other random
    numbers.
    """
    operator, _, overload = name.partition(".")
    own = getattr(getattr(aten, operator), overload or "default")
    return lambda *args, **kwargs: own._op_dk(
        torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs
    )


@contextlib.contextmanager
def registered(device: DeviceSpec | None) -> Iterator[None]:
    """Decompose fake tensors of device `cpu` as CUDA tensors, inside the block.

    Real tensors, in any thread, keep PyTorch's own decomposition. Only one such block may be open
    in a process.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in _kernels_on(device).items():
            library.impl(name, _for_fakes_only(name, kernel), "AutogradCPU")
        for name, shapes in _MISSING_SHAPES.items():
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
                library.impl(name, shapes, "Meta")
        yield
    finally:
        library._destroy()


#: Shapes of operators that PyTorch has only for CUDA, without a fake kernel.
_MISSING_SHAPES = {
    "_thnn_fused_gru_cell": cuda_rnn.gru_cell_meta,
    "_thnn_fused_gru_cell_backward": cuda_rnn.gru_cell_backward_meta,
}


def _for_fakes_only(name: str, kernel: Composite) -> Composite:
    own = own_decomposition(name)

    def choose(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_iter((args, kwargs))):
            return kernel(*args, **kwargs)
        return own(*args, **kwargs)

    return choose
