"""Build the report from an error."""

from __future__ import annotations

import linecache
import os
import re
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import FrameType, TracebackType

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from memcallback.core.allocation_trace import (
    Alloc,
    Event,
    last_step_start,
    not_freed,
    phase_events,
)
from memcallback.core.code_lines import CodeLine, frames_of, line_of_error
from memcallback.core.tensors import tensors_in
from memcallback.core.types import Category, Phase
from memcallback.core.units import format_bytes, parse_bytes
from memcallback.devices.catalogue import DeviceSpec
from memcallback.devices.memory import device_memory
from memcallback.devices.usage import processes_on
from memcallback.diagnose.out_of_memory.observer import Moment, last_moment
from memcallback.diagnose.out_of_memory.report import (
    NUM_TENSORS,
    OomMemoryState,
    OutOfMemoryReport,
    Place,
    PredictedPeak,
    StandingTensor,
)
from memcallback.diagnose.tensors.live import LiveTensor, live_tensors
from memcallback.diagnose.tensors.variables import variables
from memcallback.prediction.prediction import Prediction, StepPrediction
from memcallback.step.batch import infer_batch_size

_REQUEST = re.compile(r"[Tt]ried to allocate ([\d.]+ (?:[KMGT]i?B|bytes|B))")
_ON_HOST = re.compile(r"DefaultCPUAllocator|CPU allocator|not enough memory: you tried")
#: Of an expression that failed so much is shown.
_LONGEST_CODE = 60
_HELD = {
    Category.PARAMETER: "parameters",
    Category.BUFFER: "buffers",
    Category.GRADIENT: "gradients",
    Category.OPTIMIZER_STATE: "optimizer state",
    Category.INPUT: "input",
    Category.ACTIVATION: "saved for the backward pass",
    None: "other tensors",
}


def explain(
    error: BaseException,
    *,
    modules: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    batch: object,
    batch_size: int | None,
    device: torch.device,
    device_name: str,
    phase: str,
    step: int | None,
    prediction: StepPrediction | None,
    rank: int | None = None,
) -> OutOfMemoryReport:
    """Say where memory ran out, and what stood there. Allocates nothing on the device and keeps no
    tensor alive.
    """
    text = next((line for line in str(error).strip().splitlines() if line), type(error).__name__)
    is_on_host = isinstance(error, (MemoryError, OSError)) or bool(_ON_HOST.search(str(error)))
    moment = None if is_on_host else _moment_of(error)
    where = torch.device("cpu") if is_on_host else device
    if moment is not None and moment.device_index != (
        torch.cuda.current_device() if device.index is None else device.index
    ):
        # Of a job that uses several devices it was another one than that which is recorded.
        where = torch.device("cuda", moment.device_index)
        device_name = torch.cuda.get_device_name(where)
    names = {
        id(parameter): name for module in modules for name, parameter in module.named_parameters()
    }
    shortage = _shortage(error, where, moment)
    frames = [frame for frame, _ in frames_of(error.__traceback__)]
    if batch is None:
        batch, batch_size = _batch_of(frames)
    expected, notes = _expected(prediction, batch_size, shortage) if where == device else (None, ())
    found = live_tensors(modules, optimizers, batch, where, frames=frames)
    if where.type == "cpu" and where != device:
        device_name = "CPU"
    lines = _lines_of(found[:NUM_TENSORS], found, prediction, batch_size)
    return OutOfMemoryReport(
        error=text,
        device_name=device_name,
        rank=rank,
        place=_place(error, modules, moment, names, phase, step, prediction),
        shortage=shortage,
        by_category=tuple(_by_category(found, shortage.allocated_bytes)),
        tensors=tuple(
            StandingTensor(
                size_bytes=live.size_bytes,
                shape=live.shape,
                dtype=live.dtype,
                owner=live.owner,
                module=live.module,
                line=lines.get(live.address),
            )
            for live in found[:NUM_TENSORS]
        ),
        num_tensors=len(found),
        batch=tuple(_described(batch)),
        batch_size=batch_size,
        expected=expected,
        processes=tuple(_processes(where)),
        notes=notes,
    )


def _moment_of(error: BaseException) -> Moment | None:
    """What the allocator has told of this error; None if that was another one."""
    moment = last_moment()
    if moment is None:
        return None
    requested = _REQUEST.search(str(error))
    return (
        moment
        if requested is None or requested.group(1) == format_bytes(moment.requested_bytes)
        else None
    )


