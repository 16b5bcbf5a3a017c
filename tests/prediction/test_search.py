from hypothesis import given
from hypothesis import strategies as st

from memcallback.prediction.search import crossing, largest_number

END = 1 << 31


@given(limit=st.integers(0, 10**6), near=st.integers(1, 10**6))
def test_the_largest_number_is_found_from_wherever_one_begins_and_none_is_tried_twice(limit, near):
    tried = []

    def holds(number):
        tried.append(number)
        return number <= limit

    assert largest_number(holds, near=near, end=END) == limit
    assert len(set(tried)) == len(tried)
    assert all(number >= 1 for number in tried)


def test_few_are_tried_where_one_begins_near():
    tried = []
    assert (
        largest_number(
            lambda number: (tried.append(number), number <= 100_000)[1], near=100_400, end=END
        )
        == 100_000
    )
    assert len(tried) <= 12


def test_what_always_holds_has_no_largest_number():
    assert largest_number(lambda number: True, near=16, end=END) is None


def test_of_several_ends_the_one_that_is_found_is_one():
    assert largest_number(lambda number: number <= 50 or number == 60, near=55, end=END) in (50, 60)


@given(
    slope=st.integers(1, 1000),
    fixed=st.integers(0, 10**6),
    bound=st.integers(10**4, 10**9),
    first=st.integers(1, 100),
)
def test_where_a_straight_line_reaches_a_bound(slope, fixed, bound, first):
    found = crossing(
        lambda number: fixed + slope * number, bound, first=first, second=2 * first, end=END
    )
    assert found == max(1, (bound - fixed) // slope)


def test_a_figure_that_does_not_grow_reaches_no_bound():
    assert crossing(lambda number: 7, 100, first=4, second=8, end=END) == 8


def test_it_is_at_most_the_end():
    assert crossing(lambda number: number, 100, first=4, second=8, end=50) == 50
