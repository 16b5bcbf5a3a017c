"""What is measured on one machine is kept case by case, and read on another one."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from two_machines import Measured, in_new_process, measure_all


def test_every_case_is_kept_with_what_it_took_or_why_it_failed(tmp_path, capsys):
    path = tmp_path / "made" / "measured.json"

    def measure(name):
        if name == "second":
            raise RuntimeError("ValueError: no such card")
        return {"allocated": len(name)}

    measure_all(["first", "second", "third"], measure, path, device="NVIDIA X 80GB")
    found = Measured.read(path)
    assert found.cases == {
        "first": {"allocated": 5},
        "second": {"error": "ValueError: no such card"},
        "third": {"allocated": 5},
    }
    assert found.device == "NVIDIA X 80GB"
    assert found.folder.name == f"nvidia-x-80gb-{found.about['date']}"
    told = found.told()
    assert told["device"] == "NVIDIA X 80GB"
    assert "without a device" in told["predicted by"]
    assert "no such card" in capsys.readouterr().out


def test_a_process_of_its_own_gives_its_last_line_or_its_error(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\n"
        "print('progress')\n"
        "if sys.argv[1] == 'bad':\n"
        "    raise LookupError('which one?')\n"
        "print(json.dumps({'of': sys.argv[1]}))\n"
    )
    assert in_new_process(str(script), "good") == {"of": "good"}
    with pytest.raises(RuntimeError, match=r"^LookupError: which one\?$"):
        in_new_process(str(script), "bad")
