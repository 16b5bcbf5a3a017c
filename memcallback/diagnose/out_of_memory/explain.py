"""Builds the report on an out-of-memory error: where memory ran out, and what was live."""

from __future__ import annotations

import linecache
import os
import re
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import FrameType, TracebackType

import torch

from memcallback.core.code_lines import frames_of, line_of_error
from memcallback.core.interruptions import PassOver
from memcallback.core.tensors import tensors_in
from memcallback.core.torch_private import keystr, tree_flatten_with_path
from memcallback.core.types import Category
from memcallback.core.units import format_bytes, parse_bytes
from memcallback.core.visible import visible_name
from memcallback.devices.catalogue import DeviceSpec
from memcallback.devices.memory import device_memory
from memcallback.devices.usage import processes_on
from memcallback.diagnose.out_of_memory.context import OomContext
from memcallback.diagnose.out_of_memory.observer import AllocatorFailure
from memcallback.diagnose.out_of_memory.parts import (
    OomLocation,
    OomMemoryState,
    OomTensor,
    PredictedPeak,
)
from memcallback.diagnose.out_of_memory.report import NUM_TENSORS, OutOfMemoryReport
from memcallback.diagnose.out_of_memory.traced_lines import line_of_node, lines_of_saved
from memcallback.diagnose.tensors.live import LiveTensor, live_tensors
from memcallback.diagnose.tensors.variables import variables
from memcallback.prediction.prediction import Prediction, StepPrediction
from memcallback.step.batch import infer_batch_size

_REQUEST = re.compile(r"[Tt]ried to allocate ([\d.]+ (?:[KMGT]i?B|bytes|B))")
_REQUEST_ON_HOST = re.compile(r"tried to allocate (\d+) bytes")
_ON_HOST = re.compile(r"DefaultCPUAllocator|CPU allocator|not enough memory: you tried")
#: Longer expressions are cut.
_MAX_CODE_LENGTH = 60
_CATEGORY_NAMES = {
    Category.PARAMETER: "parameters",
    Category.BUFFER: "buffers",
    Category.GRADIENT: "gradients",
    Category.OPTIMIZER_STATE: "optimizer state",
    Category.INPUT: "input",
    Category.ACTIVATION: "saved for the backward pass",
    None: "other tensors",
}


def explain(error: BaseException, context: OomContext) -> OutOfMemoryReport:
    """Explain an out-of-memory error while its frames still hold the tensors.

    Allocates nothing on the device and keeps no tensor alive.
    """
    is_on_host = isinstance(error, (MemoryError, OSError)) or bool(_ON_HOST.search(str(error)))
    failure = None if is_on_host else _failure_of(error, context.failure)
    device = torch.device("cpu") if is_on_host else _device_of(failure, context.device)
    state = _memory_state(error, device, failure)
    frames = [frame for frame, _ in frames_of(error.__traceback__)]
    batch, batch_size = context.batch, context.batch_size
    if batch is None:
        batch = _batch_in(frames)
    if batch_size is None:
        batch_size = infer_batch_size(batch).batch_size
    # The prediction is of the recorded device.
    prediction = context.prediction if device == context.device else None
    peak, notes = _predicted_peak(prediction, batch_size, state)
    tensors = live_tensors(context.modules, context.optimizers, batch, device, frames=frames)
    lines = lines_of_saved(tensors, context.prediction, batch_size)
    return OutOfMemoryReport(
        error=next(
            (line for line in str(error).strip().splitlines() if line), type(error).__name__
        ),
        device_name=_name_of(device),
        rank=context.rank,
        place=_place(error, context, failure),
        shortage=state,
        by_category=tuple(_by_category(tensors, state.allocated_bytes)),
        tensors=tuple(
            OomTensor(
                size_bytes=live.size_bytes,
                shape=live.shape,
                dtype=live.dtype,
                owner=live.owner,
                module=live.module,
                line=lines.get(live.address),
            )
            for live in tensors[:NUM_TENSORS]
        ),
        num_tensors=len(tensors),
        batch=tuple(_tensors_of_batch(batch)),
        batch_size=batch_size,
        expected=peak,
        processes=tuple(_processes(device)),
        notes=notes,
    )


