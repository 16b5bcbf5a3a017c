"""The notebook of the examples runs, and says what it says in the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "llama_on_my_card.ipynb"
#: In a process of its own: warnings of the notebook's machinery are not ours.
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=None, resources={"metadata": {"path": "."}}).execute()
nbformat.write(notebook, "executed.ipynb")
"""


def printed(path):
    """What each cell printed, without what went to stderr."""
    cells = json.loads(path.read_text())["cells"]
    return [
        "".join("".join(out["text"]) for out in cell["outputs"] if out.get("name") == "stdout")
        for cell in cells
        if cell["cell_type"] == "code"
    ]


def test_the_notebook_says_on_a_cpu_what_it_says_in_the_repository(tmp_path):
    for package in ("nbclient", "ipykernel", "peft", "bitsandbytes"):
        pytest.importorskip(package)
    torch = pytest.importorskip("torch")
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(NOTEBOOK.parents[1]),
        "PYTHONWARNINGS": "ignore",
        "MEMCALLBACK_ISOLATE": "1",  # as a reader runs it
    }
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(NOTEBOOK)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    outputs = printed(tmp_path / "executed.ipynb")
    assert (tmp_path / "llama_on_my_card.html").stat().st_size > 50_000
    if not torch.__version__.startswith("2.13"):
        pytest.skip("the notebook's figures are those of PyTorch 2.13")
    assert outputs == printed(NOTEBOOK)


def test_the_notebook_keeps_no_trace_of_the_machine_that_ran_it():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    outputs = [out for cell in cells for out in cell.get("outputs", ())]
    assert {out.get("name") for out in outputs} == {"stdout"}
    assert all("/home/" not in "".join(out["text"]) for out in outputs)
