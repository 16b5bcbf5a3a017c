"""The workspaces of cuBLAS and cuBLASLt are those that were recorded with several versions of
PyTorch on (virtual) devices.
"""

import json

import pytest
from device_loop import figures
from workspace_steps import RECORDED, STEPS, step

import memcallback as mc

DOCUMENT = json.loads(RECORDED.read_text())


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("run", DOCUMENT)
def test_every_phase_takes_what_was_recorded_with_a_version(run, name, monkeypatch):
    recorded = DOCUMENT[run]
    monkeypatch.setattr("torch.__version__", recorded["torch"])
    prediction = mc.predict(step(name), device=recorded["device"])
    predicted = [list(map(list, figures(one))) for one in prediction.steps]
    assert predicted == recorded["steps"][name]
