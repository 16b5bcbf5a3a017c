"""Packed sequences whose lengths are known and such whose are not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn

from memcallback.core.allocation_trace import Alloc
from memcallback.core.errors import PredictionError
from memcallback.devices.catalogue import find_device
from memcallback.prediction.batch_trace import BatchTrace
from memcallback.step.training_step import TrainingStep
from memcallback.trace.request import TraceRequest
from memcallback.trace.tracer import trace

CARD = find_device("NVIDIA A100-SXM4-80GB")


class Model(nn.Module):
    def __init__(self, *, is_sorted):
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 12, batch_first=True), nn.Linear(12, 10)
        self.is_sorted = is_sorted

    def forward(self, x, lengths):
        packed = rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=self.is_sorted
        )
        output, _ = rnn.pad_packed_sequence(
            self.rnn(packed)[0], batch_first=True, total_length=x.shape[1]
        )
        return self.head(output.mean(1))


def loss_of(lengths):
    """A loss that takes the lengths from somewhere."""
    return lambda model, batch: F.cross_entropy(
        model(batch["x"], lengths(model, batch)), batch["y"]
    )


def step(lengths, *, is_sorted=False):
    batch = {
        "x": torch.randn(4, 6, 8),
        "lengths": torch.tensor([1, 2, 3, 4]),
        "y": torch.zeros(4, dtype=torch.long),
    }
    return TrainingStep(
        Model(is_sorted=is_sorted), batch, loss=loss_of(lengths), optimizer=torch.optim.SGD
    )


def of_parameters(model, batch):
    """Lengths that the device computes of parameters."""
    return model.head(batch["x"].new_ones(len(batch["x"]), 12)).sum(1).long().cpu()


def packed_rows(traced):
    """Rows of 8 values in what was packed."""
    return (
        next(
            event.size_bytes
            for event in traced.trace.events
            if isinstance(event, Alloc) and event.operator == "aten::cat"
        )
        // 32
    )


@pytest.mark.parametrize("device", [CARD, None])
def test_sequences_of_unknown_lengths_are_as_long_as_can_be(device):
    unknown = step(of_parameters)
    traced = trace(TraceRequest(unknown, device))
    assert packed_rows(traced) == 4 * 6
    assert (
        "Sequences of unknown lengths are packed: each was assumed to be as long as the longest."
        in traced.caveats
    )
    fitted = BatchTrace.fit(
        traced,
        trace(TraceRequest(unknown, device, batch_size=5)),
        trace(TraceRequest(unknown, device, batch_size=11)),
    )
    assert fitted.at(8) == trace(TraceRequest(unknown, device, batch_size=8)).trace


@pytest.mark.parametrize("device", [CARD, None])
def test_a_step_that_needs_the_lengths_of_its_batch_gets_them_and_that_is_said(device):
    def loss(model, batch):
        packed = rnn.pack_padded_sequence(
            batch["x"], batch["lengths"].cpu(), batch_first=True, enforce_sorted=False
        )
        output, _ = rnn.pad_packed_sequence(model.rnn(packed)[0], batch_first=True)
        return F.mse_loss(output, batch["y"])  # which has as many steps as the longest sequence

    batch = {
        "x": torch.randn(4, 6, 8),
        "lengths": torch.tensor([1, 2, 3, 4]),
        "y": torch.zeros(4, 4, 12),
    }
    known = TrainingStep(Model(is_sorted=False), batch, loss=loss, optimizer=torch.optim.SGD)
    traced = trace(TraceRequest(known, device))
    assert packed_rows(traced) == 1 + 2 + 3 + 4
    assert "Sequences are packed: the lengths of this batch were taken." in traced.caveats


@pytest.mark.parametrize("device", [CARD, None])
@pytest.mark.parametrize("lengths", [[2, 5, 1, 3], torch.tensor([2, 5, 1, 3])])
def test_lengths_on_the_host_are_read(device, lengths):
    traced = trace(TraceRequest(step(lambda model, batch: lengths), device))
    assert packed_rows(traced) == 2 + 5 + 1 + 3
    assert not any("Sequences of unknown lengths" in caveat for caveat in traced.caveats)


def test_lengths_for_another_number_of_sequences_are_an_error():
    with pytest.raises(
        PredictionError, match="4 lengths for 5 packed sequences: give one for each"
    ):
        trace(
            TraceRequest(
                step(lambda model, batch: [5, 3, 2, 1], is_sorted=True), CARD, batch_size=5
            )
        )


def test_without_cudnn_a_packed_layer_is_run_step_by_step(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    known = trace(TraceRequest(step(lambda model, batch: [2, 5, 1, 3]), CARD))
    with_cudnn = trace(TraceRequest(step(lambda model, batch: [2, 5, 1, 3]), None))
    names = [
        {event.operator for event in traced.trace.events if isinstance(event, Alloc)}
        for traced in (known, with_cudnn)
    ]
    assert "aten::tanh" not in names[0] ^ names[1]
    assert any(operator == "aten::addmm" for operator in names[0])
