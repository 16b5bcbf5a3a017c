"""training_page(): the page of a training: what was measured, on the prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from memcallback.batch_size.advice import BatchSizeAdvice
from memcallback.core.step_memory import StepMemory
from memcallback.core.units import brief_bytes
from memcallback.page.charts import Line, LineChart, Mark
from memcallback.page.page import Page, Section
from memcallback.prediction.prediction import Prediction
from memcallback.report.history import PeakHistory
from memcallback.report.report import Report
from memcallback.report.verdict import differ, peak_of
from memcallback.savings.plan_page import plan_sections

#: The file beside the logs.
PAGE_NAME = "memory.html"


def training_page(
    report: Report, history: PeakHistory, *, warnings: Sequence[str] = (), title: str = "Training"
) -> Page:
    """The measured peaks beside the prediction, the peaks of all steps, savings, the report.

    Warnings come first, and with them the peaks of all steps, which show since when. For another
    device than the one that trains, the verdict on it comes next.
    """
    on_target = [report.verdict.sentence()] if report.setup.target else []
    verdict = [*warnings, *on_target, _measured(report, history)]
    verdict += [note for note in report.notes if note not in warnings]
    if report.advice is not None:
        verdict.append(report.advice.sentence())
    page = _page(report, title, verdict)
    if warnings:
        # The first sentence says what is wrong, and stands out.
        page = replace(page, verdict=(*_first_and_rest(page.verdict[0]), *page.verdict[1:]))
    is_good = False if warnings else report.verdict.fits
    peaks = list(_peaks(report, history))
    sections = [*peaks, *page.sections] if warnings else [*page.sections, *peaks]
    full = Section(title="The report in full", parts=[report.document()], is_folded=True)
    return replace(page, is_good=is_good, sections=[*sections, full])


def _first_and_rest(text: str) -> Iterator[str]:
    """The first sentence, and the others if there are any."""
    first, end, rest = text.partition(". ")
    yield f"{first}." if end else first
    if rest:
        yield rest


def _page(report: Report, title: str, verdict: Sequence[str]) -> Page:
    """The page of the prediction with what was measured; without one, of the suggestion."""
    if isinstance(report.prediction, Prediction):
        return report.prediction.page(
            title,
            measured=report.measured,
            verdict=verdict,
            more=list(plan_sections(report.plan)),
            # It knows how many samples the dataset has.
            largest=report.advice.largest_in_bounds if report.advice else None,
        )
    sections = []
    if report.advice is not None:
        sections.append(Section(title="Batch size", parts=[_curve(report.advice)]))
    return Page(title=title, verdict=verdict, is_good=None, sections=sections)


def _peaks(report: Report, history: PeakHistory) -> Iterator[Section]:
    predicted = report.prediction
    chart = history.chart(
        predicted.peak_allocated_bytes if predicted else None, report.device.capacity_bytes
    )
    if chart is not None:
        yield Section(
            title="Peaks over the training",
            note="a line that keeps climbing may be a leak",
            parts=[chart],
        )


def _measured(report: Report, history: PeakHistory) -> str:
    """The measured peak beside the predicted one, and that of the largest step if it is larger."""
    if report.measured is None:
        return "No step was measured."
    text = f"Measured peak: {_peak(report.measured)}"
    is_share_known = peak_of(report.measured) is not None and not report.setup.target
    if report.device.capacity_bytes is not None and is_share_known:
        text += f" of {brief_bytes(report.device.capacity_bytes)}"
    if report.prediction is not None and not report.measured.is_warm_up:
        text += f"; predicted: {_peak(report.prediction.step)}"
    if history.largest is not None:
        step, number = history.largest
        here, there = peak_of(report.measured), peak_of(step)
        if here and there and here[1] == there[1] and differ(here[0], there[0]):
            text += f". Largest of the run: {_peak(step)}, in step {number:,}"
            text += " (warm-up)" if step.is_warm_up else ""
    return f"{text}."


def _peak(step: StepMemory) -> str:
    """The peak that counts, in words, with the allocated one beside it."""
    peak = peak_of(step)
    if peak is None:
        return "unknown"
    text = f"{brief_bytes(peak[0])} {peak[1]}"
    if peak[1] == "reserved" and step.peak_allocated_bytes is not None:
        text += f" ({brief_bytes(step.peak_allocated_bytes)} allocated)"
    return text


def _curve(advice: BatchSizeAdvice) -> LineChart:
    """The expected peak over batch sizes."""
    peaks = dict(advice.curve)
    marks = [
        Mark(name=name, x=size, num_bytes=peaks[size], kind=kind)
        for name, size, kind in (
            ("now", advice.current_batch_size, "now"),
            ("suggested", advice.batch_size, "good"),
        )
        if size in peaks
    ]
    return LineChart(
        lines=[Line(name="expected peak", points=advice.curve, kind="allocated")],
        x_name="samples per batch",
        marks=marks,
        capacity_bytes=advice.capacity_bytes,
    )
