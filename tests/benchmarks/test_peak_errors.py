"""The accuracy proof's table of peaks: median, 95th percentile, signed extremes and
under-estimates, by hand-made figures.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from accuracy_comparison import Figure
from peak_errors import (
    PEAK_ALLOCATED,
    PEAK_RESERVED,
    all_peak_errors,
    by_phase,
    peak_errors,
    step_peaks,
)

GB = 10**9


def figure(measured, predicted, *, quantity=PEAK_RESERVED, config="a", window="forward"):
    return Figure(
        config=config,
        window=window,
        quantity=quantity,
        measured_bytes=measured,
        predicted_bytes=predicted,
    )


def test_errors_are_percent_of_what_was_measured_and_keep_their_sign_at_the_extremes():
    errors = peak_errors(
        "all", PEAK_RESERVED, [figure(GB, round(share * GB)) for share in (0.97, 1.0, 1.01, 1.02)]
    )
    assert errors.num_peaks == 4
    assert (errors.lowest_pct, errors.highest_pct) == pytest.approx((-3, 2))
    assert errors.median_pct == pytest.approx(1.5)
    assert errors.percentile_95_pct == pytest.approx(3)


def test_the_95th_percentile_leaves_out_one_of_twenty():
    errors = peak_errors(
        "all",
        PEAK_RESERVED,
        [figure(GB, GB)] * 18 + [figure(GB, round(1.01 * GB)), figure(GB, 2 * GB)],
    )
    assert errors.percentile_95_pct == pytest.approx(1)
    assert errors.highest_pct == pytest.approx(100)


def test_a_byte_less_is_an_under_estimate_and_the_bound_is_that_of_the_quantity():
    reserved = [
        figure(GB, GB),
        figure(GB, GB + 1),
        figure(GB, GB - 1),
        figure(GB, round(0.97 * GB)),
    ]
    errors = peak_errors("all", PEAK_RESERVED, reserved)
    assert (errors.under_estimated_share, errors.above_bound_share) == (0.5, 0.25)
    within, beyond = GB - GB // 1000 - 2**20, GB - GB // 1000 - 2**20 - 1
    allocated = [figure(GB, size, quantity=PEAK_ALLOCATED) for size in (within, beyond)]
    errors = peak_errors("all", PEAK_ALLOCATED, allocated)
    assert (errors.under_estimated_share, errors.above_bound_share) == (1.0, 0.5)


def test_a_steps_peak_is_the_largest_of_its_phases_and_not_of_one_phase_in_both():
    phases = [
        figure(100, 90),
        figure(120, 110, window="backward"),
        figure(110, 130, window="optimizer step"),
    ]
    (step,) = step_peaks([*phases, figure(10**6, 10**6, quantity="start")])
    assert (step.measured_bytes, step.predicted_bytes, step.error_bytes) == (120, 130, 10)


def test_steps_of_several_configurations_and_quantities_stay_apart():
    found = step_peaks(
        [figure(1, 1), figure(2, 2, config="b"), figure(3, 3, quantity=PEAK_ALLOCATED)]
    )
    assert [(one.config, one.quantity, one.measured_bytes) for one in found] == [
        ("a", PEAK_RESERVED, 1),
        ("b", PEAK_RESERVED, 2),
        ("a", PEAK_ALLOCATED, 3),
    ]


def test_phases_are_told_apart_without_their_numbers():
    names = [
        "forward",
        "forward 2",
        "micro-batch 1: forward",
        "micro-batch 2: optimizer step",
        "whole step",
    ]
    found = by_phase([figure(1, 1, window=name) for name in names])
    assert {name: len(figures) for name, figures in found.items()} == {
        "forward": 3,
        "optimizer step": 1,
        "whole step": 1,
    }


def test_each_group_has_a_row_for_each_quantity_and_one_that_was_not_predicted_has_none():
    found = {"a": [figure(1, 1), figure(1, 1, quantity=PEAK_ALLOCATED)], "b": []}
    rows = [
        (row.group, row.quantity)
        for row in all_peak_errors(found, {"family one": ["a"], "family two": ["b"]})
    ]
    groups = ["all steps", "phase forward", "family one"]
    assert rows == [
        (group, quantity) for quantity in (PEAK_ALLOCATED, PEAK_RESERVED) for group in groups
    ]
