"""Real trainings, healthy and sick: the healthy ones get no warning, the sick ones theirs, once, with what is wrong in words."""

import warnings

import health_programs as programs
import pytest
import training

from memcallback import MemoryCallback, MemoryWarning
from memcallback.saved_tensors import READS_SAVED

NUM_EPOCHS = 4
ANY_DEVICE = ["cpu", pytest.param("gpu", marks=pytest.mark.cuda)]


def warnings_of(tmp_path, program, accelerator, callback=None, **options):
    """What a training warns of, in order."""
    options = (
        {"max_epochs": NUM_EPOCHS, "accelerator": accelerator, "num_sanity_val_steps": 0, "log_every_n_steps": 10}
        | program.options
        | options
    )
    others = options.pop("callbacks", [])
    callback = callback or MemoryCallback(predict=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.trainer(tmp_path, [callback, *others], **options).fit(program.module(), program.data())
    assert not callback._is_broken
    return [str(one.message) for one in caught if issubclass(one.category, MemoryWarning)]


@pytest.mark.parametrize("accelerator", ANY_DEVICE)
@pytest.mark.parametrize("name", programs.HEALTHY)
def test_a_healthy_training_gets_no_warning(tmp_path, name, accelerator):
    assert warnings_of(tmp_path, programs.HEALTHY[name], accelerator) == []


@pytest.mark.parametrize("accelerator", ANY_DEVICE)
@pytest.mark.parametrize("name", programs.SICK)
def test_a_training_that_keeps_graphs_is_told_once_what_grows_and_who_holds_it(tmp_path, name, accelerator):
    program = programs.SICK[name]
    programs.GLOBAL_LOSSES.clear()
    if name.startswith("a graph") and not READS_SAVED:
        pytest.skip("PyTorch before 2.11 tells nothing of saved tensors")
    told = warnings_of(tmp_path, program, accelerator)
    assert len(told) == 1
    assert [word for word in ("grows from step to step", *program.names) if word not in told[0]] == [], told[0]
