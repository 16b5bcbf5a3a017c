"""A model split into pipeline stages and run by a PyTorch schedule."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memcallback.core.tensors import tensors_in
from memcallback.core.validation import described, whole_number
from memcallback.step.copies.objects import copy_with
from memcallback.step.loss import Loss, wrong_with_loss

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


#: Returns a stage's module for the model, the stage's number from 0 and the number of stages.
Split = Callable[[nn.Module, int, int], nn.Module]
#: Schedules whose stages go down the ranks and up again.
_THERE_AND_BACK = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class PipelineError(ValueError):
    """Something cannot run in a pipeline; the message says what to do."""


class Pipeline(nn.Module):
    """One rank's stages of a model, and the schedule that runs them.

    Attributes:
        schedule: A schedule of `torch.distributed.pipelining`.
        stages: The modules of this rank's stages.
    """

    def __init__(self, schedule: Any, *, return_outputs: bool = True) -> None:
        super().__init__()
        self.schedule = schedule
        self.stages = nn.ModuleList(stage.submod for stage in self.pipeline_stages)
        self._return_outputs = return_outputs

    @property
    def pipeline_stages(self) -> list[Any]:
        """This rank's stages as PyTorch objects."""
        if hasattr(self.schedule, "_stages"):
            return self.schedule._stages  # type: ignore[no-any-return]
        return [self.schedule._stage]

    @property
    def named(self) -> nn.Module:
        """The module that names this rank's parameters: the only stage, or this module."""
        return self.stages[0] if len(self.stages) == 1 else self

    @property
    def num_microbatches(self) -> int:
        """The number of parts into which the schedule cuts a batch."""
        return int(self.schedule._n_microbatches)

    def step(self, loss: Loss, batch: Any) -> list[torch.Tensor]:
        """Run the forward and backward passes of all microbatches."""
        stage_loss = self.schedule._loss_fn
        if not isinstance(stage_loss, _StageLoss):
            loss(self.schedule, batch)
            return []
        num_rows = _num_rows(batch, self.num_microbatches)
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if any(stage.is_first for stage in self.pipeline_stages):
            args, kwargs = _model_arguments(loss, batch)
        losses: list[torch.Tensor] = []
        target = None
        if any(stage.is_last for stage in self.pipeline_stages):
            target = stage_loss.begin(loss, batch, num_rows)
        try:
            self.schedule.step(
                *args, target=target, losses=losses, return_outputs=self._return_outputs, **kwargs
            )
        finally:
            stage_loss.end()
        return losses


def in_pipeline(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    n_microbatches: int,
    schedule: str = "1F1B",
    stages_per_rank: int | None = None,
    split: Split | None = None,
    return_outputs: bool = True,
    scale_grads: bool = True,
) -> nn.Module:
    """Build a rank's stages of a model, on the device of a mesh."""
    from torch.distributed.pipelining import PipelineStage

    kind, is_single = _kind_of(schedule)
    device, group = torch.device(mesh.device_type), mesh.get_group()
    num_ranks, rank = mesh.size(), mesh.get_local_rank()
    per_rank = stages_per_rank or (1 if is_single else 2)
    numbers = [rank + round_ * num_ranks for round_ in range(per_rank)]
    if kind.__name__ in _THERE_AND_BACK:
        numbers = [rank, 2 * num_ranks - 1 - rank]
    num_stages = num_ranks * per_rank

    def stage(number: int) -> Any:
        module = (split or _equal_share)(model, number, num_stages)
        is_on_meta = any(parameter.is_meta for parameter in module.parameters())
        return PipelineStage(
            module.to_empty(device=device) if is_on_meta else module.to(device),
            number,
            num_stages,
            device,
            group=group,
        )

    stages = [stage(number) for number in numbers]
    run = kind(
        stages[0] if is_single else stages,
        n_microbatches,
        loss_fn=_StageLoss(),
        scale_grads=scale_grads,
    )
    return Pipeline(run, return_outputs=return_outputs)


def check_options(
    *,
    n_microbatches: int,
    schedule: str = "1F1B",
    stages_per_rank: int | None = None,
    split: Split | None = None,
    **_: object,
) -> None:
    """Check options of `in_pipeline`."""
    whole_number("n_microbatches", n_microbatches, "It is the number of parts of a batch.")
    if not isinstance(schedule, str):
        raise TypeError(
            f"schedule must be a name, got {described(schedule)}. Give one of PyTorch's, such as "
            "'1F1B' or 'GPipe'."
        )
    if split is not None and not callable(split):
        raise TypeError(
            "split must be a function of the model, the number of a stage and the number of "
            f"stages, got {described(split)}."
        )
    kind, is_single = _kind_of(schedule)
    if stages_per_rank is None:
        return
    whole_number(
        "stages_per_rank",
        stages_per_rank,
        "Leave it out for 1, or for 2 if the schedule has several stages on each rank.",
    )
    if is_single and stages_per_rank > 1:
        raise ValueError(
            f"stages_per_rank {stages_per_rank} is not possible with schedule {schedule!r}, which "
            "has one stage on each rank. Leave it out, or take schedule='Interleaved1F1B'."
        )
    if kind.__name__ in _THERE_AND_BACK and stages_per_rank != 2:
        raise ValueError(
            f"stages_per_rank {stages_per_rank} is not possible with schedule {schedule!r}, which "
            "has two on each rank. Leave it out."
        )


