"""Traces made by hand: a linear model with Adam, as an allocator sees it, small enough to add up."""

from memcallback.batch_trace import BatchTrace
from memcallback.devices import find_device
from memcallback.events import Alloc, AllocationTrace, Category, Free, Phase, PhaseEnd, PhaseStart, StepEnd, StepStart
from memcallback.prediction import Prediction
from memcallback.traced_step import TracedStep
from memcallback.units import MiB

WEIGHT_BYTES = 4 * MiB
SAMPLE_BYTES = MiB


def traced_step(batch_size, *, num_steps=2, extra=(), caveats=()):
    """Weights of 4 MiB, an activation of 1 MiB a sample, its gradient beside it, gradients, two moments and a transient of Adam."""
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
    return BatchTrace.fit(traced_step(2, **changes), traced_step(3, **changes), traced_step(7, **changes))


def prediction(batch_size=16, device="NVIDIA A100-SXM4-80GB", **changes):
    from memcallback.allocator_settings import AllocatorSettings

    spec = find_device(device)
    return Prediction.of(batch_trace(**changes), spec, batch_size=batch_size, settings=AllocatorSettings())
