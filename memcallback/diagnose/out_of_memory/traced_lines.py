"""Finds, in the traced step, the lines that made the tensors of an out-of-memory report.

An error says which autograd node or which saved tensor is concerned, but not which line of the
forward pass made it. The trace has the line of every allocation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress

from memcallback.core.allocation_trace import (
    Alloc,
    Event,
    last_step_start,
    not_freed,
    phase_events,
)
from memcallback.core.code_lines import CodeLine
from memcallback.core.types import Phase
from memcallback.diagnose.tensors.live import LiveTensor
from memcallback.prediction.prediction import Prediction, StepPrediction

#: Shape and dtype of a tensor.
_Kind = tuple[tuple[int, ...], str]


def line_of_node(
    prediction: StepPrediction | None, node: str, module: str | None
) -> CodeLine | None:
    """The forward line of an autograd node; None unless the trace has exactly one such line."""
    if not isinstance(prediction, Prediction):
        return None
    operator = _letters(node.partition("Backward")[0])
    traced = prediction.trace.of(prediction.batch_size).traced
    lines = {
        source.line
        for alloc in _forward_events(traced.trace.events)
        if isinstance(alloc, Alloc)
        and _letters(alloc.operator.rpartition("::")[2]) == operator
        and (module is None or alloc.module == module)
        and (source := prediction.origin_of(alloc)) is not None
    }
    return lines.pop() if len(lines) == 1 else None


def lines_of_saved(
    tensors: Iterable[LiveTensor], prediction: StepPrediction | None, batch_size: int | None
) -> dict[int, CodeLine]:
    """Address of each saved tensor -> the line that made it.

    Saved tensors of one shape and dtype are matched in order: the first that autograd saved is the
    first in the trace that is live at the end of the forward pass.
    """
    if not isinstance(prediction, Prediction):
        return {}
    with suppress(ValueError):
        traced = _saved_lines(prediction if batch_size is None else prediction.at(batch_size))
        by_kind: dict[_Kind, list[LiveTensor]] = defaultdict(list)
        for live in tensors:
            if live.order is not None:
                by_kind[live.shape, live.dtype].append(live)
        lines = {}
        for kind, saved in by_kind.items():
            saved.sort(key=lambda live: live.order or 0)
            for live, line in zip(saved, traced.get(kind, ()), strict=False):
                if line is not None:
                    lines[live.address] = line
        return lines
    return {}


def _saved_lines(prediction: Prediction) -> dict[_Kind, list[CodeLine | None]]:
    """The lines of the tensors live at the end of the traced forward pass, in order."""
    events = prediction.trace.at(prediction.batch_size).events
    lines: dict[_Kind, list[CodeLine | None]] = defaultdict(list)
    for alloc in not_freed(_forward_events(events)):
        source = prediction.origin_of(alloc)
        if source is not None:
            lines[source.shape, source.dtype].append(source.line)
    return lines


def _forward_events(events: Sequence[Event]) -> Sequence[Event]:
    """The events of the last step's first forward pass."""
    last_step = events[last_step_start(events) :]
    return next(phase_events(last_step, Phase.FORWARD), ())


def _letters(name: str) -> str:
    """`aten::_softmax` and `SoftmaxBackward0` name one operator; they share their letters."""
    return "".join(filter(str.isalpha, name)).lower()
