"""Plans with the rows that a test looks at: a whole plan predicts a step some thirty times."""

import re
from contextlib import contextmanager

import pytest

from memcallback.savings import what_if


@contextmanager
def only(*names):
    """In it a plan tries the savings of the step whose whole names match one of these patterns."""
    savings_for = what_if.savings_for

    def chosen(*step):
        return (
            saving
            for saving in savings_for(*step)
            if any(re.fullmatch(name, saving.name) for name in names)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(what_if, "savings_for", chosen)
        yield
