"""Into how many segments to cut, from what layers hold."""

import pytest

from memcallback.core.allocation_trace import Alloc, Free, PhaseEnd, PhaseStart
from memcallback.core.types import Category, Phase
from memcallback.savings.candidates import parts_text
from memcallback.savings.segments import (
    LayerBytes,
    layer_bytes,
    segments_together,
    sensible_segments,
)


def alloc(id_, size, module):
    return Alloc(id_, size, 0, Category.ACTIVATION, "aten::relu", module)


def test_what_layers_make_is_that_of_the_last_forward_pass():
    events = [
        PhaseStart(Phase.FORWARD),
        alloc(0, 500, "net.0"),
        PhaseEnd(Phase.FORWARD),
        Free(0),
        PhaseStart(Phase.FORWARD),
        alloc(1, 10, "net.0"),
        alloc(2, 20, "net.0.inner"),
        alloc(3, 30, "net.1"),
        alloc(4, 40, "other"),
        alloc(5, 50, "net.10"),
        Free(2),
        PhaseEnd(Phase.FORWARD),
        Free(3),
    ]
    assert layer_bytes(events, "net", ["0", "1", "2"]) == (
        LayerBytes(10, 20),
        LayerBytes(30, 30),
        LayerBytes(0, 0),
    )
    assert layer_bytes(events, "", ["0"]) == (LayerBytes(0, 0),)
    assert layer_bytes(events, "", ["net", "other"]) == (LayerBytes(90, 50), LayerBytes(40, 40))


def test_like_layers_are_cut_near_the_square_root():
    chosen = sensible_segments([LayerBytes(100, 100)] * 16)
    assert 4 in chosen
    assert max(chosen) <= 8


def test_layers_that_hold_more_than_they_give_are_cut_more_often():
    assert sensible_segments([LayerBytes(100, 1)] * 16)[-1] == 16
    assert sensible_segments([LayerBytes(100, 100)] * 16)[-1] < 16


def test_the_input_of_a_layer_that_views_its_own_is_what_it_was_given():
    # A cut after the second layer keeps what the first one gave.
    views = sensible_segments([LayerBytes(8, 8), LayerBytes(0, 0), LayerBytes(1, 1)])
    assert views == sensible_segments([LayerBytes(8, 8), LayerBytes(0, 8), LayerBytes(1, 1)])


def test_there_are_no_fewer_segments_than_wanted():
    assert sensible_segments([LayerBytes(1, 100), LayerBytes(1, 100)], least=2) == [2]
    assert sensible_segments([LayerBytes(1, 100), LayerBytes(1, 100)]) == [1, 2]


def test_fewer_numbers_may_be_wanted():
    every = sensible_segments([LayerBytes(100, 100)] * 16)
    two = sensible_segments([LayerBytes(100, 100)] * 16, num_tried=2)
    assert len(two) == 2
    assert set(two) < set(every)


def test_together_small_ones_stay_whole_beside_a_large_one():
    layers = {"large": [LayerBytes(100, 10)] * 8, "small": [LayerBytes(10, 10)] * 4}
    # A segment of the large one holds 100; so may all of the small one, without an input more.
    assert segments_together(layers) == {"large": 8, "small": 1}


def test_together_two_alike_are_cut_alike():
    layers = {"first": [LayerBytes(100, 10)] * 8, "second": [LayerBytes(100, 10)] * 8}
    assert segments_together(layers) == {"first": 8, "second": 8}


@pytest.mark.parametrize(
    "names",
    [
        [f"model.h.{number}" for number in range(0, 11, 2)],
        ["3", "4", "5"],
        ["blocks.0", "blocks.2"],
        ["blocks.0", "blocks.1", "blocks.3"],
        ["a.0", "b.1", "a.2"],
        ["layers.0", "layers.1", "head"],
    ],
)
def test_a_line_to_paste_names_the_same_modules_as_a_range_or_one_by_one(names):
    assert eval(parts_text(names)) == names
    assert len(parts_text(names)) <= max(len(str(names)), 60)


def test_a_line_to_paste_keeps_the_number_of_segments():
    parts = {"a.0": 2, "a.1": 2, "a.2": 2}
    assert parts_text(parts) == str(parts)
