"""The kinds of ranks of a job: which steps on which devices cover them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from memcallback.devices.catalogue import Device
from memcallback.devices.local import resolve
from memcallback.prediction.predict import checked_step
from memcallback.prediction.predict_here import Traces
from memcallback.step.step import Step
from memcallback.step.training_step import TrainingStep

#: As for `predict`.
AnyDevice = str | int | torch.device | Device | None


@dataclass(frozen=True, kw_only=True)
class RankKind:
    """Ranks with the same step and device."""

    step: Step
    device: Device
    ranks: list[int]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The kinds of ranks of a job, and how a batch is divided among them.

    Attributes:
        kinds: Ranks with the same step and device together.
        num_with_own_batch: How many ranks have a batch of their own.
        is_sure: Whether that number is known; else it is assumed.
        num_microbatches: Microbatches in a batch of a pipeline.
    """

    kinds: list[RankKind]
    num_with_own_batch: int
    is_sure: bool
    num_microbatches: int


def listed_devices(
    step: Step, device: AnyDevice | Sequence[AnyDevice]
) -> tuple[list[Device], bool]:
    """The devices, and whether a list of them was given."""
    ranks = checked_step(step).ranks
    if isinstance(device, Sequence) and not isinstance(device, str):
        listed, is_list = list(device), True
    else:
        listed, is_list = [device], False
    if is_list and (not listed or (ranks is not None and len(listed) != ranks.world_size)):
        expected = (
            "at least one" if ranks is None else f"one for each of the {ranks.world_size} ranks"
        )
        raise ValueError(
            f"device is a list of {len(listed)} devices, and must have {expected}. Give one device "
            "if all ranks have the same."
        )
    return [resolve(named) for named in listed], is_list


def job_of(step: Step, listed: Sequence[Device], *, is_list: bool) -> Job:
    """The kinds of ranks to predict, so that every rank is covered."""
    ranks = step.ranks
    devices = dict(enumerate(listed))
    if ranks is None:
        return Job(
            kinds=_kinds_of({0: step}, devices),
            num_with_own_batch=len(devices),
            is_sure=is_list,
            num_microbatches=1,
        )
    assert isinstance(step, TrainingStep)  # others have no ranks
    num_microbatches, unlike, num_together = (
        ranks.num_microbatches,
        ranks.unlike,
        ranks.num_at_one_batch,
    )
    if callable(ranks.strategy):
        # Only a trace shows whether the function makes a pipeline, whose ranks differ.
        traced = Traces(step, devices[0], 1, None).at(
            step.check_predictable(), step.sequence_length
        )
        num_microbatches = traced.num_batches // step.accumulate
        if num_microbatches > 1:
            unlike, num_together = tuple(range(ranks.world_size)), ranks.world_size
    steps = {rank: step.of_rank(rank) for rank in unlike}
    return Job(
        kinds=_kinds_of(steps, devices if is_list else dict.fromkeys(steps, devices[0])),
        num_with_own_batch=ranks.world_size // num_together,
        is_sure=not callable(ranks.strategy),
        num_microbatches=num_microbatches,
    )


def _kinds_of(steps: Mapping[int, Step], devices: Mapping[int, Device]) -> list[RankKind]:
    """Groups ranks by step and device; a rank without a step of its own has the first one."""
    kinds: list[RankKind] = []
    first = next(iter(steps.values()))
    for rank, device in devices.items():
        step = steps.get(rank, first)
        same = (kind for kind in kinds if kind.step is step and kind.device == device)
        if (kind := next(same, None)) is None:
            kinds.append(RankKind(step=step, device=device, ranks=[rank]))
        else:
            kind.ranks.append(rank)
    return kinds
