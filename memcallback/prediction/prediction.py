"""Prediction: the memory of a step on a device, at one batch size."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from memcallback.core.allocation_trace import Alloc, AllocationTrace, StepEnd, first_step_start
from memcallback.core.document import Document, Printable
from memcallback.core.files import write_file
from memcallback.core.kernel import AllocationSource
from memcallback.core.module_table import ModuleTable, modules_of
from memcallback.core.step_memory import PhaseMemory, StepMemory
from memcallback.core.types import Category, Kind, Phase, Stage
from memcallback.core.units import format_bytes
from memcallback.core.validation import whole_number
from memcallback.devices.catalogue import (
    Device,
    DeviceSpec,
    HostSpec,
    find_device,
)
from memcallback.prediction import caveats as assumed
from memcallback.prediction.allocator.at_start import Segment, layout, placed
from memcallback.prediction.allocator.caching import CachingAllocator
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.asking_apart import asking_apart
from memcallback.prediction.batch_trace import BatchTrace
from memcallback.prediction.consumers import (
    Consumer,
    Names,
    Peak,
    bytes_by_line,
    largest_consumers,
    most_sentence,
)
from memcallback.prediction.length_trace import SequenceLengthTrace, UnknownSequenceLength
from memcallback.prediction.module_spans import last_step
from memcallback.prediction.replay import replay, replay_on
from memcallback.prediction.replayed import LiveAllocation, Replay, ReplayedStep, live_at
from memcallback.prediction.search import (
    BatchReplays,
    Limits,
)
from memcallback.prediction.text import peak_table, phase_table, step_dict
from memcallback.prediction.textbook.law import TextbookPrediction
from memcallback.prediction.verdict import available, largest_sentences, peak_sentence
from memcallback.trace.traced_step import SAMPLES

if TYPE_CHECKING:
    from memcallback.page.page import Page, Section
    from memcallback.page.timeline import Timeline

SOURCE = "traced step"
_Key = TypeVar("_Key", bound=Hashable)


def _settings_here() -> AllocatorSettings:
    return AllocatorSettings.from_environ(os.environ)


@dataclass(frozen=True, kw_only=True)
class Prediction(Printable):
    """The predicted memory of a step on a device, from a replay of its trace.

    All values are computed when the prediction is made: reading, printing, comparing or pickling
    it runs nothing. If the step does not fit, `fits` is False and all values are for the same
    device with unlimited memory. What was assumed is in `caveats`. Sizes in bytes.

    Attributes:
        trace: The allocations at any batch size.
        device: The card, or a CPU.
        batch_size: Samples in the batch.
        settings: Settings of the caching allocator; by default those of this process's environment.
        source: How it was predicted.
        lengths: The allocations at other sequence lengths; None if the step's sequence length is
            unknown.
        sequence_length: Length of the batch's sequences; None if unknown.
        traced_for: The device that the step was traced for, if that is not `device`.
        limits: The largest batch sizes that fit; None if they were not searched.
        at_start: The segments that the allocator of this process has before the first step, if they
            are not those of the model alone, as after Lightning's sanity check; else empty.
            `limits` and other devices are for a process that has only the model.
        other_architectures: For a card known by its size alone, what is different with other
            architectures at this batch size, one sentence each; `at` and `on` leave it out.
        steps: The steps of the trace, in order. Those of the last update are steady: the update is
            repeated until its values settle. Those with a batch in between (`other_batch_size` of
            `TrainingStep`) are among them.
        fits: Whether nothing from the warm-up to the steady step runs out of memory; True on a CPU
            of unknown capacity.
        fits_without_retry: Whether the allocator never has to free its cache and try again, which
            waits for the device each time.
        out_of_memory: Where the step runs out of memory (step, phase, operator, module) and the
            error; None if it does not.
        at_peak: The allocations live when allocated memory first reaches its peak in the steady
            step, the largest first. They add up to the peak.
        saved: The activations live at the end of the steady step's forward pass, the largest first.
        modules: The steady step by module: what each keeps after its forward pass, and the peaks
            while it runs.
        caveats: What was assumed: in the trace, and about later updates, device and allocator.

    Raises:
        ValueError: If the trace has no step, or does not know the batch size.
    """

    trace: BatchTrace = field(compare=False)
    device: Device
    batch_size: int
    settings: AllocatorSettings = field(default_factory=_settings_here)
    source: str = SOURCE
    lengths: SequenceLengthTrace | None = field(default=None, repr=False)
    sequence_length: int | None = None
    traced_for: Device | None = None
    limits: Limits | None = field(default=None, compare=False)
    at_start: tuple[Segment, ...] = field(default=(), repr=False)
    other_architectures: tuple[str, ...] = field(default=(), compare=False, repr=False)
    steps: tuple[StepMemory, ...] = field(init=False, compare=False)
    fits: bool = field(init=False, compare=False)
    fits_without_retry: bool = field(init=False, compare=False)
    out_of_memory: str | None = field(init=False, compare=False)
    at_peak: tuple[LiveAllocation, ...] = field(init=False, compare=False)
    saved: tuple[LiveAllocation, ...] = field(init=False, compare=False)
    modules: ModuleTable = field(init=False, compare=False)
    caveats: tuple[str, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if not any(
            isinstance(event, StepEnd) for event in reversed(self.trace.traced.trace.events)
        ):
            raise ValueError(
                "the trace has no step to predict: put StepStart() and StepEnd() around each step"
            )
        trace, on_device, shown = asking_apart(self._replays)
        spans = last_step(trace, shown.block_bytes)
        values = {
            "steps": tuple(self._step_memory(step) for step in shown.steps),
            "fits": on_device.out_of_memory is None,
            "fits_without_retry": on_device.out_of_memory is None
            and on_device.num_alloc_retries == 0,
            "out_of_memory": on_device.out_of_memory,
            "at_peak": live_at(shown.steps[-1].peak_position, trace.events, shown.block_bytes),
            "saved": tuple(sorted(spans.saved, key=lambda live: -live.block_bytes)),
            "modules": ModuleTable(
                step_kind=Kind.PREDICTED,
                source=self.source,
                device_name=self.device_name,
                batch_size=self.batch_size,
                modules=modules_of(
                    spans.windows,
                    self.trace.of(self.batch_size).traced.modules,
                    spans.saved_bytes,
                ),
            ),
            "caveats": (),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        caveats = (
            *self.trace.of(self.batch_size).caveats,
            *shown.caveats,
            *assumed.of_device(
                self.device,
                self.settings,
                traced_for=self.traced_for,
                at_start=self.at_start,
                fits=self.fits,
                peak_bytes=self.run_peak_reserved_bytes or 0,
            ),
            *self.other_architectures,
            *assumed.of_batch_size(self.trace, self.batch_size),
        )
        object.__setattr__(self, "caveats", tuple(dict.fromkeys(caveats)))

    def _replays(self) -> tuple[AllocationTrace, Replay, Replay]:
        """The trace, its replay on the device, and one to the end, which may need more memory."""
        trace = self.trace.at(self.batch_size)
        capacity_bytes = self.device.allocator_capacity_bytes
        on = partial(replay_on, trace.events, self.device, self.settings, at_start=self.at_start)
        shown = on_device = on(capacity_bytes)
        if on_device.out_of_memory is not None:
            shown = on(None)
        return trace, on_device, shown

    @classmethod
    def of(
        cls,
        trace: BatchTrace | SequenceLengthTrace,
        device: Device,
        *,
        batch_size: int | None = None,
        settings: AllocatorSettings | None = None,
        with_limits: bool = True,
    ) -> Prediction:
        """Predict from a trace.

        Args:
            trace: The allocations at any batch size, perhaps at any sequence length.
            device: The card, or a CPU.
            batch_size: Samples in the batch; by default the traced batch size.
            settings: Settings of the caching allocator; by default those of this process's
                environment.
            with_limits: Whether to search for `limit` and `limit_without_retry`, in about 20
                replays.

        Raises:
            ValueError: As `Prediction`; also if the environment has settings that PyTorch would
                refuse.
        """
        lengths = trace if isinstance(trace, SequenceLengthTrace) else None
        trace = trace.at(trace.sequence_length) if isinstance(trace, SequenceLengthTrace) else trace
        prediction = cls(
            trace=trace,
            device=device,
            batch_size=trace.batch_size
            if batch_size is None
            else whole_number("batch_size", batch_size, SAMPLES),
            settings=_settings_here() if settings is None else settings,
            lengths=lengths,
            sequence_length=lengths.sequence_length if lengths else None,
        )
        return prediction._search_limits() if with_limits else prediction

    def at(
        self, batch_size: int | None = None, *, sequence_length: int | None = None
    ) -> Prediction:
        """The same step at another batch size or sequence length, to the byte: a replay.

        Args:
            batch_size: Samples in the batch; by default this prediction's.
            sequence_length: Length of the batch's sequences; by default this prediction's.

        Raises:
            UnknownBatchSize: If the trace knows only its own batch size, and this is another.
            UnknownSequenceLength: If the trace does not know this sequence length.
            ValueError: If a number is below 1.
            TypeError: If a number is not an integer.
        """
        if batch_size is None:
            batch_size = self.batch_size
        batch_size = whole_number("batch_size", batch_size, SAMPLES)
        if sequence_length is not None:
            sequence_length = whole_number(
                "sequence_length", sequence_length, "Give how long the batch's sequences are."
            )
        if sequence_length is None or sequence_length == self.sequence_length:
            if batch_size == self.batch_size:
                return self
            return replace(self, batch_size=batch_size, other_architectures=())
        if self.lengths is None:
            raise UnknownSequenceLength(
                f"sequence length {sequence_length} is unknown: the step does not say how long its "
                "sequences are. Give it to the step: sequence_length=..."
            )
        lengths = self.lengths
        return asking_apart(
            lambda: self._searched_anew(
                trace=lengths.at(sequence_length),
                batch_size=batch_size,
                sequence_length=sequence_length,
            )
        )

    def on(self, device: str | int | Device) -> Prediction:
        """The same trace on a device of another size: a replay, not a new trace.

        Kernels stay those of the card that was traced. On a card of another architecture they may
        need far more: predict anew for it.

        Args:
            device: A card by name or by size, such as `24GiB`; a size alone means the architecture
                of the device here.

        Raises:
            ValueError: If it is neither, or a CPU where the step was traced for a card or the other
                way round.
            TypeError: As `find_device`.
        """
        traced_for = self.traced_for or self.device
        spec = find_device(device, like=traced_for if isinstance(traced_for, DeviceSpec) else None)
        if isinstance(spec, HostSpec) != isinstance(traced_for, HostSpec):
            raise ValueError(
                f"a step traced for {traced_for.name} cannot be put on {spec.name}: operators "
                "allocate differently there. Trace it again: memcallback.predict(step, device=...)."
            )
        if isinstance(spec, DeviceSpec) and isinstance(traced_for, DeviceSpec):
            # The ranks of a job communicate on any card.
            spec = replace(spec, communication_bytes=traced_for.communication_bytes)
        return asking_apart(
            lambda: self._searched_anew(device=spec, traced_for=traced_for, at_start=())
        )

    def begun_with(self, segments: Sequence[Segment]) -> Prediction:
        """The same in a process whose allocator has some segments before the first step.

        Args:
            segments: All of the device's default stream, those of the model included.
        """
        events = self.trace.at(self.batch_size).events
        at_start = placed(segments, events)
        capacity_bytes = self.device.allocator_capacity_bytes
        taken_over = CachingAllocator(self.settings, capacity_bytes=capacity_bytes)
        if not taken_over.adopt(at_start):
            return self
        alone = CachingAllocator(self.settings)
        replay(events[: first_step_start(events)], alone)
        if layout(taken_over.segments()) == layout(alone.segments()):
            return self
        return replace(self, at_start=at_start)

    def _searched_anew(self, **changes: Any) -> Prediction:
        """The same with changes, and its limits if this one has any."""
        other = replace(self, other_architectures=(), **changes)
        return other if self.limits is None else other._search_limits()

    def _search_limits(self) -> Prediction:
        """Fill in `limits`; only for a prediction that nobody else has yet."""
        object.__setattr__(self, "limits", asking_apart(self._found_limits))
        return self

    def _found_limits(self) -> Limits:
        replays = BatchReplays(self.trace, self.device, self.settings)
        limits = replays.limits(self.batch_size)
        with_headroom = replays.largest_with_headroom(self.batch_size, limits.at_all)
        return replace(limits, with_headroom=with_headroom)

    def __repr__(self) -> str:
        num_events = len(self.trace.of(self.batch_size).traced.trace.events)
        return (
            f"<Prediction: batch size {self.batch_size} on {self.device_name}, {self.source} of "
            f"{num_events:,} events>"
        )

    def page(
        self,
        title: str | None = None,
        *,
        measured: StepMemory | None = None,
        verdict: Sequence[str] = (),
        more: Sequence[Section] = (),
        largest: int | None = None,
    ) -> Page:
        """A page of charts, which takes some replays.

        Args:
            title: What the step is, such as `mymodel:make_step`, by default `One training step`;
                batch and device follow.
            measured: A measured step, whose peaks are shown beside the predicted ones.
            verdict: Sentences to begin with, instead of the prediction's own answer.
            more: Sections before the last, which has the caveats.
            largest: The batch size that the curve marks as the largest; by default
                `largest_batch_size`.
        """
        from memcallback.page.step_page import step_page
        from memcallback.prediction.batch_size_chart import batch_size_chart
        from memcallback.prediction.peak_tree import peak_tree

        own = self.sequence_length
        length = "" if own is None else f", sequence length {own:,}"
        answer, *reasons = self.verdict()
        first, *further = verdict or (answer, "The step was predicted, not run.", *reasons)
        label = f"One {self.step.stage.label}"
        return step_page(
            f"{title or label}, batch size {self.batch_size:,}{length} on {self.device_name}",
            (first, *most_sentence(self.consumers, self.peak_allocated_bytes), *further),
            label=label,
            is_good=None if self.capacity_bytes is None else self.fits,
            timeline=self.timeline(measured),
            tree=peak_tree(self._peak),
            by_category=self.by_category,
            curve=asking_apart(
                lambda: batch_size_chart(
                    BatchReplays(self.trace, self.device, self.settings),
                    self.batch_size,
                    largest or self.largest_batch_size,
                )
            ),
            more=more,
            caveats=self.caveats,
        )

    def timeline(self, measured: StepMemory | None = None) -> Timeline:
        """The memory of the steady step after each allocation, which takes a replay.

        Args:
            measured: A measured step, whose peaks are kept beside the predicted ones.
        """
        from memcallback.prediction.timeline import timeline_of

        phases = measured.phases.items() if measured else ()
        peaks = {phase: window.peak_allocated_bytes for phase, window in phases}
        return asking_apart(
            lambda: timeline_of(
                self.trace.at(self.batch_size).events,
                self.device,
                self.settings,
                self.origin_of,
                Names(self._peak).place,
                is_unlimited=not self.fits,
                at_start=self.at_start,
                measured={phase: size for phase, size in peaks.items() if size is not None},
            )
        )

    def save_html(self, path: str | Path, *, title: str | None = None) -> None:
        """Write `page` as one file, which needs no network.

        Args:
            path: The file; it is replaced if it is there.
            title: As for `page`.

        Raises:
            OSError: If the file cannot be written.
        """
        write_file(path, self.page(title).html())

    def to_notebook_html(self) -> str:
        """The page, in a frame; it takes some replays."""
        return self.page().notebook_html()

    def document(self) -> Document:
        """Whether it fits, each phase, the memory live at the peak, and the assumptions."""
        return Document(
            *self.verdict(),
            phase_table(self.steps, self.sequence_length),
            peak_table(
                self.peak_phase, self.peak_allocated_bytes, self.by_category, self.consumers
            ),
            *self.caveats,
        )

    def verdict(self) -> tuple[str, ...]:
        """Whether it fits, its peak, and up to which batch size it fits, one sentence each."""
        peak = peak_sentence(self.step, self.peak_phase, available(self.device))
        if self.capacity_bytes is None:
            return (peak, "Whether it fits is unknown: the capacity of the CPU was not given.")
        if not self.fits:
            lines = [f"Does not fit. {peak}", f"Out of memory in {self.out_of_memory}"]
        elif self.fits_without_retry:
            lines = [f"Fits. {peak}"]
        elif self.step.num_alloc_retries:
            lines = [f"Fits, but the allocator must free its cache, which is slow. {peak}"]
        else:
            lines = [f"Fits, but the allocator must free its cache in the first steps. {peak}"]
        growth_bytes = self.trace.growth_bytes(self.batch_size)
        if self.step.stage is Stage.GENERATION and growth_bytes is not None:
            lines.append(f"Each token adds {format_bytes(growth_bytes)}.")
        if not self.trace.is_any_batch_size_known:
            lines.append(
                "The largest batch size is unknown: only this batch size was traced. "
                "suggest_batch_size traces others, unless the batch cannot be made larger."
            )
        elif self.limits is not None:
            lines += largest_sentences(self.limits, self.device, self.trace)
        return tuple(lines)

    def to_dict(self) -> dict[str, Any]:
        """Data for json; names of sizes end in `_bytes`, of numbers of samples in `batch_size`."""
        return {
            "source": self.source,
            "batch_size": self.batch_size,
            "sequence_length": self.sequence_length,
            "device_name": self.device_name,
            "architecture_of": self.architecture_of,
            "capacity_bytes": self.capacity_bytes,
            "context_bytes": self.device.context_bytes,
            "communication_bytes": self.device.outside_bytes - self.device.context_bytes,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "run_peak_reserved_bytes": self.run_peak_reserved_bytes,
            # Of a CPU of unknown capacity nobody knows.
            "fits": None if self.capacity_bytes is None else self.fits,
            "fits_without_retry": None if self.capacity_bytes is None else self.fits_without_retry,
            "out_of_memory": self.out_of_memory,
            "largest_batch_size": self.largest_batch_size,
            "limit_batch_size": self.limit,
            "limit_without_retry_batch_size": self.limit_without_retry,
            "limit_fits_again_batch_size": self.limits.fits_again if self.limits else None,
            "steps": [step_dict(step) for step in self.steps],
            "peak_phase": self.peak_phase.value,
            "at_peak_by_category_bytes": {
                category.value: size for category, size in self.by_category.items()
            },
            "at_peak_by_module_bytes": dict(self.by_module),
            "at_peak_by_operator_bytes": dict(self.by_operator),
            "at_peak_by_line": [
                {**line.to_dict(), "num_bytes": num_bytes}
                for line, num_bytes in bytes_by_line(self._peak).items()
            ],
            "caveats": list(self.caveats),
        }

    @property
    def consumers(self) -> tuple[Consumer, ...]:
        """All that is live at the peak, by who holds it, the largest first.

        Layers that repeat are one consumer. Memory that no module holds belongs to the line of the
        program that made it.
        """
        return largest_consumers(self._peak)

    @property
    def _peak(self) -> Peak:
        return Peak(
            live=self.at_peak,
            saved=self.saved,
            # Of another batch size only the sizes are others.
            events=self.trace.of(self.batch_size).traced.trace.events,
            origin_of=self.origin_of,
            kinds={module.name: module.kind for module in self.modules.modules},
            phase=self.peak_phase,
        )

    @property
    def device_name(self) -> str:
        """The device's name."""
        return self.device.name

    @property
    def architecture_of(self) -> str | None:
        """The card whose architecture was assumed, if only a size was given."""
        return self.device.architecture_of if isinstance(self.device, DeviceSpec) else None

    @property
    def capacity_bytes(self) -> int | None:
        """The device's memory; None if that of a CPU is unknown."""
        return self.device.capacity_bytes

    @property
    def largest_batch_size(self) -> int | None:
        """The most samples sure to fit with 5 % of the device kept free.

        On a small card more is kept free. 0 if not even one sample is sure to fit; None if unknown
        or unlimited. `suggest_batch_size` and `what_if` find the same with their default headroom.
        """
        return self.limits.with_headroom if self.limits else None

    @property
    def limit(self) -> int | None:
        """The largest batch size that fits with nothing kept free; no smaller one is known to fail.

        A larger one may fit again. 0 if none fits; None if unknown or unlimited.
        """
        return self.limits.at_all if self.limits else None

    @property
    def limit_without_retry(self) -> int | None:
        """The largest batch size that fits without a retry, with nothing kept free."""
        return self.limits.without_retry if self.limits else None

    @property
    def warm_up(self) -> StepMemory:
        """The stage's first step; in training it creates gradients and optimizer state."""
        return next(step for step in self.steps if step.stage is self.step.stage)

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
        """The allocated peak in the phases of the steady step."""
        return self.step.peak_allocated_bytes or 0

    @property
    def peak_reserved_bytes(self) -> int | None:
        """The reserved peak in the phases of the steady step; None on a CPU."""
        return self.step.peak_reserved_bytes

    @property
    def run_peak_reserved_bytes(self) -> int | None:
        """The most that is reserved in any of `steps`; None on a CPU.

        It is above `peak_reserved_bytes` if the warm-up reserves more than a steady step, which
        gives memory back after a retry. `nvidia-smi` shows what is reserved now, and the context.
        """
        peaks = [step.peak_reserved_bytes for step in self.steps]
        return max((peak for peak in peaks if peak is not None), default=None)

    @property
    def peak_bytes(self) -> int:
        """The peak that has to fit: reserved, on a CPU allocated."""
        reserved = self.peak_reserved_bytes
        return self.peak_allocated_bytes if reserved is None else reserved

    def origin_of(self, alloc: Alloc) -> AllocationSource | None:
        """The tensor that an allocation is for, and the line of code that made it; None if unknown.

        At another sequence length than the traced one, the shape is still the traced one.

        Args:
            alloc: An allocation of the trace, such as those of `at_peak`.
        """
        return self.trace.origin(alloc.id, self.batch_size)

    @property
    def peak_phase(self) -> Phase:
        """The phase of the steady step that has the peak."""
        return max(self.step.windows, key=lambda window: window.peak_allocated_bytes or 0).phase

    @property
    def by_category(self) -> Mapping[Category, int]:
        """Allocated bytes at the peak by category; an allocation without one is temporary."""
        sizes = self._by(lambda alloc: alloc.category or Category.TEMPORARY)
        return {category: sizes[category] for category in Category if category in sizes}

    @property
    def by_module(self) -> Mapping[str, int]:
        """Allocated bytes at the peak by the running module, largest first; the root is ""."""
        return self._by(lambda alloc: alloc.module)

    @property
    def by_operator(self) -> Mapping[str, int]:
        """Allocated bytes at the peak by operator, largest first; "" if unknown."""
        return self._by(lambda alloc: alloc.operator)

    def _by(self, key: Callable[[Alloc], _Key]) -> dict[_Key, int]:
        sizes: Counter[_Key] = Counter()
        for live in self.at_peak:
            sizes[key(live.alloc)] += live.block_bytes
        return dict(sizes.most_common())

    def _step_memory(self, step: ReplayedStep) -> StepMemory:
        return StepMemory(
            kind=Kind.PREDICTED,
            source=self.source,
            device_name=self.device_name,
            windows=step.windows,
            batch_size=step.batch_size or self.batch_size,
            is_warm_up=step.is_warm_up,
            stage=step.stage,
            num_optimizer_updates=sum(
                window.covers == (Phase.OPTIMIZER_STEP,) for window in step.windows
            ),
        )


#: A prediction of a step, traced or by the textbook estimate.
StepPrediction: TypeAlias = Prediction | TextbookPrediction
