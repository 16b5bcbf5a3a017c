"""The savings on a page: in their groups, in proportion to the present peak, with their lines."""

import re

from memcallback.core.units import GiB
from memcallback.savings.plan import Plan, PlanRow, SavingGroup
from memcallback.savings.plan_page import plan_sections, savings_section, way_out


def row(saving, size, group, **values):
    return PlanRow(
        saving=saving, group=group, batch_size=8, peak_reserved_bytes=size, line=saving, **values
    )


ROWS = (
    row("SGD", 2 * GiB, SavingGroup.CHANGES_TRAINING, changes="another optimizer"),
    row(
        "checkpoint 6 blocks",
        5 * GiB,
        SavingGroup.SAME_RESULT,
        largest_batch_size=54,
        extra_compute_pct=23.4,
        changes="nothing",
    ),
    row("fused optimizer", 9 * GiB, SavingGroup.CHANGES_NUMBERS, largest_batch_size=0),
    PlanRow(saving="broken", batch_size=8, problem="it cannot be traced"),
)


def test_groups_come_in_the_order_of_what_they_change():
    html = savings_section(10 * GiB, ROWS).html()
    headings = re.findall(r'colspan="4">([^<]+)<', html)
    assert headings == ["same result", "changes the numbers", "changes the training"]
    assert "broken" not in html


def test_a_bar_is_in_proportion_and_says_what_it_fits_and_costs():
    html = savings_section(10 * GiB, ROWS).html()
    assert re.findall(r"--share:([0-9.]+)", html) == ["1.000", "0.500", "0.900", "0.200"]
    assert "fits up to 54; +23 % compute<" in html
    assert "not even one sample is sure to fit" in html
    assert "another optimizer" in html


def test_a_plan_shows_the_savings_that_help_and_none_shows_nothing():
    plan = Plan(
        current=row("as it is", 10 * GiB, SavingGroup.SAME_RESULT, largest_batch_size=20),
        tried=(*ROWS, row("does not help", 10 * GiB, SavingGroup.SAME_RESULT)),
        device_name="a card",
        capacity_bytes=24 * GiB,
        headroom=0.05,
    )
    (section,) = plan_sections(plan)
    html = section.html()
    assert "checkpoint 6 blocks" in html
    assert "does not help" not in html
    assert list(plan_sections(None)) == []


def test_the_way_out_is_a_batch_size_or_the_mildest_saving_that_fits():
    sgd = row("SGD", 2 * GiB, SavingGroup.CHANGES_TRAINING, fits=True)
    every = row("checkpoint 6 blocks", 5 * GiB, SavingGroup.SAME_RESULT, fits=True)
    second = row("checkpoint every second block", 9 * GiB, SavingGroup.SAME_RESULT, fits=False)
    assert way_out(25, [sgd, second, every]) == (
        "To fit: batch size 25 or checkpoint 6 blocks (5.00 GiB, same result).",
    )
    assert way_out(0, [second, sgd]) == ("To fit: SGD (2.00 GiB, changes the training).",)
    assert way_out(1200, []) == ("To fit: batch size 1,200.",)
    assert way_out(None, [second]) == ()