def _kind_of(schedule: str) -> tuple[Any, bool]:
    """PyTorch's class with a name, and whether it has one stage on each rank."""
    from torch.distributed.pipelining.schedules import (
        PipelineScheduleMulti,
        PipelineScheduleSingle,
        get_schedule_class,
    )

    kind = get_schedule_class(schedule)
    if kind in (PipelineScheduleSingle, PipelineScheduleMulti):
        raise ValueError(
            f"schedule {schedule!r} is a base class of schedules. Give a schedule, such as "
            "'1F1B' or 'Interleaved1F1B'."
        )
    return kind, issubclass(kind, PipelineScheduleSingle)


def _equal_share(model: nn.Module, number: int, num_stages: int) -> nn.Module:
    """A stage's share of the children of an `nn.Sequential`."""
    children = list(model.named_children())
    if not isinstance(model, nn.Sequential) or len(children) < num_stages:
        raise PipelineError(
            f"{type(model).__name__} with {len(children)} children cannot be cut into {num_stages} "
            "stages by default. Give split=..., a function of the model, the number of a stage "
            "(from 0) and the number of stages, which returns the stage's module."
        )
    first = len(children) * number // num_stages
    end = len(children) * (number + 1) // num_stages
    # The children keep their names in the model.
    return nn.Sequential(OrderedDict(children[first:end]))


def _num_rows(batch: Any, num_parts: int) -> int:
    """Samples of all microbatches together: the most frequent first dimension of the tensors."""
    sizes = Counter(tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim())
    if not sizes:
        raise PipelineError(
            "The batch of a pipeline has no tensor with samples in its first dimension. Give a "
            "batch that can be cut."
        )
    num_rows = sizes.most_common(1)[0][0]
    if num_rows % num_parts:
        raise PipelineError(
            f"A batch of {num_rows} samples cannot be cut into {num_parts} microbatches of one "
            f"size. Give a multiple of {num_parts} samples."
        )
    return num_rows


class _ModelCalled(BaseException):
    """The loss called the model. No Exception: a loss may catch those."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.model_args, self.model_kwargs = args, kwargs


class _WholeModel:
    """Passed to a loss as the model, of which this rank has a part."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        raise PipelineError(
            f"The loss of a pipeline reads the model's {name!r}, but a rank has only a part of the "
            "model. Let the loss do nothing with the model but call it."
        )

    def __getitem__(self, key: object) -> Any:
        raise PipelineError(
            f"The loss of a pipeline reads model[{key!r}], but a rank has only a part of the "
            "model. Let the loss do nothing with the model but call it."
        )


def _model_arguments(loss: Loss, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which a loss calls the model."""

    def call(*args: Any, **kwargs: Any) -> Any:
        raise _ModelCalled(args, kwargs)

    try:
        loss(_WholeModel(call), batch)
    except _ModelCalled as called:
        return called.model_args, called.model_kwargs
    raise PipelineError(
        "The loss of a pipeline has to call the model once, and called it 0 times. Give "
        "loss=lambda model, batch: ..."
    )


class _StageLoss:
    """Adapts loss(model, batch) to PyTorch, which calls loss(output, target) per microbatch."""

    def __init__(self) -> None:
        self._of_microbatch: Callable[[Any, torch.Tensor], torch.Tensor] | None = None

    def begin(self, loss: Loss, batch: Any, num_rows: int) -> torch.Tensor:
        """Begin a step; returns the target for PyTorch to cut: a tensor with a row per sample."""

        def of_microbatch(output: Any, target: torch.Tensor) -> torch.Tensor:
            first, num_calls = target.storage_offset(), 0

            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal num_calls
                num_calls += 1
                return output

            def cut(tensor: torch.Tensor) -> torch.Tensor:
                if tensor.dim() and len(tensor) == num_rows:
                    return tensor.narrow(0, first, len(target))
                return tensor

            result = loss(_WholeModel(call), copy_with(batch, cut))
            if num_calls != 1:
                raise PipelineError(
                    f"The loss of a pipeline has to call the model once, and called it {num_calls} "
                    "times. Let it call the model with all inputs at once."
                )
            if wrong := wrong_with_loss(result, nn.Identity(), is_lightning=False):
                raise PipelineError(f"loss {wrong}")
            return result

        self._of_microbatch = of_microbatch
        return torch.empty(num_rows, dtype=torch.uint8, device="cpu")

    def end(self) -> None:
        """End the step, so that the batch does not outlive it."""
        self._of_microbatch = None

    def __call__(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        assert self._of_microbatch is not None, "PyTorch computes losses only inside a step"
        return self._of_microbatch(output, target)
