"""What a trace changes in the user's files is put back, and nothing else."""

import builtins

from memcallback.step.copies.program import untouched_program

#: So much data in a variable before the one that a step changes.
DATA = [[[number] for number in range(200)] for _ in range(200)]
SEEN = {"steps": 0}


def test_names_of_python_stay_and_variables_come_back():
    # In every module but the first `__builtins__` is the dictionary of Python's own names.
    names = set(vars(builtins))
    with untouched_program():
        SEEN["steps"] += 1
        SEEN["more"] = 1
    assert SEEN == {"steps": 0}
    assert set(vars(builtins)) == names
