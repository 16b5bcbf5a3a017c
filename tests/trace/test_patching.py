"""Patches: for this thread alone, and undone as they were."""

import threading
from types import SimpleNamespace

import pytest

from memcallback import PredictionError
from memcallback.trace.patches.patching import patched


class Base:
    def inherited(self):
        return "original"


class Owner(Base):
    @staticmethod
    def static():
        return "original"

    value = "original"


def values():
    return Owner().inherited(), Owner.static(), Owner.value


def in_another_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


PATCHES = [
    (Owner, "inherited", lambda self: "patched"),
    (Owner, "static", lambda: "patched"),
    (Owner, "value", "patched"),
]


def test_functions_are_replaced_for_this_thread_and_values_for_all():
    with patched(PATCHES):
        assert values() == ("patched", "patched", "patched")
        assert in_another_thread(values) == ("original", "original", "patched")


@pytest.mark.parametrize("fails", [False, True])
def test_patches_are_undone_also_after_an_error(fails):
    before = dict(vars(Owner))
    try:
        with patched(PATCHES):
            if fails:
                raise ArithmeticError
    except ArithmeticError:
        pass
    assert vars(Owner) == before


def test_a_missing_attribute_is_named_and_nothing_stays_patched():
    owner = SimpleNamespace(__name__="torch.some_module", known=1)
    missing = [(owner, "known", 2), (owner, "unknown", 2)]
    with (
        pytest.raises(PredictionError, match=r"has no torch\.some_module\.unknown"),
        patched(missing),
    ):
        pass
    assert owner.known == 1
