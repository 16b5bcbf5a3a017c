"""Control characters in names of others are shown, not obeyed."""

import pytest

from memcallback.core.visible import visible, visible_name


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[2Jgone", r"\x1b[2Jgone"),
        ("\x08\x0b\x1f\x7f\x9f", r"\x08\x0b\x1f\x7f\x9f"),
        ("\u202eright to left", r"\u202eright to left"),
        ("Größe \u200d", "Größe \u200d"),
    ],
)
def test_a_text_keeps_its_lines_and_shows_controls(text, shown):
    assert visible(text) == shown


@pytest.mark.parametrize(
    ("name", "shown"),
    [("linear", "linear"), ("a\nb", r"a\nb"), ("a\tb\x00", r"a\tb\x00"), ("Größe", "Größe")],
)
def test_a_name_is_one_line(name, shown):
    assert visible_name(name) == shown
