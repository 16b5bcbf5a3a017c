from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import memcallback
from memcallback.cli import main

MODELS = """
import torch
from torch import nn

def make_model():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())

def make_number():
    return 7

def fails():
    raise RuntimeError("no such file\\nat all")

class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 16)

    def forward(self, tokens):
        return self.embedding(tokens)

class Holder:
    inner = nn.Linear(3, 4)

two_inputs = nn.Bilinear(3, 4, 5)
seven = 7
"""


@pytest.fixture(autouse=True)
def folder_with_models(tmp_path, monkeypatch):
    (tmp_path / "some_models.py").write_text(MODELS)
    (tmp_path / "broken_models.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("some_models", "broken_models"):
        sys.modules.pop(name, None)


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(memcallback.__file__).parents[1])}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def imported_by(arguments: list[str]) -> set[str]:
    code = f"""
import sys
from memcallback.cli import main
try:
    main({arguments!r})
except SystemExit as error:
    assert error.code == 0
print(*(name.split(".")[0] for name in sys.modules), file=sys.stderr)
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "usage: memcallback" in done.stdout
    return set(done.stderr.split())


@pytest.mark.parametrize("arguments", [["--help"], ["layers", "--help"]], ids=["--help", "layers --help"])
def test_help_imports_neither_torch_nor_lightning_nor_rich(arguments):
    assert not imported_by(arguments) & {"torch", "lightning", "pytorch_lightning", "rich", "tensorboard"}


def test_layers_prints_the_table(capsys):
    assert main(["layers", "some_models:make_model", "--input", "1,3,10,10"]) == 0
    out, err = capsys.readouterr()
    assert "Conv2d" in out
    assert "1x8x8x8" in out
    assert "total" in out
    assert err == ""


def test_layers_prints_json(capsys):
    assert main(["layers", "some_models:make_model", "--input", "1,3,10,10", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["total"]["num_parameters"] == 3 * 8 * 9 + 8
    assert [layer["kind"] for layer in data["layers"]] == ["Conv2d", "ReLU"]


@pytest.mark.parametrize(
    ("target", "inputs", "shape"),
    [
        ("some_models:Embeds", ["2,5:int64"], [2, 5, 16]),
        ("some_models:two_inputs", ["2,3", "2,4"], [2, 5]),
        ("some_models:Holder.inner", ["2,3"], [2, 4]),
    ],
    ids=["class and dtype", "instance and two inputs", "name inside a name"],
)
def test_the_name_may_be_a_class_or_a_model_and_inputs_may_repeat_and_have_a_dtype(target, inputs, shape, capsys):
    given = [part for text in inputs for part in ("--input", text)]
    assert main(["layers", target, *given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"][-1]["output_shape"] == shape


@pytest.mark.parametrize(
    ("target", "given", "message"),
    [
        (
            "no_such_models:make",
            "1",
            "No module named 'no_such_models', on importing 'no_such_models'. Run memcallback in the folder that has it",
        ),
        ("broken_models:make", "1", "Importing 'broken_models' failed: ZeroDivisionError: division by zero. It must import without"),
        ("some_models:make", "1", "'some_models' has no attribute 'make'. Name a function, class or model"),
        ("some_models", "1", "'some_models' names nothing to load. Write an importable module, a colon and a name in it"),
        ("some_models:seven", "1", "some_models:seven gives a int, not a torch.nn.Module. Name a model"),
        ("some_models:make_number", "1", "some_models:make_number gives a int, not a torch.nn.Module. Name a model"),
        ("some_models:fails", "1", "some_models:fails failed: RuntimeError: no such file at all. It is called without arguments"),
        ("some_models:make_model", "1,x", "--input '1,x' is not a size. Write whole numbers with commas"),
        ("some_models:make_model", "1,-3", "--input '1,-3' is not a size. Write whole numbers with commas"),
        ("some_models:make_model", "1,3:int65", "--input with dtype 'int65': torch has no such dtype. Write one such as float32"),
        ("some_models:make_model", "1,4,9,9", "with --input 1,4,9,9 failed: RuntimeError: "),
    ],
)
def test_an_error_is_one_line_with_value_rule_and_way_out(target, given, message, capfd):
    assert main(["layers", target, "--input", given]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("memcallback: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_without_a_command_the_exit_code_is_2(capsys):
    with pytest.raises(SystemExit) as raised:
        main([])
    assert raised.value.code == 2
    assert "usage: memcallback" in capsys.readouterr().err


def test_python_m_memcallback_is_the_command_line():
    done = run_python("-m", "memcallback", "layers", "some_models:seven", "--input", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("memcallback: error: some_models:seven gives a int")