def at_failed_size(
    prediction: StepPrediction, batch_size: int | None, state: OomMemoryState
) -> StepPrediction:
    """A prediction at the batch size that failed, on a device with the memory available then."""
    prediction = prediction if batch_size is None else prediction.at(batch_size)
    if (
        isinstance(prediction, Prediction)
        and isinstance(prediction.device, DeviceSpec)
        and state.available_bytes is not None
    ):
        # What is outside the allocator is known then, and not available.
        device = replace(
            prediction.device,
            capacity_bytes=state.available_bytes,
            context_bytes=0,
            communication_bytes=0,
        )
        return replace(prediction, device=device)
    return prediction


def _failure_of(error: BaseException, failure: AllocatorFailure | None) -> AllocatorFailure | None:
    """What the allocator said of this error; None if its last failure was another one."""
    requested = _REQUEST.search(str(error))
    if failure is None or requested is None:
        return failure
    return failure if requested.group(1) == format_bytes(failure.requested_bytes) else None


def _device_of(failure: AllocatorFailure | None, recorded: torch.device) -> torch.device:
    """The device that ran out of memory; in a job with several devices it may be another one."""
    if failure is None:
        return recorded
    index = torch.cuda.current_device() if recorded.index is None else recorded.index
    return recorded if failure.device_index == index else torch.device("cuda", failure.device_index)


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "CPU" if device.type == "cpu" else str(device)


def _memory_state(
    error: BaseException, device: torch.device, failure: AllocatorFailure | None
) -> OomMemoryState:
    memory = device_memory(device)
    if failure is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        return OomMemoryState(
            requested_bytes=failure.requested_bytes,
            capacity_bytes=failure.capacity_bytes,
            free_bytes=failure.free_bytes,
            allocated_bytes=failure.allocated_bytes,
            reserved_bytes=failure.reserved_bytes,
            non_pytorch_bytes=max(0, total - failure.free_bytes - failure.reserved_bytes),
            available_bytes=min(
                failure.capacity_bytes, failure.free_bytes + failure.reserved_bytes
            ),
            other_processes_bytes=memory.other_processes_bytes,
        )
    requested_bytes = free_bytes = None
    if on_host := _REQUEST_ON_HOST.search(str(error)):
        requested_bytes = int(on_host.group(1))
    elif requested := _REQUEST.search(str(error)):
        requested_bytes = parse_bytes(requested.group(1))
    if memory.capacity_bytes is not None and memory.used_bytes is not None:
        free_bytes = max(0, memory.capacity_bytes - memory.used_bytes)
    return OomMemoryState(
        requested_bytes=requested_bytes,
        capacity_bytes=memory.capacity_bytes,
        free_bytes=free_bytes,
        allocated_bytes=torch.cuda.memory_allocated(device) if device.type == "cuda" else None,
        reserved_bytes=memory.reserved_bytes,
        non_pytorch_bytes=memory.non_pytorch_bytes,
        other_processes_bytes=memory.other_processes_bytes,
        resident_bytes=memory.this_process_bytes if device.type == "cpu" else None,
    )


def _place(
    error: BaseException, context: OomContext, failure: AllocatorFailure | None
) -> OomLocation:
    """Where memory ran out: in a backward pass by the autograd node, else by the frames."""
    trace = error.__traceback__
    place = OomLocation(phase=context.phase, step=context.step, line=line_of_error(trace))
    running = _module_in(trace, context.modules)
    if failure is None or not failure.node:
        return replace(place, operator=_code_in(trace), module=running)
    names = {
        id(parameter): visible_name(name)
        for module in context.modules
        for name, parameter in module.named_parameters()
    }
    own = next((names[number] for number in failure.parameter_ids if number in names), None)
    near = next((names[number] for number in failure.near_ids if number in names), None)
    is_near = own is None and not running and near is not None
    if own is None and running:  # it is computed again in the backward pass
        module: str | None = running
    else:
        name = near if own is None else own
        module = None if name is None else name.rpartition(".")[0]
    return replace(
        place,
        operator=failure.node,
        module=module,
        is_near=is_near,
        forward_line=line_of_node(context.prediction, failure.node, None if is_near else module),
    )


