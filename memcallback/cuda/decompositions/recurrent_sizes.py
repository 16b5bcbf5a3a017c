"""What cuDNN saves for the backward pass of a recurrent layer, and what it works in.

NVIDIA does not publish these sizes. We found the formulas in 1,704 calls on an H200 with cuDNN 9.19
(LSTM, GRU and RNN of one to three layers; `tests/recorded/recurrent`, 2026-11-27): the reserve is
exact in all of them. The workspace is off by 0.1 % in the median and 9 % at most, except in four
LSTMs of one layer in float16 that read 512 numbers: they took 1.3 to 3.2 times as much.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memcallback.core.units import MiB
from memcallback.devices.catalogue import DeviceSpec

_GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
#: Numbers saved per layer, direction, token and hidden unit; the output comes on top of them in
#: all layers but the last.
_KEPT = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 5, "gru": 6}
#: Bytes that every reserve has on top.
_RESERVE_HEAD_BYTES = 256
#: What is saved, and each mask of dropout between two layers (one bit for each unit), is rounded
#: up to a multiple of this.
_ALIGNMENT_BYTES = 32
#: cuBLASLt's workspace in each direction of each layer.
_PRODUCT_BYTES = 8 * MiB
#: Numbers in the workspace per layer, direction, sample and hidden unit.
_PER_SAMPLE = {"rnn_relu": 3, "rnn_tanh": 3, "lstm": 10, "gru": 5}
#: Up to this hidden size another kernel runs in float32 and float16.
_SMALL = {"rnn_relu": 200, "rnn_tanh": 200, "lstm": 128, "gru": 128}
#: Numbers per token and hidden unit that this kernel takes on top when it saves for backward.
_SMALL_TRAINING = {"rnn_relu": 5, "rnn_tanh": 5, "lstm": 0, "gru": 2}


@dataclass(frozen=True)
class RecurrentCall:
    """The settings of a recurrent layer.

    Attributes:
        kind: `lstm`, `gru`, `rnn_tanh` or `rnn_relu`.
        input_size: Size of what the first layer reads.
        hidden_size: Size of the hidden state.
        proj_size: Size of the projection, 0 for none.
        num_layers: Number of layers.
        dropout: Probability of dropping between layers.
        train: Whether it saves for backward.
        bidirectional: Whether it runs in both directions.
        batch_first: Whether the batch is the first dimension.
    """

    kind: str
    input_size: int
    hidden_size: int
    proj_size: int
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool

    @property
    def num_directions(self) -> int:
        """Number of directions."""
        return 2 if self.bidirectional else 1


def reserve_bytes(call: RecurrentCall, num_tokens: int, itemsize: int) -> int:
    """What cuDNN saves for backward."""
    if not call.train:
        return 0
    units = num_tokens * call.hidden_size * call.num_directions
    between = call.num_layers - 1
    kept = call.num_layers * _KEPT[call.kind] + between
    projected = num_tokens * call.num_directions * call.num_layers * call.proj_size
    if call.proj_size:
        kept += call.num_layers
    masks = between * call.num_directions if call.dropout > 0 else 0
    mask_bytes = _aligned(-(-units // 8))
    return (
        _aligned((units * kept + projected) * itemsize) + masks * mask_bytes + _RESERVE_HEAD_BYTES
    )


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def workspace_bytes(
    call: RecurrentCall, num_tokens: int, batch_size: int, dtype: torch.dtype
) -> int:
    """What cuDNN works in: the weights, products, and numbers per sample and per token."""
    layers = call.num_layers * call.num_directions
    per_sample = layers * call.hidden_size * _PER_SAMPLE[call.kind]
    numbers = _num_weights(call) + batch_size * per_sample + num_tokens * _per_token(call, dtype)
    return layers * _PRODUCT_BYTES + numbers * dtype.itemsize


def _num_weights(call: RecurrentCall) -> int:
    gates, hidden = _GATES[call.kind], call.hidden_size
    output = call.proj_size or hidden
    inputs = call.input_size + (call.num_layers - 1) * output * call.num_directions
    per_layer = gates * hidden * (output + 2) + call.proj_size * hidden
    return call.num_directions * (gates * hidden * inputs + call.num_layers * per_layer)


def _per_token(call: RecurrentCall, dtype: torch.dtype) -> int:
    """Numbers per token: those of the forward pass, or those of the backward pass if more."""
    directions, hidden, read = call.num_directions, call.hidden_size, call.input_size
    gates = _GATES[call.kind]
    forward = (directions * (gates + 1) + (4 if call.bidirectional else 0)) * hidden + read
    backward = 3 * directions * hidden + 3 * read
    is_small = hidden <= _SMALL[call.kind] and dtype in (torch.float32, torch.float16)
    if is_small:
        forward += 4 * gates * hidden
        backward += 4 * (gates - 1 if call.kind == "lstm" else gates) * hidden
    if not call.train:
        return forward
    # Found by trial on the measured layers; we know no reason.
    if gates == 1:
        forward += _rnn_training(call)
    elif call.num_layers > 1 and call.dropout > 0 and not call.bidirectional:
        forward += hidden
    elif call.kind == "gru" and (call.num_layers > 1) == call.bidirectional:
        forward += read
    if is_small:
        forward += _SMALL_TRAINING[call.kind] * hidden
        backward += _SMALL_TRAINING[call.kind] * hidden
    return max(forward, backward)


def _rnn_training(call: RecurrentCall) -> int:
    """Numbers per token that an RNN without gates takes on top when it saves for backward."""
    is_stacked = call.num_layers > 1
    per_unit = (4 if is_stacked else 2) if call.bidirectional else (1 if is_stacked else 2)
    return per_unit * call.hidden_size + call.input_size


def dropout_state_bytes(device: DeviceSpec) -> int:
    """The random state of cuDNN for dropout between layers, one per process.

    48 bytes for each of 1,024 threads of every multiprocessor: 6,488,064 B on an H100.
    """
    return device.num_multiprocessors * 1024 * 48
