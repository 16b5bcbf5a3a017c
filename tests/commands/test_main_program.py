"""Programs run by `memcallback run` print what they print when Python runs them, and end alike."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import memcallback

ROOT = Path(memcallback.__file__).parents[1]
#: What the command says at the end of a program that does not use PyTorch.
LAST = "memcallback: the program did not use PyTorch.\n"
PROGRAMS = {
    "what a program knows of itself": """
import os, sys
print(sys.argv, sys.path[0], __name__, __file__, __spec__, __package__, __doc__, __cached__)
print(type(__loader__).__name__, sys.modules["__main__"].__dict__ is globals(), __builtins__)
import beside
print(beside.NAME)
""",
    "what Python gives it": "print(list(globals()))\nprint(__annotations__)",
    "no future of ours": "def f(x: undefined_name): pass\nprint('not reached')",
    "an exit with a number": "import sys\nsys.exit(7)",
    "an exit with a text": "import sys\nsys.exit('it is over')",
    "an exit with nothing": "import sys\nsys.exit()",
    "an error": "def f():\n    raise ValueError('no such value')\n\nf()",
    "an error from another": """
try:
    1 / 0
except ZeroDivisionError as error:
    raise RuntimeError('because') from error
""",
    "a missing module": "import no_such_module",
    "a syntax error": "x = (1,\ny = 2",
    "Ctrl-C": "raise KeyboardInterrupt",
    "an excepthook": """
import sys
def hook(kind, error, traceback):
    print(kind.__name__, error, traceback.tb_frame.f_code.co_name, traceback.tb_lineno)
sys.excepthook = hook
raise ValueError('no such value')
""",
    "what runs at the end": """
import atexit, threading, time
class Kept:
    pass
atexit.register(lambda: print('at exit', Kept.__module__))
def late():
    time.sleep(0.05)
    import pickle, sys
    print('thread', pickle.loads(pickle.dumps(Kept())).__class__ is Kept)
threading.Thread(target=late).start()
""",
    "threads that wait for the end": """
import threading
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)  # which nobody ends
print(pool.submit(len, 'abc').result())
def late():
    threading.main_thread().join()
    print('thread')
threading.Thread(target=late).start()
""",
    "a process of its own": """
import multiprocessing
def double(x):
    return 2 * x
if __name__ == '__main__':
    with multiprocessing.get_context('spawn').Pool(1) as pool:
        print(pool.map(double, [1, 2]))
""",
    "a stdout that it closes": "import sys\nprint(1)\nsys.stdout.close()",
    "a stdout that it takes away": "import sys\nsys.stdout = None",
    "another coding": "# -*- coding: latin-1 -*-\nprint(len('\\u00e4'))",
}
PACKAGE = {
    "__init__.py": "print('package', __name__)",
    "__main__.py": "from . import part\nimport sys\nprint(__spec__.name, __package__, sys.argv)\n"
    "print(list(globals()))",
    "part.py": "print(__name__, __file__)\nif __name__ == '__main__':\n    raise ValueError",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    (tmp_path / "package").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / "package" / name).write_text(text)
    return tmp_path


def both(folder, *words):
    """How Python ends, and how it ends by `memcallback run`: status, stdout and stderr."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    environment.pop("MEMCALLBACK", None)
    for command in ([], ["-m", "memcallback", "run"]):
        done = subprocess.run(
            [sys.executable, *command, *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        yield done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_script_runs_and_ends_as_python_itself_runs_it(program, folder):
    (folder / "deep").mkdir()
    (folder / "deep" / "beside.py").write_text("NAME = 'deep'")
    (folder / "deep" / "train.py").write_text(program, encoding="latin-1")
    (status, out, err), (run_status, run_out, run_err) = both(
        folder, "deep/train.py", "--epochs", "3", "-m", "--", "-h"
    )
    assert (run_status, run_out) == (status, out)
    assert run_err.count(LAST) == 1
    assert run_err.replace(LAST, "") == err


@pytest.mark.parametrize(
    "words",
    [("package", "-h"), ("package.part",), ("package.part", "-m", "x"), ("package", "--", "x")],
    ids=" ".join,
)
def test_a_module_runs_and_ends_as_python_itself_runs_it(words, folder):
    (status, out, err), (run_status, run_out, run_err) = both(folder, "-m", *words)
    # Python's own frames, of runpy, are not in our traceback.
    inside = re.sub(r'  File "[^"]*\brunpy\b[^"]*", line .*\n(    .*\n)*', "", err)
    assert (run_status, run_out) == (status, out)
    assert run_err.replace(LAST, "") == inside


@pytest.mark.parametrize(
    "text",
    [
        "raise ImportError('libfoo.so.1: cannot open shared object file')",
        "import no_such_module",
        "import package.no_such_part",
        "def f():\n    raise ValueError('no such value')\n\nf()",
        "x = (1,\ny = 2",
        "import sys\nsys.exit(7)",
    ],
    ids=["a library", "a module", "a part", "an error", "a syntax error", "an exit"],
)
def test_a_package_that_cannot_be_imported_ends_as_python_itself_ends_it(text, folder):
    (folder / "package" / "__init__.py").write_text(text)
    (status, out, err), (run_status, run_out, run_err) = both(folder, "-m", "package.part")
    inside = re.sub(r'  File "[^"]*\brunpy\b[^"]*", line .*\n(    .*\n)*', "", err)
    if "SyntaxError" in err:  # no line of the program had run
        inside = inside.removeprefix("Traceback (most recent call last):\n")
    assert (run_status, run_out) == (status, out)
    assert run_err == inside


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "run needs a script or -m and a module, such as memcallback run train.py --epochs 3"),
        (("no.py",), "'no.py' cannot be read: No such file or directory. Name the file that pyth"),
        (("package",), "'package' cannot be read: Is a directory. Name the file that python would"),
        (("-m", ".part"), "no package specified for '.part' (required for relative module names)"),
        (("-m", "no_such"), "No module named 'no_such' that can run. Name one that python -m wou"),
        (
            ("-m", "no_such.part"),
            "No module named 'no_such'. Name one that python -m would run, in",
        ),
    ],
    ids=["nothing", "a file", "a folder", "a relative module", "a module", "a part of none"],
)
def test_a_program_that_is_not_there_is_an_error_in_one_line(words, message, folder):
    *_, (status, out, err) = both(folder, *words) if words else [run_nothing(folder)]
    assert (status, out) == (2, "")
    assert err.startswith(f"memcallback: error: {message}")
    assert len(err.splitlines()) == 1


def test_a_program_that_closes_stderr_ends_as_python_itself_ends_it(folder):
    (folder / "train.py").write_text("import sys\nprint(1)\nsys.stderr.close()")
    python, run = both(folder, "train.py")
    assert python == run == (0, "1\n", "")


def run_nothing(folder):
    done = subprocess.run(
        [sys.executable, "-m", "memcallback", "run"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr
