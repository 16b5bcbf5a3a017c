"""Packed sequences on fake tensors.

`pack_padded` and `packed_kernels` follow aten/src/ATen/native/PackedSequence.cpp and RNN.cpp. They
use the lengths if code gives them (`FakeTensor.constant`). Those of a batch are others in the next:
every sequence is assumed to be as long as the longest, unless the step fails with that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any

import torch
from torch.nn import functional as F

from memcallback.core.tensors import known_values
from memcallback.core.torch_private import no_dispatch

#: Parameters of one layer and direction: two weights (input, hidden state), two biases or None, the
#: projection or None.
_Cell = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None
]


def pack_padded(
    x: torch.Tensor,
    lengths: torch.Tensor,
    batch_first: bool,
    *,
    values: torch.Tensor | None,
    assumed: dict[str, None],
    on_host: Callable[[], AbstractContextManager[None]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_pack_padded_sequence`: the steps of all sequences, and on the host the number per step.

    `values` are the lengths of the batch, if these are to be taken.
    """
    x = x.transpose(0, 1) if batch_first else x
    longest, number = x.shape[:2]
    known = known_values(lengths)
    if known is None and values is not None:
        with no_dispatch():
            known = values.tolist()
        assumed["Sequences are packed: the lengths of this batch were taken."] = None
    if len(lengths) != number:
        raise ValueError(
            f"{len(lengths)} lengths for {number} packed sequences: give one for each."
        )
    if known is None:
        known = [longest] * number
        assumed[
            "Sequences of unknown lengths are packed: each was assumed to be as long as the "
            "longest."
        ] = None
    sizes = [sum(length > step for length in known) for step in range(max(known, default=0))]
    parts, begin = [], 0
    for size, steps in groupby(sizes):
        end = begin + len([*steps])
        parts.append(x[begin:end, :size].contiguous().view(-1, *x.shape[2:]))
        begin = end
    data = torch.cat(parts)
    with no_dispatch():
        batch_sizes = torch.tensor(sizes)
    with on_host():
        # torch.tensor itself would detach the result here in PyTorch 2.6, and a detached fake loses
        # its values.
        return data, torch.ops.aten.lift_fresh(batch_sizes)


def packed_kernels() -> dict[str, Callable[..., Any]]:
    """Name of an operator that reads the number of sequences per step -> its decomposition."""
    return {
        "_pad_packed_sequence": _pad,
        "_pack_padded_sequence_backward": _pack_backward,
        **{f"{kind}.data": _recurrent(kind, cell) for kind, cell in _CELLS.items()},
    }


