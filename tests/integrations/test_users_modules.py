"""Which of the user's modules a search for a batch size puts back."""

import importlib
import sys

import pytest

from memcallback.integrations.lightning.fit.user_code import users_modules

#: In Python's code, numbers of names and constants from 256 on need an instruction before.
LONG = (
    "\ndef long(it):\n"
    + "".join(f"    it.name{number} = {number}.5\n" for number in range(300))
    + "    import of_long\n    from namespace import longer\n    return of_long, longer\n"
)
FILES = {
    "package/__init__.py": "",
    "package/registry.py": "ITEMS = []\n",
    "package/deep/__init__.py": "",
    "package/deep/model.py": """
import functools

class Model:
    config = None

    def step(self):
        from ..registry import ITEMS
        return ITEMS, self.config

    @property
    def state(self):
        import of_property
        return of_property

    @functools.cached_property
    def other(self):
        from namespace import part
        return part

def wraps_itself():
    pass

wraps_itself.__wrapped__ = wraps_itself
"""
    + LONG,
    "elsewhere/of_property.py": "",
    "elsewhere/namespace/part.py": "",
    "elsewhere/of_long.py": "",
    "elsewhere/namespace/longer.py": "",
    # A program beside, which the model's does not import: its name is that of an attribute.
    "beside/config.py": "",
}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    for name, code in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    before = set(sys.modules)
    for folder in ("", "elsewhere", "beside"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    names = ("package.deep.model", "package.registry", "of_property", "namespace.part", "config")
    names += ("of_long", "namespace.longer")
    for name in names:
        importlib.import_module(name)
    yield sys.modules
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_modules_that_functions_import_are_of_the_program(modules):
    found = {name for name, _ in users_modules([modules["package.deep.model"].Model])}
    assert {"model.py", "registry.py", "of_property.py", "part.py"} <= found
    assert {"of_long.py", "longer.py"} <= found
    assert "config.py" not in found
