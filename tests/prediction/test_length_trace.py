import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_batch_trace import step, tiled

from memcallback.prediction.batch_trace import BatchTrace
from memcallback.prediction.length_trace import (
    LengthDependentPath,
    SequenceLengthTrace,
    UnknownSequenceLength,
    lengths_to_trace,
)


def fit(traced, length=64, *, batch_size=3):
    """A `SequenceLengthTrace` of what `traced` gives for a length and a batch size, as a step is
    traced.
    """
    *lengths, last = lengths_to_trace(length)
    traces = {
        one: BatchTrace.fit(traced(one, batch_size), traced(one, batch_size + 1)) for one in lengths
    }
    return SequenceLengthTrace.fit(traces, (last, [traced(last, 2 * batch_size + 3)]))


NUMBERS = st.integers(0, 10**4)
POLYNOMIALS = st.lists(st.tuples(*[NUMBERS] * 6), max_size=8)


def value(polynomial, length, batch_size):
    a, b, c, d, e, f = polynomial
    return a + b * length + c * length**2 + batch_size * (d + e * length + f * length**2)


@given(
    polynomials=POLYNOMIALS,
    length=st.integers(4, 300),
    batch_size=st.integers(1, 9),
    more=st.integers(-40, 40),
    other=st.integers(1, 99),
)
def test_sizes_are_known_at_other_lengths_and_batch_sizes(
    polynomials, length, batch_size, more, other
):
    def traced(length, batch_size):
        return step(
            batch_size, *(value(polynomial, length, batch_size) for polynomial in polynomials)
        )

    fitted = fit(traced, length, batch_size=batch_size)
    wanted = length + more * fitted.step
    assume(wanted > 0)
    assert fitted.at(wanted).at(other) == traced(wanted, other).trace
    assert fitted.at(wanted).at(batch_size) == traced(wanted, batch_size).trace


def ruled(polynomial):
    """Steps with an operator whose own memory is what a rule makes of a polynomial, which no
    polynomial is.
    """
    return lambda length, batch_size: tiled(
        batch_size, num_values=value(polynomial, length, batch_size)
    )


@given(polynomial=st.tuples(*[NUMBERS] * 6), more=st.integers(-7, 40), other=st.integers(1, 99))
def test_rules_are_asked_for_polynomials_of_the_length(polynomial, more, other):
    traced = ruled(polynomial)
    assert fit(traced).at(64 + 8 * more).at(other) == traced(64 + 8 * more, other).trace


def test_a_rule_is_asked_where_only_one_batch_size_is_known():
    traced = ruled((3, 5, 7, 0, 0, 0))
    *lengths, last = lengths_to_trace(64)
    fitted = SequenceLengthTrace.fit(
        {one: BatchTrace.single(traced(one, 2)) for one in lengths}, (last, [traced(last, 2)])
    )
    assert fitted.at(96).at(2) == traced(96, 2).trace
    assert not fitted.at(96).is_any_batch_size_known


