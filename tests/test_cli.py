from __future__ import annotations

import errno
import json
import os
import pickle
import shlex
import signal
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest
from hand_made import batch_trace

import memcallback
from memcallback.cli import main
from memcallback.devices.catalogue import Device, find_device
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.prediction import Prediction
from memcallback.step.importer import load_step

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

def exits():
    raise SystemExit(3)

def talks():
    print("hello")
    return nn.Linear(3, 4)
"""

STEPS = """
import torch
from lightning.pytorch import LightningModule
from torch import nn
from memcallback import TrainingStep

def make_step():
    return TrainingStep(nn.Linear(3, 4), torch.ones(5, 3))

def make_sequences():
    layers = nn.Embedding(100, 256), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 100)
    model = nn.Sequential(*layers)
    return TrainingStep(model, torch.zeros(4, 64, dtype=torch.int64), sequence_length=64)

def fails():
    raise RuntimeError("no such file\\nat all")

def talks():
    print("hello")
    return make_step()

def without_a_size():
    return TrainingStep(nn.Linear(3, 4), None)

def no_loss():
    return TrainingStep(nn.Linear(3, 4), torch.ones(5, 3), loss=lambda model, batch: 1.5)

def no_optimizer():
    return TrainingStep(nn.Linear(3, 4), torch.ones(5, 3), optimizer="adam")

class WithoutData(LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, first, second):
        return self.linear(first + second)

    def training_step(self, batch, batch_idx):
        return self.linear(batch).sum()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

class WithData(WithoutData):
    def train_dataloader(self):
        return [torch.ones(7, 3)]

class WithBrokenData(WithoutData):
    def train_dataloader(self):
        raise OSError("the disk is gone")

class WithExample(WithoutData):
    example_input_array = (torch.ones(9, 3), torch.ones(9, 3))
