"""Publisher: prints and logs what a training shows of its memory, and writes its page."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memcallback.core.errors import warn_and_go_on
from memcallback.core.files import inside, make_folder, write_file
from memcallback.core.interruptions import raise_if_meant
from memcallback.core.module_table import ModuleTable
from memcallback.devices.catalogue import Device
from memcallback.prediction.predict_here import with_communication
from memcallback.report.brief import brief_report
from memcallback.report.closing import Ending, closing_lines
from memcallback.report.console import BRIEF, FULL, SILENT, Console
from memcallback.report.history import PeakHistory
from memcallback.report.loggers.tensorboard import dashboard_command
from memcallback.report.plots.what_if import what_if_bars
from memcallback.report.report import Report, Setup
from memcallback.report.styled import letters_here
from memcallback.report.tags import (
    MODULES_TAG,
    PAGE_TAG,
    REPORT_TAG,
    WHAT_IF_IMAGE_TAG,
    WHAT_IF_TAG,
    Curves,
)
from memcallback.report.writers import Writers
from memcallback.savings.plan import Plan
from memcallback.step.copies.optimizers import unwrapped
from memcallback.step.training_step import TrainingStep

if TYPE_CHECKING:
    from memcallback.report.pictures import Pictures

#: A step by module, measured and predicted; None for what there is not.
Modules = tuple[ModuleTable | None, ModuleTable | None]


class Publisher:
    """Prints and logs a training's reports, the first in full and the last as what has changed.

    Attributes:
        writers: Where values, texts and pictures are logged; None off rank zero.
    """

    def __init__(self, console: Console, writers: Writers | None) -> None:
        self.writers = writers
        self._console = console
        self._first: Report | None = None
        self._pictures: Pictures | None = None

    def first(self, report: Report, modules: Modules, number: int) -> None:
        """Log and print the first report."""
        self._log(report, modules, number)
        self._print(report)
        self._print_modules(modules)

    def last(
        self,
        report: Report,
        modules: Modules,
        number: int,
        ending: Ending,
        *,
        peaks: PeakHistory | None,
        warnings: Sequence[str],
    ) -> None:
        """Log the last report, write the page if there are `peaks`, and print what has changed."""
        self._log(report, modules, number)
        if peaks is not None:
            ending = replace(ending, page=self._write_page(report, peaks, warnings, number))
        first = self._first
        if first is None:
            self._print(report)
        else:
            self.say(report.details().text(), level=FULL)
        if not self._console.is_silent:
            self._console.show(closing_lines(first, report, ending, letters_here()))
        self._print_modules(modules)

    def plan(self, plan: Plan, number: int) -> None:
        """Print and log a comparison of savings."""
        if self.writers is not None:
            self.say(plan.to_text(), level=FULL)
            self.writers.log_text(WHAT_IF_TAG, plan.document(), number)
            self.writers.log_image(WHAT_IF_IMAGE_TAG, number, what_if_bars, plan)

    def curves(self, curves: Curves, number: int) -> None:
        """Log the values of a point."""
        if self.writers is not None:
            self.writers.log_curves(curves, number)

    def say(self, text: str, *, level: int = BRIEF) -> None:
        """Print a text from a level of `verbose` on."""
        self._console.say(text, level=level)

    def say_of_rank(self, rank: int | None, text: str) -> None:
        """Print a text about one rank. Rank zero prints for all, but a rank that fails speaks."""
        if not rank:
            self.say(text)
        elif not self._console.is_silent:
            print(f"Rank {rank}: {text}", file=sys.stderr)

    def close(self) -> None:
        """Flush the writers; nothing is written or printed afterwards."""
        if self.writers is not None:
            self.writers.close()
        self.writers, self._console = None, Console(lambda _: None, SILENT)

    def _print(self, report: Report) -> None:
        """Print a report, with the command that opens its TensorBoard run, if there is one."""
        self._first = report
        if self._console.is_silent:
            return
        log_dir = None if self.writers is None else self.writers.log_dir
        dashboard = "" if log_dir is None else dashboard_command(log_dir)
        self._console.show(brief_report(report, letters_here(), dashboard=dashboard))
        self.say("", level=FULL)
        self.say(report.details().text(), level=FULL)

    def _print_modules(self, modules: Modules) -> None:
        measured, predicted = modules
        if measured is not None:
            self.say(measured.to_text(predicted), level=FULL)

    def _log(self, report: Report, modules: Modules, number: int) -> None:
        if self.writers is None:
            return
        if self._pictures is None:
            # Not before: the training's first step need not wait for what draws.
            from memcallback.report.pictures import Pictures

            self._pictures = Pictures()
        measured, predicted = modules
        self.writers.log_text(REPORT_TAG, report.document(), number)
        self._pictures.log(self.writers, report, measured, number)
        if measured is not None:
            self.writers.log_text(MODULES_TAG, measured.whole_document(predicted), number)

    def _write_page(
        self, report: Report, peaks: PeakHistory, warnings: Sequence[str], number: int
    ) -> str | None:
        """Log the page and write it beside the logs; its path, None if there is none."""
        from memcallback.report.training_page import PAGE_NAME, training_page

        if self.writers is None:
            return None
        folder = self.writers.make_folder()
        path = None if folder is None else inside(folder, PAGE_NAME)
        try:
            html = training_page(report, peaks, warnings=warnings).html()
            self.writers.log_page(PAGE_TAG, html, number)
            if folder is not None and path is not None:
                make_folder(folder)
                write_file(path, html)
        except Exception as error:  # a page is worth no training
            raise_if_meant(error)
            warn_and_go_on(
                f"The page of this training could not be written to {path!r}: "
                f"{type(error).__name__}: {str(error).rstrip('.')}. Give a folder that can be "
                "written."
            )
            return None
        return path


def setup_of(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    step: TrainingStep | None,
    *,
    target: Device | None,
) -> Setup:
    """The names of what trains; the step may be unknown, the target is another device."""
    if target is not None and step is not None:
        target = with_communication(target, step.ranks.world_size if step.ranks else 1)
    # A step has the model without its wrapper.
    plain_models = [step.model] if step else [getattr(model, "module", model) for model in models]
    has_buckets = any(isinstance(model, DistributedDataParallel) for model in models)
    if step is not None:
        optimizers = step.given_optimizers or optimizers
        has_buckets = has_buckets or (step.ranks is not None and step.ranks.strategy == "ddp")
    return Setup(
        model=_names(getattr(model, "_orig_mod", model) for model in plain_models),
        optimizer=_names(map(unwrapped, optimizers)),
        precision=step.precision if step else "",
        sequence_length=step.sequence_length if step else None,
        has_buckets=has_buckets,
        may_keep_batch=step is not None and step.lightning is None and not step.keep_batch,
        target=target.name if target else "",
        target_allocator_bytes=target.allocator_capacity_bytes if target else None,
    )


def _names(parts: Iterable[object]) -> str:
    names = [type(part).__name__ for part in parts]
    # Lightning has one of these where a module has no optimizer.
    return " + ".join(dict.fromkeys(name for name in names if name != "_MockOptimizer"))
