"""Health: rules for retries, headroom, fragmentation and other processes.

A finding is reported when:

- retries: the allocator ran out of memory and retried in 3 of the last 50 steady steps. The longest
  batch so far may cause a retry; one in twenty steps does not.
- headroom: the peak reserved memory of a steady step leaves less than the headroom free, and at
  least nine tenths of the reserved memory is in use.
- reserved far above allocated: the same, but a tenth of the allocator's memory is reserved and
  unallocated at the peak. Either most of it is inactive split memory, which nobody can use, or
  other processes need the device too. A cache on a device with room for it does no harm.
- another process: other processes have taken more of the device than the headroom since training
  began, at two readings in a row, so not a short-lived command.

Warm-up steps do not count, because memory is unusual before the first update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from memcallback.core.step_memory import DeviceMemory, MemoryStats, StepMemory
from memcallback.core.units import GiB, format_bytes

_NUM_STEPS = 50
_NUM_STEPS_WITH_RETRIES = 3
#: Report unallocated memory above this share of what the allocator may have.
_MAX_UNALLOCATED = 0.1
#: Other processes need the device if they use at least this share of it.
_NEEDED_BY_OTHERS = 0.05
#: Where processes cannot be distinguished, memory outside the allocator may be this process's own
#: libraries. They allocate buffers on first use (communication, kernels loaded late), up to about
#: 1 GiB.
_OWN_LIBRARIES_BYTES = 2 * GiB
_OWN_LIBRARIES = 0.1
_SETTING = "PYTORCH_CUDA_ALLOC_CONF"


class Sign(Enum):
    """A kind of problem."""

    LEAK = "leak"
    RETRIES = "retries"
    RESERVED = "reserved"
    HEADROOM = "headroom"
    OTHER_PROCESS = "other process"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem with the memory of a training. All its numbers are measured unless it says so.

    Attributes:
        sign: The kind of problem.
        value: A sentence on what was measured.
        rule: A sentence on why this is a problem.
        hint: Sentences on what to do.
    """

    sign: Sign
    value: str
    rule: str
    hint: str

    def __str__(self) -> str:
        return f"{self.value} {self.rule} {self.hint}"


