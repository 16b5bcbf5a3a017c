"""Announcer: prints a training's reports, the first in full and the last as what has changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memcallback.core.module_table import ModuleTable
from memcallback.report.brief import brief_report
from memcallback.report.closing import Ending, closing_lines
from memcallback.report.console import FULL, Console
from memcallback.report.loggers.tensorboard import dashboard_command
from memcallback.report.report import Report, Setup
from memcallback.report.styled import letters_here
from memcallback.step.training_step import TrainingStep


class Announcer:
    """What a training says of its memory on the console.

    Attributes:
        first: The first report; None before it.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self.first: Report | None = None

    def report(self, report: Report, log_dir: str | None) -> None:
        """Print a report, with the command that opens the run in `log_dir`, if there is one."""
        self.first = report
        if self._console.is_silent:
            return
        dashboard = "" if log_dir is None else dashboard_command(log_dir)
        self._console.show(brief_report(report, letters_here(), dashboard=dashboard))
        self._console.say("", level=FULL)
        self._console.say(report.details().text(), level=FULL)

    def end(self, report: Report, ending: Ending, log_dir: str | None) -> None:
        """Print the last lines, after the report if there was none."""
        if self._console.is_silent:
            return
        first = self.first
        if first is None:
            self.report(report, log_dir)
        else:
            self._console.say(report.details().text(), level=FULL)
        self._console.show(closing_lines(first, report, ending, letters_here()))

    def modules(self, measured: ModuleTable, predicted: ModuleTable | None) -> None:
        """Print the tables by module, if all tables are asked for."""
        self._console.say(measured.to_text(predicted), level=FULL)


def setup_of(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    step: TrainingStep | None,
    *,
    target: str = "",
) -> Setup:
    """The names of what trains; the step may be unknown, the target is another device."""
    # A step has the model without its wrapper.
    plain_models = [step.model] if step else [getattr(model, "module", model) for model in models]
    has_buckets = any(isinstance(model, DistributedDataParallel) for model in models)
    if step is not None:
        optimizers = step.given_optimizers or optimizers
        has_buckets = has_buckets or (step.ranks is not None and step.ranks.strategy == "ddp")
    return Setup(
        model=_names(plain_models),
        optimizer=_names(optimizers),
        precision=step.precision if step else "",
        sequence_length=step.sequence_length if step else None,
        has_buckets=has_buckets,
        target=target,
    )


def _names(parts: Iterable[object]) -> str:
    names = [type(part).__name__ for part in parts]
    # Lightning has one of these where a module has no optimizer.
    return " + ".join(dict.fromkeys(name for name in names if name != "_MockOptimizer"))
