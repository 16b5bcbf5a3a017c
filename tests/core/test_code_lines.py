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
    lines_inside,
    own_line_here,
    own_line_in,
    own_line_of_error,
    own_traceback,
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


def made(path, source):
    """What a file of a program or of a package defines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")
    names = {}
    exec(compile(source, str(path), "exec"), names)
    return names


@pytest.fixture
def library(tmp_path):
    """A function of an installed package that calls what it is given."""
    path = tmp_path / "site-packages" / "trainer" / "loop.py"
    return made(path, "def run(call):\n    return call()\n")["run"]


@pytest.fixture
def framework():
    """A function of generated code, as of a framework, that calls what it is given."""
    names = {}
    exec(compile("def wrap(call):\n    return call()\n", "<string>", "exec"), names)
    return names["wrap"]


def test_a_library_is_no_framework_and_its_line_is_the_innermost(library):
    line = library(line_here)
    assert (line.file, line.number, line.function) == ("trainer/loop.py", 2, "run")


def own_of_all():
    return own_line_here()


def test_the_programs_own_line_is_outside_of_libraries(library):
    assert own_of_all().function == "own_of_all"
    assert library(own_line_here).function == "test_the_programs_own_line_is_outside_of_libraries"


def test_both_lines_are_found_up_to_the_file_that_asks(library, framework, tmp_path):
    path = tmp_path / "asks.py"
    ask = made(path, "def ask(call):\n    return call()\n")["ask"]
    names = {"lines_inside": lines_inside, "path": str(path)}
    exec(compile("def look():\n    return lines_inside(path)\n", "<string>", "exec"), names)
    look = names["look"]

    line, own_line = ask(lambda: framework(lambda: library(look)))
    assert (line.file, line.number) == ("trainer/loop.py", 2)
    assert (own_line.file, own_line.function) == (os.path.relpath(__file__), "<lambda>")
    line, own_line = ask(lambda: framework(look))
    assert line == own_line
    assert own_line.text == "line, own_line = ask(lambda: framework(look))"
    line, own_line = ask(framework.__class__(library.__code__, {"call": look}, argdefs=(look,)))
    assert (line.file, own_line) == ("trainer/loop.py", None)
    assert ask(look) == (None, None)
    line, own_line = ask(lambda: lines_inside(str(path)))
    assert line == own_line
    assert own_line.function == "<lambda>"


def failing(call, *arguments):
    with pytest.raises(ZeroDivisionError) as failed:
        call(*arguments)
    return failed.value


def divide():
    return 1 / 0


def test_of_an_error_the_programs_line_may_be_outside_of_the_innermost(library):
    library_fails = made(Path(library.__code__.co_filename), "def fail():\n    return 1 / 0\n")[
        "fail"
    ]
    tb = failing(library_fails).__traceback__
    assert line_of_error(tb).file == "trainer/loop.py"
    assert own_line_of_error(tb).function == "failing"
    assert own_line_of_error(failing(library, divide).__traceback__).function == "divide"
    assert own_line_of_error(None) is None
    assert own_line_of_error(tb.tb_next) is None


def test_a_traceback_keeps_the_programs_lines_alone(framework):
    text = own_traceback(failing(framework, divide))
    assert "in divide" in text
    assert "in failing" in text
    assert "in wrap" not in text
    assert text.endswith("ZeroDivisionError: division by zero\n")


def test_the_causes_of_an_error_lose_the_frameworks_lines_too(framework):
    def again():
        try:
            framework(divide)
        except ZeroDivisionError as error:
            raise ValueError("no ratio") from error

    with pytest.raises(ValueError, match="no ratio") as failed:
        again()
    text = own_traceback(failed.value)
    assert "in divide" in text
    assert "in wrap" not in text
    assert "direct cause" in text


def test_a_traceback_of_frameworks_alone_is_empty_but_for_a_syntax_error():
    error = failing(divide)
    error.__traceback__ = None
    assert own_traceback(error) == ""
    with pytest.raises(SyntaxError) as failed:
        compile("a b", "train.py", "exec")
    failed.value.__traceback__ = None
    assert 'File "train.py", line 1' in own_traceback(failed.value)


def test_in_a_dumped_stack_the_programs_line_comes_before_a_librarys():
    library = '  File "/lib/site-packages/trainer/loop.py", line 7 in run'
    own = '  File "/home/me/project/train.py", line 41 in step'
    framework = '  File "<string>", line 1 in wrap'
    found = own_line_in("\n".join(["Current thread:", framework, library, own]))
    assert (found.file, found.number, found.function) == ("project/train.py", 41, "step")
    assert own_line_in("\n".join([framework, library])).file == "trainer/loop.py"
    assert own_line_in(framework) is None


def test_a_line_is_data_with_its_source():
    assert own().to_dict() == {
        "file": os.path.relpath(__file__),
        "line": own().number,
        "function": "own",
        "text": "return line_here()",
    }


def test_a_folder_that_is_gone_leaves_the_path_as_it_is(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    line = own_line_in('  File "only_here.py", line 3 in step')
    assert line.file == "only_here.py"
    assert own_line_in('  File "/a/b/elsewhere.py", line 3 in step').file == "/a/b/elsewhere.py"