class Health:
    """Judges the steps and device readings of one training on one device."""

    def __init__(
        self,
        headroom: float,
        *,
        suggestion: Callable[[], int | None] = lambda: None,
        is_expandable: bool = False,
    ) -> None:
        self._headroom = headroom
        self._suggestion = suggestion
        self._is_expandable = is_expandable
        self._retries: deque[int] = deque(maxlen=_NUM_STEPS)
        #: The steady step since the last reading that reserved the most.
        self._largest: StepMemory | None = None
        self._first: DeviceMemory | None = None
        self._were_others_above_limit = False
        self._reported: set[Sign] = set()

    def on_step(self, record: StepMemory) -> list[Finding]:
        """Judge a step; return new findings."""
        if record.is_warm_up or record.is_interrupted:
            return []
        reserved = _reserved(record)
        if reserved is not None and (
            self._largest is None or reserved >= (_reserved(self._largest) or 0)
        ):
            self._largest = record
        retries = record.num_alloc_retries
        if retries is None:
            return []
        self._retries.append(retries)
        if not retries or sum(map(bool, self._retries)) < _NUM_STEPS_WITH_RETRIES:
            return []
        return self._once(self._retrying(record))

    def on_reading(self, device: DeviceMemory, *, limit_bytes: int | None = None) -> list[Finding]:
        """Judge a reading of the whole device, made after a step; return new findings."""
        step, self._largest = self._largest, None
        if step is None:
            return []
        findings = self._once(self._nearly_full(step, device, limit_bytes))
        if self._first is None:
            self._first = device
            return findings
        growth = _growth_of_others(self._first, device)
        were_above = self._were_others_above_limit
        self._were_others_above_limit = growth is not None and growth.is_above_limit(
            self._headroom, device.capacity_bytes
        )
        if growth is not None and were_above and self._were_others_above_limit:
            findings += self._once(self._other_process(growth, device))
        return findings

    def _once(self, finding: Finding | None) -> list[Finding]:
        if finding is None or finding.sign in self._reported:
            return []
        self._reported.add(finding.sign)
        return [finding]

    def _smaller_batch_size(self, step: StepMemory) -> int | None:
        """The suggested batch size if it is smaller than the step's."""
        size = self._suggestion()
        return size if size is not None and 1 <= size < (step.batch_size or 0) else None

    def _retrying(self, record: StepMemory) -> Finding:
        num_steps, num_retries = sum(map(bool, self._retries)), sum(self._retries)
        size = self._smaller_batch_size(record)
        fits = "" if size is None else f": {size:,} samples need no retry"
        setting = (
            "Segments are expandable already."
            if self._is_expandable
            else f"Or start the program with {_SETTING}=expandable_segments:True, which needs less "
            "memory for the same tensors."
        )
        return Finding(
            sign=Sign.RETRIES,
            value=(
                f"The allocator of {record.device_name} ran out of memory and tried again "
                f"{num_retries} times in {num_steps} of the last {len(self._retries)} steps."
            ),
            rule=(
                "A retry waits for the device and frees the cache, which makes these steps slow; "
                f"this is reported if at least {_NUM_STEPS_WITH_RETRIES} of {_NUM_STEPS} steps "
                "have retries."
            ),
            hint=f"Make the batch smaller{fits}. {setting}",
        )

    def _nearly_full(
        self, step: StepMemory, device: DeviceMemory, limit_bytes: int | None
    ) -> Finding | None:
        """Judge a step that leaves less than the headroom free."""
        reserved = _reserved(step)
        if reserved is None or device.capacity_bytes is None or device.non_pytorch_bytes is None:
            return None
        available = device.capacity_bytes - device.non_pytorch_bytes
        capacity = device.capacity_bytes
        if limit_bytes is not None and limit_bytes < available:
            available = capacity = limit_bytes
        free = available - reserved
        if free >= self._headroom * capacity:
            return None
        allocated = step.peak_allocated_bytes
        unallocated = 0 if allocated is None else reserved - allocated
        if unallocated < _MAX_UNALLOCATED * capacity:
            return self._little_headroom(step, free, capacity)
        split = _split_share(step)
        if split is not None and split >= 0.5:
            return self._fragmented(unallocated, capacity, split)
        if (device.other_processes_bytes or 0) >= _NEEDED_BY_OTHERS * device.capacity_bytes:
            return self._cached(unallocated, capacity, device)
        return None

    def _little_headroom(self, step: StepMemory, free: int, capacity: int) -> Finding:
        size = self._smaller_batch_size(step)
        fits = "" if size is None else f", to at most {size:,} samples"
        number = "?" if step.index is None else str(step.index + 1)
        left = max(0, free)
        return Finding(
            sign=Sign.HEADROOM,
            value=(
                f"At the peak of step {number}, {format_bytes(left)} of {format_bytes(capacity)} "
                f"({100 * left / capacity:.1f} %) are left on {step.device_name}."
            ),
            rule=(
                "A larger batch, a longer sequence or validation may need more; "
                f"{100 * self._headroom:g} % should stay free."
            ),
            hint=(
                f"Make the batch smaller{fits}, or save memory: checkpointing, mixed precision, or "
                "smaller batches with accumulation (memcallback.checkpoint, amp, accumulate; in "
                "Lightning, arguments of MemoryCallback)."
            ),
        )

    def _fragmented(self, unallocated: int, capacity: int, split: float) -> Finding:
        return Finding(
            sign=Sign.RESERVED,
            value=(
                f"At the peak {format_bytes(unallocated)} of {format_bytes(capacity)} are reserved "
                f"but unallocated, {100 * split:.0f} % of it in gaps between tensors, and the "
                "device is nearly full."
            ),
            rule=(
                "Such gaps cannot be given back to the device, so training can run out of memory "
                "while some is free; this is reported if at least "
                f"{100 * _MAX_UNALLOCATED:g} % of the capacity is reserved but unallocated."
            ),
            hint=(
                "Segments are expandable already: use smaller batches, or batches of one length."
                if self._is_expandable
                else f"Start the program with {_SETTING}=expandable_segments:True."
            ),
        )

    def _cached(self, unallocated: int, capacity: int, device: DeviceMemory) -> Finding:
        return Finding(
            sign=Sign.RESERVED,
            value=(
                f"At the peak {format_bytes(unallocated)} of {format_bytes(capacity)} are reserved "
                "but unallocated, while other processes use "
                f"{format_bytes(device.other_processes_bytes or 0)} of the device, which is nearly "
                "full."
            ),
            rule=(
                "Other processes cannot use this cache; this is reported if it is at least "
                f"{100 * _MAX_UNALLOCATED:g} % of the capacity."
            ),
            hint=(
                "If an earlier phase needed more (validation with larger batches), call "
                "torch.cuda.empty_cache() after it; or start the program with "
                f"{_SETTING}=garbage_collection_threshold:0.8."
            ),
        )

    def _other_process(self, growth: _GrowthOfOthers, device: DeviceMemory) -> Finding:
        capacity = (
            "" if device.capacity_bytes is None else f" of {format_bytes(device.capacity_bytes)}"
        )
        if growth.is_by_process:
            who = "Other processes have"
            rule = (
                f"That is more than the {100 * self._headroom:g} % of the device that a suggested "
                "batch size leaves free."
            )
        else:
            who = "Another process or a library outside PyTorch's allocator has"
            rule = (
                "Smaller amounts can be this process's own libraries; this is reported above "
                f"{format_bytes(_OWN_LIBRARIES_BYTES)} and {100 * _OWN_LIBRARIES:g} % of the "
                "capacity."
            )
        return Finding(
            sign=Sign.OTHER_PROCESS,
            value=(
                f"{who} taken {format_bytes(growth.num_bytes)}{capacity} of this device since "
                "training began."
            ),
            rule=rule,
            hint=(
                "Run `memcallback devices` to see which process; train on a device of your own, or "
                "choose a batch size for the memory that is left."
            ),
        )


