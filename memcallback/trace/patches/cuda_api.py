"""torch.cuda and torch.accelerator as with one idle card: devices, memory, streams and events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memcallback.devices.catalogue import DeviceSpec
from memcallback.step.module_follower import SequenceLog
from memcallback.trace.dispatch.mode import CUDA, TraceMode
from memcallback.trace.patches.patching import Patch

#: The sequence number of autograd nodes that have none, or more.
_NO_NUMBER = 2**64 - 1
_RECORD_STREAM = (
    "Tensor.record_stream holds memory back until another stream is done with it: "
    "this memory was assumed to be free at once."
)
#: Functions that report memory: an idle device has none in use, so that code that trains
#: differently when memory is short goes its usual way.
_READ_MEMORY = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "memory_cached",
    "max_memory_cached",
    "device_memory_used",
)
_CHANGE_MEMORY = (
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "set_per_process_memory_fraction",
)
_SEED = (
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
)
_NVTX = ("range_push", "range_pop", "mark", "range_start", "range_end")

Functions = dict[str, Callable[..., Any]]


class DeviceProperties(SimpleNamespace):
    """What `torch.cuda.get_device_properties` returns in a trace; PyTorch's own cannot be made."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # compiled code keeps it as a constant


def cuda_api_patches(device: DeviceSpec, streams: Streams) -> Iterator[Patch]:
    """Replace the functions that ask for devices, and those that would wait for one."""
    memory = {**_memory_functions(device), "empty_cache": streams.empty_cache}
    functions: list[tuple[Any, Functions]] = [
        (
            torch.cuda,
            {
                **_device_functions(device),
                **_stream_functions(streams),
                **memory,
                **dict.fromkeys(_SEED, _nothing),
                "initial_seed": lambda: 0,
                "get_rng_state": lambda device="cuda": torch.empty(16, dtype=torch.uint8),
                "get_rng_state_all": lambda: [torch.empty(16, dtype=torch.uint8)],
            },
        ),
        (torch.cuda.memory, memory),
        (torch.cuda.nvtx, dict.fromkeys(_NVTX, _nothing)),
        (torch.cuda.Stream, {"__new__": lambda kind, *args, **kwargs: streams.new()}),
        (torch.cuda.Event, {"__new__": lambda kind, *args, **kwargs: Event()}),
        (FakeTensor, {"record_stream": streams.record}),
        (torch.backends.cuda, {"is_built": lambda: True}),
    ]
    if hasattr(torch, "accelerator"):
        functions.append((torch.accelerator, {**_accelerator_functions(streams), **memory}))
    for owner, replacements in functions:
        for name, replacement in replacements.items():
            if hasattr(owner, name):  # not every version of PyTorch has all of them
                yield owner, name, replacement


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _device_functions(device: DeviceSpec) -> Functions:
    major, minor = device.compute_capability
    properties = DeviceProperties(
        name=device.name,
        major=major,
        minor=minor,
        total_memory=device.capacity_bytes,
        multi_processor_count=device.num_multiprocessors,
        L2_cache_size=device.l2_cache_bytes,
        clock_rate=device.clock_khz,
        memory_clock_rate=device.memory_clock_khz,
        max_threads_per_multi_processor=device.max_threads_per_multiprocessor,
        shared_memory_per_block=device.shared_memory_per_block_bytes,
        shared_memory_per_block_optin=device.shared_memory_per_block_optin_bytes,
        warp_size=32,
        is_integrated=False,
    )
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": _nothing,
        "_lazy_init": _nothing,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _nothing,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "get_device_capability": lambda device=None: (major, minor),
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_arch_list": lambda: [f"sm_{major}{minor}"],
        "can_device_access_peer": lambda device, peer_device: False,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or major >= 8,
        "is_tf32_supported": lambda: major >= 8,
        "ipc_collect": _nothing,
        "_sleep": _nothing,
    }


def _memory_functions(device: DeviceSpec) -> Functions:
    free_and_total = (device.capacity_bytes, device.capacity_bytes)
    return {
        **dict.fromkeys(_READ_MEMORY, lambda *args, **kwargs: 0),
        **dict.fromkeys(_CHANGE_MEMORY, _nothing),
        "memory_stats": lambda *args, **kwargs: defaultdict(int),
        "memory_summary": lambda *args, **kwargs: "",
        "mem_get_info": lambda *args, **kwargs: free_and_total,
        "get_memory_info": lambda *args, **kwargs: free_and_total,
    }


