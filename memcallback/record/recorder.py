"""MemoryRecorder: records a loop by its marks, or by hooks that set them, and has the results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from memcallback.batch_size.bounds import DEFAULT_BOUNDS, BatchSizeBounds
from memcallback.core.interruptions import remember_handlers
from memcallback.core.module_table import ModuleTable
from memcallback.core.step_memory import DeviceMemory, StepMemory
from memcallback.core.validation import DEFAULT_HEADROOM, whole_number
from memcallback.devices.local import default_device
from memcallback.devices.meters import AllocatorMeter, CpuMeter, Meter
from memcallback.prediction.prediction import StepPrediction
from memcallback.record.oom_response import forget_explained
from memcallback.record.open_step import Followed, Models, Optimizers
from memcallback.record.sampling import Sampling
from memcallback.record.step_recorder import StepRecorder
from memcallback.record.watch import FirstCall, Watch
from memcallback.report.report import Report

_UNSEEN_UPDATES = (
    "The recorder has no optimizer of PyTorch's, so it sees no update: each step with a backward "
    "pass counts as one. If the loop has one, give it: recorder.watch(model, optimizer)."
)


class MemoryRecorder(StepRecorder):
    """Records the memory of training steps, in any loop.

    On CUDA each step costs five reads of the allocator's counters and no synchronisation. The bytes
    held by model, optimizers and batch, by category, are counted on sampled steps only: those of
    the first three updates, then those of every `sample_every_n_steps`-th update (an accumulation
    window is sampled whole). On a CPU only sampled steps are recorded, the first of each new batch
    size, and some of those that are logged (see `begin_step`).

    Args:
        model: The model or models. The split by category needs them; on a CPU, so does every value
            but the resident size.
        optimizer: The optimizer or optimizers, for their state, and to know which steps made an
            update; without any, each optimizer step counts as one.
        device: The device to read; by default the model's, else the current accelerator, else the
            CPU.
        sample_every_n_steps: Optimizer updates from one sampled step to the next, at least 1;
            without an optimizer, steps.
        reset_peaks: Whether the allocator's peaks are reset where a phase starts or ends (see
            `MemoryCallback`).
        use_profiler: Whether a CPU is read through PyTorch's profiler; else, and while another
            profile of PyTorch runs, only the resident size is read. A process can have one
            profile at a time, and ours gives way. If you later start a profile with
            `profile_memory=True`, it also shows releases of memory that was allocated in sampled
            steps.
        per_module: Whether sampled steps are also read wherever another module begins to run,
            forward and backward (see `modules`). Each reading takes 24 to 85 µs on an H100
            (benchmarks/per_module.py); other steps have no hooks.

    Attributes:
        out_of_memory: The report on the last out-of-memory error in a step; None if there was none.

    Raises:
        ValueError: If `sample_every_n_steps` is below 1.
        TypeError: If it is not a whole number, if a model is no module, or if an optimizer is none.
        MeterUnavailableError: If the device cannot be read. It is a `RuntimeError`, of
            `memcallback.devices.meters`.

    Examples:
        >>> from memcallback import Phase
        >>> model = torch.nn.Linear(10, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> recorder = MemoryRecorder(model, optimizer)
        >>> with recorder.step(batch_size=32):
        ...     with recorder.phase(Phase.FORWARD):
        ...         loss = model(torch.ones(32, 10)).sum()
        ...     with recorder.phase(Phase.BACKWARD):
        ...         loss.backward()
        ...     with recorder.phase(Phase.OPTIMIZER_STEP):
        ...         optimizer.step()
        >>> [phase.label for phase in recorder.steps[-1].phases]
        ['forward', 'backward', 'optimizer step']
    """

    #: Whether models and optimizers live as long as the recorder, or until it is closed.
    _keeps_alive = True

    def __init__(
        self,
        model: Models | None = None,
        optimizer: Optimizers | None = None,
        *,
        device: torch.device | str | None = None,
        sample_every_n_steps: int = 50,
        reset_peaks: bool = True,
        use_profiler: bool = True,
        per_module: bool = False,
    ) -> None:
        sampling = Sampling(
            whole_number(
                "sample_every_n_steps", sample_every_n_steps, "Leave it out for every 50th step."
            )
        )
        self._device = None if device is None else torch.device(device)
        remember_handlers()
        followed = Followed(sampling, keeps_alive=self._keeps_alive)
        followed.add(model, optimizer)
        self._reset_peaks = reset_peaks
        self._use_profiler = use_profiler
        self._watch: Watch | None = None
        meter = self._new_meter(followed.models)
        super().__init__(followed, sampling, meter, per_module=per_module)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is on the same device, and watches nothing."""
        return super().__getstate__() | {
            "meter": None if isinstance(self.meter, CpuMeter) else self.meter,
            "_device": self.meter.device,
            "_watch": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if state["meter"] is None:  # of a CPU: it may hold a running profile
            self.meter = self._new_meter(())

    def _new_meter(self, models: Iterable[torch.nn.Module]) -> Meter:
        device = default_device(models) if self._device is None else self._device
        if device.type == "cpu":
            return CpuMeter(reset_peaks=self._reset_peaks, use_profiler=self._use_profiler)
        return AllocatorMeter(device, reset_peaks=self._reset_peaks)

    def watch(
        self,
        model: Models | None = None,
        optimizer: Optimizers | None = None,
        *,
        batch_size: int | None = None,
        per_module: bool = True,
        on_first_call: FirstCall | None = None,
    ) -> Watch:
        """Mark steps and phases from now on by hooks on models and optimizers.

        The loop stays as it is.

        A step begins when a model is called in training mode and with gradients. It ends when each
        optimizer has made its update; under gradient accumulation, when the next batch comes. A
        forward pass without a backward pass belongs to the step of the next forward pass. If a
        batch has several backward passes that are to be one step (a GAN), put the loop's body into
        `with recorder.step(batch):`; phases are still marked inside it. `torch.autograd.grad`
        counts towards the phase in which it is called.

        Args:
            model: The model or models that the loop calls, besides those of the recorder.
            optimizer: The optimizer or optimizers, besides those of the recorder. Without any, each
                step with a backward pass counts as an update.
            batch_size: Samples in a batch; by default inferred from the model's arguments.
            per_module: Whether sampled steps are recorded by module too (see `modules`), even if
                the recorder was made without that.
            on_first_call: Called before the first step begins, with the positional and the keyword
                arguments of the model's call.

        Returns:
            The watch. It ends when it is closed (it is a context manager), when the recorder is
            closed, or at the next call of this method.

        Raises:
            ValueError: If there is no model, or the batch size is below 1.
            TypeError: If the batch size is not a whole number, if a model is no module, or if an
                optimizer is none.

        Examples:
            >>> model = torch.nn.Linear(10, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> recorder = MemoryRecorder()
            >>> with recorder.watch(model, optimizer):
            ...     model(torch.ones(32, 10)).sum().backward()
            ...     optimizer.step()
            >>> recorder.steps[-1].batch_size, [phase.label for phase in recorder.steps[-1].phases]
            (32, ['forward', 'backward', 'optimizer step'])
        """
        had_models = bool(self.models)
        if not had_models and model is None:
            raise ValueError(
                "There is no model to watch. Give it: recorder.watch(model, optimizer)."
            )
        self._followed.add(model, optimizer)
        self._sampling.counts_backward = not self.optimizers
        if not had_models:
            self.meter = self._new_meter(self.models)  # the model says which device to read
        self._per_module = self._per_module or per_module
        if self._watch is not None:
            self._watch.close()
        forget_explained()
        self._watch = Watch(
            self,
            self.models,
            self.optimizers,
            batch_size=batch_size,
            on_first_call=on_first_call,
        )
        return self._watch

    def count_beside(self, items: Iterable[object]) -> None:
        """Count these modules and tensors too, as parameters and buffers, as long as they exist.

        Args:
            items: Modules, and tensors in containers, that are on the device beside the models
                (see `TrainingStep`). `MemoryLog` and the callbacks call this for the step that
                they predict.
        """
        self._followed.add_beside(items)

    def close(self) -> None:
        """End the recording: remove the hooks, drop an open step, release the model.

        Reports still work.
        """
        if self._watch is not None:
            self._watch.close()
        super().close()
        self._watch = None

    def _give_way(self) -> None:
        if self._watch is not None:
            self._watch.give_up_step()

    # What was recorded.

    @property
    def steps(self) -> tuple[StepMemory, ...]:
        """The last 100 recorded steps, oldest first."""
        return self.history.steps

    @property
    def num_read(self) -> int:
        """How many of `num_updates` were in steps that were read; on CUDA, all."""
        return self.num_updates - self._sampling.num_unread

    @property
    def warm_up(self) -> StepMemory | None:
        """The last step before the first optimizer update; None if there was none."""
        return self.history.warm_up

    @property
    def steady(self) -> StepMemory | None:
        """The steady sampled step with the largest sum of its phases' peaks, or None."""
        return self.history.steady

    @property
    def largest(self) -> StepMemory | None:
        """Of all steady steps, the one with the largest peak; None if there was none."""
        return self.history.largest

    @property
    def typical(self) -> StepMemory | None:
        """The last sampled steady step with the most frequent batch size and peaks, or None.

        Of those as frequent, the one with the largest peaks. The step in which
        DistributedDataParallel rebuilds its buckets is none.
        """
        return self.history.typical

    @property
    def num_alloc_retries(self) -> int | None:
        """Retries of the allocator since the first step began; None if unknown."""
        return self.history.num_alloc_retries

    @property
    def modules(self) -> ModuleTable | None:
        """With `per_module` the last sampled steady step by module; None if there was none.

        A step with an optimizer step is preferred.
        """
        return self.history.modules

    @property
    def lifetime_peak_allocated_bytes(self) -> int | None:
        """The largest allocated bytes of the process so far; None before the first step.

        It covers the time before and between steps too: what `torch.cuda.max_memory_allocated()`
        would return without this recorder's resets. Peaks that an earlier recorder of the process
        has reset are not in it.
        """
        return self.history.lifetime_peaks["allocated_bytes"]

    @property
    def lifetime_peak_reserved_bytes(self) -> int | None:
        """The same for reserved memory."""
        return self.history.lifetime_peaks["reserved_bytes"]

    @property
    def lifetime_peak_resident_bytes(self) -> int | None:
        """The same for the resident size of the process (CPU)."""
        return self.history.lifetime_peaks["resident_bytes"]

    def report(
        self,
        prediction: StepPrediction | None = None,
        *,
        device: DeviceMemory | None = None,
        capacity_bytes: int | None = None,
        headroom: float = DEFAULT_HEADROOM,
        bounds: BatchSizeBounds = DEFAULT_BOUNDS,
        notes: tuple[str, ...] = (),
    ) -> Report:
        """Compare the recorded steps with a prediction; suggest the largest batch size that fits.

        It asks the device's driver, so do not call it every step.

        Args:
            prediction: The prediction, at any batch size.
            device: The memory of the device, if it has just been read.
            capacity_bytes: The memory to suggest a batch size for, by default that of the device
                that trains.
            headroom: The fraction of the capacity that the suggestion leaves free, at least 0 and
                below 1.
            bounds: What bounds the batch size besides memory, such as the size of the dataset: a
                `BatchSizeBounds` of `memcallback.batch_size.bounds`.
            notes: More notes for the reader, one sentence each.

        Raises:
            ValueError: If `headroom` is out of range.
        """
        return self.history.report(
            self.meter.device,
            prediction,
            device=device,
            capacity_bytes=capacity_bytes,
            headroom=headroom,
            bounds=bounds,
            notes=(*notes, _UNSEEN_UPDATES) if self._sampling.counts_backward else notes,
        )
