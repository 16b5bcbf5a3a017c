"""The brief report: the verdict, the phases, what is live at the peak, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from memcallback.batch_size.advice import BatchSizeAdvice
from memcallback.core.document import num_cells
from memcallback.core.step_memory import PhaseMemory
from memcallback.core.types import PERSISTENT_CATEGORIES, Phase
from memcallback.core.units import brief_bytes
from memcallback.prediction.prediction import Prediction
from memcallback.prediction.textbook.law import TextbookPrediction
from memcallback.report.report import Report
from memcallback.report.styled import (
    INDENT,
    WIDTH,
    Letters,
    Line,
    Part,
    Style,
    bar,
    block_bar,
    fitted,
    label_text,
    labelled,
    padded,
    width_of,
)
from memcallback.report.verdict import share_text
from memcallback.savings.plan import Plan, PlanRow, SavingGroup

_EMPTY: Line = ()
_NUM_CONSUMERS = 3
_NUM_SAVINGS = 2
#: Categories below this share of the peak are one row, and so are those beyond a number of rows.
_SMALL_SHARE, _NUM_CATEGORIES = 0.005, 6
#: Bars at most.
_VERDICT_BAR, _CATEGORY_BAR = 40, 13
_GAP = "     "


def brief_report(report: Report, letters: Letters, *, dashboard: str = "") -> tuple[Line, ...]:
    """The lines of a report, at most 100 columns wide; `dashboard` opens the curves."""
    if report.measured is None and report.prediction is None:
        return (_title(report, letters), _EMPTY, *labelled("note", report.notes))
    return (
        _title(report, letters),
        _EMPTY,
        _verdict(report, letters),
        _EMPTY,
        *_phases_and_categories(report, letters),
        *_consumers(report),
        *_advice(report),
        *_deviation(report),
        *_savings(report, letters),
        *labelled("note", report.notes),
        *([(Part(label_text("more")), Part(dashboard))] if dashboard else []),
    )


def _title(report: Report, letters: Letters) -> Line:
    step = report.measured or (report.prediction.step if report.prediction else None)
    setup = report.setup
    size = ""
    if step is not None and step.batch_size:
        size = f"batch {step.batch_size:,}"
        size += f" {letters.times} {setup.sequence_length:,}" if setup.sequence_length else ""
    parts = [setup.model, size, setup.optimizer, setup.precision, _device(report)]
    if report.measured is not None and report.measured.is_warm_up:
        parts.append("warm-up step")
    if step is None:
        parts.append("nothing was recorded")
    text = f" {letters.dot} ".join(part for part in parts if part)
    return Part("memcallback", Style.BOLD), Part(f" {letters.side} {fitted(text, WIDTH - 14)}")


def _device(report: Report) -> str:
    step = report.measured or (report.prediction.step if report.prediction else None)
    name = step.device_name.removeprefix("NVIDIA ").removeprefix("GeForce ") if step else ""
    capacity = report.device.capacity_bytes
    size = "" if capacity is None else brief_bytes(capacity)
    if not report.setup.target:
        return f"{name} ({size})" if name and size else name
    # The name of a card given by its size ends with the size.
    target = report.setup.target
    return f"{name}, for {target}" + ("" if target.endswith(size) else f" ({size})")


def _verdict(report: Report, letters: Letters) -> Line:
    verdict = report.verdict
    style = Style.BOLD if verdict.fits is None else Style.GOOD if verdict.fits else Style.BAD
    line: Line = (Part(INDENT), Part(verdict.word, style), Part(f"   {verdict.peak_text}"))
    if verdict.share is None:
        return line
    width = min(_VERDICT_BAR, WIDTH - width_of(line) - num_cells(verdict.share_text) - 4)
    drawn = (Part("   "), Part(bar(verdict.share, width, letters), style)) if width > 4 else ()
    return (*line, *drawn, Part(f" {verdict.share_text}"))


# Two tables, side by side.


def _phases_and_categories(report: Report, letters: Letters) -> Iterator[Line]:
    left, peak = _phase_lines(report)
    if len(left) == 1:  # only the resident size of the whole step is known
        return
    width = max(map(num_cells, left))
    room = WIDTH - len(INDENT) - width - len(_GAP)
    right = list(_category_lines(report, letters, room))
    is_beside = all(width_of(line) <= room for line in right)
    for number, (text, line) in enumerate(zip_longest(left, right if is_beside else ())):
        mark = letters.mark if number == peak else " "
        style = Style.FAINT if number == 0 else Style.PEAK if number == peak else Style.PLAIN
        phase = Part(padded(f"{INDENT}{text or ''}", width + 2), style)
        yield (phase, Part(f" {mark}", Style.PEAK), Part(_GAP[2:]), *(line or ()))
    if not is_beside:
        yield from ((Part(INDENT), *line) for line in right)
    yield _EMPTY


def _phase_lines(report: Report) -> tuple[list[str], int]:
    """The peak of each phase, under a title; and the number of the line with the largest."""
    phases = report.measured.phases if report.measured else {}
    measured = {
        phase: window for phase, window in phases.items() if window.peak_allocated_bytes is not None
    }
    prediction = report.prediction
    # Predictions are of steady steps: a warm-up step is not set beside one.
    is_warm_up = report.measured is not None and report.measured.is_warm_up
    predicted = {} if prediction is None or is_warm_up else prediction.step.phases
    kinds = [name for name, known in (("predicted", predicted), ("measured", measured)) if known]
    rows = [["peak of", *kinds]]
    sizes: list[int] = []
    for phase in Phase:
        ours, theirs = predicted.get(phase), measured.get(phase)
        if ours is None and theirs is None:
            continue
        cells = [_predicted_text(ours)] if predicted else []
        cells += [_size(theirs)] if measured else []
        rows.append([theirs.label if theirs else phase.label, *cells])
        shown = theirs or ours
        sizes.append((shown.peak_allocated_bytes or 0) if shown else 0)
    widths = [max(num_cells(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        _GAP[2:].join(
            padded(cell, width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return lines, 1 + sizes.index(max(sizes)) if any(sizes) else 0


def _predicted_text(window: PhaseMemory | None) -> str:
    text = _size(window)
    low = None if window is None else window.low_bytes
    return text if low is None else f"{brief_bytes(low)} to {text}"


def _size(window: PhaseMemory | None) -> str:
    size = None if window is None else window.peak_allocated_bytes
    return "" if size is None else brief_bytes(size)


def _category_lines(report: Report, letters: Letters, room: int) -> Iterator[Line]:
    """What is in memory at the peak, in so many columns if they are enough for all but bars."""
    kind, phase, sizes = _at_peak(report)
    peak_bytes = sum(sizes.values())
    if not peak_bytes:
        return
    rows = _rows_of(sizes, peak_bytes)
    texts = [(label, brief_bytes(size), share_text(size / peak_bytes)) for label, size in rows]
    title = f"at the {kind} peak ({phase})"
    widths = [max(num_cells(text[column]) for text in texts) for column in range(3)]
    total = brief_bytes(peak_bytes)
    title_width = max(num_cells(title) + 2, 2 + widths[0] + 3 + widths[1] - num_cells(total))
    yield (Part(f"{padded(title, title_width)}{total}", Style.FAINT),)
    bar_width = max(0, min(_CATEGORY_BAR, room - sum(widths) - 9))
    for (label, size, share), (_, num_bytes) in zip(texts, rows, strict=True):
        drawn = block_bar(num_bytes / max(size for _, size in rows), bar_width, letters)
        text = f"  {padded(label, widths[0])}   {size:>{widths[1]}}  {share:>{widths[2]}}  "
        yield (Part(text), Part(drawn, Style.PEAK))


def _rows_of(sizes: dict[str, int], peak_bytes: int) -> list[tuple[str, int]]:
    """The largest first; what is too small to matter is one row, with its names."""
    rows = sorted(((label, size) for label, size in sizes.items() if size), key=lambda row: -row[1])
    num_large = sum(size >= _SMALL_SHARE * peak_bytes for _, size in rows)
    if len(rows) > _NUM_CATEGORIES:
        num_large = min(num_large, _NUM_CATEGORIES - 1)
    small = rows[num_large:]
    if not small:
        return rows
    names = [label for label, _ in small]
    label = ", ".join(names) if len(names) < 4 else f"{names[0]}, {len(names) - 1} others"
    return [*rows[:num_large], (label, sum(size for _, size in small))]


def _at_peak(report: Report) -> tuple[str, str, dict[str, int]]:
    """What is in memory at the peak: of which kind it is, the phase, and bytes by category."""
    prediction, measured = report.prediction, report.measured
    if isinstance(prediction, Prediction | TextbookPrediction) and not (
        measured is not None and measured.is_warm_up
    ):
        window = max(prediction.step.windows, key=lambda window: window.peak_allocated_bytes or 0)
        by_category = prediction.by_category
        return "predicted", window.label, {c.label: size for c, size in by_category.items()}
    if measured is None or not measured.windows:
        return "measured", "", {}
    window = max(measured.windows, key=lambda window: window.peak_allocated_bytes or 0)
    split, peak_bytes = window.start.by_category, window.peak_allocated_bytes
    if split is None or peak_bytes is None:
        return "measured", window.label, {}
    sizes = {category.label: split.get(category, 0) for category in PERSISTENT_CATEGORIES}
    sizes["activations and other"] = max(0, peak_bytes - sum(sizes.values()))
    return "measured", window.label, sizes


# What holds most, and what to do.


def _consumers(report: Report) -> Iterator[Line]:
    if not isinstance(report.prediction, Prediction):
        return
    bound = _SMALL_SHARE * report.prediction.peak_allocated_bytes
    consumers = report.prediction.consumers[:_NUM_CONSUMERS]
    largest = [consumer for consumer in consumers if consumer.num_bytes >= bound]
    names = [fitted(consumer.name, 60) for consumer in largest]
    width = max(map(num_cells, names), default=0)
    for number, (name, consumer) in enumerate(zip(names, largest, strict=True)):
        size = brief_bytes(consumer.num_bytes)
        label = label_text("" if number else "largest")
        yield (Part(label), Part(f"{padded(name, width)}  {size:>9}"))


def _advice(report: Report) -> Iterator[Line]:
    if report.advice is not None:
        yield from labelled("batch size", [_advice_text(report.advice, report)])


def _advice_text(advice: BatchSizeAdvice, report: Report) -> str:
    kept_free = f"{advice.kept_free} kept free"
    if advice.batch_size == 0:
        return f"not even one sample is sure to fit with {kept_free}"
    formula = isinstance(report.prediction, TextbookPrediction) and not advice.is_measured
    by = ", by the textbook estimate" if formula else ""
    now = f"(now {advice.current_batch_size:,})"
    largest = f"{advice.largest_in_bounds:,}"
    if advice.has_whole_dataset:
        whole = (
            f"a rank's whole share of the training set ({largest})"
            if advice.bounds.world_size > 1
            else f"the whole training set ({largest})"
        )
        return f"{whole} fits with {kept_free}{by} {now}"
    if advice.is_measured and advice.largest < advice.current_batch_size:
        return f"{largest} may fit with {kept_free} {now}; only a prediction can tell"
    if advice.is_measured:
        return f"{largest} should fit with {kept_free} {now}, perhaps a larger one too"
    return f"{largest} is the largest that fits with {kept_free}{by} {now}"


def _deviation(report: Report) -> Iterator[Line]:
    if report.deviation is not None:
        yield from labelled("prediction", [report.deviation.sentence()], Style.BAD)


def _savings(report: Report, letters: Letters) -> Iterator[Line]:
    plan = report.plan
    if plan is None:
        if report.verdict.fits is False:
            yield from labelled(
                "to save", ["memcallback.what_if predicts the step with each saving"]
            )
        return
    rows = [
        row
        for row in plan.rows
        if plan.helps(row) and row.group != SavingGroup.CHANGES_TRAINING and not row.is_several
    ][:_NUM_SAVINGS]
    width = max((num_cells(row.saving) for row in rows), default=0)
    for number, row in enumerate(rows):
        label = label_text("" if number else "to save")
        text = f"{padded(row.saving, width)}  {letters.to} {_effect(plan, row)}"
        room = WIDTH - num_cells(label) - num_cells(text) - 3
        code = row.line if num_cells(row.line) <= room else ""
        yield (Part(label), Part(text), Part(f"   {code}", Style.FAINT))


def _effect(plan: Plan, row: PlanRow) -> str:
    peak = "" if row.peak_bytes is None else brief_bytes(row.peak_bytes)
    extra = row.extra_compute_pct
    return peak + (f", {extra:+.0f} % compute" if extra is not None and abs(extra) >= 0.5 else "")
