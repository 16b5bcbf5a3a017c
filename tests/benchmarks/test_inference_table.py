"""The benchmark of forward passes: its cases, and what its page says."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from inference import ALL, WAYS, off, to_markdown


def row(name, allocated=100, predicted=100, *, held_out=False):
    return {
        "way": "inference",
        "name": name,
        "precision": "32-true",
        "held_out": held_out,
        "trace_s": 1.0,
        "allocated_bytes": allocated,
        "reserved_bytes": 200,
        "predicted_allocated_bytes": predicted,
        "predicted_reserved_bytes": 200,
    }


def test_there_are_as_many_cases_as_the_bar_asks_for():
    assert len(WAYS["inference"]) >= 15
    assert len(WAYS["validation"]) >= 15
    assert len(WAYS["generation"]) >= 6
    assert len(set(ALL)) == len(ALL)


def test_an_error_has_a_sign():
    assert off(row("a", 100, 110), "allocated") == pytest.approx(0.1)
    assert off(row("a", 100, 90), "allocated") == pytest.approx(-0.1)
    assert off(row("a"), "reserved") == 0


def test_the_page_counts_exact_rows_apart_from_held_out_ones_and_keeps_errors():
    text = to_markdown(
        [
            row("a"),
            row("b", 100, 110),
            row("c", held_out=True),
            {"way": "x", "name": "d", "error": "E: no"},
        ],
        {"device": "a card"},
    )
    assert "1 of 2 are exact to the byte, allocated and reserved. The largest error is 10" in text
    assert "Held-out models: 1 of 1 are exact" in text
    assert "| x | d | | | | E: no |" in text