@dataclass(frozen=True, kw_only=True)
class _GrowthOfOthers:
    """Memory taken outside the allocator since the first reading."""

    num_bytes: int
    #: Whether these are known to be other processes, rather than our own libraries.
    is_by_process: bool

    def is_above_limit(self, headroom: float, capacity_bytes: int | None) -> bool:
        if capacity_bytes is None:
            return False
        if self.is_by_process:
            return self.num_bytes > headroom * capacity_bytes
        return self.num_bytes > max(_OWN_LIBRARIES_BYTES, _OWN_LIBRARIES * capacity_bytes)


def _growth_of_others(first: DeviceMemory, now: DeviceMemory) -> _GrowthOfOthers | None:
    """Compare two readings; None if they do not show memory outside the allocator."""
    if first.reserved_bytes is None or now.reserved_bytes is None:
        return None  # a CPU, whose memory all processes share anyway
    if first.other_processes_bytes is not None and now.other_processes_bytes is not None:
        return _GrowthOfOthers(
            num_bytes=now.other_processes_bytes - first.other_processes_bytes, is_by_process=True
        )
    if first.non_pytorch_bytes is None or now.non_pytorch_bytes is None:
        return None
    return _GrowthOfOthers(
        num_bytes=now.non_pytorch_bytes - first.non_pytorch_bytes, is_by_process=False
    )


def _reserved(step: StepMemory) -> int | None:
    """The peak reserved memory; if peaks were not reset, the reserved memory at the end."""
    if step.peak_reserved_bytes is not None or not step.windows:
        return step.peak_reserved_bytes
    return step.windows[-1].end.reserved_bytes


def _split_share(step: StepMemory) -> float | None:
    """The inactive split share of unallocated memory, at the boundary with most allocated."""
    fullest: MemoryStats | None = max(
        (window.end for window in step.windows if window.end.allocated_bytes is not None),
        key=lambda end: end.allocated_bytes or 0,
        default=None,
    )
    if (
        fullest is None
        or fullest.reserved_bytes is None
        or fullest.allocated_bytes is None
        or fullest.inactive_split_bytes is None
    ):
        return None
    unallocated = fullest.reserved_bytes - fullest.allocated_bytes
    return fullest.inactive_split_bytes / unallocated if unallocated > 0 else None
