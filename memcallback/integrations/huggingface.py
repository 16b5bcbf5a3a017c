"""MemoryTrainerCallback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memcallback.batch_size.advice import DEFAULT_HEADROOM
from memcallback.batch_size.estimate import check_headroom
from memcallback.core.code_lines import frames_of
from memcallback.core.errors import fail_safe
from memcallback.core.step_memory import StepMemory
from memcallback.core.types import Phase
from memcallback.core.validation import whole_number
from memcallback.devices.catalogue import Device
from memcallback.devices.local import resolve
from memcallback.diagnose.health.growth import Progress
from memcallback.diagnose.out_of_memory.report import OutOfMemoryReport
from memcallback.diagnose.tensors.variables import variables
from memcallback.prediction.predict_or_warn import predict_or_warn
from memcallback.prediction.prediction import StepPrediction
from memcallback.record.memory_log import rank_here, say_here
from memcallback.record.monitor import Monitor
from memcallback.record.rank_exchange import RankExchange
from memcallback.record.recorder import MemoryRecorder
from memcallback.record.watch import Watch
from memcallback.report.report import Report
from memcallback.report.writers import Writers
from memcallback.step.batch import INFERRED, warn_of_batch
from memcallback.step.copies.optimizers import unwrapped
from memcallback.step.loss import Loss
from memcallback.step.model import is_sharded, warn_of_devices
from memcallback.step.training_step import TrainingStep


def step_of(
    model: torch.nn.Module,
    inputs: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None,
    args: Any,
    *,
    loss: Loss | None = None,
    batch_size: int | None = None,
) -> TrainingStep:
    """The step that a Trainer is about to run.

    A model that accelerate has prepared enters autocast itself; so does the copy that is traced.
    """
    if is_sharded(model):
        return TrainingStep(model, inputs, batch_size=batch_size)
    return TrainingStep(
        model,
        dict(inputs),
        loss=loss or loss_of_model,
        optimizer=optimizer,
        precision="16-mixed" if args.fp16 else "bf16-mixed" if args.bf16 else "32-true",
        batch_size=batch_size,
        accumulate=args.gradient_accumulation_steps,
        clip_grad_norm=args.max_grad_norm
        if args.max_grad_norm and args.max_grad_norm > 0
        else None,
    )


def loss_of_model(model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The loss that a model returns, as `Trainer.compute_loss` takes it."""
    outputs = model(**inputs)
    if isinstance(outputs, dict) and "loss" not in outputs:
        raise ValueError(
            f"the model returns no loss for {', '.join(inputs)}, and how the Trainer computes it is not known. Give it: "
            "MemoryTrainerCallback(loss=lambda model, inputs: ...)"
        )
    loss: torch.Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    return loss


def notes_on(inputs: Mapping[str, Any]) -> tuple[str, ...]:
    """What the prediction assumes of the inputs, one sentence each."""
    if "attention_mask" not in inputs:
        return ()
    return (
        "Predicted with padding in the batch: where the attention mask is all ones, transformers may leave it out, and less is needed.",
    )


if TYPE_CHECKING:
    from transformers import TrainerCallback
else:
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise ModuleNotFoundError(
            "MemoryTrainerCallback needs transformers: pip install transformers accelerate."
        ) from error
_SEVERAL_DEVICES = (
    "The Trainer uses several devices in one process (DataParallel): what is recorded is the first device, which holds the outputs of all, and what "
    "is predicted is a step of its samples on one device alone. Start one process for each device instead: torchrun --nproc-per-node=gpu train.py."
)


