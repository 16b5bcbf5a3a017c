"""Scales, treemaps, lines and pages: what they draw, and that no text ends an element."""

import pytest

from memcallback.core.document import Document
from memcallback.core.types import Category
from memcallback.core.units import GiB, MiB
from memcallback.page.charts import Bar, Bars, CategoryBars, Line, LineChart, Mark
from memcallback.page.page import Page, Section
from memcallback.page.scale import Scale, round_step
from memcallback.page.treemap import Node, Treemap


@pytest.mark.parametrize(("length", "step"), [(24, 5), (6.9, 2), (0.7, 0.2), (1000, 200), (6, 1)])
def test_ticks_are_one_two_or_five_times_a_power_of_ten(length, step):
    assert round_step(length) == pytest.approx(step)


def test_a_capacity_far_above_is_named_and_not_drawn():
    near, is_drawn = Scale.for_sizes(10 * GiB, 24 * GiB)
    assert is_drawn
    assert near.share(24 * GiB) < 1
    far, is_drawn = Scale.for_sizes(57 * MiB, 24 * GiB)
    assert not is_drawn
    assert far.unit == "MiB"
    assert "24.0 GiB, far above" in far.capacity_html(24 * GiB, is_drawn=is_drawn)


def leaf(name, num_bytes):
    return Node(name=name, num_bytes=num_bytes, category=Category.ACTIVATION)


def test_boxes_of_a_treemap_are_as_large_as_their_memory():
    root = Node(name="all", num_bytes=100, children=(leaf("a", 60), leaf("b", 30), leaf("c", 10)))
    html = Treemap(root).html()
    shares = []
    for style in html.split('style="')[1:]:
        places = dict(one.split(":") for one in style.split('"')[0].split(";"))
        width, height = (float(places[name].rstrip("%")) for name in ("width", "height"))
        shares.append(width * height / 100)
    assert shares == pytest.approx([60, 30, 10], abs=0.1)


def test_small_boxes_share_one():
    many = tuple(leaf(f"leaf{number}", 1) for number in range(40))
    html = Treemap(Node(name="all", num_bytes=140, children=(leaf("a", 100), *many))).html()
    assert "17 more" in html
    assert html.count('class="box') == 25


def test_a_line_chart_has_its_marks_and_ticks():
    html = LineChart(
        lines=[Line(name="peak", points=[(1, GiB), (100, 20 * GiB)], kind="allocated")],
        x_name="samples per batch",
        marks=[Mark(name="largest", x=72, num_bytes=14 * GiB, kind="good")],
        capacity_bytes=24 * GiB,
    ).html()
    assert "largest 72: 14.0 GiB" in html
    assert "capacity 24.0 GiB" in html
    assert ">20<" in html


def test_the_largest_is_named_below_the_capacity_and_the_present_size_above_the_curve():
    html = LineChart(
        lines=[Line(name="peak", points=[(1, GiB), (90, 30 * GiB)], kind="allocated")],
        x_name="samples per batch",
        marks=[
            Mark(name="now", x=64, num_bytes=21 * GiB, kind="now"),
            Mark(name="largest", x=69, num_bytes=23 * GiB, kind="good"),
        ],
        capacity_bytes=24 * GiB,
    ).html()
    assert 'class="label above now"' in html
    assert 'class="label below good"' in html


def test_categories_add_up():
    html = CategoryBars({Category.PARAMETER: 3 * MiB, Category.ACTIVATION: 9 * MiB}).html()
    assert html.index("activations") < html.index("parameters")
    assert "12.0 MiB" in html
    assert "75.0 %" in html


def test_savings_stand_in_their_groups():
    bar = Bar(name="checkpoint", num_bytes=GiB, note="+16 % compute", line="mc.checkpoint(model)")
    html = Bars(
        groups=[("same result", [bar]), ("changes the training", [])], present_bytes=2 * GiB
    )
    text = html.html()
    assert "same result" in text
    assert "changes the training" not in text
    assert "--share:0.500" in text


def test_no_text_of_a_program_ends_an_element():
    evil = '</script><script>alert("x")</script><img src=x onerror=alert(1)>'
    page = Page(
        title=evil,
        verdict=(evil, evil),
        is_good=None,
        sections=[
            Section(
                title=evil,
                note=evil,
                parts=[
                    Treemap(
                        Node(
                            name="all",
                            num_bytes=4,
                            children=(
                                Node(
                                    name=evil,
                                    num_bytes=4,
                                    detail=evil,
                                    category=Category.INPUT,
                                ),
                            ),
                        )
                    ),
                    Document(evil),
                ],
            )
        ],
    )
    for html in (page.html(), page.notebook_html()):
        assert "<img" not in html
        assert "<script>alert" not in html
