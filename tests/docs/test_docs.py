"""The documentation: its programs run and say what the page says, its names and pictures are there.

A program is a Python block under the comment `<!-- program -->`. It runs as a reader pastes it:
nothing stands before it that the page does not show. `<!-- program: cuda -->` needs a device, and
`<!-- program: peft -->` the packages that it names. If its first line is `# train.py`, it is that
file for the commands that follow: a block under `<!-- commands -->`, whose lines are given to the
command line, or to pytest. A text block right after either is its output, with `...` for what may
differ or is left out. `pytest --overwrite-golden` writes the outputs anew.
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

import memcallback
from memcallback import cli
from memcallback.devices.cards import AMD_CARDS, CARDS
from memcallback.devices.catalogue import find_device
from memcallback.report import tags
from memcallback.step.importer import UsageError

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Texts beside the pages: what they link to and name exists, and their programs are not run.
TEXTS = [
    *PAGES,
    *sorted(set(ROOT.glob("*.md")) - set(PAGES)),
    ROOT / "benchmarks" / "results" / "README.md",
]
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>program|commands)(?:: (?P<needs>[\w, ]+))? -->\n)?"
    r"^```(?P<language>python|sh)\n(?P<code>.*?)^```$(?:\n\n^```text\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
#: The names of the package's commands.
(COMMANDS,) = (
    action.choices
    for action in cli._parser()._actions
    if isinstance(action, argparse._SubParsersAction)
)
#: Of the pages' figures; with others they are not the same to the byte.
TORCH, CUDA_TORCH, CUDA_DEVICE = "2.13", "2.11", "NVIDIA H200"


@dataclass(frozen=True)
class Program:
    page: Path
    line: int
    mark: str | None
    needs: tuple[str, ...]
    language: str
    code: str
    output: str | None
    output_at: tuple[int, int]

    @property
    def name(self):
        return f"{self.page.name}:{self.line}"

    @property
    def needs_cuda(self):
        return "cuda" in self.needs

    @property
    def lacks(self):
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


def programs(page):
    text = page.read_text()
    for match in BLOCK.finditer(text):
        yield Program(
            page,
            text.count("\n", 0, match.start("code")),
            match["mark"],
            tuple(match["needs"].split(", ")) if match["needs"] else (),
            match["language"],
            match["code"],
            match["output"],
            match.span("output"),
        )


ALL = [program for page in PAGES for program in programs(page)]


def where(needs_cuda):
    chosen = [one for one in ALL if one.mark and one.needs_cuda is needs_cuda]
    return pytest.mark.parametrize("program", [pytest.param(one, id=one.name) for one in chosen])


#: Runs programs one after the other in one process, since most of a program's time is the import of
#: PyTorch; each has names of its own, and each page a folder.
RUNNER = """
import contextlib, io, json, linecache, os, shlex, subprocess, sys, traceback
from memcallback.cli import main

def run(language, code):
    if language == "sh":
        for line in code.splitlines():
            command, *arguments = shlex.split(line, comments=True)
            if command == "pytest":
                words = [sys.executable, "-m", *shlex.split(line)]
                done = subprocess.run(words, capture_output=True, text=True)
                print(done.stdout, end="")
                assert done.returncode == 0, done.stdout
                continue
            assert command == "memcallback", line
            out = contextlib.nullcontext()
            if ">" in arguments:
                *arguments, _, name = arguments
                out = contextlib.redirect_stdout(open(name, "w"))
            with out:
                assert not main(arguments), line
        return
    linecache.cache["train.py"] = len(code), None, code.splitlines(keepends=True), "train.py"
    exec(compile(code, "train.py", "exec"), {"__name__": "__main__"})

root = os.getcwd()
for page, language, code in json.load(open("programs.json")):
    os.makedirs(page, exist_ok=True)
    out, error = io.StringIO(), None
    linecache.checkcache()
    name = code.splitlines()[0].removeprefix("# ")
    if language == "python" and name.endswith(".py"):
        open(os.path.join(page, name), "w").write(code)
        sys.modules.pop(name.removesuffix(".py"), None)
    os.chdir(page)
    try:
        with contextlib.redirect_stdout(out):
            run(language, code)
    except BaseException:
        error = traceback.format_exc()
    os.chdir(root)
    print(json.dumps([out.getvalue(), error]), flush=True)
