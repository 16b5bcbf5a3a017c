import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

import memcallback
from memcallback import MemoryCallback, MemoryWarning

PROJECT = Path(memcallback.__file__).parents[1] / "pyproject.toml"


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    """The entry points of pyproject.toml, as where the package is installed."""
    tomllib = pytest.importorskip("tomllib")
    groups = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]
    folder = tmp_path / "site" / "memcallback-99.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: memcallback\nVersion: 99\n")
    lines = [f"[{name}]\n{key} = {at}" for name, of in groups.items() for key, at in of.items()]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(folder.parent)


@pytest.fixture
def trainer(tmp_path):
    def make(callbacks=None, trainer_class=Trainer, **options):
        return trainer_class(
            default_root_dir=tmp_path,
            accelerator="cpu",
            max_steps=3,
            logger=False,
            callbacks=callbacks,
            enable_model_summary=False,
            enable_progress_bar=False,
            **options,
        )

    return make


def added(trainer):
    return [one for one in trainer.callbacks if "MemoryCallback" in type(one).__name__]


def test_with_1_a_trainer_gets_the_callback_and_reports(trainer, monkeypatch, capsys):
    monkeypatch.setenv("MEMCALLBACK", "1")
    made = trainer()
    (callback,) = added(made)
    assert isinstance(callback, MemoryCallback)
    made.fit(BoringModel())
    assert callback.recorder.num_updates == 3
    assert callback.report is not None
    assert "memcallback │ BoringModel" in capsys.readouterr().out


def test_a_trainer_of_the_other_package_of_lightning_gets_it_too():
    pytest.importorskip("pytorch_lightning")
    code = "import pytorch_lightning as pl\n"
    code += "print([type(one).__mro__[1].__name__ for one in pl.Trainer(logger=False).callbacks])"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"MEMCALLBACK": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "MemoryCallback" in done.stdout, done.stderr


def test_a_trainer_that_has_one_gets_no_other(trainer, monkeypatch):
    monkeypatch.setenv("MEMCALLBACK", "1")
    own = MemoryCallback()
    assert added(trainer([own])) == [own]


def test_a_callback_that_the_module_brings_takes_its_place(trainer, monkeypatch, capsys):
    monkeypatch.setenv("MEMCALLBACK", "1")
    own, was_set_up = MemoryCallback(), []

    class Other(Callback):
        def setup(self, trainer, pl_module, stage):
            was_set_up.append(self)

    class Brings(BoringModel):
        def configure_callbacks(self):
            return own

    other = Other()
    made = trainer([other])
    (of_environment,) = added(made)
    made.fit(Brings())
    assert added(made) == [own]
    assert own.recorder.num_updates == 3
    assert of_environment.recorder is None
    assert was_set_up == [other]
    assert capsys.readouterr().out.count("memcallback │ ") == 1


def test_a_trainer_that_is_made_inside_of_another_gets_its_own(trainer, monkeypatch):
    monkeypatch.setenv("MEMCALLBACK", "1")
    inner = []

    class Nested(BoringModel):
        def on_train_start(self):
            inner.append(trainer())

    trainer(enable_checkpointing=False).fit(Nested())
    assert len(added(inner[0])) == 1


@pytest.mark.parametrize("value", [None, "", "0"])
def test_without_the_variable_nothing_is_added(value, trainer, monkeypatch):
    if value is None:
        monkeypatch.delenv("MEMCALLBACK", raising=False)
    else:
        monkeypatch.setenv("MEMCALLBACK", value)
    assert added(trainer()) == []


def test_another_value_is_a_warning_that_says_which_there_are(trainer, monkeypatch):
    monkeypatch.setenv("MEMCALLBACK", "yes")
    with pytest.warns(MemoryWarning, match="MEMCALLBACK='yes' is neither 1 nor 0"):
        made = trainer()
    assert added(made) == []


def test_a_callback_that_cannot_be_made_is_a_warning_and_the_trainer_is_made(trainer, monkeypatch):
    monkeypatch.setenv("MEMCALLBACK", "1")
    monkeypatch.setitem(sys.modules, "memcallback.integrations.lightning.added_callback", None)
    with pytest.warns(MemoryWarning, match="No MemoryCallback is added"):
        made = trainer()
    assert added(made) == []


def test_without_the_variable_the_entry_point_imports_nothing_heavy():
    code = "import sys\nfrom memcallback.integrations.lightning.from_environment import callbacks\n"
    code += "assert callbacks() == []\nprint(*{*sys.modules} & {'torch', 'lightning', 'numpy'})"
    environment = {name: value for name, value in os.environ.items() if name != "MEMCALLBACK"}
    environment["PYTHONPATH"] = str(PROJECT.parent)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_a_checkpoint_has_nothing_of_it_and_it_can_be_sent_to_other_processes(
    trainer, monkeypatch, tmp_path
):
    monkeypatch.setenv("MEMCALLBACK", "1")
    made = trainer()
    made.fit(BoringModel())
    made.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert not [name for name in saved["callbacks"] if "Memory" in name]
    (callback,) = added(made)
    assert type(pickle.loads(pickle.dumps(callback))) is type(callback)
