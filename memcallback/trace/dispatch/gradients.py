"""Gradients that PyTorch computes by other operators for fakes: FunctionsManual.cpp of autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from memcallback.core.torch_private import sequence_nr
from memcallback.cuda.op_call import OpCall

_aten = torch.ops.aten
_Instead = Callable[..., Any]
_PRODUCTS = ("ProdBackward0", "ProdBackward1", "CumprodBackward0")
_NO_ZEROS = (
    "The gradient of a product (prod, cumprod) was predicted for numbers of which none is 0. With "
    "zeros it takes more memory."
)


class Gradients:
    """Finds what runs instead of an operator of an autograd node.

    `prod` and `cumprod` look for zeros first, which fakes cannot. They get formulas that are right
    for zeros too, and take more. Those run without being recorded, up to their last operator, in
    whose place the formula for other numbers runs.
    """

    def __init__(self, *, is_cuda: bool, assumed: dict[str, None]) -> None:
        self._is_cuda = is_cuda
        self._assumed = assumed
        self._begin(-1)

    def _begin(self, node: int) -> None:
        self._node, self._is_silent, self._num_last, self._dim = node, False, 0, 0
        self._factors: torch.Tensor | None = None

    def instead(self, call: OpCall, node: Any, silently: Callable[..., Any]) -> _Instead | None:
        """What runs instead of a call, which `silently` runs unrecorded; None for the call."""
        if node is None or torch.is_grad_enabled():
            return None
        name = node.name()
        if name == "RenormBackward0":
            return self._in_float32(call)
        if name not in _PRODUCTS:
            return None
        if self._node != sequence_nr(node):
            self._begin(sequence_nr(node))
        formula = (self._of_cumprod if name == "CumprodBackward0" else self._of_prod)(call)
        if formula is not None:
            self._begin(-1)
            self._assumed[_NO_ZEROS] = None
            return formula
        return partial(silently, call.op) if self._is_silent else None

    def _of_prod(self, call: OpCall) -> _Instead | None:
        """`prod_backward`: up to the second product of `prod_safe_zeros_backward`."""
        op = call.op
        self._is_silent |= op in (_aten.ones.default, _aten.clone.default)
        if op is _aten.slice.Tensor and self._factors is None:
            self._factors, self._dim = call.inputs[0], call.arguments[1]
        if op is not _aten.mul.Tensor or self._factors is None:
            return None
        self._num_last += 1
        if self._num_last < 2:
            return None
        return partial(_prod_backward, call.inputs[0], self._factors, self._dim)

    def _of_cumprod(self, call: OpCall) -> _Instead | None:
        """`cumprod_backward`: up to `stack`, or the second `where` since PyTorch 2.13."""
        op = call.op
        if self._factors is None:
            if op is _aten.eq.Scalar:
                self._factors = call.inputs[0]
            return None
        self._is_silent = True
        if op in (_aten.slice.Tensor, _aten.cumsum.default):
            self._dim = call.arguments[1]
        self._num_last += op is _aten.where.self
        if op is not _aten.stack.default and self._num_last < 2:
            return None
        return partial(_cumprod_backward, self._factors, self._dim)

    def _in_float32(self, call: OpCall) -> _Instead | None:
        """`renorm_backward`: what a CPU sums in float64 a card sums in float32."""
        given = call.kwargs.get("dtype")
        if not self._is_cuda or given is not torch.float64 or call.inputs[0].dtype is given:
            return None
        return lambda *args, **kwargs: call.op(*args, **{**kwargs, "dtype": torch.float32})


def _prod_backward(
    grad: torch.Tensor, factors: torch.Tensor, dim: int, *args: object
) -> torch.Tensor:
    """The gradient times the product over each factor, once there are known to be no zeros."""
    zeros = factors == 0
    if grad.dim():
        counts = zeros.sum(dim, keepdim=True)
        counts.sum()
    else:  # the product of all, for which their places are found: some KiB
        del zeros
    gradient: torch.Tensor = grad * (grad / factors)
    return gradient


def _cumprod_backward(factors: torch.Tensor, dim: int, *args: object) -> torch.Tensor:
    """`reversed_cumsum` of the weighted gradient, which is as large as the factors, over them."""
    factors.any()
    backwards = factors.flip(dim)
    sums = backwards.cumsum(dim)
    summed = sums.flip(dim)
    del backwards, sums  # which C++ keeps until its expression ends
    gradient: torch.Tensor = summed / factors
    return gradient
