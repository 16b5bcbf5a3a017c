"""The small changes that `make mutants` tries are made in all modules that it is for."""

from pathlib import Path

from mutants import LEFT_OUT, NEAREST

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "memcallback"


def test_each_module_has_its_nearest_tests_or_is_left_out():
    modules = {
        path.relative_to(PACKAGE).with_suffix("").as_posix()
        for folder in ("core", "prediction/allocator", "batch_size")
        for path in (PACKAGE / folder).glob("*.py")
        if path.stem != "__init__"
    }
    assert modules | {"prediction/replay", "prediction/steady_state"} == {*NEAREST, *LEFT_OUT}
    assert not set(NEAREST) & set(LEFT_OUT)


def test_the_nearest_tests_are_there():
    names = {name for names in NEAREST.values() for name in names.split()}
    assert [name for name in sorted(names) if not (TESTS / f"{name}.py").is_file()] == []
