"""MonitorSettings: what the user of a callback or a log has set."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memcallback.batch_size.estimate import check_headroom
from memcallback.core.validation import DEFAULT_HEADROOM, whole_number
from memcallback.devices.catalogue import CATALOGUE, Device, DeviceSpec
from memcallback.isolation.isolated import TIMEOUT_S, check_timeout
from memcallback.report.console import BRIEF, check_verbose
from memcallback.step.batch import INFERRED


@dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """What the user of a callback or a log has set.

    Attributes:
        owner: The name of that class, for warnings.
        without_prediction: How to leave the prediction out, for warnings.
        target: The device to suggest a batch size for; None for the one that trains.
        headroom: The fraction of its memory that the suggestion leaves free.
        batch_size: Samples in a batch; None to infer them.
        predict: Whether to predict the first step.
        wait_for_prediction: Whether the first step waits for the prediction.
        isolate: Whether to predict in a child process.
        timeout_s: Seconds after which a prediction is ended.
        warnings: Whether to warn of unhealthy memory; None for all devices but a CPU.
        oom_snapshot: Whether to record the CUDA allocator's history.
        verbose: How much is printed (see `MemoryCallback`).
    """

    owner: str
    without_prediction: str
    target: Device | None = None
    headroom: float = DEFAULT_HEADROOM
    batch_size: int | None = None
    predict: bool = True
    wait_for_prediction: bool = False
    isolate: bool = True
    timeout_s: float = TIMEOUT_S
    warnings: bool | None = None
    oom_snapshot: bool = False
    verbose: int = BRIEF

    def __post_init__(self) -> None:
        check_verbose(self.verbose)
        check_headroom(self.headroom)
        check_timeout(self.timeout_s)
        if self.batch_size is not None:
            whole_number("batch_size", self.batch_size, INFERRED)

    def is_unanswerable(self, device: torch.device) -> bool:
        """Whether a card is asked for where a CPU trains: only a size means the CPU's memory."""
        target = self.target
        is_card = isinstance(target, DeviceSpec) and target.architecture_of is None
        return is_card and device.type == "cpu"

    def target_on(self, device: torch.device) -> Device | None:
        """The target of a training on a device; None for that device, or if unanswerable."""
        return None if self.is_unanswerable(device) else self.target

    def capacity_bytes_on(self, device: torch.device) -> int | None:
        """The memory of that target; None for that of the device."""
        target = self.target_on(device)
        return None if target is None else target.capacity_bytes

    def notes_on(self, device: torch.device) -> tuple[str, ...]:
        """What the report of a training on a device says of the target."""
        target = self.target
        if target is None:
            return ()
        # Of a card by name the caveats say which one was meant; its architecture is nothing here.
        is_named = any(target.name == card.name for card in CATALOGUE)
        caveats = target.caveats if is_named else ()
        if not self.is_unanswerable(device):
            return caveats
        return (
            *caveats,
            f"No batch size is suggested for {target.name}: this training runs on a CPU, where the "
            "memory that the card needs besides tensors is not seen. To predict the step for the "
            f'card, call memcallback.suggest_batch_size(step, device="{target.name}").',
        )
