"""Rules: retries, headroom, fragmentation, other processes.

| finding | it is right when |
|---|---|
| retries | the allocator ran out and tried again in 3 of the last 50 steady steps: a step that meets the longest batch so far may, one in twenty does not |
| headroom | the peak reserved memory of a steady step leaves less than the headroom free, and at least nine tenths of it are in use |
| reserved far above allocated | the same, and a tenth of what the allocator may have is reserved and not allocated at the peak; either most of that is split, so that nobody can have it, or others use the device too. A cache on a device with room for it harms nobody |
| another process | others have taken more of the device than the headroom since training began, at two readings in a row, so that it is not the moment of a short command |

The first steps do not count: before the first update nothing is as it will be.
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
#: Of what the allocator may have: reserved and not allocated at the peak.
_SLACK = 0.1
#: Who else has less than this share of a device does not need the cache of this process.
_NEEDED_BY_OTHERS = 0.05
#: Where processes are not told apart, what grows outside of the allocator may be this process's own
#: libraries, whose buffers come with the first use of each (communication between devices, kernels
#: loaded late, other libraries): up to about 1 GiB.
_OWN_LIBRARIES_BYTES = 2 * GiB
_OWN_LIBRARIES = 0.1
_SETTING = "PYTORCH_CUDA_ALLOC_CONF"


class Sign(Enum):
    """What is wrong."""

    LEAK = "leak"
    RETRIES = "retries"
    RESERVED = "reserved"
    HEADROOM = "headroom"
    OTHER_PROCESS = "other process"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong with the memory of a training. All figures in it are measured, unless
    they say otherwise.

    Attributes:
        sign: What it is.
        value: What was seen, a sentence.
        rule: Why that is told, a sentence.
        way_out: What to do, one sentence or several.
    """

    sign: Sign
    value: str
    rule: str
    hint: str

    def __str__(self) -> str:
        return f"{self.value} {self.rule} {self.hint}"


