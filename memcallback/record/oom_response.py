"""Responds to an out-of-memory error once: print, write and log the report, and try savings."""

from __future__ import annotations

import json
import pickle
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from memcallback.core.errors import MissingPartError, warn_and_go_on
from memcallback.core.files import inside, make_folder, write_file
from memcallback.core.interruptions import raise_if_meant
from memcallback.core.torch_private import (
    is_memory_history_on,
    memory_snapshot,
    record_memory_history,
)
from memcallback.diagnose.out_of_memory.context import OomContext
from memcallback.diagnose.out_of_memory.observer import find_out_of_memory
from memcallback.isolation.isolated import TIMEOUT_S, can_isolate, run_isolated
from memcallback.prediction.apart import report_progress
from memcallback.prediction.prediction import Prediction, StepPrediction
from memcallback.report.tags import OUT_OF_MEMORY_TAG
from memcallback.report.writers import Writers
from memcallback.savings.plan import PlanRow
from memcallback.step.training_step import TrainingStep

if TYPE_CHECKING:
    from memcallback.diagnose.out_of_memory.report import OutOfMemoryReport

#: Allocations and frees in a history, at most.
NUM_EVENTS = 20_000
#: Errors that were explained: id -> a weak reference; None for Python's own types, which allow none
#: and whose ids hold until the next step or watch begins.
_explained: dict[int, weakref.ref[BaseException] | None] = {}


def forget_explained() -> None:
    """A step or a watch begins, so an error after it is a new one, unless it is still alive."""
    for number, reference in list(_explained.items()):
        if reference is None or reference() is None:
            del _explained[number]


def is_new_shortage(error: BaseException) -> bool:
    """Whether memory ran out, and this was not explained yet."""
    shortage = find_out_of_memory(error)
    if shortage is None:
        return False
    if id(shortage) not in _explained:
        return True
    reference = _explained[id(shortage)]
    return reference is not None and reference() is not shortage


def explain_or_warn(error: BaseException, context: OomContext) -> OutOfMemoryReport | None:
    """Explain an out-of-memory error; None for another error, or, with a warning, if that fails."""
    shortage = find_out_of_memory(error)
    if shortage is None:
        return None
    _explained[id(shortage)] = None
    with suppress(TypeError):
        _explained[id(shortage)] = weakref.ref(shortage)
    try:
        from memcallback.diagnose.out_of_memory.explain import explain

        return explain(shortage, context)
    except Exception as other:  # a full device can fail in any way, and the error itself goes on
        raise_if_meant(other)
        warn_and_go_on(
            f"The out-of-memory error could not be explained: {type(other).__name__}: "
            f"{str(other).rstrip('.')}. It is raised as usual."
        )
        return None


