"""The workspaces of cuBLAS and cuBLASLt are those that were recorded with several versions of
PyTorch on (virtual) devices.
"""

import json
from dataclasses import replace

import pytest
from device_loop import figures
from workspace_steps import RECORDED, STEPS, step

import memcallback as mc
from memcallback.devices.catalogue import find_device

DOCUMENT = json.loads(RECORDED.read_text())


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("run", DOCUMENT)
def test_every_phase_takes_what_was_recorded_with_a_version(run, name):
    recorded = DOCUMENT[run]
    version = tuple(map(int, recorded["torch"].split(".")[:2]))
    card = replace(find_device(recorded["device"]), torch_version=version)
    prediction = mc.predict(step(name), device=card)
    predicted = [list(map(list, figures(one))) for one in prediction.steps]
    assert predicted == recorded["steps"][name]