def rounded_up(multiple, number):
    return -(-number // multiple) * multiple


@pytest.mark.parametrize("length", [64, 128, 512, 1024, 4096])
@pytest.mark.parametrize("step_of", [2, 8, 16, 32, 64, 128, 256, 512])
def test_a_size_rounded_up_is_never_taken_for_a_polynomial(step_of, length):
    if step_of >= length:
        pytest.skip("looks constant up to this length")

    def traced(length, batch_size):
        return step(batch_size, batch_size * rounded_up(step_of, length))

    try:
        fitted = fit(traced, length)
    except LengthDependentPath:
        return
    for more in range(1, 9):
        wanted = length + more * fitted.step
        assert fitted.at(wanted).at(1) == traced(wanted, 1).trace


@pytest.mark.parametrize(
    ("length", "traced"),
    [
        (4, (4, 3, 2, 1)),
        (12, (12, 9, 6, 3)),
        (32, (32, 24, 16, 8)),
        (63, (63, 55, 47, 39)),
        (64, (64, 48, 32, 24)),
        (100, (100, 76, 52, 44)),
        (1024, (1024, 768, 512, 384)),
    ],
)
def test_lengths_to_trace_are_alike_modulo_eight_and_far_apart(length, traced):
    assert lengths_to_trace(length) == traced


def attention(length, batch_size):
    return step(batch_size, 100 + batch_size * length**2, operators=["aten::bmm"])


def longer(length, batch_size):
    """The path depends on the length: long sequences take an operator more."""
    return step(batch_size, *[100] * (2 if length > 40 else 1))


def other_rule(length, batch_size):
    return tiled(batch_size, tile_bytes=length)


def rule_for_long_ones(length, batch_size):
    return tiled(batch_size) if length > 40 else step(batch_size, 8 * batch_size)


def cubic(length, batch_size):
    return step(batch_size, length**3)


@pytest.mark.parametrize(
    ("traced", "message"),
    [
        (
            longer,
            "at sequence length 64 it has aten::mm in module 'net.0' (backward) with 100 bytes, "
            "and at sequence length 32 the freeing of aten::mm in",
        ),
        (
            other_rule,
            "at sequence length 64 it has a call of aten::sort in module 'net', and at sequence "
            "length 48 a call of aten::sort in module",
        ),
        (
            rule_for_long_ones,
            "at sequence length 64 it has a call of aten::sort in module 'net', and at sequence "
            "length 32 aten::mm in module 'net.0'",
        ),
        (
            cubic,
            "with 13824 bytes; from other lengths, aten::mm in module 'net.0' (backward) with "
            "21504 bytes was expected.",
        ),
        (
            lambda length, batch_size: step(batch_size, length // 24),
            "sizes do not follow a parabola over the sequence length: at sequence length 24",
        ),
        (
            lambda length, batch_size: step(batch_size, *[8] * (1 + (length == 24))),
            "the freeing of aten::mm in module 'net.0' (backward)",
        ),
    ],
    ids=[
        "an operator more",
        "another rule",
        "a rule only there",
        "cubic",
        "not whole",
        "the check's path",
    ],
)
def test_where_the_program_takes_another_path_the_first_event_is_named(traced, message):
    with pytest.raises(LengthDependentPath, match=re.escape(message)):
        fit(traced)


def test_a_length_between_the_known_ones_is_refused_with_those_that_are_known():
    with pytest.raises(
        UnknownSequenceLength,
        match="length 97 is not known: known are 64 and lengths that differ from it by a multiple "
        "of 8, ",
    ):
        fit(attention).at(97)


@pytest.mark.parametrize("length", [0, -8])
def test_a_length_below_one_is_refused(length):
    with pytest.raises(ValueError, match=f"sequence_length must be at least 1, got {length}"):
        fit(attention).at(length)


def test_a_size_that_shrinks_below_nothing_is_refused():
    with pytest.raises(
        UnknownSequenceLength,
        match=re.escape(
            "gives a negative size (-28) for aten::mm in module 'net.0' (backward) with 36 bytes "
            "at sequence length 128"
        ),
    ):
        fit(lambda length, batch_size: step(batch_size, 100 - length)).at(128)


def test_a_size_that_is_not_whole_is_refused():
    lengths = {64: 0, 48: 0, 32: 1}
    fitted = SequenceLengthTrace.fit(
        {length: BatchTrace.single(step(1, size)) for length, size in lengths.items()}
    )
    assert fitted.step == 16
    with pytest.raises(
        UnknownSequenceLength,
        match=r"at sequence length 80 a size of aten::mm in module 'net\.0' .* would not be a "
        r"whole number",
    ):
        SequenceLengthTrace.fit(
            {
                length: BatchTrace.single(step(1, size))
                for length, size in {96: 0, 64: 0, 48: 1}.items()
            }
        ).at(80)


def test_a_single_trace_knows_only_its_own_length():
    trace = BatchTrace.single(attention(64, 2))
    single = SequenceLengthTrace.single(trace, 64)
    assert single.at(64) is trace
    with pytest.raises(
        UnknownSequenceLength,
        match=r"traced at sequence length 64 only, so length 72 is unknown: memcallback\.predict",
    ):
        single.at(72)


def test_that_a_longer_sequence_was_not_tried_is_said():
    fitted = fit(attention)
    assert fitted.at(56).caveats == fitted.at(64).caveats == ()
    assert fitted.at(72).caveats == (
        "The longest sequence that was traced has length 64. Whether the model accepts length 72 "
        "and runs the same way was not checked.",
    )


def test_three_lengths_at_the_same_batch_sizes_are_needed():
    traces = {length: BatchTrace.single(attention(length, 2)) for length in (64, 48)}
    with pytest.raises(
        ValueError,
        match=re.escape("a parabola needs traces at three sequence lengths, got 2: [48, 64]"),
    ):
        SequenceLengthTrace.fit(traces)
    with pytest.raises(
        ValueError, match=re.escape("must know the same batch sizes, got {64: 2, 48: 2, 32: 3}")
    ):
        SequenceLengthTrace.fit({**traces, 32: BatchTrace.single(attention(32, 3))})
