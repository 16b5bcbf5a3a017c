"""The documentation: its programs run and say what the page says, its names and pictures are there.

A program is a Python block under the comment `<!-- program -->`; one that needs a device stands
under `<!-- program: cuda -->`. The code in the comments `<!-- setup ... -->` above it, which a
reader does not see, comes before it. A text block right after it is its output, with `...` for what
may differ or is left out; a program is called `train.py` in it. `pytest --overwrite-golden` writes
the outputs anew.
"""

from __future__ import annotations

import argparse
import doctest
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import memcallback
from memcallback import cli
from memcallback.report import tags

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->$"
    r"|(?:^<!-- (?P<mark>program(?:: cuda)?) "
    r"-->\n)?^```python\n(?P<code>.*?)^```$(?:\n\n^```text\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
#: Of the pages' figures; with others they are not the same to the byte.
TORCH, CUDA_TORCH, CUDA_DEVICE = "2.13", "2.11", "NVIDIA H200"


@dataclass(frozen=True)
class Program:
    page: Path
    line: int
    code: str
    output: str | None
    output_at: tuple[int, int]
    mark: str | None

    @property
    def name(self):
        return f"{self.page.name}:{self.line}"


def programs(page):
    text, setup = page.read_text(), ""
    for match in BLOCK.finditer(text):
        if match["setup"] is not None:
            setup += match["setup"]
            continue
        line = text.count("\n", 0, match.start("code"))
        yield Program(
            page, line, setup + match["code"], match["output"], match.span("output"), match["mark"]
        )


ALL = [program for page in [*PAGES, ROOT / "README.md"] for program in programs(page)]


def on(mark):
    return pytest.mark.parametrize(
        "program", [pytest.param(one, id=one.name) for one in ALL if one.mark == mark]
    )


#: Runs programs one after the other in one process, since most of a program's time is the import of
#: PyTorch; each has names of its own.
RUNNER = """
import contextlib, io, json, linecache, traceback
for code in json.load(open("programs.json")):
    out, error = io.StringIO(), None
    linecache.cache["train.py"] = len(code), None, code.splitlines(keepends=True), "train.py"
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(code, "train.py", "exec"), {"__name__": "__main__"})
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps([out.getvalue(), error]))
"""


def run(codes, folder, **environment):
    """Output and error of each program."""
    (folder / "programs.json").write_text(json.dumps(codes))
    environment = (
        os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        | environment
    )
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@functools.cache
def outputs_of_page(page):
    codes = [program.code for program in programs(page) if program.mark == "program"]
    with tempfile.TemporaryDirectory() as folder:
        return dict(zip(codes, run(codes, Path(folder), CUDA_VISIBLE_DEVICES=""), strict=True))


def is_said(wanted, output):
    """Whether an output is that of the page. A figure of the machine makes a table's column wider
    or narrower.
    """
    wanted, output = (re.sub("─+", "─", text) for text in (wanted, output))
    return doctest.OutputChecker().check_output(
        wanted, output, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )


def check(program, output, error, overwrites):
    assert error is None, f"{program.name}\n{error}"
    if program.output is None or is_said(program.output, output):
        return
    if overwrites:
        # Outputs above it may have become longer, so its place is looked for anew.
        (start, end), text = (
            next(one.output_at for one in programs(program.page) if one.code == program.code),
            program.page.read_text(),
        )
        program.page.write_text(text[:start] + output + text[end:])
        return
    assert output == program.output, program.name


@on("program")
def test_a_program_says_what_the_page_says(program, request):
    import torch

    if program.output is not None and not torch.__version__.startswith(TORCH):
        pytest.skip(f"the page's figures are those of PyTorch {TORCH}")
    check(
        program,
        *outputs_of_page(program.page)[program.code],
        request.config.getoption("--overwrite-golden"),
    )


@pytest.mark.cuda
@on("program: cuda")
def test_a_program_on_a_device_says_what_the_page_says(program, tmp_path, request):
    import torch

    is_of_the_page = (
        torch.__version__.startswith(CUDA_TORCH) and torch.cuda.get_device_name() == CUDA_DEVICE
    )
    if program.output is not None and not is_of_the_page:
        pytest.skip(f"the page's figures are those of PyTorch {CUDA_TORCH} and an {CUDA_DEVICE}")
    # In a process of its own, so that the allocator begins empty.
    (result,) = run([program.code], tmp_path)
    check(program, *result, request.config.getoption("--overwrite-golden"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_of_a_page_is_run(page):
    assert [program.name for program in programs(page) if program.mark is None] == []
    assert len(list(programs(page))) == page.read_text().count("```python")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_every_picture_of_a_page_is_there(page):
    pictures = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text())
    assert [picture for picture in pictures if not (page.parent / picture).is_file()] == []


def test_every_picture_is_shown_somewhere():
    shown = {
        Path(name).name
        for page in [*PAGES, ROOT / "README.md"]
        for name in re.findall(r"images/([\w-]+\.png)", page.read_text())
    }
    assert {picture.name for picture in (ROOT / "docs" / "images").iterdir()} == shown


def test_every_public_name_is_in_the_reference():
    named = re.findall(
        r"^::: memcallback\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE
    )
    assert sorted(named) == sorted(memcallback.__all__)


def test_every_logged_tag_is_explained():
    scalars, images, rest = (
        (ROOT / "docs" / "tensorboard.md").read_text().partition("\n## Images\n")
    )
    row = re.compile(r"^\| `((?:memory|memory_gib|device)/[^`]+)` \|", flags=re.MULTILINE)
    assert row.findall(scalars) == row.findall(tags.__doc__)
    named = [value for name, value in vars(tags).items() if name.endswith("_TAG")]
    assert named
    assert [tag for tag in named if f"`{tag}`" not in images + rest] == []


def test_every_command_is_in_the_reference():
    (commands,) = (
        action
        for action in cli._parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    named = re.findall(
        r"^<!-- help (\S+) -->$",
        (ROOT / "docs" / "command-line.md").read_text(),
        flags=re.MULTILINE,
    )
    assert sorted(named) == sorted(commands.choices)


def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "api" / "index.html").is_file()
