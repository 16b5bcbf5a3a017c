"""Sentences of a prediction's verdict: its peak, what there is of memory, the largest batches."""

from __future__ import annotations

from memcallback.core.step_memory import StepMemory
from memcallback.core.types import Phase
from memcallback.core.units import brief_bytes
from memcallback.core.validation import DEFAULT_HEADROOM
from memcallback.devices.catalogue import Device, DeviceSpec, HostSpec
from memcallback.prediction.batch_trace import BatchTrace
from memcallback.prediction.search import Limits, gap_sentence, kept_free


def available(device: Device) -> str:
    """What there is of memory for the step; empty if nobody knows."""
    available_bytes = device.allocator_capacity_bytes
    if available_bytes is None:
        return ""
    if isinstance(device, HostSpec):
        return f"; the CPU has {brief_bytes(available_bytes)}"
    return f"; the allocator can have {brief_bytes(available_bytes)}"


def largest_sentences(limits: Limits, device: Device, trace: BatchTrace) -> list[str]:
    """The largest batch sizes, equal ones once, and what they assume."""
    limit, without_retry = limits.at_all, limits.without_retry
    if limit is None or without_retry is None:
        return []
    both = f"{limit:,}"
    if not isinstance(device, HostSpec) and without_retry < limit:
        both = f"{without_retry:,} without a retry, {limit:,} with retries"
    assert device.capacity_bytes is not None
    kept = kept_free(
        device.capacity_bytes,
        DEFAULT_HEADROOM,
        device.outside_bytes,
        device.most_outside_bytes,
    )
    if limits.with_headroom == limit:
        largest = f"Largest batch size: {limit:,}, with or without {kept} kept free"
    elif limits.with_headroom is not None:
        largest = (
            f"Largest batch size: {limits.with_headroom:,} with {kept} kept free. "
            f"With nothing kept free: {both}"
        )
    else:
        largest = f"Largest batch size with nothing kept free: {both}"
    if limit == 0:
        largest = "Not even one sample fits"
    largest += "."
    if isinstance(device, DeviceSpec) and device.architecture_of:
        largest += f" The architecture of {device.architecture_of} was assumed."
    if limits.fits_again is not None:
        return [largest, gap_sentence(limit, limits.fits_again)]
    if limit == 0:
        return [largest]
    assumed = f"Batches above {limit:,} are assumed not to fit."
    if trace.is_far(limit):
        assumed += (
            f" Batches above the largest traced, {trace.largest_traced:,}, are assumed to "
            "run the same way."
        )
    return [f"{largest} {assumed}"]


def peak_sentence(step: StepMemory, phase: Phase, available: str) -> str:
    """The peak of a step, the phase that has it, and what there is of memory."""
    allocated, reserved = step.peak_allocated_bytes or 0, step.peak_reserved_bytes
    peak = f"{brief_bytes(allocated)} allocated"
    if reserved is not None:
        peak = f"{brief_bytes(reserved)} reserved ({peak})"
    return f"Peak {peak} in {phase.label}{available}."
