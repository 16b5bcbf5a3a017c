"""The wheel and the sdist: what is in them, what they say of themselves, and that they install."""

import configparser
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import memcallback

ROOT = Path(memcallback.__file__).parents[1]
VERSION = memcallback.__version__

pytest.importorskip("hatchling")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with both, built from this checkout without a network."""
    folder = tmp_path_factory.mktemp("dist")
    code = "from hatchling.build import build_sdist, build_wheel\n"
    code += f"build_wheel({str(folder)!r})\nbuild_sdist({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    return zipfile.ZipFile(built / f"memcallback-{VERSION}-py3-none-any.whl")


@pytest.fixture(scope="module")
def metadata(wheel):
    return Parser().parsestr(wheel.read(f"memcallback-{VERSION}.dist-info/METADATA").decode())


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "memcallback"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if tracked.returncode:
        pytest.skip("not in a git checkout")
    ours = {name for name in tracked.stdout.splitlines() if (ROOT / name).is_file()}
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == ours
    assert {"memcallback/py.typed", "memcallback/page/style.css"} < names
    assert f"memcallback-{VERSION}.dist-info/licenses/LICENSE" in wheel.namelist()


def test_the_sdist_can_be_built_from_and_holds_no_output(built):
    with tarfile.open(built / f"memcallback-{VERSION}.tar.gz") as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "CHANGELOG.md"} < names
    assert "memcallback/cli.py" in names
    assert not [name for name in names if re.search(r"__pycache__|\.(pyc|ckpt|pt)$|^site/", name)]


def test_the_metadata_says_for_which_pythons_it_is(metadata):
    asked = metadata["Requires-Python"]
    least = int(re.search(r">=3\.(\d+)", asked)[1])
    above = re.search(r"<3\.(\d+)", asked)
    named = [
        int(one.rpartition(".")[2])
        for one in metadata.get_all("Classifier")
        if re.search(r":: 3\.\d+$", one)
    ]
    assert named == list(range(least, named[-1] + 1))
    assert above is None or named[-1] == int(above[1]) - 1
    assert metadata["Author"] == "memcallback developers"


def test_extras_are_not_installed_unless_they_are_asked_for(metadata):
    extras = metadata.get_all("Provides-Extra")
    assert {"huggingface", "notebook", "loggers"} <= {*extras}
    needed = [one for one in metadata.get_all("Requires-Dist") if "extra ==" not in one]
    names = {re.match(r"[\w-]+", one)[0] for one in needed}
    assert {"torch", "lightning", "nvidia-ml-py", "tensorboard"} <= names
    assert not names & {"transformers", "accelerate", "wandb", "mlflow", "comet-ml", "ipykernel"}


def test_every_entry_point_is_there(wheel):
    parser = configparser.ConfigParser()
    parser.read_string(wheel.read(f"memcallback-{VERSION}.dist-info/entry_points.txt").decode())
    assert {*parser} - {"DEFAULT"} == {
        "console_scripts",
        "lightning.pytorch.callbacks_factory",
        "pytorch_lightning.callbacks_factory",
        "pytest11",
    }
    for group in set(parser) - {"DEFAULT"}:
        module, _, name = parser[group]["memcallback"].partition(":")
        source = wheel.read(f"{module.replace('.', '/')}.py").decode()
        assert not name or f"def {name}(" in source


def test_the_changelog_and_the_citation_are_of_this_version():
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert VERSION in headings[:2]  # above it only what is not released yet


def test_the_workflows_call_targets_of_the_makefile():
    yaml = pytest.importorskip("yaml")
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            commands = [step["run"] for step in job["steps"] if "run" in step]
            called.update(command.split()[1] for command in commands)
            assert all(command.startswith("make ") for command in commands), path
    assert {"test-all", "test-oldest", "docs", "dist"} == called
    assert called <= targets


def test_an_index_can_show_it(built):
    if importlib.util.find_spec("twine") is None:
        pytest.skip("needs twine")
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_it_installs_and_its_command_answers_where_nothing_else_is_installed(built, tmp_path):
    venv.create(tmp_path / "clean", with_pip=False, symlinks=True)
    python = tmp_path / "clean" / "bin" / "python"
    wheel = built / f"memcallback-{VERSION}-py3-none-any.whl"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in (
        [*pip, "--no-deps", "--quiet", str(wheel)],
        [str(python.with_name("memcallback")), "--version"],
    ):
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout == f"memcallback {VERSION}, PyTorch not installed\n"
