"""The page of a training: a warning comes first, with the peaks that show since when."""

from hand_made import prediction as traced

from memcallback.batch_size.bounds import BatchSizeBounds
from memcallback.batch_size.estimate import suggest
from memcallback.core.step_memory import DeviceMemory
from memcallback.core.units import brief_bytes
from memcallback.report.history import PeakHistory
from memcallback.report.report import UNKNOWN_SETUP, Report, Setup
from memcallback.report.training_page import training_page


def made(
    advice=None, *, batch_sizes=(16, 16, 16), capacity_bytes=2**30, setup=UNKNOWN_SETUP, **options
):
    predicted = traced(16)
    measured = predicted.step
    history = PeakHistory()
    for number, batch_size in enumerate(batch_sizes):
        history.add(traced(batch_size).step, number)
    report = Report(
        measured=measured,
        prediction=predicted,
        device=DeviceMemory(capacity_bytes=capacity_bytes),
        advice=advice,
        notes=("Memory grows from step to step.",),
        setup=setup,
    )
    return training_page(report, history, **options)


def test_a_healthy_training_begins_with_its_peak_and_is_good():
    page = made()
    assert page.verdict[0].startswith("Measured peak: ")
    assert page.is_good
    assert page.sections[0].title == "One training step"


def test_a_step_that_does_not_fit_another_device_is_not_good_and_the_page_begins_with_that():
    page = made(capacity_bytes=2**20, setup=Setup(target="a small card"))
    assert page.is_good is False
    assert page.verdict[0].startswith("DOES NOT FIT: measured peak ")
    assert page.verdict[0].endswith(" of 1.00 MiB.")
    (measured,) = (line for line in page.verdict if line.startswith("Measured peak: "))
    assert "1.00 MiB" not in measured
    assert made(setup=Setup(target="a large card")).is_good is True


def test_whether_a_step_fits_a_device_of_unknown_size_is_unknown():
    assert made(capacity_bytes=None).is_good is None


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
