"""The caveats of a prediction beyond those of its trace: of device, allocator and batch size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memcallback.core.units import format_bytes
from memcallback.devices.catalogue import CONTEXT_SEEN_BYTES, NCCL_BYTES, Device, DeviceSpec
from memcallback.prediction.allocator.at_start import Segment, total_bytes
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.batch_trace import BatchTrace
from memcallback.prediction.search import CONFIRMED_ITEMS


def of_device(
    device: Device,
    settings: AllocatorSettings,
    *,
    traced_for: Device | None,
    at_start: Sequence[Segment],
    fits: bool,
    peak_bytes: int,
) -> Iterator[str]:
    """What was assumed of a device whose reserved peak is so many bytes, and of its allocator."""
    yield from device.caveats
    if (
        isinstance(device, DeviceSpec)
        and isinstance(traced_for, DeviceSpec)
        and device.architecture != traced_for.architecture
    ):
        yield (
            f"The step was traced for {traced_for.name} ({traced_for.architecture}), "
            "so workspaces and kernels are those of that card. memcallback.predict(step, "
            f"device=...) traces it for {device.name}."
        )
    free_bytes = total_bytes(segment for segment in at_start if segment.is_free)
    if free_bytes:
        yield (
            f"Before the first step, the allocator had {format_bytes(free_bytes)} of free "
            "segments: something ran before, as a validation or an earlier training. They "
            "count as reserved."
        )
    if isinstance(device, DeviceSpec):
        seen = " to ".join(map(format_bytes, CONTEXT_SEEN_BYTES))
        yield (
            f"{format_bytes(device.context_bytes)} of the card are assumed to be outside the "
            f"allocator (CUDA context, driver; {seen} were seen). Other processes are not "
            "counted."
        )
        left_bytes = device.capacity_bytes - device.communication_bytes - peak_bytes
        if fits and left_bytes < device.most_outside_bytes - device.communication_bytes:
            yield (
                "The step fits if context and driver take no more than "
                f"{format_bytes(left_bytes)} on your card."
            )
        if device.communication_bytes:
            seen = " to ".join(map(format_bytes, NCCL_BYTES))
            yield (
                f"NCCL is assumed to need {format_bytes(device.communication_bytes)} of the "
                f"card outside the allocator ({seen} were seen)."
            )
        for name in settings.not_simulated:
            yield f"The allocator's setting {name} is not simulated."


def of_batch_size(trace: BatchTrace, batch_size: int) -> Iterator[str]:
    """What was assumed at a batch size, and in the search for the largest ones."""
    if trace.thinned(CONFIRMED_ITEMS) is not trace:
        yield (
            "The step runs many batches or tokens one after another. To save time, the search "
            "for the largest batch sizes replayed only some of these batches or tokens, so the "
            "sizes that it found can be too large. The values for this batch size do not "
            "depend on the search."
        )
    elif trace.thinned() is not trace:
        yield (
            "The step runs many batches or tokens one after another. The largest batch sizes "
            "were checked with all of these: the sizes fit, and slightly larger ones may fit "
            "too. To save time, other batch sizes were replayed with only some of the batches "
            "or tokens, so their peaks can be too low."
        )
    if trace.is_far(batch_size):
        yield (
            f"Extrapolated: batch size {batch_size:,} is far beyond the largest traced, "
            f"{trace.largest_traced:,}. memcallback.predict(step, "
            f"batch_size={batch_size}) traces it there."
        )
