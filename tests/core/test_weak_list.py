"""Lists that keep nothing alive."""

import gc

from memcallback.core.weak_list import WeakList


class Item:
    pass


class WithoutReferences:
    __slots__ = ()


def test_items_are_there_in_order_as_long_as_they_live():
    first, second, third = Item(), Item(), Item()
    items = WeakList([first, second])
    items.append(third)
    assert [*items] == [first, second, third]
    del second
    gc.collect()
    assert [*items] == [first, third]


def test_an_item_that_takes_no_weak_references_is_kept():
    items = WeakList([WithoutReferences()])
    gc.collect()
    assert len([*items]) == 1
