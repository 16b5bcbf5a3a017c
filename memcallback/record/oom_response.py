"""What a training does about it: print, write and log the OOM report; try which savings would have
helped.
"""

from __future__ import annotations

import json
import os
import pickle
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from memcallback.core.errors import warn_and_go_on
from memcallback.diagnose.out_of_memory.explain import there_was
from memcallback.diagnose.out_of_memory.report import OutOfMemoryReport
from memcallback.prediction.predict import report_progress
from memcallback.prediction.prediction import Prediction, StepPrediction
from memcallback.report.tensorboard import OUT_OF_MEMORY_TAG
from memcallback.report.writers import Writers
from memcallback.savings.plan import PlanRow
from memcallback.savings.what_if import rescues
from memcallback.step.training_step import TrainingStep


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file beside its place and move it there once it is on the disk; its folder is made if
    need be.

    A process that is killed meanwhile leaves the place as it was. Of several that write at once the
    last one stays, whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with beside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


#: Allocations and frees in a history, at most.
NUM_EVENTS = 20_000


def tell(
    report: OutOfMemoryReport,
    *,
    say: Callable[[str], None],
    folder: Path | None,
    sinks: Writers | None = None,
    prediction: StepPrediction | None = None,
    make_step: Callable[[], TrainingStep] | None = None,
    history: AllocatorHistory | None = None,
) -> OutOfMemoryReport:
    """Print a report once, log it as text, write it as Markdown and JSON, and work out which
    savings would have helped.

    The savings come last, since each is a trace of the step; an interrupt (Ctrl-C) ends that, and
    what is known by then stays.
    """
    of_step = "" if report.place.step is None else f"_step{report.place.step}"
    name = "out_of_memory" + of_step + ("" if report.rank is None else f"_rank{report.rank}")
    say(report.to_text())
    written = _write(report, folder, name)
    if history is not None and written is not None:
        try:
            say(
                f"The allocator's history, for https://pytorch.org/memory_viz: {history.write(written.parent, name)}"
            )
        except OSError as error:
            warn_and_go_on(
                f"The allocator's history could not be written: {error}. Give a folder with more room."
            )
    if isinstance(prediction, Prediction) and make_step is not None:
        report = report.with_savings(_savings(report, prediction, make_step, say))
        if report.savings:
            say(report.savings_document().text().rstrip("\n"))
            _write(report, folder, name)
    if sinks is not None:
        sinks.log_text(OUT_OF_MEMORY_TAG, report.to_markdown(), report.place.step or 0)
    if written is not None:
        say(f"This report: {written}")
    return report


def _savings(
    report: OutOfMemoryReport,
    prediction: Prediction,
    make_step: Callable[[], TrainingStep],
    say: Callable[[str], None],
) -> list[PlanRow]:
    found: list[PlanRow] = []
    try:
        base = there_was(prediction, report.batch_size, report.shortage)
        assert isinstance(base, Prediction)
        progress = report_progress(
            lambda part: say(f"Trying what would have helped: {part} (Ctrl-C to leave it)."),
            of="savings",
        )
        # Those that are known before an interrupt stay in the list.
        found.extend(rescues(make_step(), base, progress=progress))
    except KeyboardInterrupt:
        pass
    except (
        Exception
    ) as error:  # whatever a user's model does on fake tensors, the real error goes on
        warn_and_go_on(
            f"What would have helped is not told: {type(error).__name__}: {str(error).rstrip('.')}."
        )
    return found


def _write(report: OutOfMemoryReport, folder: Path | None, name: str) -> Path | None:
    """Write both files; a folder that cannot be written is told of once, and nothing is lost that
    was not printed.
    """
    if folder is None:
        return None
    try:
        write_whole(folder / f"{name}.json", json.dumps(report.to_dict(), indent=2) + "\n")
        write_whole(folder / f"{name}.md", report.to_markdown() + "\n")
    except OSError as error:
        warn_and_go_on(
            f"The out-of-memory report could not be written to {str(folder)!r}: {error}. It is printed. Give a folder that can be written."
        )
        return None
    return folder / f"{name}.md"


class AllocatorHistory:
    """The allocator's own history of the last allocations with the lines that made them, for
    PyTorch's memory_viz. It costs time at each of them.

    Where somebody else records a history already, that one is left as it is, and is the one that is
    written.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_ours = not torch._C._cuda_isHistoryEnabled()
        if self._is_ours:
            torch.cuda.memory._record_memory_history(max_entries=NUM_EVENTS, stacks="python")

    def write(self, folder: Path, name: str) -> Path:
        """Write the allocator's snapshot with the history."""
        with torch.cuda.device(self._device):
            snapshot = torch.cuda.memory._snapshot()
        path = folder / f"{name}.pickle"
        write_whole(path, pickle.dumps(snapshot))
        return path

    def close(self) -> None:
        """Record no more."""
        if self._is_ours:
            self._is_ours = False
            torch.cuda.memory._record_memory_history(enabled=None)
