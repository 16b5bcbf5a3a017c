"""In bfloat16 on a card without it, PyTorch takes other kernels: what they take is what was
recorded on such a (virtual) device.
"""

import json

import pytest
from bfloat16_steps import RECORDED, STEPS, figures, step

import memcallback as mc

DOCUMENT = json.loads(RECORDED.read_text())


@pytest.mark.parametrize("name", STEPS)
def test_every_phase_takes_what_was_recorded(name):
    prediction = mc.predict(step(name), device=DOCUMENT["device"])
    assert figures(prediction.step) == DOCUMENT["steps"][name]