class Health:
    """Judges the steps and readings of one training on one device."""

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
        self._is_taken = False
        self._found: set[Sign] = set()

    def on_step(self, record: StepMemory) -> list[Finding]:
        """Take a step."""
        if record.is_warm_up or record.is_interrupted:
            return []
        if _reserved(record) is not None and (
            self._largest is None or (_reserved(record) or 0) >= (_reserved(self._largest) or 0)
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
        """Take a reading of the whole device, made after a step."""
        step, self._largest = self._largest, None
        if step is None:
            return []
        found = self._once(self._nearly_full(step, device, limit_bytes))
        if self._first is None:
            self._first = device
            return found
        taken = _taken(self._first, device)
        was_taken, self._is_taken = (
            self._is_taken,
            taken is not None and taken.is_much(self._headroom, device.capacity_bytes),
        )
        if taken is not None and was_taken and self._is_taken:
            found += self._once(self._other_process(taken, device))
        return found

    def _once(self, finding: Finding | None) -> list[Finding]:
        if finding is None or finding.sign in self._found:
            return []
        self._found.add(finding.sign)
        return [finding]

    def _retrying(self, record: StepMemory) -> Finding:
        num_steps, num_retries = sum(map(bool, self._retries)), sum(self._retries)
        smaller = self._suggestion()
        fits = (
            ""
            if smaller is None or smaller < 1 or smaller >= (record.batch_size or 0)
            else f": {smaller:,} samples need no retry"
        )
        return Finding(
            sign=Sign.RETRIES,
            value=(
                f"The allocator of {record.device_name} ran out of memory and tried again {num_retries} times in {num_steps} of the last "
                f"{len(self._retries)} steps."
            ),
            rule="Each time it waits for the device and gives its cache back, which makes these steps slow; it is told from "
            f"{_NUM_STEPS_WITH_RETRIES} steps of {_NUM_STEPS} on.",
            hint=f"Make the batch smaller{fits}. {self._expandable()}",
        )

    def _expandable(self) -> str:
        if self._is_expandable:
            return "Segments are expandable already."
        return f"Or start the program with {_SETTING}=expandable_segments:True, which needs less memory for the same tensors."

    def _nearly_full(
        self, step: StepMemory, device: DeviceMemory, limit_bytes: int | None
    ) -> Finding | None:
        reserved = _reserved(step)
        allocated = step.peak_allocated_bytes
        outside = device.non_pytorch_bytes
        if reserved is None or device.capacity_bytes is None or outside is None:
            return None
        may_have = device.capacity_bytes - outside
        whole = device.capacity_bytes
        if limit_bytes is not None and limit_bytes < may_have:
            may_have = whole = limit_bytes
        free = may_have - reserved
        if free >= self._headroom * whole:
            return None
        slack = 0 if allocated is None else reserved - allocated
        if slack < _SLACK * whole:
            return self._short(step, free, whole)
        split = _split_share(step)
        if split is not None and split >= 0.5:
            return self._fragmented(slack, whole, split)
        if (device.other_processes_bytes or 0) >= _NEEDED_BY_OTHERS * device.capacity_bytes:
            return self._cached(slack, whole, device)
        return None

    def _short(self, step: StepMemory, free: int, whole: int) -> Finding:
        smaller = self._suggestion()
        fits = (
            ""
            if smaller is None or smaller < 1 or smaller >= (step.batch_size or 0)
            else f", to at most {smaller:,} samples"
        )
        left = f"{format_bytes(max(0, free))} of {format_bytes(whole)} ({100 * max(0, free) / whole:.1f} %)"
        return Finding(
            sign=Sign.HEADROOM,
            value=f"At the peak of step {_number(step)} {left} are left on {step.device_name}.",
            rule=f"A larger batch, a longer sequence or validation can need more; {100 * self._headroom:g} % are to stay free.",
            hint=f"Make the batch smaller{fits}, or save memory: MemoryCallback(checkpoint=True), amp='bf16-mixed', accumulate=2.",
        )

    def _fragmented(self, slack: int, whole: int, split: float) -> Finding:
        setting = (
            "Segments are expandable already: make the batch smaller, or batches of one length."
            if self._is_expandable
            else f"Start the program with {_SETTING}=expandable_segments:True."
        )
        return Finding(
            sign=Sign.RESERVED,
            value=(
                f"At the peak {format_bytes(slack)} of {format_bytes(whole)} are reserved and not allocated, {100 * split:.0f} % of it between "
                "tensors, and the device is nearly full."
            ),
            rule=f"What lies between tensors cannot be given back, so memory can run out although it is free; it is told from {100 * _SLACK:g} % on.",
            hint=setting,
        )

    def _cached(self, slack: int, whole: int, device: DeviceMemory) -> Finding:
        return Finding(
            sign=Sign.RESERVED,
            value=(
                f"At the peak {format_bytes(slack)} of {format_bytes(whole)} are reserved and not allocated, while other processes use "
                f"{format_bytes(device.other_processes_bytes or 0)} of the device, which is nearly full."
            ),
            rule=f"They cannot have what this process keeps for later; it is told from {100 * _SLACK:g} % on.",
            hint=(
                "If something before needed more (validation with larger batches), call torch.cuda.empty_cache() after it; or start the program "
                f"with {_SETTING}=garbage_collection_threshold:0.8."
            ),
        )

    def _other_process(self, taken: _Taken, device: DeviceMemory) -> Finding:
        who = (
            "Other processes have"
            if taken.is_by_process
            else "Something that is not PyTorch's allocator, another process or a library, has"
        )
        rule = (
            f"More than {100 * self._headroom:g} % of the device is as much as a suggested batch size leaves free."
            if taken.is_by_process
            else f"This process's own libraries take less; told from {format_bytes(_OWN_LIBRARIES_BYTES)} and {100 * _OWN_LIBRARIES:g} % on."
        )
        of = "" if device.capacity_bytes is None else f" of {format_bytes(device.capacity_bytes)}"
        return Finding(
            sign=Sign.OTHER_PROCESS,
            value=f"{who} taken {format_bytes(taken.num_bytes)}{of} of this device since training began.",
            rule=rule,
            hint="See who it is with `memcallback devices`; train on a device of your own, or choose the batch size for what is left.",
        )


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """What others have taken since the first reading, and whether processes are told apart."""

    num_bytes: int
    is_by_process: bool

    def is_much(self, headroom: float, capacity_bytes: int | None) -> bool:
        if capacity_bytes is None:
            return False
        if self.is_by_process:
            return self.num_bytes > headroom * capacity_bytes
        return self.num_bytes > max(_OWN_LIBRARIES_BYTES, _OWN_LIBRARIES * capacity_bytes)


def _taken(first: DeviceMemory, now: DeviceMemory) -> _Taken | None:
    if first.reserved_bytes is None or now.reserved_bytes is None:
        # Of a CPU, whose memory everything shares, this says nothing.
        return None
    if first.other_processes_bytes is not None and now.other_processes_bytes is not None:
        return _Taken(
            num_bytes=now.other_processes_bytes - first.other_processes_bytes, is_by_process=True
        )
    if first.non_pytorch_bytes is None or now.non_pytorch_bytes is None:
        return None
    return _Taken(num_bytes=now.non_pytorch_bytes - first.non_pytorch_bytes, is_by_process=False)


def _reserved(step: StepMemory) -> int | None:
    """The largest reserved figure: without resets of peaks, that at the end."""
    if step.peak_reserved_bytes is not None or not step.windows:
        return step.peak_reserved_bytes
    return step.windows[-1].end.reserved_bytes


def _split_share(step: StepMemory) -> float | None:
    """Of what is reserved and not allocated at the boundary at which the most is allocated: how
    much is split.
    """
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


def _number(step: StepMemory) -> str:
    return "?" if step.index is None else str(step.index + 1)