class MemoryTrainerCallback(TrainerCallback):
    """Records device memory in each phase of each training step of a Hugging Face Trainer, beside a
    prediction, and suggests the largest batch.

    Nothing of the training changes. A Trainer tells its callbacks where steps end; where the phases
    inside them are, hooks on its model and its optimizer tell (see `MemoryRecorder.watch`). Figures
    go every `logging_steps` to a TensorBoard run in the folder `memcallback` under the Trainer's
    logging or output folder; a report is printed once the first steady step is known, and at the
    end.

    Args:
        batch_size: Samples in a batch of this process, if they are not to be inferred from the
            model's inputs.
        device: The memory to plan for: that of a card by name, or a size, as for
            `memcallback.predict`; by default that of the device that trains.
        headroom: The fraction of the capacity that a suggested batch size leaves free, at least 0
            and below 1.
        predict: Whether to predict the step before it first runs.
        loss: For the prediction, the loss as a function of the model and its inputs, where the
            Trainer does not take the one that the model returns.
        per_module: Whether to record by module too (see `MemoryCallback`).
        warnings: Whether to warn of what is wrong with the memory of the training (see
            `MemoryCallback`).
        reset_peaks: Whether the allocator's peaks are reset at each boundary, so that each phase
            has a peak of its own.

    Attributes:
        recorder: The recorder of the current or last training; None before.

    Raises:
        ValueError: If the device is none, or one without a known size; if the headroom or the batch
            size is out of range.
        TypeError: If one of them is not of its kind.

    Examples:
        >>> callback = MemoryTrainerCallback(device="24GiB")
    """

    def __init__(
        self,
        *,
        batch_size: int | None = None,
        device: str | int | torch.device | Device | None = None,
        headroom: float = DEFAULT_HEADROOM,
        predict: bool = True,
        loss: Loss | None = None,
        per_module: bool = False,
        warnings: bool | None = None,
        reset_peaks: bool = True,
    ) -> None:
        check_headroom(headroom)
        self._batch_size = (
            None if batch_size is None else whole_number("batch_size", batch_size, INFERRED)
        )
        self._planned = None if device is None else resolve(device, needs_capacity=True)
        self._headroom = headroom
        self._predicts = predict
        self._loss = loss
        self._per_module = per_module
        self._warns = warnings
        self._reset_peaks = reset_peaks
        self.recorder: MemoryRecorder | None = None
        self._journal: Monitor | None = None
        self._watch: Watch | None = None
        self._state: Any = None
        self._folder: Path | None = None
        self._step_of: Callable[[Mapping[str, Any]], TrainingStep] | None = None
        self._is_broken = False

    @property
    def prediction(self) -> StepPrediction | None:
        """The prediction of the current or last training; None if there is none."""
        return self._journal.prediction if self._journal else None

    @property
    def report(self) -> Report | None:
        """The last report; None before the first."""
        return self._journal.report if self._journal else None

    @property
    def out_of_memory(self) -> OutOfMemoryReport | None:
        """Of the out-of-memory error that ended the current or last training; None if none did."""
        return self._journal.out_of_memory if self._journal else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin recording. An earlier training's errors are past."""
        self._is_broken = False
        self._begin(args, state, **kwargs)

    @fail_safe
    def _begin(
        self, args: Any, state: Any, *, model: torch.nn.Module, optimizer: Any = None, **_: object
    ) -> None:
        self._release()
        self._state = state
        optimizer = unwrapped(optimizer)
        # Those of DeepSpeed are no optimizers of PyTorch.
        own = optimizer if hasattr(optimizer, "_optimizer_step_post_hooks") else None
        recorder = self.recorder = MemoryRecorder(
            model,
            own,
            device=args.device,
            # A CPU is read at the logging interval; elsewhere the split by category, which walks
            # the model, needs no such frequency.
            sample_every_n_steps=sys.maxsize if args.device.type == "cpu" else 50,
            reset_peaks=self._reset_peaks,
        )
        self._folder = folder = (
            Path(getattr(args, "logging_dir", None) or args.output_dir) / "memcallback"
        )
        self._journal = Monitor(
            recorder,
            Writers([], folder) if state.is_world_process_zero else None,
            self._say,
            planned=self._planned,
            headroom=self._headroom,
            exchange=RankExchange.of_job(),
        )
        if self._warns or (self._warns is None and args.device.type != "cpu"):
            self._journal.watch_health(
                recorder.models, recorder.optimizers, progress=self._progress
            )
        if args.n_gpu > 1:
            self._journal.notes = (*self._journal.notes, _SEVERAL_DEVICES)
        self._step_of = lambda inputs: step_of(
            model, inputs, own, args, loss=self._loss, batch_size=self._batch_size
        )
        warn_of_devices(model, args.device)
        recorder.listen(self)
        self._watch = recorder.watch(
            batch_size=self._batch_size,
            per_module=self._per_module,
            on_first_call=lambda _, inputs: self._on_first_call(inputs),
        )

    @fail_safe
    def _on_first_call(self, inputs: dict[str, Any]) -> None:
        assert self.recorder is not None
        assert self._step_of is not None
        assert self._journal is not None
        warn_of_batch(inputs, self._batch_size, "MemoryTrainerCallback")
        prediction, step_of = None, self._step_of
        if self._predicts:
            meter = self.recorder.meter
            prediction = predict_or_warn(
                lambda: step_of(inputs),
                device=meter.device,
                device_name=meter.device_name,
                capacity_bytes=self._planned.capacity_bytes if self._planned else None,
                say=self._say,
                without="MemoryTrainerCallback(predict=False)",
            )
        if prediction is not None:
            self._journal.notes = (*self._journal.notes, *notes_on(inputs))
        self._journal.begin(prediction)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Which update comes."""
        self._state = state

    @fail_safe
    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step without an update is over."""
        if self._watch is not None:
            self._watch.end_step()

    @fail_safe
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step is over, also one whose update was skipped."""
        if self._watch is not None:
            self._watch.end_step()

    @fail_safe
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last report."""
        self._finish(state)

    @fail_safe
    def wants_step(self) -> bool:
        """As `StepListener`: steps of the logging interval."""
        return self._is_logging_step()

    @fail_safe
    def on_step(self, record: StepMemory) -> None:
        """As `StepListener`."""
        assert self._journal is not None
        if record.is_interrupted:
            # A Trainer tells its callbacks of no exception.
            kind, *_ = sys.exc_info()
            name = kind.__name__ if kind else "an exception"
            self._journal.notes = (*self._journal.notes, f"The last step ended with {name}.")
            self._finish(self._state)
            return
        is_window_complete = Phase.OPTIMIZER_STEP in record.phases
        self._journal.publish(
            record,
            self._state.global_step + 1,
            is_due=self._is_logging_step(),
            is_window_complete=is_window_complete,
        )

    @fail_safe
    def on_out_of_memory(self, error: BaseException) -> None:
        """As `StepListener`."""
        if self._journal is not None:
            step_of, inputs = self._step_of, _inputs_of(error)
            make_step = None if step_of is None or inputs is None else lambda: step_of(inputs)
            self._journal.explain(error, folder=self._folder, rank=rank_here(), make_step=make_step)

    def close(self) -> None:
        """As `StepListener`."""

    def _progress(self) -> Progress:
        return Progress(
            epoch=int(self._state.epoch or 0),
            steps_left=max(0, self._state.max_steps - self._state.global_step),
        )

    def _is_logging_step(self) -> bool:
        interval = int(self._state.logging_steps or 0)
        return interval > 0 and (self._state.global_step + 1) % interval == 0

    def _say(self, text: str) -> None:
        if self._state.is_world_process_zero:
            say_here(text)

    def _finish(self, state: Any) -> None:
        if self._journal is not None and self.recorder is not None and self._watch is not None:
            self._watch.close()
            self._journal.finish(state.global_step, num_updates=self.recorder.num_updates)
            self._release()

    def _release(self) -> None:
        """Leave nothing behind on model and optimizer; write out what is buffered."""
        self._watch = self._step_of = None
        if self.recorder is not None:
            self.recorder.close()
        if self._journal is not None:
            self._journal.close()


def _inputs_of(error: BaseException) -> Mapping[str, Any] | None:
    """The inputs with which the Trainer's own functions were called; None if the error went through
    none of them.
    """
    found = (variables(frame).get("inputs") for frame, _ in frames_of(error.__traceback__))
    return next((inputs for inputs in found if isinstance(inputs, Mapping)), None)
