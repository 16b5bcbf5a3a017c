"""Two folders of `device_run.sh`, made by hand: equal ones meet the bars, doctored ones show what
differs and miss them.
"""

import gzip
import io
import json
import sys
import tarfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import device_compare
from accuracy import read_json, write_json
from device_bars import judged

MB = 10**6


def step(allocated, reserved):
    """The one window of a step."""
    moment = {"allocated_bytes": allocated // 2, "reserved_bytes": reserved}
    peaks = {"peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved}
    return [{"phase": "forward", "start": moment, "end": moment, **peaks, "num_alloc_retries": 0}]


def pair(config, suggestion=96, trains=97, *, ran=True, num_ooms=0):
    truth = {"trains": trains, "gets_by": trains + 1, "num_trials": 5}
    return {
        "config": config,
        "card": "NVIDIA H200",
        "capacity_bytes": 12 * 2**30,
        "suggestion": {"size": suggestion, "limit_without_retry": 100, "limit": 101},
        "trial": {
            "batch_size": suggestion,
            "ran": ran,
            "num_retries": 0,
            "num_last_retries": 0,
            "num_ooms": num_ooms,
        },
        "less": truth,
        "whole": truth,
        "searches": [],
    }


def make(
    folder,
    *,
    measured=None,
    predicted=None,
    pairs=None,
    events=None,
    workspace=100,
    context=512 * MB,
):
    """A folder of 100 trainings of 1000 MB allocated and 2000 MB reserved, each predicted so; by
    name other figures.

    Args:
        folder: Where.
        measured: Name -> step.
        predicted: Name -> step, or None for no prediction.
        pairs: Of batch sizes.
        events: Of the one history.
        workspace: cuDNN's answer.
        context: Bytes of the context.
    """
    folder.mkdir()
    names = [f"model-{number}" for number in range(100)]
    truth = {name: {"windows": [[step(1000 * MB, 2000 * MB)]], "period": 1} for name in names}
    truth |= {
        name: {"windows": [[window]], "period": 1} for name, window in (measured or {}).items()
    }
    answers = {name: {"result": {"steps": one["windows"][-1]}} for name, one in truth.items()}
    answers |= {
        name: {"result": {"steps": [window]}} if window else {"error": "not traced"}
        for name, window in (predicted or {}).items()
    }
    about = {"device": "NVIDIA H200", "is_virtual": True}
    write_json(folder / "accuracy.json.gz", {"environment": about, "configs": truth})
    write_json(
        folder / "predicted.json.gz", {"environment": about, "answers": answers, "left_out": {}}
    )
    write_json(
        folder / "batch_size.json",
        {"pairs": pairs or [pair(f"model-{number}") for number in range(8)]},
    )
    facts = {
        "context_bytes": {"after": context},
        "workspace_bytes": {"product": 32 * MB},
        "first_segments_bytes": {"1": 2 * 2**20},
    }
    write_json(folder / "facts.json", {"environment": about, **facts})
    write_json(
        folder / "NVIDIA-H200.json.gz",
        {"cases": {"plain": [[100, -100], []]}, "workspaces": {"plain": workspace}},
    )
    history = gzip.compress(
        json.dumps({"events": events or [["a", 5, 512, 0], ["r", 0, 512, 0]]}).encode()
    )
    with tarfile.open(folder / "allocator.tar", "w") as archive:
        member = tarfile.TarInfo("./cnn.json.gz")
        member.size = len(history)
        archive.addfile(member, io.BytesIO(history))
    return folder


def run(monkeypatch, capsys, *arguments):
    """The exit code and the page."""
    monkeypatch.setattr(sys, "argv", ["device_compare.py", *map(str, arguments)])
    return device_compare.main(), capsys.readouterr().out


def missed(folder):
    return [bar.asked for bar in judged(folder) if not bar.is_met]


def test_equal_folders_meet_every_bar_and_differ_in_nothing(tmp_path, monkeypatch, capsys):
    code, page = run(
        monkeypatch,
        capsys,
        make(tmp_path / "real"),
        make(tmp_path / "virtual"),
        "--out",
        tmp_path / "out",
    )
    assert code == 0
    assert "**no**" not in page
    assert "| figure | differ |" not in page
    assert page == (tmp_path / "out" / "device_compare.md").read_text()
    result = json.loads((tmp_path / "out" / "device_compare.json").read_text())
    assert set(result["differences"]) == {section.title for section in device_compare.SECTIONS}
    assert not any(result["differences"].values())
    assert len(result["bars"]) == 8


def test_each_figure_that_differs_is_told_with_both_values(tmp_path, monkeypatch, capsys):
    real = make(tmp_path / "real")
    virtual = make(
        tmp_path / "virtual",
        measured={"model-7": step(1010 * MB, 2000 * MB)},
        pairs=[pair("model-0", 95), *(pair(f"model-{number}") for number in range(1, 8))],
        events=[["a", 9, 512, 0], ["r", 0, 1024, 0]],
        workspace=300,
        context=400 * MB,
    )
    code, page = run(monkeypatch, capsys, real, virtual)
    assert code == 0  # the bars are about the first alone
    for row in (
        "| model-7, window 1, forward | peak_allocated_bytes | 1000000000 | 1010000000 |",
        "| peak_allocated_bytes | 1 | 100 | +1.000 % | +1.000 % |",
        "| cnn, event 1 of 2 | code and bytes | ['r', 512] | ['r', 1024] |",
        "| plain | cuDNN's answer | 100 | 300 |",
        "| context_bytes | after | 512000000 | 400000000 |",
        "| model-0 | suggestion | 96 | 95 |",
    ):
        assert row in page


def test_a_training_that_runs_on_one_device_alone_is_told(tmp_path, monkeypatch, capsys):
    real, virtual = (
        make(tmp_path / "real", measured={"extra": step(MB, MB)}),
        make(tmp_path / "virtual"),
    )
    assert "| extra | runs | True | False |" in run(monkeypatch, capsys, real, virtual)[1]


def test_of_a_part_that_failed_the_missing_file_is_named_and_its_bars_are_missed(
    tmp_path, monkeypatch, capsys
):
    real, virtual = make(tmp_path / "real"), make(tmp_path / "virtual")
    (real / "batch_size.json").unlink()
    (virtual / "allocator.tar").unlink()
    code, page = run(monkeypatch, capsys, real, virtual)
    assert code == 1
    assert "| batch sizes | batch_size.json is not there | **no** |" in page
    assert "virtual/allocator.tar is not there." in page
    assert "real/batch_size.json is not there." in page


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ((1005, 2000), []),
        ((1006, 2000), ["peak allocated: median error at most 0.5 %"]),
        ((1000, 2040), []),
        ((1000, 2041), ["peak reserved: median error at most 2 %"]),
    ],
)
def test_the_median_error_has_a_bar_for_each_kind_of_peak(tmp_path, figures, expected):
    allocated, reserved = figures
    wrong = {f"model-{number}": step(allocated * MB, reserved * MB) for number in range(60)}
    assert missed(make(tmp_path / "real", predicted=wrong)) == expected


