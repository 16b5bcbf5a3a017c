"""Prediction: the result."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from memcallback.core.allocation_trace import Alloc, Event, StepEnd
from memcallback.core.document import Document, Printable
from memcallback.core.kernel import AllocationSource
from memcallback.core.module_table import ModuleTable, modules_of
from memcallback.core.step_memory import PhaseMemory, StepMemory, largest
from memcallback.core.types import Category, Kind, Phase
from memcallback.core.units import format_bytes
from memcallback.core.validation import whole_number
from memcallback.devices.catalogue import NCCL_BYTES, Device, DeviceSpec, HostSpec, find_device
from memcallback.prediction import search
from memcallback.prediction import text as prediction_text
from memcallback.prediction.allocator.caching import CachingAllocator
from memcallback.prediction.allocator.host import HostAllocator
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.batch_trace import BatchTrace
from memcallback.prediction.length_trace import SequenceLengthTrace, UnknownSequenceLength
from memcallback.prediction.module_spans import StepSpans, last_step
from memcallback.prediction.replay import LiveAllocation, Replay, ReplayedStep, live_at, replay
from memcallback.trace.traced_step import SAMPLES

SOURCE = "traced step"
#: No search for a batch size goes beyond it.
_MANY_SAMPLES = 1 << 31
_Key = TypeVar("_Key", bound=Hashable)


def _settings_here() -> AllocatorSettings:
    return AllocatorSettings.from_environ(os.environ)


@dataclass(frozen=True, kw_only=True)
class Prediction(Printable):
    """What training will ask of a device, and what its allocator will make of it.

    Every figure is that of a replay of the trace; what was assumed in that is in `caveats`. If the
    memory runs out, the figures are those of the same device with memory without end, and `fits`
    says so.

    Attributes:
        trace: The allocations at any batch size.
        device: The card, or a CPU.
        batch_size: Samples in the batch.
        settings: Those of a card's allocator; by default those of this process's environment.
        source: How it was worked out.
        lengths: The allocations at other sequence lengths; None if it is not known how long the
            sequences are.
        sequence_length: How long they are; None if that is not known.
        traced_for: The device that the step was traced for, if it is another than `device`.

    Raises:
        ValueError: If the trace has no step, or cannot tell of the batch size.
    """

    trace: BatchTrace
    device: Device
    batch_size: int
    settings: AllocatorSettings = field(default_factory=_settings_here)
    source: str = SOURCE
    lengths: SequenceLengthTrace | None = field(default=None, repr=False)
    sequence_length: int | None = None
    traced_for: Device | None = None

    def __post_init__(self) -> None:
        if not any(
            isinstance(event, StepEnd) for event in reversed(self.trace.traced.trace.events)
        ):
            raise ValueError(
                "the trace has no step, so there is none to predict: put StepStart() and StepEnd() around each"
            )
        _ = self._events  # of a batch size that the trace cannot tell of nothing is predicted

    @classmethod
    def of(
        cls,
        trace: BatchTrace | SequenceLengthTrace,
        device: Device,
        *,
        batch_size: int | None = None,
        settings: AllocatorSettings | None = None,
    ) -> Prediction:
        """Predict from a trace.

        Args:
            trace: The allocations at any batch size, perhaps at any sequence length.
            device: The card, or a CPU.
            batch_size: Samples in the batch; by default as many as were traced.
            settings: Those of a card's allocator; by default those of this process's environment.

        Raises:
            ValueError: As `Prediction`; also if the environment has settings that PyTorch would
                refuse.
        """
        lengths = trace if isinstance(trace, SequenceLengthTrace) else None
        sequence_length = lengths.sequence_length if lengths else None
        trace = trace.at(trace.sequence_length) if isinstance(trace, SequenceLengthTrace) else trace
        return cls(
            trace=trace,
            device=device,
            batch_size=trace.batch_size
            if batch_size is None
            else whole_number("batch_size", batch_size, SAMPLES),
            settings=_settings_here() if settings is None else settings,
            lengths=lengths,
            sequence_length=sequence_length,
        )

    def at(
        self, batch_size: int | None = None, *, sequence_length: int | None = None
    ) -> Prediction:
        """The same step at another batch size or sequence length, to the byte.

        Args:
            batch_size: Samples in the batch; by default as many as here.
            sequence_length: How long the batch's sequences are; by default as long as here.

        Raises:
            UnknownBatchSize: If the trace knows only its own batch size, and this is another.
            UnknownSequenceLength: If nothing is known of this sequence length.
            ValueError: If a number is below 1.
            TypeError: If a number is not whole.
        """
        wanted = (
            self.batch_size
            if batch_size is None
            else whole_number("batch_size", batch_size, SAMPLES)
        )
        if sequence_length is not None:
            sequence_length = whole_number(
                "sequence_length", sequence_length, "Give how long the batch's sequences are."
            )
        if sequence_length is None or sequence_length == self.sequence_length:
            return self if wanted == self.batch_size else replace(self, batch_size=wanted)
        if self.lengths is None:
            raise UnknownSequenceLength(
                f"sequence length {sequence_length} is not known: the step does not say how long its sequences are. Give it: "
                "sequence_length=... to TrainingStep."
            )
        return replace(
            self,
            trace=self.lengths.at(sequence_length),
            batch_size=wanted,
            sequence_length=sequence_length,
        )

    def on(self, device: str | int | Device) -> Prediction:
        """The same trace on a device of another size. What a card's architecture changes in the
        trace is not traced anew.

        Args:
            device: A card by name or by size, such as `24GiB`; of the size alone it has the
                architecture of the device here.

        Raises:
            ValueError: If it is neither, or a CPU where the step was traced for a card or the other
                way round.
            TypeError: As `find_device`.
        """
        traced_for = self.traced_for or self.device
        spec = find_device(device, like=traced_for if isinstance(traced_for, DeviceSpec) else None)
        if isinstance(spec, HostSpec) != isinstance(traced_for, HostSpec):
            raise ValueError(
                f"a step that was traced for {traced_for.name} says nothing of {spec.name}: what operators allocate differs. Trace it for that: "
                "memcallback.predict(step, device=...)."
            )
        return replace(self, device=spec, traced_for=traced_for)

    def __repr__(self) -> str:
        return f"<Prediction: batch size {self.batch_size} on {self.device_name}, {self.source} of {len(self._events):,} events>"

    def document(self) -> Document:
        """What each phase needs, what is live at the peak, whether and up to which batch size it
        fits, and what was assumed.
        """
        return prediction_text.document(self)

    def to_dict(self) -> dict[str, Any]:
        """Data that json writes; every size is named `_bytes`, every number of samples
        `batch_size`.
        """
        return prediction_text.to_dict(self)

    @property
    def device_name(self) -> str:
        """The device's name."""
        return self.device.name

    @property
    def capacity_bytes(self) -> int | None:
        """The device's memory; None if that of a CPU is unknown."""
        return self.device.capacity_bytes

    @property
    def caveats(self) -> tuple[str, ...]:
        """What was assumed: by the trace, of the updates after it, of the device, of the allocator."""
        said = (
            *self.trace.caveats,
            *self._shown.caveats,
            *self.device.caveats,
            *self._of_another_architecture(),
        )
        if isinstance(self.device, HostSpec):
            return tuple(dict.fromkeys((*said, *self._far())))
        context = (
            f"{format_bytes(self.device.context_bytes)} of the card are taken to be outside the allocator (CUDA context, driver); what other "
            "processes use is not counted."
        )
        settings = tuple(
            f"The allocator's setting {name} is not simulated."
            for name in self.settings.not_simulated
        )
        return tuple(
            dict.fromkeys((*said, context, *self._of_communication(), *settings, *self._far()))
        )

    def _of_communication(self) -> Iterator[str]:
        if isinstance(self.device, DeviceSpec) and self.device.communication_bytes:
            seen = " to ".join(map(format_bytes, NCCL_BYTES))
            yield (
                f"NCCL is taken to need {format_bytes(self.device.communication_bytes)} of the card outside the allocator ({seen} were seen)."
            )

    def _of_another_architecture(self) -> Iterator[str]:
        device, traced_for = self.device, self.traced_for
        if (
            isinstance(device, DeviceSpec)
            and isinstance(traced_for, DeviceSpec)
            and device.compute_capability != traced_for.compute_capability
        ):
            major, minor = traced_for.compute_capability
            yield (
                f"The step was traced for {traced_for.name} (compute capability {major}.{minor}), and its workspaces and kernels are those of "
                f"that card: memcallback.predict(step, device=...) traces it for {device.name}."
            )

    def _far(self) -> Iterator[str]:
        if self.trace.is_far(self.batch_size):
            yield (
                f"Batch size {self.batch_size} is far beyond the largest that was traced, {self.trace.largest_traced}: whether the step does the "
                f"same there was not tried. memcallback.predict(step, batch_size={self.batch_size}) traces it there."
            )

    @cached_property
    def steps(self) -> tuple[StepMemory, ...]:
        """The steps of the trace, in order; those of the last update are steady, of as many updates
        as that takes.
        """
        return tuple(self._step_memory(step) for step in self._shown.steps)

    @property
    def warm_up(self) -> StepMemory:
        """The first step: gradients and optimizer state come into being in it."""
        return self.steps[0]

    @property
    def step(self) -> StepMemory:
        """The steady step: the last one."""
        return self.steps[-1]

    @property
    def phases(self) -> Mapping[Phase, PhaseMemory]:
        """The steady step's phases."""
        return self.step.phases

    @property
    def peak_allocated_bytes(self) -> int:
        """The largest allocated figure in the phases of the steady step."""
        return self.step.peak_allocated_bytes or 0

    @property
    def peak_reserved_bytes(self) -> int | None:
        """The largest reserved figure in the phases of the steady step; None on a CPU."""
        return self.step.peak_reserved_bytes

    @cached_property
    def at_peak(self) -> tuple[LiveAllocation, ...]:
        """What stands where allocated memory is first largest in the steady step, the largest
        first; adds up to the peak.
        """
        shown = self._shown
        return live_at(shown.steps[-1].peak_position, self._events, shown.block_bytes)

    def origin_of(self, alloc: Alloc) -> AllocationSource | None:
        """The tensor that an allocation is for, and by which line of the program; None if no tensor
        stands for it.

        Of a step at another sequence length than the traced one the shape is that of the traced
        one.

        Args:
            alloc: One of the trace's, such as those of `at_peak`.
        """
        return self.trace.origin(alloc.id, self.batch_size)

    @cached_property
    def peak_phase(self) -> Phase:
        """The phase of the steady step that has the peak."""
        return max(self.step.windows, key=lambda window: window.peak_allocated_bytes or 0).phase

    @cached_property
    def by_category(self) -> Mapping[Category, int]:
        """Allocated bytes at the peak by what they are for; what has no category is temporary."""
        found = self._by(lambda alloc: alloc.category or Category.TEMPORARY)
        return {category: found[category] for category in Category if category in found}

    @cached_property
    def by_module(self) -> Mapping[str, int]:
        """Allocated bytes at the peak by the module that was running, largest first; the root is
        "".
        """
        return self._by(lambda alloc: alloc.module)

    @cached_property
    def by_operator(self) -> Mapping[str, int]:
        """Allocated bytes at the peak by the operator that asked for them, largest first; "" where
        that is unknown.
        """
        return self._by(lambda alloc: alloc.operator)

    @cached_property
    def modules(self) -> ModuleTable:
        """The steady step by module: what each one keeps after its forward pass, and the peaks
        while it runs.
        """
        spans = self._by_spans
        return ModuleTable(
            step_kind=Kind.PREDICTED,
            source=self.source,
            device_name=self.device_name,
            batch_size=self.batch_size,
            modules=modules_of(spans.windows, self.trace.traced.modules, spans.saved_bytes),
        )

    @cached_property
    def saved(self) -> tuple[LiveAllocation, ...]:
        """The activations that stand where the steady step's forward pass ends, the largest first."""
        return tuple(sorted(self._by_spans.saved, key=lambda one: one.block_bytes, reverse=True))

    @cached_property
    def _by_spans(self) -> StepSpans:
        return last_step(self.trace.at(self.batch_size), self._shown.block_bytes)

    @property
    def fits(self) -> bool:
        """Whether nothing from the warm-up to the steady step runs out of memory, of which a CPU of
        unknown capacity has no end.
        """
        return self._on_device.out_of_memory is None

    @property
    def fits_without_retry(self) -> bool:
        """Whether the allocator never has to give back its cache and try again, which waits for the
        device each time.
        """
        return self.fits and self._on_device.num_alloc_retries == 0

    @property
    def out_of_memory(self) -> str | None:
        """Where the memory runs out and at what; None if it does not."""
        return self._on_device.out_of_memory

    @cached_property
    def limit(self) -> int | None:
        """The largest batch size that fits at all; 0 if none does; None if the trace knows only its
        own, or there is no end.
        """
        if self.capacity_bytes is None:
            return None
        return self.largest_batch_size(lambda prediction: prediction.fits, with_cache=False)

    @cached_property
    def limit_without_retry(self) -> int | None:
        """The largest batch size that fits without a retry; as `limit`."""
        if self.capacity_bytes is None:
            return None
        return self.largest_batch_size(lambda prediction: prediction.fits_without_retry)

    def largest_batch_size(
        self, is_good: Callable[[Prediction], bool], *, with_cache: bool = True
    ) -> int | None:
        """The largest batch size of which something holds, found by replays.

        The size found is good and the next one is not; sizes far from both are not tried. Of
        reserved memory a few samples less can need more, and a few more less, where blocks fit into
        each other or do not. Of a step that has less of something in a larger batch (a queue of
        fixed length), sizes beyond its end are not known.

        Args:
            is_good: What is to hold.
            with_cache: Whether that is near where the peak of reserved memory reaches the capacity;
                else near where that of allocated memory does, beyond which nothing fits.

        Returns:
            The size; 0 if it does not hold for one sample; None if the trace knows only its own
            batch size, or there is no end.
        """
        if not self.trace.grows:
            return None
        end = self.trace.largest_known

        def holds(batch_size: int) -> bool:
            return (end is None or batch_size <= end) and is_good(self.at(batch_size))

        return search.largest(holds, near=self._near_limit(with_cache), end=_MANY_SAMPLES)

    def _near_limit(self, with_cache: bool) -> int:
        """About the batch size at which the peak, were there no end of memory, would reach the
        capacity; at least 1.
        """
        capacity_bytes = self.device.allocator_capacity_bytes
        end = self.trace.largest_known or _MANY_SAMPLES
        if capacity_bytes is None or end < 2 * self.batch_size:
            return self.batch_size
        return search.crossing(
            lambda batch_size: self.at(batch_size)._endless_peak_bytes(with_cache),
            capacity_bytes,
            first=self.batch_size,
            second=2 * self.batch_size,
            end=end,
        )

    def _endless_peak_bytes(self, with_cache: bool) -> int:
        """The largest figure of all steps without an end of memory; on a CPU, which reserves
        nothing, of allocated memory.
        """
        windows = [window for step in self._endless.steps for window in step.windows]
        reserved = largest(window.peak_reserved_bytes for window in windows) if with_cache else None
        return (
            largest(window.peak_allocated_bytes for window in windows) or 0
            if reserved is None
            else reserved
        )

    def _by(self, key: Callable[[Alloc], _Key]) -> dict[_Key, int]:
        found: Counter[_Key] = Counter()
        for standing in self.at_peak:
            found[key(standing.alloc)] += standing.block_bytes
        return dict(found.most_common())

    @cached_property
    def _events(self) -> tuple[Event, ...]:
        return self.trace.at(self.batch_size).events

    @cached_property
    def _on_device(self) -> Replay:
        return self._replay(self.device.allocator_capacity_bytes)

    @cached_property
    def _shown(self) -> Replay:
        return self._on_device if self.fits else self._endless

    @cached_property
    def _endless(self) -> Replay:
        return self._replay(None)

    def _replay(self, capacity_bytes: int | None) -> Replay:
        unlimited = capacity_bytes is None
        if isinstance(self.device, HostSpec):
            return replay(
                self._events, HostAllocator(capacity_bytes=capacity_bytes), unlimited=unlimited
            )
        return replay(
            self._events,
            CachingAllocator(self.settings, capacity_bytes=capacity_bytes),
            unlimited=unlimited,
        )

    def _step_memory(self, step: ReplayedStep) -> StepMemory:
        return StepMemory(
            kind=Kind.PREDICTED,
            source=self.source,
            device_name=self.device_name,
            windows=step.windows,
            batch_size=self.batch_size,
            is_warm_up=step.is_warm_up,
            num_optimizer_updates=sum(
                window.covers == (Phase.OPTIMIZER_STEP,) for window in step.windows
            ),
        )


def predicted_modules(prediction: object, batch_size: int | None) -> ModuleTable | None:
    """What a prediction says of the modules at a batch size; None if it is none that can, or does
    not know the modules.
    """
    if not isinstance(prediction, Prediction):
        return None
    with suppress(ValueError):  # it may not tell of this batch size
        modules = prediction.at(batch_size).modules
        return modules if modules.ran else None
    return None