def respond(
    report: OutOfMemoryReport,
    *,
    print_fn: Callable[[str], None],
    folder: str | None,
    writers: Writers | None = None,
    prediction: StepPrediction | None = None,
    make_step: Callable[[], TrainingStep] | None = None,
    history: AllocatorHistory | None = None,
    isolate: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> OutOfMemoryReport:
    """Print, write (JSON, Markdown, a page) and log a report; find savings that would have helped.

    The savings come last, since each needs a trace of the step. Ctrl-C ends the search and keeps
    the rows found so far.
    """
    step = "" if report.place.step is None else f"_step{report.place.step}"
    name = f"out_of_memory{step}" + ("" if report.rank is None else f"_rank{report.rank}")
    print_fn(report.to_text())
    failed = _at_failed_size(prediction, report)
    path = _write(report, folder, name, failed)
    if history is not None and folder is not None and path is not None:
        try:
            snapshot = history.write(folder, name)
            print_fn(f"The allocator's history, for https://pytorch.org/memory_viz: {snapshot}")
        except MissingPartError as error:
            warn_and_go_on(f"{error}. The allocator's history is not written.")
        except OSError as error:
            warn_and_go_on(
                f"The allocator's history could not be written: {error}. Give a folder with more "
                "room."
            )
    if failed is not None and make_step is not None:
        rows = _savings(failed, make_step, print_fn, isolate, timeout_s)
        report = report.with_savings(rows)
        if report.savings:
            print_fn(report.savings_document().text().rstrip("\n"))
            _write(report, folder, name, failed)
    if writers is not None:
        writers.log_text(OUT_OF_MEMORY_TAG, report.document(), report.place.step or 0)
    if path is not None:
        print_fn(f"This report: {path}")
    return report


def _at_failed_size(
    prediction: StepPrediction | None, report: OutOfMemoryReport
) -> Prediction | None:
    """The traced prediction of the batch that failed, in the memory that there was."""
    from memcallback.diagnose.out_of_memory.explain import at_failed_size

    if not isinstance(prediction, Prediction):
        return None
    try:
        failed = at_failed_size(prediction, report.batch_size, report.shortage)
    except Exception as error:  # a trace may know one batch size alone; the real error goes on
        raise_if_meant(error)
        warn_and_go_on(
            f"The step that failed could not be predicted: {type(error).__name__}: "
            f"{str(error).rstrip('.')}."
        )
        return None
    return failed if isinstance(failed, Prediction) else None


def _savings(
    base: Prediction,
    make_step: Callable[[], TrainingStep],
    print_fn: Callable[[str], None],
    isolate: bool,
    timeout_s: float,
) -> list[PlanRow]:
    from memcallback.savings.what_if import rescues

    rows: list[PlanRow] = []
    try:
        progress = report_progress(
            lambda part: print_fn(
                f"Looking for savings that would have helped: {part} (Ctrl-C to stop)."
            ),
            of="savings",
        )

        def work(report: Callable[[Any], None]) -> None:
            for row in rescues(make_step(), base, progress=lambda *done: report(done)):
                report(row)

        # One by one: an interrupt keeps those before it.
        def on_report(value: PlanRow | tuple[int, int]) -> None:
            if isinstance(value, PlanRow):
                rows.append(value)
            else:
                progress(*value)

        if isolate and can_isolate():
            run_isolated(work, timeout_s=timeout_s, on_report=on_report)
        else:
            work(on_report)
    except KeyboardInterrupt:
        pass
    except Exception as error:  # a model can fail on fake tensors; the real error goes on
        raise_if_meant(error)
        warn_and_go_on(
            f"The search for savings that would have helped failed: {type(error).__name__}: "
            f"{str(error).rstrip('.')}."
        )
    return rows


def _write(
    report: OutOfMemoryReport, folder: str | None, name: str, failed: Prediction | None
) -> str | None:
    """Write the report as JSON, Markdown and a page, whose path is returned; None on failure."""
    if folder is None:
        return None
    try:
        make_folder(folder)
        write_file(inside(folder, f"{name}.json"), json.dumps(report.to_dict(), indent=2) + "\n")
        write_file(inside(folder, f"{name}.md"), report.to_markdown() + "\n")
        write_file(inside(folder, f"{name}.html"), report.page(failed).html())
    except Exception as error:  # the real error goes on
        raise_if_meant(error)
        warn_and_go_on(
            f"The out-of-memory report could not be written to {folder!r}: {error}. It is "
            "printed. Give a folder that can be written."
        )
        return None
    return inside(folder, f"{name}.html")


class AllocatorHistory:
    """The CUDA allocator's last events with the lines that caused them, for PyTorch's memory_viz.

    Recording costs time at each allocation. If another part of the program records a history
    already, we leave it as it is and write that one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_ours = not is_memory_history_on()
        if self._is_ours:
            record_memory_history(max_entries=NUM_EVENTS, stacks="python")

    def write(self, folder: str, name: str) -> str:
        """Write the allocator's snapshot with its history."""
        with torch.cuda.device(self._device):
            snapshot = memory_snapshot()
        path = inside(folder, f"{name}.pickle")
        write_file(path, pickle.dumps(snapshot))
        return path

    def close(self) -> None:
        """Stop recording."""
        if self._is_ours:
            self._is_ours = False
            record_memory_history(enabled=None)


def record_history(device: torch.device) -> AllocatorHistory | None:
    """Start recording; None on a device without CUDA, and with a warning if PyTorch cannot."""
    if device.type != "cuda":
        return None
    try:
        return AllocatorHistory(device)
    except MissingPartError as error:
        warn_and_go_on(f"{error}. The allocator's history is not recorded.")
        return None
