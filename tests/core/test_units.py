import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcallback.core.units import (
    GiB,
    KiB,
    MiB,
    brief_bytes,
    format_bytes,
    parse_bytes,
    round_down_to_power_of_2,
    round_up,
)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1024, "1024 bytes"),
        (1025, "1.00 KiB"),
        (123 * MiB + 768 * KiB, "123.75 MiB"),
        (1024 * KiB, "1024.00 KiB"),
        (1024 * KiB + 1, "1.00 MiB"),
        (1024 * MiB, "1024.00 MiB"),
        (1024 * MiB + 1, "1.00 GiB"),
        (5000 * GiB, "5000.00 GiB"),
        (24 * GiB, "24.00 GiB"),
        (-3 * MiB, "-3.00 MiB"),
    ],
)
def test_bytes_are_written_as_in_pytorchs_oom_message(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GiB", 24 * GiB),
        ("24 GB", 24 * 10**9),
        ("1.5 MiB", 3 * MiB // 2),
        ("512", 512),
        ("1_000kb", 10**6),
        ("1,000 mb", 10**9),
        ("12,345,678.5", 12_345_678),
        ("3 TB", 3 * 10**12),
        ("2 KiB", 2048),
        ("2TiB", 2 << 40),
        ("7 bytes", 7),
        ("1 byte", 1),
        ("5B", 5),
        ("1.7", 1),
        (0, 0),
        (4096, 4096),
    ],
)
def test_a_size_is_read_with_its_unit(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "24 gigs", "1.2.3 MiB", "NVIDIA A100"])
def test_what_is_not_a_size_is_refused_with_the_way_out(text):
    with pytest.raises(
        ValueError, match=r"is not a size. Write a number and a unit .* such as '24GiB'"
    ):
        parse_bytes(text)


@pytest.mark.parametrize(
    "text", ["1,5GiB", "12,34 MiB", "1,0000", "1234,567", "1,000_000", "1.5,5"]
)
def test_a_comma_that_separates_no_thousands_is_refused(text):
    with pytest.raises(ValueError, match=r"is not a size\..* A comma separates .* has a point\."):
        parse_bytes(text)


def test_a_negative_number_of_bytes_is_refused():
    for size in (-1, "-1", "-3GiB", "- 3 GiB"):
        with pytest.raises(
            ValueError, match=f"{size!r} is not a size: a size cannot be negative. Give"
        ):
            parse_bytes(size)


@pytest.mark.parametrize("size", [True, 1.5, None, b"24GiB"])
def test_what_is_neither_text_nor_a_whole_number_is_no_size(size):
    with pytest.raises(
        TypeError,
        match=f"A size must be text or a whole number of bytes, got {size!r}. Give .* '24GiB'",
    ):
        parse_bytes(size)


@given(st.integers(min_value=0, max_value=2**60))
def test_a_written_size_reads_back_within_its_last_digit(num_bytes):
    read = parse_bytes(format_bytes(num_bytes))
    assert abs(read - num_bytes) <= max(1, num_bytes // 100)


@given(st.integers(min_value=0, max_value=2**60), st.integers(min_value=1, max_value=2**30))
def test_rounding_up_gives_the_next_multiple(num_bytes, multiple):
    rounded = round_up(num_bytes, multiple)
    assert rounded % multiple == 0
    assert num_bytes <= rounded < num_bytes + multiple


def test_rounding_to_nothing_is_refused():
    with pytest.raises(ValueError, match="multiple_bytes must be at least 1, got 0"):
        round_up(10, 0)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "0.98 KiB"),
        (-1000, "-0.98 KiB"),
        (9 * KiB, "9.00 KiB"),
        (int(9.994 * KiB), "9.99 KiB"),
        (int(9.996 * KiB), "10.0 KiB"),
        (int(99.94 * KiB), "99.9 KiB"),
        (int(99.96 * KiB), "100 KiB"),
        (int(999.4 * KiB), "999 KiB"),
        (int(999.6 * KiB), "0.98 MiB"),
        (13 * GiB, "13.0 GiB"),
        (5000 * GiB, "5,000 GiB"),
    ],
)
def test_at_a_glance_a_size_has_three_digits(num_bytes, text):
    assert brief_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("number", "power"), [(-4, 1), (0, 1), (1, 1), (2, 2), (3, 2), (4, 4), (1023, 512)]
)
def test_rounding_down_gives_a_power_of_two(number, power):
    assert round_down_to_power_of_2(number) == power