def _sizes(data: torch.Tensor, batch_sizes: torch.Tensor) -> list[int]:
    """The number of sequences at each step; the same at all steps if unknown."""
    known = known_values(batch_sizes)
    return (
        [data.shape[0] // max(len(batch_sizes), 1)] * len(batch_sizes) if known is None else known
    )


def _pad(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> Any:
    sizes = _sizes(data, batch_sizes)
    output = data.new_full(
        (max(total_length, len(sizes)), sizes[0], *data.shape[1:]), padding_value
    )
    begin = offset = 0
    for size, steps in groupby(sizes):
        num_steps = len([*steps])
        part = data[offset : offset + size * num_steps]
        output[begin : begin + num_steps, :size].copy_(part.view(num_steps, size, *data.shape[1:]))
        begin, offset = begin + num_steps, offset + size * num_steps
    with no_dispatch():  # on the host, with its values
        lengths = torch.tensor([sum(size > sample for size in sizes) for sample in range(sizes[0])])
    return (output.transpose(0, 1) if batch_first else output), lengths


def _pack_backward(
    grad: torch.Tensor, input_size: Sequence[int], batch_sizes: torch.Tensor, batch_first: bool
) -> torch.Tensor:
    shape = (input_size[1], input_size[0], *input_size[2:]) if batch_first else input_size
    gradient, offset = grad.new_zeros(shape), 0
    for step, size in enumerate(_sizes(grad, batch_sizes)):
        gradient[step, :size].copy_(grad[offset : offset + size])
        offset += size
    return gradient.transpose(0, 1) if batch_first else gradient


def _recurrent(kind: str, cell: Callable[..., Any]) -> Callable[..., Any]:
    """A recurrent layer without cuDNN: `apply_layer_stack` over `(Reversed)PackedLayer`."""

    def kernel(
        data: torch.Tensor,
        batch_sizes: torch.Tensor,
        hx: Any,
        params: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> Any:
        sizes, is_lstm = _sizes(data, batch_sizes), kind == "lstm"
        states = [*zip(*(state.unbind(0) for state in (hx if is_lstm else [hx])), strict=True)]
        cells = _cells(
            params, has_biases, has_projection=is_lstm and hx[0].shape[2] != hx[1].shape[2]
        )
        ends: list[tuple[torch.Tensor, ...]] = []
        num_directions = 2 if bidirectional else 1
        for layer in range(num_layers):
            outputs = []
            for direction in range(num_directions):
                index = layer * num_directions + direction
                output, end = (_backward_layer if direction else _forward_layer)(
                    cell, data, sizes, states[index], cells[index]
                )
                outputs.append(output)
                ends.append(end)
            data = torch.cat(outputs, -1) if bidirectional else outputs[0]
            if dropout and train and layer < num_layers - 1:
                data = torch.dropout(data, dropout, True)
        return (data, *(torch.stack(state) for state in zip(*ends, strict=True)))

    return kernel


def _cells(
    params: Sequence[torch.Tensor], has_biases: bool, *, has_projection: bool
) -> list[_Cell]:
    """`gather_params`."""
    step = 2 + 2 * has_biases + has_projection
    groups = (params[start : start + step] for start in range(0, len(params), step))
    return [
        (
            group[0],
            group[1],
            *((group[2], group[3]) if has_biases else (None, None)),
            group[-1] if has_projection else None,
        )
        for group in groups
    ]


def _forward_layer(
    cell: Callable[..., Any], data: torch.Tensor, sizes: Sequence[int], state: Any, params: _Cell
) -> Any:
    offset, last, outputs, ended = 0, sizes[0], [], []
    state = tuple(part.narrow(0, 0, last) for part in state)
    for size in sizes:
        if size < last:
            ended.append([part[size:last] for part in state])
            state = tuple(part[:size] for part in state)
        state, last = cell(data.narrow(0, offset, size), state, params), size
        outputs.append(state[0])
        offset += size
    ended.append(state)
    return torch.cat(outputs), tuple(
        torch.cat(parts) for parts in zip(*reversed(ended), strict=True)
    )


def _backward_layer(
    cell: Callable[..., Any], data: torch.Tensor, sizes: Sequence[int], whole: Any, params: _Cell
) -> Any:
    offset, last, outputs = data.shape[0], sizes[-1], []
    state = tuple(part.narrow(0, 0, last) for part in whole)
    for size in reversed(sizes):
        if size > last:
            state = tuple(
                torch.cat([part, rest[last:size]]) for part, rest in zip(state, whole, strict=True)
            )
        offset -= size
        state, last = cell(data.narrow(0, offset, size), state, params), size
        outputs.append(state[0])
    return torch.cat(outputs[::-1]), state


def _lstm_cell(
    x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor], params: _Cell
) -> tuple[torch.Tensor, ...]:
    w_ih, w_hh, b_ih, b_hh, projection = params
    gates = F.linear(state[0], w_hh, b_hh).add_(F.linear(x, w_ih, b_ih)).unsafe_chunk(4, 1)
    in_gate, forget_gate, cell_gate, out_gate = (
        gates[0].sigmoid_(),
        gates[1].sigmoid_(),
        gates[2].tanh_(),
        gates[3].sigmoid_(),
    )
    cell = (forget_gate * state[1]).add_(in_gate * cell_gate)
    hidden = out_gate * cell.tanh()
    return hidden if projection is None else torch.matmul(hidden, projection.t()), cell


def _gru_cell(
    x: torch.Tensor, state: tuple[torch.Tensor], params: _Cell
) -> tuple[torch.Tensor, ...]:
    w_ih, w_hh, b_ih, b_hh, _ = params
    of_input, of_hidden = (
        F.linear(x, w_ih, b_ih).unsafe_chunk(3, 1),
        F.linear(state[0], w_hh, b_hh).unsafe_chunk(3, 1),
    )
    reset, update = (
        of_hidden[0].add_(of_input[0]).sigmoid_(),
        of_hidden[1].add_(of_input[1]).sigmoid_(),
    )
    new = of_input[2].add(of_hidden[2].mul_(reset)).tanh_()
    return ((state[0] - new).mul_(update).add_(new),)


def _simple_cell(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[..., tuple[torch.Tensor, ...]]:
    def cell(
        x: torch.Tensor, state: tuple[torch.Tensor], params: _Cell
    ) -> tuple[torch.Tensor, ...]:
        w_ih, w_hh, b_ih, b_hh, _ = params
        return (function(F.linear(state[0], w_hh, b_hh).add_(F.linear(x, w_ih, b_ih))),)

    return cell


_CELLS: dict[str, Callable[..., Any]] = {
    "lstm": _lstm_cell,
    "gru": _gru_cell,
    "rnn_tanh": _simple_cell(torch.tanh),
    "rnn_relu": _simple_cell(torch.relu),
}