"""


@pytest.fixture(autouse=True)
def folder_with_models(tmp_path, monkeypatch):
    (tmp_path / "some_models.py").write_text(MODELS)
    (tmp_path / "some_steps.py").write_text(STEPS)
    (tmp_path / "broken_models.py").write_text("1 / 0\n")
    (tmp_path / "exiting_models.py").write_text("raise SystemExit(5)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("some_models", "some_steps", "broken_models", "exiting_models"):
        sys.modules.pop(name, None)


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(memcallback.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


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


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["layers", "--help"],
        ["predict", "--help"],
        ["suggest", "--help"],
        ["export", "--help"],
        ["report", "--help"],
        ["diff", "--help"],
    ],
    ids=" ".join,
)
def test_help_imports_neither_torch_nor_lightning(arguments):
    assert not imported_by(arguments) & {"torch", "lightning", "pytorch_lightning", "tensorboard"}


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


def test_a_file_is_taken_as_its_module(tmp_path):
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    (folder / "filed_models.py").write_text("from torch import nn\nmodel = nn.Linear(3, 4)\n")
    for target in ("some_models.py:two_inputs", "./some_models.py:two_inputs"):
        assert main(["layers", target, "--input", "2,3", "--input", "2,4"]) == 0
    assert main(["layers", "deep/er/filed_models.py:model", "--input", "2,3"]) == 0
    assert main(["layers", f"{folder / 'filed_models.py'}:model", "--input", "2,3"]) == 0


def test_a_file_that_is_not_there_is_said_so(tmp_path, capfd):
    (tmp_path / "empty").mkdir()
    assert main(["layers", "empty/no_models.py:model", "--input", "2,3"]) == 2
    assert "error: No module named 'empty.no_models'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("target", "inputs", "shape"),
    [
        ("some_models:Embeds", ["2,5:int64"], [2, 5, 16]),
        ("some_models:two_inputs", ["2,3", "2,4"], [2, 5]),
        ("some_models:Holder.inner", ["2,3"], [2, 4]),
    ],
    ids=["class and dtype", "instance and two inputs", "name inside a name"],
)
def test_the_name_may_be_a_class_or_a_model_and_inputs_may_repeat_and_have_a_dtype(
    target, inputs, shape, capsys
):
    given = [part for text in inputs for part in ("--input", text)]
    assert main(["layers", target, *given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"][-1]["output_shape"] == shape


@pytest.mark.parametrize(
    ("target", "given", "message"),
    [
        (
            "no_such_models:make",
            "1",
            "No module named 'no_such_models', on importing 'no_such_models'. Run memcallback in "
            "the folder that has it",
        ),
        (
            "some_models:make",
            "1",
            "'some_models' has no attribute 'make'. Name a function, class or model",
        ),
        (
            "some_models",
            "1",
            "'some_models' names nothing to load. Write a Python module or its file, a colon, and "
            "the name of an object in it",
        ),
        (
            "some_models:seven",
            "1",
            "some_models:seven is an int, not a torch.nn.Module. Name a model",
        ),
        (
            "some_models:make_number",
            "1",
            "some_models:make_number returned an int, not a torch.nn.Module. Name a model",
        ),
        (
            "some_models:make_model",
            "1,x",
            "--input '1,x' is not a size. Write whole numbers with commas",
        ),
        (
            "some_models:make_model",
            "1,-3",
            "--input '1,-3' is not a size. Write whole numbers with commas",
        ),
        (
            "some_models:make_model",
            "99999999999999999999,64",
            "--input '99999999999999999999,64' has more than 1,000,000,000,000,000 elements. Write "
            "smaller numbers, such as --input 1,3,224,224.",
        ),
        ("some_models:make_model", f"{10**9},{10**9}", "has more than 1,000,000,000,000,000 elem"),
        ("some_models:make_model", f"0,{10**20}", "has more than 1,000,000,000,000,000 elements."),
        ("some_models:make_model", f"1{'0' * 5000}", "has more than 1,000,000,000,000,000 elemen"),
        (
            "some_models:make_model",
            "1,3:int65",
            "--input with dtype 'int65': torch has no such dtype. Write one such as float32",
        ),
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


@pytest.mark.parametrize(
    ("target", "own_lines", "message"),
    [
        (
            "some_models:fails",
            ["some_models.py", "in fails", 'raise RuntimeError("no such file\\nat all")'],
            "some_models:fails failed: RuntimeError: no such file at all. It is called without "
            "arguments",
        ),
        (
            "broken_models:make",
            ["broken_models.py", "in <module>", "1 / 0"],
            "Importing 'broken_models' failed: ZeroDivisionError: division by zero. It must "
            "import without",
        ),
        (
            "unfinished_models:make",
            ["unfinished_models.py", "def make("],
            "Importing 'unfinished_models' failed: SyntaxError: '(' was never closed",
        ),
    ],
)
def test_an_error_in_a_users_code_comes_with_its_traceback(
    target, own_lines, message, tmp_path, capfd
):
    (tmp_path / "unfinished_models.py").write_text("def make(\n")
    assert main(["layers", target, "--input", "5,3"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    traceback, _, last = err.rpartition("memcallback: error: ")
    assert last.startswith(message)
    assert last.count("\n") == 1
    assert [line for line in own_lines if line not in traceback] == []
    assert traceback.count("\n  File ") + traceback.startswith("  File ") == 1
    assert "memcallback" not in traceback.replace(str(tmp_path), "")


def test_a_traceback_begins_at_the_users_first_line_and_has_all_of_the_users(tmp_path, capfd):
    (tmp_path / "deep_steps.py").write_text(
        "def make():\n    return helper()\n\ndef helper():\n    return {}['nothing']\n"
    )
    assert main(["predict", "deep_steps:make", "--device", "T4"]) == 2
    lines = [line.strip() for line in capfd.readouterr().err.splitlines()]
    assert lines[0] == "Traceback (most recent call last):"
    assert [line for line in lines if line.startswith("File ")] == [
        f'File "{tmp_path / "deep_steps.py"}", line {number}, in {function}'
        for number, function in ((2, "make"), (5, "helper"))
    ]
    assert lines[-2] == "KeyError: 'nothing'"
    assert lines[-1].startswith("memcallback: error: deep_steps:make failed: KeyError: 'nothing'.")


def test_an_error_of_a_users_data_comes_with_its_traceback(capfd):
    assert main(["predict", "some_steps:WithBrokenData", "--device", "T4"]) == 2
    err = capfd.readouterr().err
    assert 'raise OSError("the disk is gone")' in err
    assert "neither a train_dataloader that gives a batch (OSError: the disk is gone)" in err


def test_without_a_command_the_help_is_printed_and_the_exit_code_is_2(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage: memcallback" in err
    assert "what-if" in err


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out == (
        f"memcallback {memcallback.__version__}, PyTorch {version('torch')}\n"
    )


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("predct", "there is no command 'predct'. Did you mean predict?"),
        ("what_if", "there is no command 'what_if'. Did you mean what-if?"),
        ("xyz", "there is no command 'xyz'. There are predict, suggest, what-if, report, "),
    ],
)
def test_of_a_command_that_there_is_not_the_one_that_was_meant_is_named(word, message, capsys):
    assert main([word, "some_steps:make_step"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"memcallback: error: {message}")
    assert err.count("\n") == 1


def test_the_example_of_the_help_is_one_that_works(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    example = capsys.readouterr().out.partition("  mymodel.py\n")[2]
    program, _, command = example.partition("  memcallback ")
    (tmp_path / "mymodel.py").write_text(textwrap.dedent(program))
    assert main(shlex.split(command)) == 0
    sys.modules.pop("mymodel")


def test_python_m_memcallback_is_the_command_line():
    done = run_python("-m", "memcallback", "layers", "some_models:seven", "--input", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("memcallback: error: some_models:seven is an int")


class StandIn:
    """Replaces the tracer: every step gets the same trace, made by hand."""

    def __init__(self):
        self.steps, self.sequence_lengths = [], []

    def predict(self, step, *, device, batch_size=None, sequence_length=None, progress=None):
        assert isinstance(device, Device)
        progress(1, 3)
        self.steps.append(step)
        self.sequence_lengths.append(sequence_length)
        return Prediction.of(
            batch_trace(),
            device,
            batch_size=batch_size or step.batch_size.batch_size,
            settings=AllocatorSettings(),
        )


@pytest.fixture
def tracing(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "memcallback.prediction.predict", stand_in)
    return stand_in


def test_predict_prints_phases_what_stands_at_the_peak_and_what_fits(tracing, capsys, request):
    assert (
        main(["predict", "some_steps:make_step", "--batch-size", "16", "--device", "rtx3090"]) == 0
    )
    out, err = capsys.readouterr()
    golden = Path(__file__).parent / "golden" / "predict.txt"
    if request.config.getoption("--overwrite-golden"):
        golden.write_text(out, encoding="utf-8")
    assert out == golden.read_text(encoding="utf-8")
    assert err == ""  # it takes less than 10 s, and is no terminal


def test_predict_prints_json_whose_keys_carry_their_units(tracing, capsys):
    assert main(["predict", "some_steps:make_step", "--device", "24GiB", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["batch_size"] == 5
    assert data["capacity_bytes"] == 24 << 30
    assert (
        data["peak_allocated_bytes"]
        == sum(data["at_peak_by_category_bytes"].values())
        == sum(data["at_peak_by_module_bytes"].values())
    )
    assert [window["phase"] for window in data["steps"][-1]["windows"]] == [
        "forward",
        "backward",
        "optimizer_step",
    ]
    assert data["caveats"][0].startswith("Only the size of the card is known, 24.00 GiB")
    check_units(data)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--device", "24GiB"], 0),
        (["--device", "24GiB", "--check", "--max-peak", "1GiB"], 0),
        (["--device", "24GiB", "--max-peak", "1MiB"], 1),
        (["--device", "1GiB"], 0),
        (["--device", "1GiB", "--check"], 1),
    ],
)
def test_the_exit_code_of_a_check_is_1_if_it_fails(options, code, tracing, capsys):
    batch_size = "9000" if "1GiB" in options[1] else "5"
    arguments = ["predict", "some_steps:make_step", "--batch-size", batch_size, *options]
    assert main([*arguments, "--json"]) == code
    out, err = capsys.readouterr()
    assert json.loads(out)["fits"] == (options[1] == "24GiB")
    assert (" MiB, is above --max-peak 1024.00 KiB." in err) == ("1MiB" in options)


def test_a_step_that_does_not_fit_says_what_to_do_next(tracing, capsys):
    assert (
        main(["predict", "some_steps:make_step", "--batch-size", "9000", "--device", "1GiB"]) == 0
    )
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Next: --batch-size ")
    command = "memcallback what-if some_steps:make_step --device 1024.00MiB --batch-size 9000"
    assert last.endswith(f" fits. What savings would buy: {command}")
    assert find_device("1024.00MiB").capacity_bytes == 1 << 30


def test_a_step_at_another_sequence_length_gets_no_advice_for_its_own(tracing, capsys):
    arguments = ["predict", "some_steps:make_step", "--batch-size", "9000", "--device", "1GiB"]
    assert main([*arguments, "--sequence-length", "128"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Next: --batch-size ")
    assert last.endswith(" fits.")


def test_a_check_of_a_cpu_of_unknown_capacity_is_refused(tracing, capsys):
    arguments = ["predict", "some_steps:make_step", "--device", "cpu"]
    assert main([*arguments, "--check"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "--check cannot tell whether the step fits: the capacity of CPU is unknown." in err
    assert main([*arguments, "--max-peak", "1GiB"]) == 0


def test_a_peak_that_is_no_size_is_refused(capsys):
    arguments = ["predict", "some_steps:make_step", "--device", "24GiB", "--max-peak", "20G"]
    assert main(arguments) == 2
    assert "error: --max-peak '20G' is not a size. Write a number and a unit" in (
        capsys.readouterr().err
    )


def test_json_says_its_versions(tracing, capsys):
    versions = {
        "schema_version": 1,
        "memcallback_version": memcallback.__version__,
        "torch_version": version("torch"),
    }
    for arguments in (
        ["predict", "some_steps:make_step", "--device", "24GiB"],
        ["layers", "some_models:make_model", "--input", "1,3,10,10"],
        ["devices"],
    ):
        assert main([*arguments, "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert {key: data[key] for key in versions} == versions


def test_a_reader_that_has_enough_gets_no_traceback():
    command = [sys.executable, "-m", "memcallback", "devices", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        started.stdout.close()
        assert started.stderr.read() == b""
        assert started.wait() == 141  # 1 would be a check that failed


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_an_answer_that_cannot_be_written_is_no_failed_check():
    command = [sys.executable, "-m", "memcallback", "devices", "--json"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 2
    assert ended.stderr == (
        "memcallback: error: the answer cannot be written: No space left on device. Free some "
        "space, or write it elsewhere.\n"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_ctrl_c_ends_a_command_without_a_traceback(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import signal\ndef make_step():\n    signal.raise_signal(signal.SIGINT)\n"
    )
    command = [sys.executable, "-m", "memcallback", "predict", "slow:make_step", "--device", "L4"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr.endswith("memcallback: interrupted\n")
    assert "Traceback" not in ended.stderr


def test_devices_needs_no_pytorch_on_a_machine_without_a_gpu(tmp_path):
    code = """
