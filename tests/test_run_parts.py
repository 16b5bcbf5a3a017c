"""The files of a run are in one of its parts each."""

import pytest
from run_parts import part, parts_of, seconds_of
from slow_files import SLOW_FILES


def test_the_parts_of_a_run_are_all_its_files_once():
    assert parts_of({"a": 4, "b": 3, "c": 2, "d": 1}, 2) == [{"a", "d"}, {"b", "c"}]
    assert parts_of({"a": 4, "b": 3, "c": 2, "d": 9}, 2) == [{"d"}, {"a", "b", "c"}]


def test_a_slow_file_counts_as_long_as_it_takes_and_others_by_their_tests():
    slow = next(iter(SLOW_FILES))
    seconds = seconds_of([slow, "test_new.py", slow, "test_new.py", "test_one.py"], on_device=False)
    assert seconds[slow] == SLOW_FILES[slow]
    assert seconds["test_new.py"] == 2 * seconds["test_one.py"] < SLOW_FILES[slow]


def test_on_a_device_each_test_counts():
    ranks = "integrations/test_huggingface_ranks_cuda.py"
    seconds = seconds_of([ranks, ranks, "test_new.py"], on_device=True)
    assert seconds == {ranks: 100, "test_new.py": 1}


def test_a_part_is_a_number_of_a_total():
    assert part("2/3") == (2, 3)
    for wrong in ("0/2", "3/2", "1", "x/y"):
        with pytest.raises(ValueError, match=f"{wrong} is no part, such as 1/2"):
            part(wrong)
