"""The words for phases, stages and categories, as people read them."""

from memcallback.core.types import PERSISTENT_CATEGORIES, Category, Phase, Stage


def test_phases_are_in_the_order_in_which_they_run():
    assert [phase.label for phase in Phase] == ["forward", "backward", "optimizer step"]


def test_a_step_is_named_for_its_stage():
    assert Stage.TRAINING.label == "training step"
    assert Stage.GENERATION.label == "generation step"


def test_categories_that_can_be_counted_are_plural():
    assert [category.label for category in Category] == [
        "parameters",
        "buffers",
        "gradients",
        "optimizer state",
        "input",
        "activations",
        "temporary",
        "workspaces",
    ]


def test_what_lives_beyond_a_step_can_be_counted_and_categories_are_keys():
    assert set(Category) - set(PERSISTENT_CATEGORIES) == {
        Category.ACTIVATION,
        Category.TEMPORARY,
        Category.WORKSPACE,
    }
    assert {Category.INPUT: 1}[Category("input")] == 1