def _stream_functions(streams: Streams) -> Functions:
    return {
        "current_stream": lambda device=None: streams.current,
        "default_stream": lambda device=None: streams.default,
        "set_stream": streams.set,
        "stream": streams.entered,
        "StreamContext": streams.entered,
        "synchronize": _nothing,
        "is_current_stream_capturing": lambda: streams.is_capturing,
    }


def _accelerator_functions(streams: Streams) -> Functions:
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: 0,
        "current_stream": lambda device=None: streams.current,
        "set_stream": streams.set,
        "synchronize": _nothing,
        "set_device_index": _nothing,
    }


class Streams:
    """The streams of a trace, numbered from 0 (the default stream), and the current one.

    Autograd runs a node in the stream in which it was created, whatever stream is current where the
    backward pass is called (`evaluate_function` in torch/csrc/autograd/engine.cpp).
    """

    def __init__(self, mode: TraceMode) -> None:
        self._mode = mode
        self._all: list[Stream] = []
        self.default = self._current = self.new()
        self._node_streams = SequenceLog(self.default)
        #: The autograd node that made its stream the current one.
        self._node: int | None = None

    def new(self) -> Stream:
        """Another stream."""
        self._all.append(Stream(self, len(self._all)))
        return self._all[-1]

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is recorded."""
        return self._mode.is_capturing

    @property
    def current(self) -> Stream:
        """The current stream; in a backward pass that of the running node."""
        self._follow_node()
        return self._current

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache`: the allocator releases its free segments."""
        if self._mode.is_recording:
            self._mode.ledger.empty_cache()

    def set(self, stream: Stream | None) -> None:
        """Make a stream the current one; None keeps the current one."""
        if stream is None:
            return
        self._follow_node()
        self._set(stream)
        self._mode.follow_streams = self._follow_node

    def _set(self, stream: Stream) -> None:
        self._current = stream
        self._mode.ledger.stream = stream.stream_id
        self._node_streams.add(stream)

    def _follow_node(self) -> None:
        node = torch._C._current_autograd_node()
        if node is None:
            return
        number = node._sequence_nr()
        if number >= _NO_NUMBER:
            # It accumulates gradients. Where nobody knows its stream, that of the node before is.
            stream = self._mode.accumulated_in.get(id(getattr(node, "variable", None)))
            if stream is not None:
                self._node = None
                self._set(self._all[stream])
        elif number != self._node:
            self._node = number
            self._set(self._node_streams.at(number))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Make the stream that is current now current again after a backward pass."""
        before, node = self.current, self._node
        try:
            yield
        finally:
            self._node = node
            self._set(before)

    @contextmanager
    def entered(self, stream: Stream | None) -> Iterator[None]:
        """Make a stream the current one until the end of the context."""
        before = self.current
        self.set(stream)
        try:
            yield
        finally:
            self.set(before)

    def record(self, tensor: torch.Tensor, s: Stream) -> None:
        """`Tensor.record_stream`: note an assumption, as a trace knows nothing of time."""
        with torch._C.DisableTorchFunction():
            entry = self._mode.ledger.find(tensor)
        if entry is not None and not entry.is_host and entry.stream != s.stream_id:
            self._mode.assumed[_RECORD_STREAM] = None


class Stream:
    """Replaces torch.cuda.Stream: all its work is done at once."""

    device, device_index, priority = CUDA, 0, 0

    def __init__(self, streams: Streams, number: int) -> None:
        self.stream_id = self.cuda_stream = number
        self._streams = streams
        self._before: list[Stream] = []

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is captured."""
        return False

    def record_event(self, event: Any = None) -> Any:
        """Return the event, or a new one."""
        return event or Event()

    wait_event = wait_stream = synchronize = _nothing

    def __enter__(self) -> Stream:
        """Make this stream the current one."""
        self._before.append(self._streams.current)
        self._streams.set(self)
        return self

    def __exit__(self, *exception: object) -> None:
        """Make the stream before the current one."""
        self._streams.set(self._before.pop())


class Event:
    """Replaces torch.cuda.Event: it has happened, and no time went by."""

    device, cuda_event = CUDA, 0

    def query(self) -> bool:
        """Whether it has happened."""
        return True

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds until another event."""
        return 0.0

    record = wait = synchronize = _nothing
