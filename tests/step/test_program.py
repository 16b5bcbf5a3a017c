"""What a trace changes in the user's files is put back, and nothing else."""

import builtins
import importlib
import sys
from types import SimpleNamespace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memcallback as mc
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


class Store:
    """Keeps what a forward pass leaves for the next one."""

    last = None

    def __init__(self):
        self.history, self.nested = ["before"], {"inner": SimpleNamespace(count=0)}


STORE = Store()


def test_attributes_of_global_objects_come_back():
    before = vars(STORE)
    with untouched_program():
        STORE.last = torch.ones(2)
        STORE.history.append(STORE.last)
        STORE.nested["inner"].count += 1
    assert vars(STORE) is before
    assert before == {"history": ["before"], "nested": {"inner": SimpleNamespace(count=0)}}


class AddsTheLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        x, last = self.layer(x), STORE.last
        STORE.last = x.detach()
        return x if last is None else x + last


def test_a_model_that_keeps_tensors_in_a_global_object_is_predicted_at_any_size(monkeypatch):
    monkeypatch.delenv("MEMCALLBACK_ISOLATE", raising=False)

    def predicted(num_samples):
        step = mc.TrainingStep(AddsTheLast(), torch.zeros(num_samples, 64))
        return mc.predict(step, device="24GiB")

    assert predicted(32).at(80).step.windows == predicted(80).step.windows
    assert STORE.last is None


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
