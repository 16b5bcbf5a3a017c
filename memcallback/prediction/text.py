"""Tables and JSON of a prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memcallback.core.document import Table
from memcallback.core.step_memory import PHASE_COLUMNS, MemoryStats, StepMemory
from memcallback.core.types import Category, Phase
from memcallback.core.units import format_bytes
from memcallback.prediction.consumers import Consumer

#: How many consumers `peak_table` names: those that hold most at the peak.
_NUM_CONSUMERS = 8


def phase_table(steps: Sequence[StepMemory], sequence_length: int | None) -> Table:
    """The phases of the warm-up step and of the steady step."""
    step = steps[-1]
    steps = [each for each in steps if each.stage is step.stage]
    rows = [window.row(window.label) for window in step.windows]
    warm_up = []
    if len(steps) > 1:
        warm_up = [window.row(f"warm-up: {window.label}") for window in steps[0].windows]
    columns = PHASE_COLUMNS if step.peak_reserved_bytes is not None else PHASE_COLUMNS[:-1]
    length = "" if sequence_length is None else f", sequence length {sequence_length}"
    return Table(
        title=f"Memory of one {step.stage.label} (batch size {step.batch_size:,}{length}) on "
        f"{step.device_name}\npredicted by {step.source}",
        columns=columns,
        rows=tuple(row[: len(columns)] for row in (*warm_up, *rows)),
        rules_after=frozenset({len(warm_up) - 1} if warm_up else ()),
    )


def peak_table(
    phase: Phase,
    peak_bytes: int,
    by_category: Mapping[Category, int],
    consumers: Sequence[Consumer],
) -> Table:
    """What is live at the peak, by category and by who holds it."""
    rows = [_share_row(category.label, size, peak_bytes) for category, size in by_category.items()]
    num_categories = len(rows)
    named = consumers[:_NUM_CONSUMERS]
    rows += [_share_row(each.name, each.num_bytes, peak_bytes) for each in named]
    if rest := len(consumers) - len(named):
        rest_bytes = peak_bytes - sum(each.num_bytes for each in named)
        rows.append(_share_row(f"{rest} more", rest_bytes, peak_bytes))
    rows.append(("all", format_bytes(peak_bytes), "100.0 %"))
    return Table(
        title=f"Live at the peak ({phase.label}), by category and by who holds it",
        columns=("", "allocated", "share"),
        rows=tuple(rows),
        totals=True,
        rules_after=frozenset({num_categories - 1}),
    )


def _share_row(label: str, num_bytes: int, peak_bytes: int) -> tuple[str, ...]:
    share = f"{100 * num_bytes / peak_bytes:.1f} %" if peak_bytes else ""
    return label, format_bytes(num_bytes), share


def step_dict(step: StepMemory) -> dict[str, Any]:
    """A step as data for json."""
    return {
        "is_warm_up": step.is_warm_up,
        "peak_allocated_bytes": step.peak_allocated_bytes,
        "peak_reserved_bytes": step.peak_reserved_bytes,
        "num_alloc_retries": step.num_alloc_retries,
        "windows": [
            {
                "phase": window.phase.value,
                "start": _stats_dict(window.start),
                "end": _stats_dict(window.end),
                "peak_allocated_bytes": window.peak_allocated_bytes,
                "peak_reserved_bytes": window.peak_reserved_bytes,
                "num_alloc_retries": window.num_alloc_retries,
            }
            for window in step.windows
        ],
    }


def _stats_dict(stats: MemoryStats) -> dict[str, Any]:
    by_category = stats.by_category or {}
    return {
        "allocated_bytes": stats.allocated_bytes,
        "reserved_bytes": stats.reserved_bytes,
        "active_bytes": stats.active_bytes,
        "requested_bytes": stats.requested_bytes,
        "inactive_split_bytes": stats.inactive_split_bytes,
        "held_by_category_bytes": {category.value: size for category, size in by_category.items()},
    }
