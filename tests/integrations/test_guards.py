"""Our own faults in any hook of a callback are warnings; a wrong setting of the user raises."""

import pytest
import torch
import training

import memcallback as mc
from memcallback.integrations.lightning.trainer import predictor
from memcallback.integrations.lightning.trainer.savings import TrainerSavings
from memcallback.record.monitor import Monitor
from memcallback.record.recording import Recording


def broken(*_, **__):
    raise RuntimeError("a fault of ours")


def fit(tmp_path, callback, **options):
    torch.manual_seed(0)
    trainer = training.trainer(tmp_path, [callback], **options)
    trainer.fit(training.Automatic(), training.loader(4))
    return trainer


@pytest.mark.parametrize(
    ("owner", "name", "lost"),
    [
        (TrainerSavings, "setup", "without the savings that could not be applied"),
        (TrainerSavings, "checkpoint", "without the savings that could not be applied"),
        (TrainerSavings, "undo", "could not be undone"),
        (predictor, "copy_unsharded", "shards the module, its step will not be predicted"),
        (Monitor, "__init__", "has stopped recording"),
        (Monitor, "finish", "has stopped recording"),
        (Monitor, "close", "has stopped recording"),
    ],
)
@pytest.mark.filterwarnings("ignore::memcallback.MemoryWarning")  # a fault may cost more than one
def test_a_fault_is_a_warning_and_training_goes_on(owner, name, lost, tmp_path, monkeypatch):
    monkeypatch.setattr(owner, name, broken)
    with pytest.warns(mc.MemoryWarning, match=f"{lost}.*a fault of ours"):
        trainer = fit(tmp_path, mc.MemoryCallback())
    assert trainer.global_step == 4


@pytest.mark.parametrize(
    ("owner", "name", "lost"),
    [
        (Recording, "peaks_to_dict", "lacks the memory peaks"),
        (TrainerSavings, "state_dict", "lacks the state of amp's GradScaler"),
    ],
)
def test_a_checkpoint_is_written_in_spite_of_a_fault(owner, name, lost, tmp_path, monkeypatch):
    callback = mc.MemoryCallback(predict=False)
    trainer = fit(tmp_path, callback)
    monkeypatch.setattr(owner, name, broken)
    with pytest.warns(mc.MemoryWarning, match=f"{lost}.*a fault of ours"):
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 4


@pytest.mark.parametrize(
    "state", [{"lifetime_peak_allocated_bytes": "much"}, {"amp": "none"}, {"amp": {"scale": 1.0}}]
)
def test_a_checkpoint_of_another_kind_is_a_warning(state, tmp_path):
    callback = mc.MemoryCallback(predict=False)
    trainer = fit(tmp_path, callback)
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["callbacks"]["MemoryCallback"] = state
    torch.save(checkpoint, path)
    again = mc.MemoryCallback(predict=False, amp="16-mixed" if "amp" in state else None)
    trainer = training.trainer(tmp_path, [again], max_epochs=2)
    with pytest.warns(mc.MemoryWarning, match="in the checkpoint can"):
        trainer.fit(training.Automatic(), training.loader(4), ckpt_path=path)
    assert trainer.global_step == 8
    assert len(again.recorder.steps) > 0


@pytest.mark.parametrize("state", [None, [], "text"])
def test_a_state_that_is_none_is_a_warning(state):
    callback = mc.MemoryCallback()
    with pytest.warns(mc.MemoryWarning, match="in the checkpoint cannot be"):
        callback.load_state_dict(state)
    assert callback.state_dict() == {}


def test_a_saving_that_cannot_be_applied_still_raises(tmp_path):
    with pytest.raises(ValueError, match="accumulate_grad_batches=2"):
        fit(tmp_path, mc.MemoryCallback(accumulate=2), accumulate_grad_batches=2)
    with pytest.raises(ValueError, match="has no module named 'nowhere'"):
        fit(tmp_path, mc.MemoryCallback(checkpoint=["nowhere"]))
