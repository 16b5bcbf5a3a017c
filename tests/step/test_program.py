"""What a trace changes in the user's files is put back, and nothing else."""

import builtins
import importlib
import sys

from memcallback.step.copies.program import untouched_program

#: So much data in a variable before the one that a step changes.
DATA = [[[number] for number in range(200)] for _ in range(200)]
SEEN = {"steps": 0}
#: Some programs keep their own namespace, in which Python's own names are too.
NAMESPACES = {"own": globals()}


def test_names_of_python_stay_and_variables_come_back():
    # In every module but the first `__builtins__` is the dictionary of Python's own names.
    names = set(vars(builtins))
    with untouched_program():
        SEEN["steps"] += 1
        SEEN["more"] = 1
    assert SEEN == {"steps": 0}
    assert set(vars(builtins)) == names


IMPORTED = []


def test_a_module_that_is_imported_meanwhile_is_imported_again(tmp_path, monkeypatch):
    code = "import test_program\ntest_program.IMPORTED.append(__name__)\n"
    (tmp_path / "registers_itself.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for _ in range(2):
        with untouched_program():
            importlib.import_module("registers_itself")
            assert IMPORTED == ["registers_itself"]
        assert IMPORTED == []


def test_what_a_trace_leaves_in_a_librarys_cache_is_gone(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "cached_masks"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import functools\n"
        "TABLE, MASKS = {'a': 1}, {}\n"
        "@functools.lru_cache\n"
        "def made(number):\n"
        "    return [number]\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    import cached_masks

    table = cached_masks.TABLE
    with untouched_program():
        cached_masks.MASKS["size"] = 8
        cached_masks.TABLE["b"] = 2
        cached_masks.made(1)
    assert cached_masks.MASKS == {}
    assert table is cached_masks.TABLE
    assert table == {"a": 1}
    assert cached_masks.made.cache_info().currsize == 0
    monkeypatch.delitem(sys.modules, "cached_masks")
