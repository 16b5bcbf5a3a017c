import json
import math
import sys

import pytest
from hand_made import batch_trace

from memcallback.cli import main
from memcallback.core.units import MiB
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.prediction import Prediction

STEP = "import torch\nfrom memcallback import TrainingStep\nmake_step = lambda: TrainingStep("
STEP += "torch.nn.Linear(3, 4), torch.ones(5, 3))\n"


class StandIn:
    """Replaces the tracer: every step gets the same trace, made by hand."""

    def predict(self, step, *, device, batch_size=None, sequence_length=None, progress=None):
        size = batch_size or step.batch_size.batch_size
        return Prediction.of(batch_trace(), device, batch_size=size, settings=AllocatorSettings())


@pytest.fixture(autouse=True)
def folder_with_a_step(tmp_path, monkeypatch):
    (tmp_path / "one_step.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "memcallback.prediction.predict", StandIn())
    yield
    sys.modules.pop("one_step", None)


@pytest.fixture
def predict(capsys):
    def run(*options, device="L4"):
        code = main(["predict", "one_step:make_step", "--device", device, "--json", *options])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def base(predict, tmp_path):
    """The saved prediction, with a peak that is as much smaller as is asked."""

    def write(factor=1.0, **changes):
        data = json.loads(predict()[1])
        peak = round(data["peak_reserved_bytes"] * factor)
        (tmp_path / "base.json").write_text(
            json.dumps({**data, "peak_reserved_bytes": peak} | changes)
        )
        return peak

    return write


def test_a_peak_like_that_of_the_baseline_passes(predict, base):
    size = f"{base() / MiB:.2f} MiB"
    code, _, err = predict("--baseline", "base.json")
    assert code == 0
    assert err == (
        f"memcallback: the peak, {size}, is the same as that of base.json, {size}; at most 0 % is "
        "allowed.\n"
    )


def test_growth_within_the_tolerance_passes_and_is_said(predict, base):
    base(0.9)
    code, _, err = predict("--baseline", "base.json", "--tolerance", "20%")
    assert code == 0
    assert "11.1 % above that of base.json" in err
    assert err.endswith("at most 20 % is allowed.\n")


def test_a_peak_above_the_baseline_exits_with_1_and_says_what_has_grown(predict, base):
    peak = base(0.9)
    code, out, err = predict("--baseline", "base.json")
    assert code == 1
    grown = json.loads(out)["peak_reserved_bytes"]
    assert err.startswith(
        f"memcallback: the peak, {grown / MiB:.2f} MiB, is {100 * grown / peak - 100:.1f} % above "
        f"that of base.json, {peak / MiB:.2f} MiB; at most 0 % is allowed. This change adds "
    )


@pytest.mark.parametrize(("tolerance", "code"), [("20%", 0), ("12", 0), ("5%", 1), ("0", 1)])
def test_the_tolerance_says_how_far_above_the_baseline_is_allowed(tolerance, code, predict, base):
    base(0.9)
    assert predict("--baseline", "base.json", "--tolerance", tolerance)[0] == code


def test_a_smaller_peak_passes(predict, base):
    base(1.1)
    code, _, err = predict("--baseline", "base.json")
    assert code == 0
    assert "9.1 % below that of base.json" in err


def test_another_version_is_no_failure_but_is_named_in_one(predict, base):
    base(torch_version="2.5.0")
    assert predict("--baseline", "base.json")[0] == 0
    base(0.9, torch_version="2.5.0")
    assert "Another PyTorch: 2.5.0 -> " in predict("--baseline", "base.json")[2]


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (["--batch-size", "7"], "Another batch size: 5 -> 7."),
        (["--device", "A10"], "Another device: NVIDIA L4 -> NVIDIA A10."),
    ],
)
def test_a_baseline_of_another_question_is_refused(options, difference, predict, base):
    base()
    code, out, err = predict("--baseline", "base.json", *options)
    assert (code, out) == (2, "")
    assert f"--baseline 'base.json' cannot be compared: {difference} Predict with the same" in err


