"""In bfloat16 on a card without it, PyTorch takes other kernels: what they take is what was
recorded on such a (virtual) device.
"""

import json
from dataclasses import replace

import pytest
from bfloat16_steps import RECORDED, STEPS, figures, step

import memcallback as mc
from memcallback.devices.catalogue import find_device

DOCUMENT = json.loads(RECORDED.read_text())
#: With the workspaces of the PyTorch that ran there.
CARD = replace(find_device(DOCUMENT["device"]), torch_version=(2, 11))


@pytest.mark.parametrize("name", STEPS)
def test_every_phase_takes_what_was_recorded(name):
    prediction = mc.predict(step(name), device=CARD)
    assert figures(prediction.step) == DOCUMENT["steps"][name]
