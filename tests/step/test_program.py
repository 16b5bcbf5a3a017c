"""What a trace changes in the user's files is put back, and nothing else."""

import builtins
import importlib
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

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


def test_fakes_that_a_trace_leaves_in_a_librarys_caches_are_gone(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "cached_masks"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import functools\n"
        "import torch\n"
        "TABLE, MASKS = {'a': 1}, {}\n"
        "@functools.lru_cache\n"
        "def made(number):\n"
        "    return [torch.ones(number)]\n"
        "@functools.lru_cache\n"
        "def registered():\n"
        "    return 'once'\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    import cached_masks

    with untouched_program(), FakeTensorMode():
        cached_masks.MASKS["size"] = torch.ones(8)
        cached_masks.TABLE["b"] = 2
        cached_masks.made(1)
        cached_masks.registered()
    assert cached_masks.MASKS == {}
    # What is registered once stays so.
    assert cached_masks.TABLE == {"a": 1, "b": 2}
    assert cached_masks.registered.cache_info().currsize == 1
    assert cached_masks.made.cache_info().currsize == 0
    monkeypatch.delitem(sys.modules, "cached_masks")
