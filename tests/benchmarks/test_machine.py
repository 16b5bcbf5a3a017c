"""Where results of benchmarks go, and which of them is the newest."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import machine

IS_FOLDER = re.compile(r"[a-z0-9-]+-\d{4}-\d\d-\d\d")


def test_a_folder_has_the_devices_name_and_the_date(monkeypatch):
    monkeypatch.delenv("VGPU", raising=False)
    monkeypatch.setattr(machine, "today", lambda: "2026-01-02")
    assert (
        machine.results_folder("NVIDIA A100-SXM4-80GB")
        == machine.RESULTS / "nvidia-a100-sxm4-80gb-2026-01-02"
    )
    assert machine.results_folder("CPU") == machine.RESULTS / "cpu-2026-01-02"


def test_a_virtual_device_is_called_so_and_a_cpu_is_real(monkeypatch):
    monkeypatch.setenv("VGPU", "1")
    assert machine.kind("Tesla T4") == "tesla-t4-virtual"
    assert machine.kind("CPU") == "cpu"
    assert machine.driver() == "none (virtual device)"


def test_the_newest_result_is_that_of_the_last_date_that_has_the_file(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    for folder, file in (
        ("t4-2026-01-09", "a.json"),
        ("t4-2026-02-01", "a.json"),
        ("t4-2026-03-01", "b.json"),
        ("t4-virtual-2026-04-01", "a.json"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).touch()
    assert machine.latest_result("t4", "a.json") == tmp_path / "t4-2026-02-01" / "a.json"
    assert machine.latest_result("t4-virtual", "a.json").parent.name == "t4-virtual-2026-04-01"
    with pytest.raises(FileNotFoundError, match=r"no c\.json"):
        machine.latest_result("t4", "c.json")


def test_a_command_says_where_a_file_is_by_its_name_alone(monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["/somewhere/benchmarks/law.py", "--only", "a b", "--out", "/somewhere/else"]
    )
    assert machine.command() == "python benchmarks/law.py --only 'a b' --out else"


def test_each_page_of_results_lies_beside_its_data_with_a_command_and_what_it_does_not_report():
    folders = [path for path in machine.RESULTS.iterdir() if path.is_dir()]
    pages = [page for folder in folders for page in folder.glob("*.md")]
    assert len(pages) >= 10
    for page in pages:
        assert IS_FOLDER.fullmatch(page.parent.name)
        assert list(page.parent.glob(f"{page.stem}.json*")), page
        text = page.read_text()
        assert "date: " in text, page
        assert "command: " in text, page
        assert "Not reported:" in text, page
