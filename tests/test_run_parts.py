"""The files of a run are in one of its parts each."""

from types import SimpleNamespace

import pytest
from run_parts import part, parts_of


def test_the_parts_of_a_run_are_all_its_files_once():
    items = [SimpleNamespace(path=path) for path in "aaaabbbccd"]
    parts = parts_of(items, 2)
    assert sorted(map(sorted, parts)) == [["a", "d"], ["b", "c"]]
    parts = parts_of(items, 2, cost=lambda item: 9 if item.path == "d" else 1)
    assert sorted(map(sorted, parts)) == [["a", "b", "c"], ["d"]]
    assert part("2/3") == (2, 3)
    for wrong in ("0/2", "3/2", "1", "x/y"):
        with pytest.raises(ValueError, match=f"{wrong} is no part, such as 1/2"):
            part(wrong)