def test_so_has_the_95th_percentile(tmp_path):
    wrong = {f"model-{number}": step(1021 * MB, 2121 * MB) for number in range(6)}
    assert missed(make(tmp_path / "real", predicted=wrong)) == [
        "peak allocated: 95th percentile of the error at most 2 %",
        "peak reserved: 95th percentile of the error at most 6 %",
    ]
    five = {name: wrong[name] for name in list(wrong)[:5]}
    assert missed(make(tmp_path / "another", predicted=five)) == []


@pytest.mark.parametrize("wrong", [step(997 * MB, 2000 * MB), step(1000 * MB, 1959 * MB), None])
def test_in_two_of_a_hundred_trainings_a_peak_may_be_above_its_bound_or_have_no_prediction(
    tmp_path, wrong
):
    assert (
        missed(make(tmp_path / "two", predicted=dict.fromkeys(("model-0", "model-1"), wrong))) == []
    )
    (asked,) = missed(
        make(tmp_path / "three", predicted=dict.fromkeys(("model-0", "model-1", "model-2"), wrong))
    )
    assert (
        asked == "a peak above its stated bound, or no prediction, in at most 2% of the trainings"
    )


def test_what_is_within_the_stated_band_is_not_above_the_bound(tmp_path):
    close = {f"model-{number}": step(998 * MB, 1960 * MB) for number in range(50)}
    assert missed(make(tmp_path / "real", predicted=close)) == []


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (pair("model-0", ran=False), ["the suggested batch never runs out of memory"]),
        (pair("model-0", num_ooms=1), ["the suggested batch never runs out of memory"]),
        (pair("model-0", 97, 100), []),
        (pair("model-0", 96, 100), ["it is at least 97% of the true one"]),
        (pair("model-1"), ["of at least 8 models"]),
    ],
)
def test_suggested_batches_have_bars(tmp_path, one, expected):
    assert (
        missed(
            make(
                tmp_path / "real", pairs=[one, *(pair(f"model-{number}") for number in range(1, 8))]
            )
        )
        == expected
    )


def test_what_a_virtual_device_only_guesses_is_left_out_of_the_bars(tmp_path):
    folder = make(
        tmp_path / "real",
        predicted=dict.fromkeys((f"model-{number}" for number in range(9)), step(MB, MB)),
    )
    assert missed(folder)
    predicted = read_json(folder / "predicted.json.gz")
    write_json(
        folder / "predicted.json.gz",
        predicted | {"left_out": {f"model-{number}": "a guess" for number in range(9)}},
    )
    assert missed(folder) == []