def _module_in(trace: TracebackType | None, modules: Sequence[torch.nn.Module]) -> str | None:
    """The innermost module with a method in the frames; None if none, or an optimizer is inner."""
    names = {
        id(child): visible_name(name)
        for module in modules
        for name, child in module.named_modules()
    }
    innermost = None
    for frame, _ in frames_of(trace):
        with PassOver():  # a variable of a user's frame can be of any kind
            owner = variables(frame).get("self")
            if isinstance(owner, torch.optim.Optimizer):
                innermost = None
            if id(owner) in names and isinstance(owner, torch.nn.Module):
                innermost = names[id(owner)]
    return innermost


def _code_in(trace: TracebackType | None) -> str:
    """The expression that failed, without its arguments; before Python 3.11 the whole line."""
    summary = traceback.extract_tb(trace)
    if not summary:
        return ""
    last = summary[-1]
    text = (last.line or "").strip()
    start, end = getattr(last, "colno", None), getattr(last, "end_colno", None)
    if start is not None and end is not None:
        # Columns count the bytes of a line. Of an expression of several lines we take the first.
        line = linecache.getline(last.filename, last.lineno or 0).encode()
        code = line[start : end if last.end_lineno == last.lineno else None]
        text = code.decode(errors="replace").strip()
    called = re.match(r"[\w.]+(?=\()", text)
    text = called.group() if called else text
    return text if len(text) <= _MAX_CODE_LENGTH else f"{text[:_MAX_CODE_LENGTH]}..."


def _predicted_peak(
    prediction: StepPrediction | None, batch_size: int | None, state: OomMemoryState
) -> tuple[PredictedPeak | None, tuple[str, ...]]:
    """The predicted peak at the failed batch size, and a note if there is none for that size."""
    if prediction is None:
        return None, ()
    try:
        prediction = at_failed_size(prediction, batch_size, state)
    except ValueError:
        return None, (f"There is no prediction for batch size {batch_size:,}.",)
    peak = PredictedPeak(
        peak_allocated_bytes=prediction.peak_allocated_bytes,
        peak_reserved_bytes=prediction.peak_reserved_bytes,
        available_bytes=state.available_bytes,
        fits=prediction.fits,
    )
    return peak, ()


def _batch_in(frames: Sequence[FrameType]) -> object:
    """The variable `batch` of the innermost frame where it has tensors; None if there is none."""
    for frame in reversed(frames):
        batch = variables(frame).get("batch")
        if next(tensors_in(batch), None) is not None:
            return batch
    return None


def _by_category(
    tensors: Iterable[LiveTensor], allocated_bytes: int | None
) -> Iterator[tuple[str, int]]:
    sums: dict[Category | None, int] = defaultdict(int)
    for live in tensors:
        sums[live.category] += live.size_bytes
    for category, name in _CATEGORY_NAMES.items():
        if sums[category]:
            yield name, sums[category]
    if allocated_bytes is not None:
        # Rounding, workspaces, temporaries of the operator, gradients still inside autograd.
        yield "allocated, no tensor found", max(0, allocated_bytes - sum(sums.values()))


def _tensors_of_batch(batch: object) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of each tensor in a batch."""
    leaves, _ = tree_flatten_with_path(batch)
    named = [
        (keystr(path) or "batch", leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)
    ]
    for name, tensor in named or [("", tensor) for tensor in tensors_in(batch)]:
        yield name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _processes(device: torch.device) -> Iterator[str]:
    """The other processes on a CUDA device that the driver shows."""
    if device.type != "cuda":
        return
    for process in processes_on(str(torch.cuda.get_device_properties(device).uuid)):
        if process.pid == os.getpid():
            continue
        used = "memory unknown" if process.used_bytes is None else format_bytes(process.used_bytes)
        yield (
            f"Also on the device: process {process.pid} of {process.user or 'an unknown user'}, "
            f"{used}: {process.command or 'not visible'}."
        )