import sys
from memcallback.devices import usage
usage.has_device_file = lambda: False
from memcallback.cli import main
assert main(["devices"]) == 0
assert "torch" not in sys.modules
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_predict_asks_for_a_sequence_length(tracing, capsys):
    assert (
        main(["predict", "some_steps:make_step", "--device", "24GiB", "--sequence-length", "128"])
        == 0
    )
    assert tracing.sequence_lengths == [128]


def check_units(data, inside=""):
    """A number is named for its unit, itself or by the mapping that it is in."""
    if isinstance(data, dict):
        for key, value in data.items():
            check_units(value, inside if inside.endswith("_bytes") else key)
    elif isinstance(data, list):
        for value in data:
            check_units(value, inside)
    elif isinstance(data, (int, float)) and not isinstance(data, bool):
        is_named = inside.endswith(("_bytes", "batch_size")) or inside.startswith("num_")
        assert is_named or inside == "schema_version", inside


@pytest.mark.parametrize(
    ("target", "batch_size"),
    [("make_step", 5), ("WithData", 7), ("WithExample", 9)],
    ids=["a function", "a LightningModule with its data", "a LightningModule with an example"],
)
def test_the_step_may_be_given_in_three_ways(target, batch_size, tracing, capsys):
    assert main(["predict", f"some_steps:{target}", "--device", "A100-SXM4-80GB"]) == 0
    out, err = capsys.readouterr()
    assert f"batch size {batch_size}" in out
    assert ("its forward is predicted" in err) == (target == "WithExample")
    (step,) = tracing.steps
    assert step.loss(step.model, step.batch).shape == ()
    assert step.batch_size.batch_size == batch_size
    assert len(step.optimizers_of(step.model)) == (target != "make_step")


