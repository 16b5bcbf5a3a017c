"""Gradients of views that were written to in place, which autograd copies, but not with fakes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from memcallback.core.torch_private import (
    FakeTensor,
    base_of,
    next_sequence_nr,
    schema_of,
    sequence_nr,
)
from memcallback.cuda.op_call import OpCall, dense_bytes
from memcallback.trace.dispatch.in_place import InPlace
from memcallback.trace.dispatch.ledger import Ledger


class ReplayedViews:
    """Finds the nodes whose gradient autograd would copy into a new tensor.

    An operator in place on a view gives the view another node. It is one `AsStridedBackward0`,
    which copies the gradient into zeros (`as_strided_backward` in
    torch/csrc/autograd/FunctionsManual.cpp). With fakes, autograd replays the view's own operators
    on the tensor that it is a view of (`grad_fn` in torch/csrc/autograd/variable.cpp). The
    gradient of a view of all elements is then a view itself. A view in another order, as of
    `permute`, is left alone.
    """

    def __init__(self, in_place: InPlace) -> None:
        self._in_place = in_place
        #: The tensor that the next operator is replayed on, and the layout of the view.
        self._replayed: tuple[weakref.ref[torch.Tensor], tuple[object, ...]] | None = None
        #: The numbers of the nodes, and that of the node that runs.
        self._nodes: set[int] = set()
        self._running: int | None = None

    def follow(self, call: OpCall) -> None:
        """Note an operator in place on a view, or the replay after it."""
        replayed, self._replayed = self._replayed, None
        first = call.inputs[0] if call.inputs else None
        if not isinstance(first, FakeTensor) or not torch.is_grad_enabled():
            return
        if call.op.is_view:
            if replayed is not None and replayed[0]() is first:
                view = call.outputs[0]
                if _layout(view) == replayed[1]:
                    self._nodes.add(next_sequence_nr() - 1)
                else:
                    self._replayed = weakref.ref(view), replayed[1]
        elif (
            schema_of(call.op).is_mutable
            and first is call.args[0]
            and _is_whole_view(first)
            and any(tensor.requires_grad for tensor in call.inputs)
        ):
            self._replayed = weakref.ref(base_of(first)), _layout(first)

    def instead(self, call: OpCall, node: Any, ledger: Ledger) -> Callable[..., Any] | None:
        """What runs instead of a view of a gradient that autograd copies; None for the view."""
        if not self._nodes or not self._has_copied(call, node):
            return None
        gradient: Any = call.args[0]
        storage = gradient.untyped_storage()
        if storage.nbytes() != dense_bytes(gradient) or not self._in_place.is_last_view(
            gradient, call.op
        ):
            return lambda *args, **kwargs: call.op(_copied(args[0]), *args[1:], **kwargs)
        # The view of a copy would be one of the gradient for autograd, and so keep it.
        ledger.replace(storage, "aten::new_zeros", sequence_nr(node))
        return None

    def _has_copied(self, call: OpCall, node: Any) -> bool:
        """Whether a node copies its gradient, of which this operator, its first one, is a view."""
        before, self._running = self._running, None if node is None else sequence_nr(node)
        return (
            self._running in self._nodes
            and self._running != before
            and bool(call.op.is_view)
            and isinstance(call.args[0], FakeTensor)
        )


def _copied(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient in new zeros, as `as_strided_backward` has it."""
    return gradient.new_zeros(gradient.shape).copy_(gradient)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _is_whole_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of all elements of another, in their order."""
    base = base_of(tensor)
    return (
        base is not tensor
        and base.numel() == tensor.numel()
        and base.is_contiguous()
        and tensor.is_contiguous()
    )
