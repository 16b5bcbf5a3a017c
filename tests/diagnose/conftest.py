"""No test runner is on the stack of a user's program: all that pytest's frames lead to takes longer
to search than all that a test makes.
"""

from itertools import takewhile
from pathlib import Path

import _pytest
import pytest

from memcallback.diagnose.tensors import diff, others, variables

_PYTEST = str(Path(_pytest.__file__).parent)


def _stack_of_the_test(frame):
    return takewhile(
        lambda frame: not frame.f_code.co_filename.startswith(_PYTEST), variables.stack(frame)
    )


@pytest.fixture(autouse=True)
def without_the_frames_of_pytest(monkeypatch):
    for module in (diff, others):
        monkeypatch.setattr(module, "stack", _stack_of_the_test)
