"""FitSearch: predicts the largest batch size, runs it in trials, and corrects the prediction."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from memcallback.batch_size.bounds import BatchSizeBounds
from memcallback.batch_size.estimate import Estimate, estimate
from memcallback.batch_size.fitted import (
    BatchSizeSearch,
    FittedBatchSize,
    LikelyPeak,
    Trial,
    nothing_fits,
)
from memcallback.batch_size.peaks import PeakLine, TracedPeak, counted_peak
from memcallback.core.interruptions import raise_if_meant
from memcallback.core.step_memory import StepMemory
from memcallback.devices.memory import device_memory
from memcallback.diagnose.out_of_memory.errors import is_out_of_memory, let_go, release_memory
from memcallback.integrations.lightning.fit.agreement import Agreement
from memcallback.integrations.lightning.fit.loaders import NAME, batch_size_settings, resized
from memcallback.integrations.lightning.fit.run_state import RunState
from memcallback.integrations.lightning.fit.settings import (
    GIVE_LIMIT,
    FitSettings,
    accumulating,
    budget_on,
    check_supported,
    largest_accumulation,
    notes_on_callbacks,
    notes_on_updates,
)
from memcallback.integrations.lightning.fit.signals import ended_by_sigterm
from memcallback.integrations.lightning.fit.trial import (
    Probe,
    TrialMeter,
    check_loaders,
    given_loaders,
    loaders_in,
    run,
)
from memcallback.integrations.lightning.trainer.package import as_callback
from memcallback.integrations.lightning.trainer.step import step_of
from memcallback.prediction.predict_or_warn import device_or_error, predict_or_warn
from memcallback.prediction.prediction import Prediction, StepPrediction
from memcallback.record.pending import PendingPrediction
from memcallback.step.batch import infer_batch_size

#: What a rank that stops for another one's error says has failed.
_BEGINNING = "The search for a batch size"
_MAX_TRIALS = 20
_UNKNOWN = -1


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """The outcome of a trial on this rank.

    Attributes:
        peak_bytes: The peak, reserved or on a CPU allocated; None if it could not be read.
        is_out_of_memory: Whether memory ran out.
        num_alloc_retries: Retries of the allocator during the trial.
        step: The trial as one measured step; None if it did not complete, or had no peak.
        persistent_bytes: Parameters, buffers and optimizer state at the end.
        error: Any other error.
    """

    peak_bytes: int | None
    is_out_of_memory: bool
    num_alloc_retries: int
    step: StepMemory | None
    persistent_bytes: int
    error: Exception | None


class FitSearch:
    """Searches the batch size of a Trainer that is set up to fit and has not started to train."""

    def __init__(
        self, trainer: Any, module: Any, settings: FitSettings, say: Callable[[str], None]
    ) -> None:
        self._trainer, self._module, self._settings, self._say = trainer, module, settings, say
        self._device: torch.device = trainer.strategy.root_device
        self._ranks = Agreement(self._device, trainer.world_size)
        self._prediction: StepPrediction | None = None
        self._line: LikelyPeak | PeakLine | TracedPeak | None = None
        self._is_inferred = False
        self._notes: list[str] = []
        self._trials: list[Trial] = []
        with self._ranks.of_all(_BEGINNING):
            check_supported(trainer, module)
            self._given = given_loaders(trainer)
            self._batch_size_settings = batch_size_settings(module, trainer.datamodule)
            if self._given is None and not self._batch_size_settings:
                raise ValueError(
                    "Neither the module nor its data module has the attribute or hyperparameter "
                    f"{NAME}, so train_dataloader() cannot get one. Set self.{NAME} in __init__ "
                    f"and write DataLoader(..., batch_size=self.{NAME}); or give the loader to fit."
                )
            self._accumulate = largest_accumulation(trainer)
            self._meter = TrialMeter(self._device, module)
            release_memory(self._device)
            self._budget = budget_on(self._device, settings)
            self._elsewhere_bytes = self._meter.elsewhere_bytes()
            launcher = getattr(trainer.strategy, "launcher", None)
            self._state = RunState(
                trainer,
                *loaders_in(trainer),
                device=self._device,
                leave_alone=(*trainer.loggers, launcher),
            )

    def find(self) -> FittedBatchSize:
        """Find the size, and restore everything, the batch size too."""
        any_size = BatchSizeBounds(multiple_of=self._settings.multiple_of)
        with ended_by_sigterm(), ExitStack() as stack:
            with self._ranks.of_all(_BEGINNING):
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                previous, num_samples = self._look(folder)
            cap, why = self._cap(num_samples)
            with self._ranks.of_all(_BEGINNING):
                first_estimate = self._estimate(
                    measured=None, elsewhere_bytes=self._elsewhere_bytes
                )
                predicted = line = None
                if first_estimate is not None:
                    predicted = any_size.within(first_estimate.largest, first_estimate.fits)
                    line = first_estimate.peaks
                self._line = (
                    LikelyPeak(line=line, fixed_bytes=self._elsewhere_bytes)
                    if isinstance(line, TracedPeak)
                    else line
                )
                first = self._first(previous, predicted, cap)
            (first,) = self._ranks.smallest(first)
            search = BatchSizeSearch(first, replace(any_size, max_batch_size=cap))
            while search.next is not None and len(self._trials) < _MAX_TRIALS:
                size = search.next
                fits, expected = self._try(size, folder)
                search.record(size, fits=fits, expected=expected)
        if not search.best:
            raise RuntimeError(
                nothing_fits(
                    self._trials[-1],
                    self._meter.device_name,
                    self._budget.capacity_bytes,
                    self._prediction,
                )
            )
        if cap is not None and search.best == any_size.within(cap):
            self._notes.append(f"{why}: no larger batch was tried.")
        updates = notes_on_updates(self._trainer, search.best, previous, num_samples)
        return FittedBatchSize(
            batch_size=search.best,
            previous_batch_size=previous,
            predicted_batch_size=predicted,
            trials=tuple(self._trials),
            device_name=self._meter.device_name,
            capacity_bytes=self._budget.capacity_bytes,
            outside_bytes=self._budget.outside_bytes,
            headroom=self._budget.headroom,
            counts=self._meter.counts,
            num_updates=self._settings.num_updates,
            has_validation=bool(self._trainer.enable_validation),
            notes=(*self._notes, *notes_on_callbacks(self._trainer), *updates),
            train_dataloaders=None if self._given is None else resized(self._given, search.best),
        )

    def _look(self, folder: str) -> tuple[int, int | None]:
        """Predict from the first batch; return the current batch size and samples per epoch."""
        probe = as_callback(self._trainer, Probe)(self._meter, 0)
        with self._state.trial():
            check_loaders(self._trainer)
            run(
                self._trainer,
                probe,
                num_updates=0,
                accumulate=1,
                folder=folder,
                train_loaders=resized(self._given, None),
            )
        if probe.batch is None or probe.batch_size is None:
            raise ValueError(
                "The training loader returns no batch, so there is nothing to try. Give it data, "
                "and limit_train_batches above 0."
            )
        num_samples: int | None = probe.num_samples
        given = probe.batch_size if num_samples is None else min(probe.batch_size, num_samples)
        self._is_inferred = infer_batch_size(probe.batch).batch_size == given
        # A prediction in this process may change as much as a trial.
        with self._state.trial(), accumulating(self._trainer, self._accumulate):
            device = device_or_error(self._device)
            pending = PendingPrediction(
                lambda say: (
                    predict_or_warn(
                        lambda: step_of(
                            self._trainer, self._module, probe.batch, given, loaded=probe.loaded
                        ),
                        device=device,
                        device_name=self._meter.device_name,
                        capacity_bytes=self._budget.capacity_bytes,
                        say=say,
                        without=None,
                    ),
                    None,
                ),
                say=self._say,
                without=None,
            )
            with closing(pending):
                pending.wait(None)
            self._prediction = pending.prediction
        return probe.batch_size, num_samples

    def _cap(self, num_samples: int | None) -> tuple[int | None, str]:
        """The largest size to consider, None for unlimited; and why."""
        where = " on each device" if self._trainer.world_size > 1 else ""
        (fewest,) = self._ranks.smallest(sys.maxsize if num_samples is None else num_samples)
        limits = []
        if fewest < sys.maxsize:
            limits.append((fewest, f"The training data have {{}} samples{where}"))
        if self._settings.max_batch_size is not None:
            limits.append((self._settings.max_batch_size, "max_batch_size is {}"))
        if not limits:
            return None, ""
        size, why = min(limits)
        return size, why.format(size)

    def _first(self, previous: int, predicted: int | None, cap: int | None) -> int:
        """The size to try first: the predicted one, without a prediction the current one."""
        if predicted is not None:
            return max(1, predicted)
        is_unlimited = (
            isinstance(self._prediction, Prediction)
            and self._prediction.trace.is_any_batch_size_known
        )
        if not is_unlimited:
            return previous
        if cap is None:
            raise ValueError(
                "The memory of a step does not grow with the batch size, so every size is "
                "predicted to fit, and the number of training samples is unknown. Give the largest "
                f"batch size that you would train with: {GIVE_LIMIT}."
            )
        self._notes.append("The memory of a step does not grow with the batch size.")
        return cap

    def _estimate(
        self,
        *,
        measured: StepMemory | None,
        held_bytes: int | None = None,
        elsewhere_bytes: int = 0,
    ) -> Estimate | None:
        return estimate(
            measured=measured,
            predicted=self._prediction,
            always_held_bytes=held_bytes,
            capacity_bytes=self._budget.capacity_bytes,
            outside_bytes=self._budget.outside_bytes + elsewhere_bytes,
            headroom=self._budget.headroom,
        )

    def _try(self, size: int, folder: str) -> tuple[bool, int | None]:
        """Run a size; return whether all ranks fit, and the largest size now expected to fit."""
        self._say(f"Trying batch size {size:,}.")
        with self._ranks.of_all(f"The trial of batch size {size:,}"):
            outcome = self._run(size, folder)
            if outcome.error is not None:
                raise outcome.error
            trial = Trial(
                batch_size=size,
                peak_bytes=outcome.peak_bytes,
                predicted_bytes=None if self._line is None else self._line.at(size),
                budget_bytes=self._budget.verified_budget_bytes,
                is_out_of_memory=outcome.is_out_of_memory,
                num_alloc_retries=outcome.num_alloc_retries,
            )
            is_corrected = outcome.step is not None and self._correct(trial, outcome)
            largest = (
                self._line.largest_within(self._budget.budget_bytes)
                if is_corrected and self._line
                else None
            )
        # The smallest of all ranks counts.
        fits, expected = self._ranks.smallest(
            int(trial.fits), _UNKNOWN if largest is None else largest
        )
        self._trials.append(trial)
        return bool(fits), None if expected == _UNKNOWN else expected

    def _correct(self, trial: Trial, outcome: TrialOutcome) -> bool:
        """Correct the expected peaks by a trial; return whether there are any."""
        if isinstance(self._line, LikelyPeak):
            self._line = self._line.after(trial)
        else:
            corrected = self._estimate(measured=outcome.step, held_bytes=outcome.persistent_bytes)
            self._line = self._line if corrected is None else corrected.peaks
        return self._line is not None

    def _run(self, size: int, folder: str) -> TrialOutcome:
        """Run a size for a few updates, and restore everything."""
        trainer, num_updates = self._trainer, self._settings.num_updates
        # A second batch adds to existing gradients, as all later ones do.
        accumulate = min(self._accumulate, 2)
        probe = as_callback(trainer, Probe)(
            self._meter,
            num_updates * accumulate,
            batch_size=size,
            is_inferred=self._is_inferred,
            attributes=" and ".join(setting.label for setting in self._batch_size_settings),
        )
        error: Exception | None = None
        try:
            with self._state.trial():
                self._meter.begin(trainer.optimizers)
                for setting in self._batch_size_settings:
                    setting.set(size)
                try:
                    run(
                        trainer,
                        probe,
                        num_updates=num_updates,
                        accumulate=accumulate,
                        folder=folder,
                        train_loaders=resized(self._given, size),
                    )
                    self._state.refusals.check()
                except Exception as caught:  # the user's step can fail in any way: an outcome
                    raise_if_meant(caught)
                    error = caught
                self._meter.end()
                return self._outcome_of(size, probe.num_run, error)
        finally:
            self._meter.end()
            release_memory(self._device)
            self._meter.forget_peaks()

    def _outcome_of(self, size: int, num_run: int, error: Exception | None) -> TrialOutcome:
        is_short = bool(self._meter.num_alloc_retries or self._meter.num_ooms)
        is_oom = error is not None and is_out_of_memory(error, is_memory_short=is_short)
        if error is not None and is_oom:
            let_go(error)
        if error is None and num_run == 0:
            error = ValueError(
                f"The training loader returns no batch of {size} samples. Give it data, and "
                "limit_train_batches above 0."
            )
        self._update_outside_bytes()
        step = self._meter.step(size)
        return TrialOutcome(
            peak_bytes=None if step is None else counted_peak(step),
            is_out_of_memory=is_oom,
            num_alloc_retries=self._meter.num_alloc_retries,
            step=step if error is None else None,
            persistent_bytes=self._meter.persistent_bytes(),
            error=None if is_oom else error,
        )

    def _update_outside_bytes(self) -> None:
        """Measure the device's context again, since a trial has loaded the kernels."""
        if (
            not self._budget.is_given
            and (outside := device_memory(self._device).non_pytorch_bytes) is not None
        ):
            self._budget = replace(self._budget, outside_bytes=outside)
