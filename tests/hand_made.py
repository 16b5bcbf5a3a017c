"""Traces made by hand: a linear model with Adam, seen by an allocator, small enough to add up."""

from memcallback.core.allocation_trace import (
    Alloc,
    AllocationTrace,
    Free,
    PhaseEnd,
    PhaseStart,
    StepEnd,
    StepStart,
)
from memcallback.core.types import Category, Phase
from memcallback.core.units import MiB
from memcallback.devices.catalogue import find_device
from memcallback.prediction.allocator.at_start import Part, Segment
from memcallback.prediction.batch_trace import BatchTrace
from memcallback.prediction.prediction import Prediction
from memcallback.prediction.textbook.law import LinearBytes, TextbookPrediction
from memcallback.trace.traced_step import TracedStep

WEIGHT_BYTES = 4 * MiB
SAMPLE_BYTES = MiB
#: Where the model lies in a process of its own.
MODEL = (
    Segment(False, (Part(WEIGHT_BYTES, WEIGHT_BYTES, is_held=True), Part(16 * MiB))),
    Segment(True, (Part(512, 400, is_held=True), Part(2 * MiB - 512))),
)


def free_segment(size_bytes):
    """A segment that nothing lies in."""
    return Segment(is_small=False, parts=(Part(size_bytes),))


def traced_step(batch_size, *, num_steps=2, extra=(), caveats=()):
    """Weights of 4 MiB, an activation of 1 MiB a sample, its gradient beside it, gradients, two
    moments and a transient of Adam.
    """
    ids = iter(range(10_000))
    events = []

    def alloc(size, category, operator, module=""):
        made = Alloc(next(ids), size, 0, category, operator, module)
        events.append(made)
        return made

    weight = alloc(WEIGHT_BYTES, Category.PARAMETER, "", "net.linear")
    bias = alloc(400, Category.PARAMETER, "", "net.linear")
    gradient = None
    for number in range(num_steps):
        events.append(StepStart())
        batch = alloc(batch_size * 1000, Category.INPUT, "", "")
        events.append(PhaseStart(Phase.FORWARD))
        output = alloc(batch_size * SAMPLE_BYTES, Category.ACTIVATION, "aten::addmm", "net.linear")
        mask = alloc(0, Category.ACTIVATION, "aten::empty", "net.dropout")
        loss = alloc(4, Category.ACTIVATION, "aten::mean", "")
        events.extend(extra)
        events.append(PhaseEnd(Phase.FORWARD))
        if gradient is not None:
            events.append(Free(gradient.id))
        events.append(PhaseStart(Phase.BACKWARD))
        of_output = alloc(batch_size * SAMPLE_BYTES, Category.TEMPORARY, "aten::mean_backward", "")
        gradient = alloc(WEIGHT_BYTES, Category.GRADIENT, "aten::mm", "net.linear")
        events.extend(Free(one.id) for one in (output, of_output, mask, loss))
        events.append(PhaseEnd(Phase.BACKWARD))
        events.append(PhaseStart(Phase.OPTIMIZER_STEP))
        if number == 0:
            for _ in range(2):
                alloc(WEIGHT_BYTES, Category.OPTIMIZER_STATE, "aten::zeros_like", "net.linear")
        transient = alloc(WEIGHT_BYTES, Category.TEMPORARY, "aten::_foreach_sqrt", "")
        events.append(Free(transient.id))
        events.append(PhaseEnd(Phase.OPTIMIZER_STEP))
        events.append(Free(batch.id))
        events.append(StepEnd())
    assert bias.id == 1, "what tests count on"
    assert weight.id == 0
    return TracedStep(AllocationTrace(tuple(events)), batch_size, caveats=caveats)


def batch_trace(**changes):
    return BatchTrace.fit(
        traced_step(2, **changes), traced_step(3, **changes), traced_step(7, **changes)
    )


def prediction(batch_size=16, device="NVIDIA A100-SXM4-80GB", *, with_limits=True, **changes):
    from memcallback.prediction.allocator.settings import AllocatorSettings

    spec = find_device(device)
    return Prediction.of(
        batch_trace(**changes),
        spec,
        batch_size=batch_size,
        settings=AllocatorSettings(),
        with_limits=with_limits,
    )


def boundaries(traced):
    """Bytes alive at the start and the end of each phase, step by step."""
    sizes, alive, steps = {}, 0, []
    for event in traced.trace.events:
        if isinstance(event, Alloc):
            sizes[event.id] = event.size_bytes
            alive += event.size_bytes
        elif isinstance(event, Free):
            alive -= sizes[event.id]
        elif isinstance(event, StepStart):
            steps.append([])
        elif isinstance(event, (PhaseStart, PhaseEnd)):
            steps[-1].append(alive)
    return steps


def law(**changes):
    """The textbook estimate of a step with round numbers."""
    values = {
        "source": "textbook estimate",
        "device_name": "any device",
        "batch_size": 10,
        "held": {
            Category.PARAMETER: 1000,
            Category.BUFFER: 10,
            Category.GRADIENT: 1000,
            Category.OPTIMIZER_STATE: 2000,
        },
        "input": LinearBytes(fixed_bytes=0, per_sample_bytes=5),
        "outputs": LinearBytes(fixed_bytes=100, per_sample_bytes=300),
        "kept": LinearBytes(fixed_bytes=100, per_sample_bytes=320),
        "saved": LinearBytes(fixed_bytes=0, per_sample_bytes=200),
        "optimizer_transient_bytes": 500,
    }
    return TextbookPrediction(**(values | changes))