"""


def run(programs, folder, **environment):
    """Output and error of each program."""
    items = [(one.page.stem, one.language, one.code) for one in programs]
    (folder / "programs.json").write_text(json.dumps(items))
    settings = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "MEMCALLBACK_ISOLATE": "1",  # as a reader runs it
    }
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | settings | environment,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(programs, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.fixture(scope="module")
def outputs(request, tmp_path_factory):
    """Output and error of the programs of all pages that this session tests."""
    tested = {
        item.callspec.params["program"].page
        for item in request.session.items
        if item.path == Path(__file__) and "outputs" in item.fixturenames
    }
    chosen = [one for one in ALL if one.mark and one.page in tested and not one.lacks]
    # What changes how others are imported comes last.
    chosen.sort(key=lambda one: len(one.needs))
    return run(chosen, tmp_path_factory.mktemp("pages"), CUDA_VISIBLE_DEVICES="")


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


@where(needs_cuda=False)
def test_a_program_says_what_the_page_says(program, outputs, request):
    import torch

    if program.lacks:
        pytest.skip(f"needs {', '.join(program.lacks)}")
    if program.output is not None and not torch.__version__.startswith(TORCH):
        pytest.skip(f"the page's figures are those of PyTorch {TORCH}")
    check(program, *outputs[program], request.config.getoption("--overwrite-golden"))


def run_alone(_, folder):
    """In a process of its own: the program of a folder, its output and error into a file."""
    os.chdir(folder)
    warnings.simplefilter("ignore")
    # With the lowest priority a prediction does not end in time where other tests have all cores.
    os.nice = lambda increment: 0
    with open("outputs.json", "w") as file, contextlib.redirect_stdout(file):
        exec(RUNNER, {})


@pytest.mark.cuda
@where(needs_cuda=True)
def test_a_program_on_a_device_says_what_the_page_says(program, tmp_path, request, monkeypatch):
    import own_process
    import torch

    is_of_the_page = (
        torch.__version__.startswith(CUDA_TORCH) and torch.cuda.get_device_name() == CUDA_DEVICE
    )
    if program.output is not None and not is_of_the_page:
        pytest.skip(f"the page's figures are those of PyTorch {CUDA_TORCH} and an {CUDA_DEVICE}")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.setenv("MEMCALLBACK_ISOLATE", "1")  # as a reader runs it
    item = program.page.stem, program.language, program.code
    (tmp_path / "programs.json").write_text(json.dumps([item]))
    # In a process of its own, so that the allocator begins empty.
    own_process.start(run_alone, (str(tmp_path),))
    result = json.loads((tmp_path / "outputs.json").read_text())
    check(program, *result, request.config.getoption("--overwrite-golden"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_of_a_page_is_run(page):
    blocks = [program for program in programs(page) if program.language == "python"]
    assert [program.name for program in blocks if program.mark is None] == []
    assert len(blocks) == page.read_text().count("```python")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_hides_code_in_a_comment(page):
    comments = re.findall(r"<!--(.*?)-->", page.read_text(), flags=re.DOTALL)
    assert [comment for comment in comments if "\n" in comment] == []


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_every_file_that_a_page_links_to_is_there(page):
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\((?!https?://|#)([^)\s#]+)", prose)
    assert [link for link in links if not (page.parent / link).is_file()] == []


def prose_of(page):
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors_of(page):
    """The anchors of a page's headings, as a repository's site makes them."""
    titles = re.findall(r"^#+ (.+)$", prose_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_every_heading_that_a_page_links_to_is_there(page):
    links = re.findall(r"\]\((?!https?://)([^)\s#]*)#([^)\s]+)\)", prose_of(page))
    assert [
        f"{name}#{anchor}"
        for name, anchor in links
        if anchor not in anchors_of(page.parent / name if name else page)
    ] == []


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_every_command_in_a_sentence_has_arguments_that_exist(page):
    commands = re.findall(r"`memcallback ([^`]+)`", prose_of(page))
    for command in commands:
        check_command(command)


def check_command(command):
    """Whether the arguments of a command exist; those of a name alone may be missing."""
    name, *arguments = shlex.split(command.replace("...", "x"), comments=True)
    assert name in COMMANDS, command
    if arguments:
        try:
            cli._parser().parse_args([name, *arguments])
        except UsageError as error:
            if "No such file" not in str(error):  # which the reader has
                raise


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_every_command_and_target_in_a_shell_block_exists(page):
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).splitlines()
    for line in lines:
        if found := re.search(r"\bmemcallback ([a-z-]+ ?[^>|]*)", line):
            check_command(found[1])
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = [target for line in lines for target in re.findall(r"^make ([a-z-]+)", line)]
    assert [target for target in named if target not in targets] == []


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_every_name_of_the_package_in_a_sentence_exists(page):
    names = set(re.findall(r"`[^`\n]*?\b(?:mc|memcallback)\.(\w+)[^`\n]*`", prose_of(page)))
    named = {name for name in names if not hasattr(memcallback, name)}
    assert [name for name in named if not (ROOT / "memcallback" / name).is_dir()] == []


def names_of_cards(begin):
    text = (ROOT / "docs" / "will-it-fit.md").read_text()
    return re.findall("`(.+?)`", re.search(rf"{begin}.*?: (.+?)\.$", text, re.MULTILINE)[1])


def test_the_page_of_predictions_lists_every_card():
    assert sorted(names_of_cards("Known cards")) == sorted(CARDS)
    assert [find_device(name).name for name in names_of_cards("By name, of AMD")] == [
        card[0] for card in AMD_CARDS
    ]


@pytest.mark.parametrize("name", names_of_cards("Known cards"))
def test_every_card_that_the_page_lists_is_known(name):
    found = find_device(name).name
    assert found in [card[0] for card in CARDS[name]]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_every_example_that_a_page_names_is_there(page):
    named = re.findall(r"`((?:examples|benchmarks)/[\w/]+\.(?:py|ipynb|sh))", page.read_text())
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_every_picture_is_shown_somewhere():
    shown = {
        Path(name).name
        for page in PAGES
        for name in re.findall(r"images/([\w-]+\.png)", page.read_text())
    }
    assert {picture.name for picture in (ROOT / "docs" / "images").iterdir()} == shown


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("repository", [None, "https://example.org/somebody/memcallback"])
def test_on_a_package_index_no_link_of_the_readme_dies(repository):
    pytest.importorskip("hatchling")
    readme_for_index = runpy.run_path(str(ROOT / "hatch_build.py"))["readme_for_index"]
    readme = (ROOT / "README.md").read_text()
    text = readme_for_index(readme, repository)
    links = re.findall(r"(!?)\[[^\]]+\]\(([^)]+)\)", text)
    assert all(target.startswith("https://") for _, target in links)
    assert "<!--" not in text
    assert text.count("```python") == readme.count("```python")
    if repository is None:
        assert links == []
        assert "[" not in re.sub(r"^```.*?^```$|`[^`]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    else:
        assert ("!", f"{repository}/raw/main/docs/images/page-gpt2.png") in links
        assert ("", f"{repository}/blob/main/docs/getting-started.md") in links


def test_the_reference_says_what_docstrings_and_help_say():
    pytest.importorskip("griffe")
    reference = runpy.run_path(str(ROOT / "docs" / "write_reference.py"))["reference"]
    stale = [path.name for path, text in reference().items() if path.read_text() != text]
    if sys.version_info >= (3, 13):  # whose argparse writes options in another way
        stale = [name for name in stale if name != "command-line.md"]
    assert stale == [], "run python docs/write_reference.py"


def test_every_public_name_is_in_the_reference():
    table = (ROOT / "docs" / "api.md").read_text()
    named = re.findall(r"^\| \[`(\w+)`\]", table, flags=re.MULTILINE)
    assert sorted(named) == sorted(memcallback.__all__)


def test_every_command_is_in_the_reference():
    text = (ROOT / "docs" / "command-line.md").read_text()
    named = re.findall(r"^<!-- help (\S+) -->$", text, flags=re.MULTILINE)
    assert sorted(named) == sorted(COMMANDS)


#: Keys that name what was found in a step, and not what a value is.
MAPS = {
    "held_by_category_bytes",
    "at_peak_by_category_bytes",
    "at_peak_by_module_bytes",
    "at_peak_by_operator_bytes",
}


def keys_of(data):
    if isinstance(data, list):
        return set().union(*map(keys_of, data))
    if not isinstance(data, dict):
        return set()
    inner = (keys_of(value) for key, value in data.items() if key not in MAPS)
    return set(data).union(*inner)


def test_every_key_of_the_json_is_explained(tmp_path, monkeypatch, capsys):
    example = next(one for one in programs(ROOT / "docs" / "command-line.md"))
    (tmp_path / "json_step.py").write_text(example.code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    keys = set()
    for command in (
        "predict json_step:make_step --device L4",
        "suggest json_step:make_step --device L4 --effective-batch-size 65536",
        "what-if json_step:make_step --device L4",
        "layers json_step:make_model --input 1,1024",
        "diff predict.json predict.json",
        "devices",
    ):
        assert not cli.main([*command.split(), "--json"]) or command == "devices"
        out = capsys.readouterr().out
        (tmp_path / f"{command.split()[0]}.json").write_text(out)
        keys |= keys_of(json.loads(out))
    page = (ROOT / "docs" / "json.md").read_text()
    assert sorted(key for key in keys if f"`{key}`" not in page) == []
    explained = set().union(
        *(
            re.findall(r"`(\w+)`", row.split("|")[1] if row.startswith("|") else row)
            for row in page.partition("## JSON")[2].splitlines()
            if row.startswith(("| `", "A row"))
        )
    )
    assert sorted(explained - keys) == []


def test_every_logged_tag_is_explained():
    scalars, images, rest = (
        (ROOT / "docs" / "tensorboard.md").read_text().partition("\n## Images\n")
    )
    row = re.compile(r"^\| `((?:memory|memory_gib|device)/[^`]+)` \|", flags=re.MULTILINE)
    assert row.findall(scalars) == row.findall(tags.__doc__)
    named = [value for name, value in vars(tags).items() if name.endswith("_TAG")]
    assert named
    assert [tag for tag in named if f"`{tag}`" not in images + rest] == []


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