def test_a_tolerance_without_a_baseline_is_refused(predict):
    code, _, err = predict("--tolerance", "5%")
    assert code == 2
    assert "--tolerance says how far the peak may be above that of --baseline, which is mis" in err


def test_a_tolerance_that_is_no_percentage_is_refused(predict, base):
    base()
    code, _, err = predict("--baseline", "base.json", "--tolerance", "lots")
    assert code == 2
    assert "--tolerance 'lots' is not a percentage from 0 to below 100" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "'base.json' cannot be read: No such file or directory. Write it: "),
        ("", "'base.json' is not JSON: "),
        ("[]", "'base.json' was not written by memcallback. Write it: "),
        ('{"a": 1}', "'base.json' was not written by memcallback. Write it: "),
        ('{"schema_version": 2}', "'base.json' has schema_version 2, and this memcallback reads 1"),
        (
            '{"schema_version": true}',
            "'base.json' has schema_version true, and this memcallback re",
        ),
        ('{"schema_version": 1}', "'base.json' lacks peak_allocated_bytes: another command, or an"),
        ("[" * 100_000, "'base.json' is not JSON: "),
    ],
)
def test_a_file_that_is_no_prediction_is_refused(content, message, predict, tmp_path, capsys):
    if content is not None:
        (tmp_path / "base.json").write_text(content)
    code, _, err = predict("--baseline", "base.json")
    assert code == 2
    assert f"memcallback: error: {message}" in err
    assert main(["diff", "base.json", "base.json"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("peak_reserved_bytes", "1GiB", '"1GiB"'),
        ("peak_allocated_bytes", None, "null"),
        ("peak_allocated_bytes", True, "true"),
        ("peak_allocated_bytes", -1, "-1"),
        ("peak_allocated_bytes", 10**400, f"1{'0' * 39}..."),
        ("largest_batch_size", 1.5, "1.5"),
        ("fits", 1, "1"),
        ("device_name", ["L4"], "a list"),
        ("at_peak_by_category_bytes", [1], "a list"),
        ("at_peak_by_module_bytes", {"0": math.nan}, "an object"),
        ("at_peak_by_line", None, "null"),
        ("at_peak_by_line", [1, 2], "a list"),
        ("at_peak_by_line", [{"file": "a.py"}], "a list"),
        ("steps", [], "[]"),
        ("steps", "x", '"x"'),
        ("steps", [{}], "a list"),
        ("steps", [{"windows": [{"phase": "forward"}]}], "a list"),
        ("steps", [{"windows": [{"phase": "lunch", "peak_allocated_bytes": 1}]}], "a list"),
    ],
)
def test_a_prediction_that_was_damaged_is_refused_before_anything_is_traced(
    key, value, shown, predict, base, monkeypatch, capsys
):
    base(**{key: value})
    monkeypatch.setitem(sys.modules, "memcallback.prediction.predict", None)
    code, out, err = predict("--baseline", "base.json")
    assert (code, out) == (2, "")
    has = f"memcallback: error: 'base.json' has {shown} as {key}, which must be "
    assert err.startswith(has)
    assert ": it was damaged or changed. Write it: memcallback predict train:make_step " in err
    assert len(err.splitlines()) == 1
    assert main(["diff", "base.json", "base.json"]) == 2
    assert capsys.readouterr().err == err


def test_diff_prints_what_changed_and_with_json_the_same_as_data(predict, base, tmp_path, capsys):
    base(0.9, largest_batch_size=1)
    (tmp_path / "new.json").write_text(predict()[1])
    assert main(["diff", "base.json", "new.json"]) == 0
    out = capsys.readouterr().out
    assert main(["diff", "base.json", "new.json", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert " ".join(out.partition("\n\n")[0].split()) == data["verdict"]
    assert data["peak"]["change_bytes"] > 0
    assert data["old_largest_batch_size"] == 1
    assert [row["name"] for row in data["by_phase"]] == ["forward", "backward", "optimizer step"]
