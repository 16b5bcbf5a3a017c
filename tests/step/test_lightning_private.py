"""Lightning's private parts: named in one module, and a missing one says what it costs."""

import ast
from pathlib import Path

import pytest
import training

import memcallback as mc
from memcallback.step import lightning_private

PACKAGE = Path(mc.__file__).parent
NAMES = {
    "_broadcast_sigterm_tensor",
    "_cache_enabled",
    "_combined_loader",
    "_data_fetcher",
    "_data_source",
    "_default_root_dir",
    "_device_mesh",
    "_run_stage",
    "_setup_activation_checkpointing",
    "_trainer",
    "_TunerExitException",
}


def test_private_names_of_lightning_are_in_one_module():
    for path in PACKAGE.rglob("*.py"):
        if path.stem != "lightning_private":
            nodes = [
                n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)
            ]
            of_others = {
                node.attr
                for node in nodes
                if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
            }
            assert not of_others & NAMES, path


@pytest.fixture
def fitted(tmp_path):
    trainer = training.trainer(tmp_path)
    trainer.fit(training.Automatic(), training.loader())
    return trainer


def test_loaders_are_found_where_fit_has_put_them_and_forgotten(fitted):
    assert lightning_private.has_made_loaders(fitted)
    sources = lightning_private.loader_sources(fitted)
    assert len(list(sources.training.instance)) == 4
    lightning_private.forget_loaders(fitted)
    assert not lightning_private.has_made_loaders(fitted)


def test_a_part_that_is_missing_says_what_it_is_needed_for(fitted):
    loop = fitted.fit_loop
    vars(loop)["kept"] = vars(loop).pop("_data_source")
    message = r"Lightning's _FitLoop has no _data_source \(needed for fit_batch_size\)"
    with pytest.raises(mc.PredictionError, match=message):
        lightning_private.loader_sources(fitted)


def test_a_module_without_a_trainer_has_none():
    module = training.Automatic()
    assert lightning_private.trainer_of(module) is None
    lightning_private.set_trainer(module, "one")
    assert lightning_private.trainer_of(module) == "one"
