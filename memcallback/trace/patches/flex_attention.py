"""flex_attention as Inductor runs it.

flex_attention is a higher-order operator: it takes Python functions, and fake tensors reach no
kernel of it. The replacement allocates as Inductor's code does: `flex_attention` and
`flex_attention_backward` in torch/_inductor/kernel/flex/flex_attention.py. It keeps what
`FlexAttentionAutogradOp` saves, torch/_higher_order_ops/flex_attention.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from memcallback.cuda.decompositions.registry import is_compiling
from memcallback.trace.dispatch.mode import TraceMode
from memcallback.trace.patches.patching import Patch

_MODULE = "torch.nn.attention.flex_attention"
#: The figures: "flex attention by itself" of benchmarks/compiled.py, 2026-11-27.
_AS_COMPILED = (
    "flex_attention is predicted as torch.compile runs it. In two trainings that did so on a "
    "virtual H200, reserved memory was as predicted and allocated memory at most 1.5 KiB more. "
    "Without torch.compile, flex_attention also holds the scores of all queries and keys."
)


def flex_attention_patches(mode: TraceMode) -> Iterator[Patch]:
    """Replace functions of flex_attention's module if the program has imported it."""
    module = sys.modules.get(_MODULE)
    if module is None:
        return
    # PyTorch 2.6 returns no largest scores.
    num_outputs = 3 if hasattr(module, "AuxRequest") else 2

    def operator(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score_mod: Any,
        block_mask: Any,
        *args: Any,
    ) -> Any:
        mode.assumed[_AS_COMPILED] = None
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        trained: list[torch.Tensor] = []
        kept = _tensors(block_mask)
        if torch.is_grad_enabled():
            with mode.unrecorded():
                score = query.new_zeros(())
                position = [query.new_zeros((), dtype=torch.int32) for _ in range(4)]
                of_score = _captured(score_mod, score, *position)
                of_mask = _captured(block_mask[-1], *position)
            trained = [tensor for tensor in of_score if tensor.requires_grad]
            kept += [tensor for tensor in of_score if not tensor.requires_grad] + of_mask
        attention: Any = _FlexAttention
        outputs = attention.apply(len(trained), query, key, value, *trained, *kept)
        return outputs[:num_outputs]

    # Patched in its class, so that PyTorch's compiler finds the operator itself.
    kind: Any = type(module.flex_attention_hop)
    call = kind.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(self, *args, **kwargs) if is_compiling() else operator(*args, **kwargs)

    yield kind, "__call__", called
    if hasattr(module, "_warn_once"):
        # PyTorch would advise to compile the call, even where this stands for a compiled one.
        yield module, "_warn_once", lambda *args, **kwargs: None


class _FlexAttention(torch.autograd.Function):
    """The fused kernels: they keep their inputs for the backward pass.

    The first `num_trained` tensors after the value get gradients.
    """

    @staticmethod
    def forward(ctx: Any, num_trained: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, _, value = tensors[:3]
        logsumexp, max_scores = (
            query.new_empty(query.shape[:-1], dtype=torch.float32) for _ in range(2)
        )
        output = _empty_like(query, (*query.shape[:-1], value.shape[-1]))
        ctx.num_trained = num_trained
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(max_scores)
        ctx.save_for_backward(*tensors, output, logsumexp)
        return output, logsumexp, max_scores

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *others, _, logsumexp = ctx.saved_tensors
        scaled = None if grads[1] is None else torch.empty_like(logsumexp)
        delta = torch.empty_like(logsumexp)
        del scaled
        grad_query = _empty_like(query, query.shape)
        # A key for all samples gets a gradient for each sample; these are summed below.
        grad_value, grad_key = (
            _empty_like(tensor, (query.shape[0], *tensor.shape[1:])) for tensor in (value, key)
        )
        of_trained = [
            torch.zeros_like(tensor, dtype=torch.float32) for tensor in others[: ctx.num_trained]
        ]
        del delta
        if key.shape[0] != query.shape[0]:
            grad_key, grad_value = grad_key.sum(0, keepdim=True), grad_value.sum(0, keepdim=True)
        cast = [grad.to(tensor.dtype) for grad, tensor in zip(of_trained, others, strict=False)]
        return (
            None,
            grad_query,
            grad_key,
            grad_value,
            *cast,
            *(None for _ in others[ctx.num_trained :]),
        )


def _empty_like(tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """An empty tensor without gaps in another's order of dimensions, the last one innermost."""
    last = tensor.dim() - 1
    order = [*sorted(range(last), key=tensor.stride, reverse=True), last]
    return tensor.new_empty([size[dim] for dim in order]).permute(
        [order.index(dim) for dim in range(last + 1)]
    )


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _captured(
    function: Callable[..., torch.Tensor], *arguments: torch.Tensor
) -> list[torch.Tensor]:
    """The tensors besides its arguments that a `score_mod` or `mask_mod` reads, each once."""
    # Lets a tensor be an index, as flex_attention does: `table[query]` gathers.
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    reads = _Reads(arguments)
    with TransformGetItemToIndex(), reads:
        function(*arguments)
    return reads.tensors


class _Reads(TorchFunctionMode):
    """Collects the tensors whose values torch functions read, but for those created inside."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []
        self._known = list(known)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function; one that returns no tensor (a shape) reads no values."""
        outputs = func(*args, **(kwargs or {}))
        created = _tensors(outputs)
        if created:
            self.tensors += [
                tensor
                for tensor in _tensors((args, kwargs))
                if not any(tensor is known for known in (*self._known, *self.tensors))
            ]
        self._known += created
        return outputs