def _shortage(error: BaseException, device: torch.device, moment: Moment | None) -> OomMemoryState:
    whole = device_memory(device)
    if moment is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        return OomMemoryState(
            requested_bytes=moment.requested_bytes,
            capacity_bytes=moment.capacity_bytes,
            free_bytes=moment.free_bytes,
            allocated_bytes=moment.allocated_bytes,
            reserved_bytes=moment.reserved_bytes,
            non_pytorch_bytes=max(0, total - moment.free_bytes - moment.reserved_bytes),
            available_bytes=min(moment.capacity_bytes, moment.free_bytes + moment.reserved_bytes),
            other_processes_bytes=whole.other_processes_bytes,
        )
    requested = _REQUEST.search(str(error))
    on_host = re.search(r"tried to allocate (\d+) bytes", str(error))
    free = None
    if whole.capacity_bytes is not None and whole.used_bytes is not None:
        free = max(0, whole.capacity_bytes - whole.used_bytes)
    is_cuda = device.type == "cuda"
    return OomMemoryState(
        requested_bytes=int(on_host.group(1))
        if on_host
        else parse_bytes(requested.group(1))
        if requested
        else None,
        capacity_bytes=whole.capacity_bytes,
        free_bytes=free,
        allocated_bytes=torch.cuda.memory_allocated(device) if is_cuda else None,
        reserved_bytes=whole.reserved_bytes,
        non_pytorch_bytes=whole.non_pytorch_bytes,
        other_processes_bytes=whole.other_processes_bytes,
        resident_bytes=whole.this_process_bytes if device.type == "cpu" else None,
    )


def _place(
    error: BaseException,
    modules: Sequence[torch.nn.Module],
    moment: Moment | None,
    names: Mapping[int, str],
    phase: str,
    step: int | None,
    prediction: StepPrediction | None,
) -> Place:
    line = line_of_error(error.__traceback__)
    if moment is not None and moment.node:
        own = next((names[number] for number in moment.parameter_ids if number in names), None)
        near = next((names[number] for number in moment.near_ids if number in names), None)
        name = near if own is None else own
        # A module that is computed again in the backward pass is in the frames.
        running = _module_of(error.__traceback__, modules) if own is None else None
        module = running or (None if name is None else name.rpartition(".")[0])
        is_near = own is None and near is not None and not running
        forward_line = _forward_line(prediction, moment.node, None if is_near else module)
        return Place(
            phase=phase,
            step=step,
            operator=moment.node,
            module=module,
            is_near=is_near,
            line=line,
            forward_line=forward_line,
        )
    return Place(
        phase=phase,
        step=step,
        operator=_code_of(error.__traceback__),
        module=_module_of(error.__traceback__, modules),
        line=line,
    )


def _forward_line(
    prediction: StepPrediction | None, node: str, module: str | None
) -> CodeLine | None:
    """The line of the operator of a node of autograd, after the trace; None unless there is exactly
    one such line.
    """
    if not isinstance(prediction, Prediction):
        return None
    operator = _letters(node.partition("Backward")[0])
    lines = {
        origin.line
        for alloc in _forward_events(prediction.trace.traced.trace.events)
        if isinstance(alloc, Alloc)
        if _letters(alloc.operator.rpartition("::")[2]) == operator
        and (module is None or alloc.module == module)
        and (origin := prediction.origin_of(alloc)) is not None
    }
    return lines.pop() if len(lines) == 1 else None


def _letters(name: str) -> str:
    return "".join(filter(str.isalpha, name)).lower()


def _module_of(trace: TracebackType | None, modules: Sequence[torch.nn.Module]) -> str | None:
    """The innermost module in whose own function the error was; None if it was in none, or in an
    optimizer.
    """
    names = {id(one): name for module in modules for name, one in module.named_modules()}
    found = None
    for frame, _ in frames_of(trace):
        with suppress(Exception):  # what is in a person's frames can be of any kind
            owner = variables(frame).get("self")
            if isinstance(owner, torch.optim.Optimizer):
                found = None
            if id(owner) in names and isinstance(owner, torch.nn.Module):
                found = names[id(owner)]
    return found


def _code_of(trace: TracebackType | None) -> str:
    """The expression that failed, as it stands in the code, without its arguments; before Python
    3.11 the whole line.
    """
    summary = traceback.extract_tb(trace)
    if not summary:
        return ""
    last = summary[-1]
    text = (last.line or "").strip()
    start, end = getattr(last, "colno", None), getattr(last, "end_colno", None)
    if start is not None and end is not None:
        # Columns are those of the line's bytes; of an expression of several lines it is the first
        # one's rest.
        whole = linecache.getline(last.filename, last.lineno or 0).encode()
        text = (
            whole[start : end if last.end_lineno == last.lineno else None]
            .decode(errors="replace")
            .strip()
        )
    called = re.match(r"[\w.]+(?=\()", text)
    text = called.group() if called else text
    return text if len(text) <= _LONGEST_CODE else f"{text[:_LONGEST_CODE]}..."


