"""The page of a training: a warning comes first, with the peaks that show since when."""

from hand_made import prediction as traced

from memcallback.batch_size.bounds import BatchSizeBounds
from memcallback.batch_size.estimate import suggest
from memcallback.core.step_memory import DeviceMemory
from memcallback.core.units import brief_bytes
from memcallback.report.history import PeakHistory
from memcallback.report.report import Report
from memcallback.report.training_page import training_page


def made(advice=None, *, batch_sizes=(16, 16, 16), **options):
    predicted = traced(16)
    measured = predicted.step
    history = PeakHistory()
    for number, batch_size in enumerate(batch_sizes):
        history.add(traced(batch_size).step, number)
    report = Report(
        measured=measured,
        prediction=predicted,
        device=DeviceMemory(),
        advice=advice,
        notes=("Memory grows from step to step.",),
    )
    return training_page(report, history, **options)


def test_a_healthy_training_begins_with_its_peak_and_is_good():
    page = made()
    assert page.verdict[0].startswith("Measured peak: ")
    assert page.is_good
    assert page.sections[0].title == "One training step"


def test_the_largest_step_of_the_run_is_told_beside_a_smaller_one():
    assert "Largest of the run" not in made().verdict[0]
    largest = traced(64).step
    assert (
        made(batch_sizes=[16, 64, 16, 32])
        .verdict[0]
        .endswith(
            f". Largest of the run: {brief_bytes(largest.peak_reserved_bytes)} reserved "
            f"({brief_bytes(largest.peak_allocated_bytes)} allocated), in step 1."
        )
    )


def test_a_warning_comes_first_once_with_the_peaks_of_all_steps():
    page = made(warnings=["Memory grows from step to step."])
    assert page.verdict[0] == "Memory grows from step to step."
    assert page.verdict.count("Memory grows from step to step.") == 1
    assert page.is_good is False
    assert page.sections[0].title == "Peaks over the training"


def test_of_a_warning_the_first_sentence_stands_out_from_the_others():
    page = made(warnings=["Memory grows. At this rate the device is full soon. Keep numbers."])
    assert page.verdict[:2] == (
        "Memory grows.",
        "At this rate the device is full soon. Keep numbers.",
    )


def test_the_largest_batch_of_the_page_is_that_of_the_console_and_no_multiple_of_it():
    predicted = traced(16)
    advice = suggest(
        measured=None,
        predicted=predicted,
        capacity_bytes=predicted.capacity_bytes,
        bounds=BatchSizeBounds(dataset_size=23),
    )
    assert (advice.batch_size, advice.largest_in_bounds) == (16, 23)
    assert "largest 23: " in made(advice).html()
