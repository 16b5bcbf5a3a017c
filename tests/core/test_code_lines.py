"""Which line of a person's program something comes from."""

import collections
import os
import sys
from pathlib import Path

import pytest

from memcallback.core.code_lines import (
    CodeLine,
    is_framework,
    is_library,
    line_here,
    line_of,
    line_of_error,
)


def own():
    return line_here()


def test_the_line_is_the_innermost_of_the_program():
    line = own()
    assert line is not None
    assert (line.function, line.text) == ("own", "return line_here()")
    assert Path(line.path) == Path(__file__)
    assert line.file == os.path.relpath(__file__)
    assert str(line) == f"{line.file}:{line.number} in own"


def test_python_itself_is_passed_over():
    class Spy(collections.UserDict):
        def __setitem__(self, key, item):
            caller = sys._getframe(1)
            seen.append((caller.f_code.co_filename, line_of(caller)))

    seen = []
    Spy().update({"a": 1})  # MutableMapping.update sets the items
    ((file, line),) = seen
    assert "_collections_abc" in file
    assert line is not None
    assert line.text.startswith('Spy().update({"a": 1})')


def test_torch_is_passed_over_and_other_packages_are_not():
    torch = pytest.importorskip("torch")
    seen = []

    class Layer(torch.nn.Module):
        def forward(self, x):
            return x

    layer = Layer()
    layer.register_forward_hook(lambda *_: seen.append(line_of(sys._getframe(1))))
    layer(1)
    assert seen[0].text == "layer(1)"


def test_of_an_error_it_is_the_innermost_line_that_it_went_through():
    torch = pytest.importorskip("torch")

    def forward():
        return torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 5))

    with pytest.raises(RuntimeError) as failed:
        torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(5, 6))(torch.ones(2, 3))
    line = line_of_error(failed.value.__traceback__)
    assert line is not None
    assert line.text.startswith("torch.nn.Sequential(")
    with pytest.raises(RuntimeError) as failed:
        forward()
    assert line_of_error(failed.value.__traceback__).function == "forward"


def test_there_may_be_none():
    assert line_of(None) is None
    assert line_of_error(None) is None


def test_outside_of_functions_there_is_no_name():
    assert str(CodeLine("train.py", 3, "<module>", "train.py")) == "train.py:3"
    assert CodeLine("gone.py", 3, "<module>", "/gone.py").text == ""


@pytest.mark.parametrize(
    ("path", "framework", "library"),
    [
        (__file__, False, False),
        ("<stdin>", False, False),
        ("<string>", True, True),
        (collections.__file__, True, True),
        (sys.modules[CodeLine.__module__].__file__, True, True),
        (pytest.__file__, False, True),
        ("/tmp/torchinductor_me/ab/kernel.py", True, True),
    ],
)
def test_a_file_is_of_a_framework_of_another_package_or_of_the_program(path, framework, library):
    assert (is_framework(path), is_library(path)) == (framework, library)