def there_was(
    prediction: StepPrediction, batch_size: int | None, shortage: OomMemoryState
) -> StepPrediction:
    """A prediction at the batch size that did not fit; of a trace, on the device with the memory
    that there was.
    """
    there = prediction if batch_size is None else prediction.at(batch_size)
    available = shortage.available_bytes
    if (
        not isinstance(there, Prediction)
        or not isinstance(there.device, DeviceSpec)
        or available is None
    ):
        return there
    return replace(
        there, device=replace(there.device, capacity_bytes=available + there.device.outside_bytes)
    )


def _expected(
    prediction: StepPrediction | None, batch_size: int | None, shortage: OomMemoryState
) -> tuple[PredictedPeak | None, tuple[str, ...]]:
    """What was predicted at the batch size, and what stands in the way of it."""
    if prediction is None:
        return None, ()
    try:
        there = there_was(prediction, batch_size, shortage)
    except ValueError:
        return None, (f"Nothing was predicted for batch size {batch_size}.",)
    expected = PredictedPeak(
        peak_allocated_bytes=there.peak_allocated_bytes,
        peak_reserved_bytes=there.peak_reserved_bytes,
        available_bytes=shortage.available_bytes,
        fits=there.fits,
    )
    return expected, ()


def _batch_of(frames: Sequence[FrameType]) -> tuple[object, int | None]:
    """What the innermost function calls its batch, and how many samples it has; None if none does."""
    for frame in reversed(frames):
        batch = variables(frame).get("batch")
        if next(tensors_in(batch), None) is not None:
            return batch, infer_batch_size(batch).batch_size
    return None, None


def _by_category(
    found: Iterable[LiveTensor], allocated_bytes: int | None
) -> Iterator[tuple[str, int]]:
    sums: dict[Category | None, int] = defaultdict(int)
    for live in found:
        sums[live.category] += live.size_bytes
    for category, name in _HELD.items():
        if sums[category]:
            yield name, sums[category]
    if allocated_bytes is not None:
        # Rounding, workspaces, what an operator had taken so far, gradients on their way.
        yield "allocated, of no known tensor", max(0, allocated_bytes - sum(sums.values()))


def _lines_of(
    wanted: Iterable[LiveTensor],
    found: Iterable[LiveTensor],
    prediction: StepPrediction | None,
    batch_size: int | None,
) -> dict[int, CodeLine]:
    """Address -> the line that made it, after the trace: of what was saved the first there is the
    first that was saved here.
    """
    if not isinstance(prediction, Prediction):
        return {}
    with suppress(ValueError):
        made = _saved_lines(prediction if batch_size is None else prediction.at(batch_size))
        lines = {}
        saved = sorted(
            (live for live in found if live.order is not None), key=lambda live: live.order or 0
        )
        by_kind: dict[tuple[tuple[int, ...], str], list[LiveTensor]] = defaultdict(list)
        for live in saved:
            by_kind[live.shape, live.dtype].append(live)
        for kind, tensors in by_kind.items():
            lines.update(
                {
                    live.address: line
                    for live, line in zip(tensors, made.get(kind, ()), strict=False)
                    if line is not None
                }
            )
        return {live.address: lines[live.address] for live in wanted if live.address in lines}
    return {}


def _saved_lines(
    prediction: Prediction,
) -> dict[tuple[tuple[int, ...], str], list[CodeLine | None]]:
    """Of what stands at the end of the traced step's forward pass: shape and dtype -> the lines
    that made it, in order.
    """
    events = prediction.trace.at(prediction.batch_size).events
    found: dict[tuple[tuple[int, ...], str], list[CodeLine | None]] = defaultdict(list)
    for alloc in not_freed(_forward_events(events)):
        origin = prediction.origin_of(alloc)
        if origin is not None:
            found[origin.shape, origin.dtype].append(origin.line)
    return found


def _forward_events(events: Sequence[Event]) -> Sequence[Event]:
    """The events of the last step's first forward pass."""
    last_step = events[last_step_start(events) :]
    return next(phase_events(last_step, Phase.FORWARD), ())


def _described(batch: object) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """The batch's tensors with their place in it."""
    leaves, _ = tree_flatten_with_path(batch)
    named = [
        (keystr(path) or "batch", leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)
    ]
    for name, tensor in named or [("", tensor) for tensor in tensors_in(batch)]:
        yield name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _processes(device: torch.device) -> Iterator[str]:
    """The other processes on a CUDA device, as far as the driver shows them."""
    if device.type != "cuda":
        return
    for process in processes_on(str(torch.cuda.get_device_properties(device).uuid)):
        if process.pid != os.getpid():
            used = (
                "memory unknown" if process.used_bytes is None else format_bytes(process.used_bytes)
            )
            yield f"Also on the device: process {process.pid} of {process.user or 'an unknown user'}, {used}: {process.command or 'not visible'}."
