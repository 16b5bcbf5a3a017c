"""OpenStep: the step being recorded. Followed: the models and optimizers, from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memcallback.core.allocation_trace import ModuleMark
from memcallback.core.errors import warn_and_go_on
from memcallback.core.module_table import ModuleInfo, ModuleTable, Span, modules_of, phase_of_span
from memcallback.core.phase_spans import PhaseSpan, PhaseSpans, phase_of
from memcallback.core.step_memory import Holdings, MemoryStats, StepMemory, measured_window
from memcallback.core.tensors import tensors_in
from memcallback.core.types import Kind, Phase
from memcallback.core.validation import described
from memcallback.core.weak_list import WeakList
from memcallback.devices.meters import Meter
from memcallback.record.sampling import Sampling
from memcallback.step.copies.optimizers import unwrapped
from memcallback.step.holdings import HoldingsCounter
from memcallback.step.module_follower import ModuleFollower, module_infos

Models = nn.Module | Iterable[nn.Module]
Optimizers = Optimizer | Iterable[Optimizer]


def _several(
    given: Any, is_right: Callable[[object], bool], name: str, kind: str, example: str
) -> list[Any]:
    """What was given alone or in a container, as a list, after a check."""
    if given is None or is_right(given):
        return [] if given is None else [given]
    is_container = isinstance(given, Iterable) and not isinstance(given, (str, bytes, type))
    items = []
    for item in given if is_container else [given]:  # the first of a whole loader is wrong
        if not is_right(item):
            raise TypeError(
                f"{name} must be {kind}, or several of them, got {described(item)}. Give {example}."
            )
        items.append(item)
    return items


def _is_module(value: object) -> bool:
    return isinstance(value, nn.Module)


def _is_optimizer(value: object) -> bool:
    """Whether it is an optimizer, in a wrapper or not, that tells of its updates."""
    inner = unwrapped(value)
    return not isinstance(inner, type) and callable(getattr(inner, "register_step_post_hook", None))


class Followed:
    """The models and optimizers of a training, and what is on the device beside them.

    Without `keeps_alive` only as long as they live elsewhere.
    """

    def __init__(self, sampling: Sampling, *, keeps_alive: bool = True) -> None:
        self._sampling = sampling
        self._models: list[nn.Module] | WeakList[nn.Module] = [] if keeps_alive else WeakList()
        self._optimizers: list[Optimizer] | WeakList[Optimizer] = [] if keeps_alive else WeakList()
        self._hooks: list[Any] = []
        self._beside: WeakList[Any] = WeakList()
        self._infos: tuple[ModuleInfo, ...] | None = None

    @property
    def models(self) -> list[nn.Module]:
        """The models."""
        return [*self._models]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers."""
        return [*self._optimizers]

    def add(self, models: Models | None, optimizers: Optimizers | None) -> None:
        """Follow more of them, each once; updates of these optimizers are counted."""
        given = _several(models, _is_module, "model", "a torch.nn.Module", "MemoryRecorder(model)")
        added = _several(
            optimizers,
            _is_optimizer,
            "optimizer",
            "an optimizer",
            "MemoryRecorder(model, torch.optim.AdamW(model.parameters()))",
        )
        for model in given:
            if all(model is not known for known in self.models):
                self._models.append(model)
        self._infos = None
        for optimizer in map(unwrapped, added):
            if all(optimizer is not known for known in self.optimizers):
                self._optimizers.append(optimizer)
                self._hooks.append(optimizer.register_step_post_hook(self._sampling.on_update))
        self._sampling.counts_updates = bool(self.optimizers)

    def add_beside(self, items: Iterable[object]) -> None:
        """Count modules, and tensors in containers, while they live."""
        for item in items:
            parts = [item] if isinstance(item, nn.Module) else tensors_in(item)
            for part in parts:
                self._beside.append(part)

    def release(self) -> None:
        """Follow nothing any longer."""
        for hook in self._hooks:
            hook.remove()
        self._models, self._optimizers, self._hooks, self._beside = [], [], [], WeakList()
        self._sampling.counts_updates = False

    def open_step(
        self,
        batch: object,
        batch_size: int | None,
        *,
        meter: Meter,
        is_sampled: bool,
        per_module: bool,
        num_updates_before: int,
    ) -> OpenStep:
        """Open a step; if it is sampled, with a split by category, and by module where asked."""
        models = self.models
        if not (is_sampled and models):
            count_holdings = timeline = None
        else:
            counter = HoldingsCounter(models, self.optimizers, meter.device, [*self._beside])
            count_holdings = partial(counter.count, batch)
            if self._infos is None:
                self._infos = module_infos(models)
            timeline = ModuleTimeline(models, self._infos, meter) if per_module else None
        return OpenStep(
            batch,
            batch_size,
            num_updates_before=num_updates_before,
            num_rebuilt=num_rebuilt(models),
            meter=meter,
            count_holdings=count_holdings,
            modules=timeline,
        )