def test_savings_of_a_module_with_only_an_example_are_predicted_on_the_example_too(capsys):
    step = load_step("some_steps:WithExample")
    assert "its forward is predicted" in capsys.readouterr().err
    whole, mixed = (
        memcallback.predict(step.varied(precision=precision), device="24GiB")
        for precision in ("32-true", "bf16-true")
    )
    assert whole.batch_size == mixed.batch_size == 9


def test_export_writes_a_snapshot_and_says_how_to_open_it(tracing, tmp_path, capsys):
    assert main(["export", "some_steps:make_step", "-o", "step.pickle"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Fits. Peak ")
    assert "Wrote step.pickle. Open it at https://pytorch.org/memory_viz" in out
    assert set(pickle.loads((tmp_path / "step.pickle").read_bytes())) >= {
        "segments",
        "device_traces",
    }


def test_export_says_where_a_step_that_does_not_fit_ends(tracing, capsys):
    arguments = ["export", "some_steps:make_step", "--batch-size", "99999999", "-o", "big.pickle"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("Does not fit. Peak ")
    assert "Wrote big.pickle, which ends where memory ran out. Open it at" in out


def test_report_writes_a_page_and_says_the_verdict(tracing, tmp_path, capsys):
    assert main(["report", "some_steps:make_step", "--device", "T4", "-o", "step.html"]) == 0
    printed = capsys.readouterr().out
    page = (tmp_path / "step.html").read_text()
    assert printed.startswith("Fits")
    assert printed.endswith(". Wrote step.html.\n")
    assert page.startswith("<!DOCTYPE html>")
    assert "some_steps:make_step" in page


@pytest.mark.parametrize(("kind", "is_advised"), [("TrainingStep", True), ("InferenceStep", False)])
def test_report_names_what_if_for_a_training_alone(kind, is_advised, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"large_{kind.lower()}.py").write_text(
        "import memcallback as mc\nimport torch\n\n\ndef make_step():\n"
        f"    return mc.{kind}(torch.nn.Linear(8192, 8192), torch.zeros(2, 8192))\n"
    )
    target = f"large_{kind.lower()}:make_step"
    assert main(["report", target, "--device", "600MiB", "-o", "step.html"]) == 0
    page = (tmp_path / "step.html").read_text()
    assert "Does not fit" in page
    assert ("With --what-if" in page) == is_advised


def test_report_traces_the_step_as_often_with_savings_as_what_if_does(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MEMCALLBACK_ISOLATE", "0")  # a child's count would be lost
    (tmp_path / "counted_step.py").write_text(
        "import memcallback as mc\nimport torch\n\nnum_forward = 0\n\n"
        "def loss(model, batch):\n    global num_forward\n    num_forward += 1\n"
        "    return model(batch).sum()\n\n"
        "def make_step():\n"
        "    return mc.TrainingStep(torch.nn.Linear(8, 8), torch.zeros(4, 8), loss=loss)\n"
    )
    counts = []
    for command in (["what-if"], ["report", "--what-if", "-o", "step.html"]):
        name, *options = command
        assert main([name, "counted_step:make_step", "--device", "T4", *options]) == 0
        counts.append(sys.modules["counted_step"].num_forward)
    assert counts[1] == 2 * counts[0] > 0
    assert (tmp_path / "step.html").read_text().count("as it is") > 0


def test_a_page_that_cannot_be_written_is_an_error(tracing, capfd):
    assert (
        main(["report", "some_steps:make_step", "--device", "T4", "-o", "no/such/folder.html"]) == 2
    )
    assert (
        "--output 'no/such/folder.html' cannot be written: No such file or directory. Name a "
        in (capfd.readouterr().err)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["some_steps:make_step", "--device", "rtx9090"],
            "--device 'rtx9090' is not a known card. Similar names: NVIDIA GeForce RTX",
        ),
        (
            ["some_steps:make_step", "--device=-1GiB"],
            "--device '-1GiB' is not a size: a size cannot be negative. Give",
        ),
        (
            ["some_steps:make_step", "--device", "0"],
            "--device '0' is neither a card nor a card's size: a plain number means bytes",
        ),
        (
            ["some_steps:make_step", "--device", "T4", "--batch-size", "0"],
            "--batch-size '0' is not a number of samples. Write a whole number",
        ),
        (
            ["some_steps:make_step", "--device", "T4", "--sequence-length", "x"],
            "--sequence-length 'x' is not a length of a sequence. Write a whole",
        ),
        (
            ["some_steps:make_step", "--device", "T4", "--sequence-length", "3"],
            "--sequence-length '3' is not a length of a sequence. Write a whole number of at least "
            "4, such as --sequence-length 32.",
        ),
        (
            ["some_steps:make_step", "--device", "T4", "--batch-size", "2147483649"],
            "--batch-size 2147483649 is too large for a number of samples. Write a whole number of "
            "at most 2,147,483,648, such as --batch-size 32.",
        ),
        (
            ["some_steps:make_step", "--device", "T4", "--batch-size", f"1{'0' * 5000}"],
            f"--batch-size 1{'0' * 29}... is too large for a number of samples. Write a whole numb",
        ),
        (
            ["some_steps:make_step", "--device", "T4", "--sequence-length", "99999999999999999999"],
            "--sequence-length 99999999999999999999 is too large for a length of a sequence. Write",
        ),
        (
            ["some_models:seven", "--device", "T4"],
            "some_models:seven is an int, neither a TrainingStep nor an InferenceStep nor a ",
        ),
        (
            ["some_models:make_model", "--device", "T4"],
            "returned a Sequential, neither a TrainingStep nor an InferenceStep nor a ",
        ),
        (
            ["some_steps:WithoutData", "--device", "T4"],
            "has neither a train_dataloader that gives a batch (MisconfigurationException",
        ),
        (["no_such_steps:make", "--device", "T4"], "No module named 'no_such_steps'"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_an_error_of_predict_is_one_line_too(arguments, message, tracing, capfd):
    assert main(["predict", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("memcallback: error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("error", "said"),
    [(KeyError("a\nb"), "KeyError: 'a\\nb'."), (AssertionError(), "AssertionError.")],
)
def test_what_stops_the_tracer_is_said_in_one_line(error, said, tracing, monkeypatch, capfd):
    def fail(step, *, device, batch_size=None, sequence_length=None, progress=None):
        raise error

    monkeypatch.setattr(tracing, "predict", fail)
    assert main(["predict", "some_steps:make_step", "--device", "T4"]) == 2
    assert capfd.readouterr().err.endswith(
        f"error: some_steps:make_step cannot be predicted: {said}\n"
    )


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "without_a_size",
            "some_steps:without_a_size cannot be predicted: The batch size cannot be inferred: no "
            "tensor in the batch has",
        ),
        (
            "no_loss",
            "some_steps:no_loss cannot be predicted: loss returned a float; it must return the "
            "loss",
        ),
        (
            "no_optimizer",
            "some_steps:no_optimizer failed: optimizer must be an optimizer of the model, or a "
            "function from parameters",
        ),
    ],
)
def test_an_error_of_ours_is_said_without_the_name_of_its_class(target, message, capfd):
    assert main(["predict", f"some_steps:{target}", "--device", "T4"]) == 2
    out, err = capfd.readouterr()
    last = err.splitlines()[-1]
    assert (out, last[: len("memcallback: error: ")]) == ("", "memcallback: error: ")
    assert message in last
    assert ".." not in last


def test_what_a_users_code_prints_is_no_part_of_the_answer(tracing, capsys):
    assert main(["predict", "some_steps:talks", "--device", "24GiB", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["batch_size"] == 5
    assert err.startswith("hello\n")
    assert main(["layers", "some_models:talks", "--input", "1,3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["num_parameters"] == 16


@pytest.mark.parametrize("command", ["predict", "layers"])
def test_code_that_exits_is_an_error_like_another(command, capfd):
    more = ["--device", "T4"] if command == "predict" else ["--input", "1"]
    assert main([command, "exiting_models:make", *more]) == 2
    assert (
        "Importing 'exiting_models' failed: SystemExit: 5. It must import without running a "
        "training." in capfd.readouterr().err
    )
    assert main([command, "some_models:exits", *more]) == 2
    assert (
        "some_models:exits failed: SystemExit: 3. It is called without arguments"
        in capfd.readouterr().err
    )


def test_predict_for_a_cpu_has_no_reserved_memory(tracing, capsys):
    assert main(["predict", "some_steps:make_step", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "Peak 26.0 MiB allocated in backward.\n"
        "Whether it fits is unknown: the capacity of the CPU was not given.\n\n"
    )
    assert "Memory of one training step (batch size 5) on CPU\n" in out
    assert "reserved peak" not in out
    assert main(["predict", "some_steps:make_step", "--device", "cpu", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (
        data["capacity_bytes"],
        data["peak_reserved_bytes"],
        data["fits"],
        data["limit_batch_size"],
    ) == (None, None, None, None)
    check_units(data)


def test_a_snapshot_for_a_cpu_is_refused(tracing, tmp_path, capfd):
    assert main(["export", "some_steps:make_step", "--device", "cpu", "-o", "step.pickle"]) == 2
    assert (
        "error: --device 'CPU' cannot be exported: a CPU has no caching allocator"
        in capfd.readouterr().err
    )
    assert not (tmp_path / "step.pickle").exists()


def test_an_output_that_cannot_be_written_is_said_so(tracing, capfd):
    assert main(["export", "some_steps:make_step", "-o", "no/such/folder.pickle"]) == 2
    assert (
        "--output 'no/such/folder.pickle' cannot be written: No such file or directory. Name a file"
        in capfd.readouterr().err
    )


def test_a_full_disk_leaves_an_earlier_output_as_it_was(tracing, tmp_path, monkeypatch, capfd):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "step.pickle").write_bytes(b"earlier")
    monkeypatch.setattr(os, "fsync", full)
    assert main(["export", "some_steps:make_step", "-o", "step.pickle"]) == 2
    assert "cannot be written: No space left on device" in capfd.readouterr().err
    assert (tmp_path / "step.pickle").read_bytes() == b"earlier"


def test_a_device_of_this_machine_that_is_not_there_is_said_so(tracing, monkeypatch, capfd):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["predict", "some_steps:make_step", "--device", "cuda:0"]) == 2
    assert (
        "error: --device 'cuda:0' names a CUDA device of this machine, and this machine has none. "
        "Give the name of a card" in capfd.readouterr().err
    )


def test_the_largest_batch_size_is_suggested(capsys):
    arguments = [
        "suggest",
        "some_steps:make_step",
        "--device",
        "24GiB",
        "--max-batch-size",
        "1000",
        "--effective-batch-size",
        "4000",
    ]
    assert main(arguments) == 0
    written = " ".join(capsys.readouterr().out.split())
    assert written.startswith(
        "Largest batch size: 1,000 (max_batch_size) with 5 % of 24.00 GiB kept free. "
        "That is 200x the current 5. The architecture of NVIDIA"
    )
    assert (
        "For 4,000 samples between two updates: batch size 1,000, accumulate 4 batches." in written
    )
    assert "suggested" in written
    assert main([*arguments, "--json", "--world-size", "2"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["batch_size"], data["global_batch_size"]) == (1000, 2000)
    assert data["accumulation"] == {"batch_size": 1000, "accumulate": 2, "world_size": 2}


def test_a_batch_size_is_suggested_for_each_length(capsys):
    assert (
        main(
            [
                "suggest",
                "some_steps:make_sequences",
                "--device",
                "24GiB",
                "--sequence-lengths",
                "32,64",
            ]
        )
        == 0
    )
    written = capsys.readouterr().out
    sizes = [
        int(line.split(": batch size ")[1].replace(",", ""))
        for line in written.splitlines()
        if line.startswith("Sequences of length ")
    ]
    assert len(sizes) == 2
    assert sizes[0] > sizes[1]


def test_savings_are_listed_with_what_they_buy(capsys):
    assert main(["what-if", "some_steps:make_step", "--device", "24GiB"]) == 0
    written = capsys.readouterr()
    assert "What savings would buy (batch size 5) on a card of 24.00 GiB" in written.out
    assert "Left out: " in written.out
    assert main(["what-if", "some_steps:make_step", "--device", "24GiB", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {row["saving"] for row in data["savings"]} >= {
        "bf16-mixed",
        "SGD",
        "expandable_segments",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["suggest", "--headroom", "x"],
            "--headroom 'x' is not a percentage from 0 to below 100. Write",
        ),
        (["suggest", "--headroom", "100"], "--headroom '100' is not a percentage"),
        (
            ["suggest", "--multiple-of", "0"],
            "--multiple-of '0' is not a number of samples. Write a whole",
        ),
        (
            ["suggest", "--effective-batch-size", "7", "--world-size", "2"],
            "must be a multiple of 2, the number of ranks, got 7",
        ),
        (["suggest", "--dataset-size", "1", "--world-size", "2"], "got 1 samples for 2 ranks"),
        (
            ["suggest", "--sequence-lengths", "32,y"],
            "--sequence-lengths 'y' is not a length of a sequence",
        ),
        (
            ["suggest", "--sequence-lengths", "32,9999999999"],
            "--sequence-lengths 9999999999 is too large for a length of a sequence.",
        ),
        (
            ["suggest", "--dataset-size", "1000000000001"],
            "--dataset-size 1000000000001 is too large for a number of samples. Write a whole "
            "number of at most 1,000,000,000,000, such as --dataset-size 32.",
        ),
        (
            ["what-if", "--world-size", "1000001"],
            "--world-size 1000001 is too large for a number of ranks. Write a whole number of at "
            "most 1,000,000, such as --world-size 32.",
        ),
        (["what-if", "--batch-size", "2147483649"], "is too large for a number of samples."),
        (["what-if", "--batch-size", "-1"], "--batch-size '-1' is not a number of samples"),
        (["what-if", "--headroom", "-1"], "--headroom '-1' is not a percentage"),
    ],
)
def test_what_is_wrong_with_an_argument_of_advice_is_one_line(capsys, arguments, message):
    command, *options = arguments
    assert main([command, "some_steps:make_step", "--device", "24GiB", *options]) == 2
    written = capsys.readouterr()
    assert message in written.err
    assert written.err.count("\n") == 1
    assert not written.out


def test_without_torch_a_command_says_so_in_one_line(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "memcallback.prediction.predict", None)
    monkeypatch.delitem(sys.modules, "memcallback.prediction.predict")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["predict", "some_steps:make_step", "--device", "T4"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("memcallback: error: ")
    assert "torch" in err


def test_a_function_may_return_a_forward_pass_alone(tmp_path, capsys):
    (tmp_path / "serving.py").write_text(
        "import torch\n"
        "from memcallback import InferenceStep\n"
        "def make_step():\n"
        "    return InferenceStep(torch.nn.Linear(8, 4).eval(), torch.zeros(3, 8))\n"
    )
    assert main(["predict", "serving:make_step", "--device", "24GiB"]) == 0
    assert "Memory of one inference step (batch size 3)" in capsys.readouterr().out
    assert main(["what-if", "serving:make_step", "--device", "24GiB"]) == 2
    assert "must be a TrainingStep, got an InferenceStep" in capsys.readouterr().err


def test_no_saving_is_advised_for_a_forward_pass_that_does_not_fit(tmp_path, capsys):
    (tmp_path / "large_serving.py").write_text(
        "import torch\n"
        "from memcallback import InferenceStep\n"
        "def make_step():\n"
        "    return InferenceStep(torch.nn.Linear(4096, 8192).eval(), torch.zeros(3, 4096))\n"
    )
    arguments = ["predict", "large_serving:make_step", "--device", "1GiB", "--batch-size", "90000"]
    assert main(arguments) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Next: --batch-size ")
    assert last.endswith(" fits.")