class OpenStep:
    """A step that has begun; its phases lie between two readings of the meter each.

    Attributes:
        phases: Its phases; None once the reading is over.
        num_rebuilt: `num_rebuilt` of the models when it began.
        failed_in: The phase that an exception has ended; None if none has.
    """

    def __init__(
        self,
        batch: object,
        batch_size: int | None,
        *,
        num_updates_before: int,
        num_rebuilt: int,
        meter: Meter,
        count_holdings: Callable[[], Holdings] | None,
        modules: ModuleTimeline | None,
    ) -> None:
        self.batch = batch
        self.batch_size = batch_size
        self.num_updates_before = num_updates_before
        self.num_rebuilt = num_rebuilt
        self.failed_in: Phase | None = None
        self.phases: PhaseSpans | None = PhaseSpans(self._read)
        self._meter = meter
        self._count_holdings = count_holdings
        self._modules = modules
        self._windows: list[PhaseSpan] = []
        self._stats: tuple[MemoryStats, ...] = ()

    def begin(self, called: nn.Module | None) -> None:
        """Begin reading, in the call of a model if one is given."""
        self._meter.begin()
        if self._modules is not None:
            self._modules.begin(called)

    def _read(self) -> None:
        self._meter.read(None if self._count_holdings is None else self._count_holdings())
        if self._modules is not None:
            self._modules.on_boundary()

    def end_reading(self) -> None:
        """Stop reading, and release the meter."""
        if self.phases is None:
            return
        if self._modules is not None:
            self._modules.end()
        # This also ends the reference cycle through `_read`, which would keep the batch alive.
        self._windows, self.phases = self.phases.windows, None
        self._stats = self._meter.end()

    def end(self) -> None:
        """End the open phase and the reading; a provisional phase did not happen."""
        try:
            if self.phases is not None:
                self.phases.end_step()
        finally:
            self.end_reading()

    @property
    def stats(self) -> tuple[MemoryStats, ...]:
        """All readings, once the reading is over."""
        return self._stats

    def to_memory(
        self, *, index: int, num_updates: int | None, is_interrupted: bool
    ) -> tuple[StepMemory, Callable[[], ModuleTable] | None]:
        """The step that was read, and what computes its table by module, if there is one."""
        windows = self._windows if self._modules is None else self._modules.windows(self._windows)
        record = StepMemory(
            kind=Kind.MEASURED,
            source=self._meter.source,
            device_name=self._meter.device_name,
            windows=tuple(
                measured_window(phase_of(covers), covers, self._stats[start : end + 1])
                for covers, start, end in windows
            ),
            index=index,
            batch_size=self.batch_size,
            is_warm_up=self.num_updates_before == 0,
            num_optimizer_updates=num_updates,
            is_interrupted=is_interrupted,
        )
        if self._modules is None:
            return record, None
        return record, self._modules.table(windows, self._stats, batch_size=self.batch_size)


def num_rebuilt(models: Sequence[nn.Module]) -> int:
    """How many of the models have rebuilt their buckets (DistributedDataParallel)."""
    return sum(bool(getattr(model, "_has_rebuilt_buckets", False)) for model in models)


class ModuleTimeline:
    """Reads the meter wherever another module begins to run; assigns the readings to modules."""

    def __init__(
        self, models: Sequence[nn.Module], infos: tuple[ModuleInfo, ...], meter: Meter
    ) -> None:
        self._infos = infos
        self._meter = meter
        self._follower = ModuleFollower(models, self._on_change, self._fail, keeps_fused=True)
        self._marks: dict[int, ModuleMark] = {}
        self._boundaries: list[int] = []
        self._num_readings = 0
        self._has_failed = False

    def begin(self, called: nn.Module | None) -> None:
        """Put hooks on the modules; the meter has begun, in the call of a model if one is given."""
        try:
            self._follower.begin(called)
        except Exception as error:  # a user's module can refuse hooks
            self._follower.end()
            self._fail(error)

    def on_boundary(self) -> None:
        """Note that the meter has read the boundary of a phase."""
        self._boundaries.append(self._num_readings)
        path = self._follower.begin_phase()
        self._marks[self._num_readings] = ModuleMark(self._num_readings, path)
        self._num_readings += 1

    def end(self) -> None:
        """Remove all hooks; the meter ends next."""
        self._follower.end()

    def windows(self, windows: Sequence[PhaseSpan]) -> list[PhaseSpan]:
        """Phase windows by the numbers of readings instead of the numbers of phase boundaries."""
        return [
            (covers, self._boundaries[start], self._boundaries[end])
            for covers, start, end in windows
        ]

    def table(
        self,
        windows: Sequence[PhaseSpan],
        stats: Sequence[MemoryStats],
        *,
        batch_size: int | None,
    ) -> Callable[[], ModuleTable] | None:
        """What computes the table by module; None if following the modules has failed.

        The sums take longer than the readings, so they are computed only when asked for.
        """
        if self._has_failed:
            return None
        # The function must not keep the models alive, as this object does.
        source, device_name = self._meter.source, self._meter.device_name
        infos, notes, marks = self._infos, self._follower.notes, self._marks

        def compute() -> ModuleTable:
            spans = [list(_spans(window, stats, marks)) for window in windows]
            return ModuleTable(
                step_kind=Kind.MEASURED,
                source=source,
                device_name=device_name,
                batch_size=batch_size,
                modules=modules_of(spans, infos),
                notes=notes,
            )

        return compute

    def _on_change(self, path: tuple[str, ...], is_backward: bool) -> None:
        if not self._boundaries:
            return  # before the first phase, where the meter does not know yet what is held
        self._meter.mark()
        self._marks[self._num_readings] = ModuleMark(self._num_readings, path, is_backward)
        self._num_readings += 1

    def _fail(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            warn_and_go_on(
                f"Memory by module is not recorded in this step: {type(error).__name__}: "
                f"{str(error).rstrip('.')}. All else is recorded."
            )


def _spans(
    window: PhaseSpan, stats: Sequence[MemoryStats], marks: Mapping[int, ModuleMark]
) -> Iterator[Span]:
    """Cut a phase window at its module marks."""
    covers, start, end = window
    mark = ModuleMark(start, ())
    for position in range(start, end):
        mark = marks.get(position, mark)
        phase = phase_of_span(covers, is_backward=mark.is_backward)
        if phase is not None:
            before, after = stats[position], stats[position + 1]
            yield Span(
                phase,
                mark.path,
                before.allocated_bytes,
                after.allocated_bytes,
                after.peak_allocated_bytes,
            )
