"""What `report_to` of a Hugging Face Trainer names gets memory too; the Trainer itself does not."""

import random
from pathlib import Path

import pytest
import torch
from event_files import curves_of, events_of

import memcallback as mc
from memcallback import MemoryWarning

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

PEAKS = ["memory_gib/peak_backward", "memory_gib/peak_forward", "memory_gib/peak_optimizer"]
# The libraries' own: threads and files that they leave to the end of the program, old syntax.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning",
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 64)

    def forward(self, features, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.layer(features), labels)}


def train(folder, callbacks, report_to):
    torch.manual_seed(0)
    random.seed(0)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        report_to=report_to,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        run_name="memory",
    )
    generator = torch.Generator().manual_seed(0)
    samples = [
        {"features": torch.randn(16, generator=generator), "labels": torch.tensor(number % 64)}
        for number in range(24)
    ]
    trainer = transformers.Trainer(
        model=Small(), args=arguments, train_dataset=samples, callbacks=callbacks
    )
    trainer.train()
    return trainer


def test_tensorboard_has_its_own_run_of_the_trainer_and_runs_below(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    train(tmp_path, [mc.MemoryTrainerCallback()], "tensorboard")
    curves = curves_of(tmp_path / "board")
    assert sorted(curves) == ["", "capacity", "predicted"]
    assert list(curves[""]["train/loss"]) == [1, 2, 3, 4, 5, 6]
    for tag in PEAKS:
        assert list(curves[""][tag]) == [1, 2, 3, 4, 5, 6]
        assert next(iter(curves["predicted"][tag])) == 1
    tags = events_of(tmp_path / "board").Tags()
    assert "memory_pictures/1_timeline" in tags["images"]
    assert "memory/report/text_summary" in tags["tensors"]
    assert (tmp_path / "board" / "memory.html").exists()
    assert not (tmp_path / "memcallback").exists()


def test_wandb_gets_curves_pictures_texts_and_the_page(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    wandb = pytest.importorskip("wandb")
    run = wandb.init(project="memory")
    rows, log = [], run.log
    monkeypatch.setattr(
        run, "log", lambda data, **options: (rows.append((data, options)), log(data, **options))
    )
    trainer = train(tmp_path, [mc.MemoryTrainerCallback()], "wandb")
    wandb.finish()
    ours = [data for data, _ in rows if any(key.startswith("memory") for key in data)]
    assert [data["train/global_step"] for data in ours if PEAKS[0] in data] == [1, 2, 3, 4, 5, 6]
    assert all(options == {} for data, options in rows if data in ours)
    values = {key: value for data in ours for key, value in data.items()}
    assert isinstance(values["memory_pictures/1_timeline"], wandb.Image)
    assert isinstance(values["memory/report"], wandb.Html)
    assert isinstance(values["memory/page"], wandb.Html)
    assert not any(key.startswith("memory") for row in trainer.state.log_history for key in row)
    # W&B has the curves; the page is a file too, which the last line names.
    files = [path.name for path in tmp_path.glob("memcallback/version_*/*")]
    assert files == ["memory.html"]


def test_mlflow_has_all_in_the_trainers_run_and_no_other_run_begins(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = pytest.importorskip("mlflow")
    # Not by the environment: another test's logger may have set it in this process.
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    train(tmp_path, [mc.MemoryTrainerCallback()], "mlflow")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert mlflow.active_run() is None
    points = client.get_metric_history(run.info.run_id, "memory_gib/predicted/peak_forward")
    assert [point.step for point in points] == [1, 2, 3, 4, 5, 6]
    pages = [artifact.path for artifact in client.list_artifacts(run.info.run_id, "memory")]
    assert sorted(pages) == ["memory/page.html", "memory/report.md"]


class TrackioCallback(transformers.TrainerCallback):
    """An integration that takes values, as the Trainer's own does."""

    def __init__(self, error=None):
        self.points, self.error = [], error

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        if self.error is not None and any(tag.startswith("memory") for tag in logs):
            raise self.error
        self.points.append((state.global_step, logs))


def test_another_integration_gets_values_by_its_own_on_log(tmp_path):
    other = TrackioCallback()
    trainer = train(tmp_path, [other, mc.MemoryTrainerCallback()], "none")
    ours = [(step, logs) for step, logs in other.points if PEAKS[0] in logs]
    assert [step for step, _ in ours] == [1, 2, 3, 4, 5, 6]
    assert all(f"memory_gib/predicted/{tag[11:]}" in ours[-1][1] for tag in PEAKS)
    assert trainer.state.global_step == 6


def test_an_integration_that_raises_is_told_once_and_the_training_goes_on(tmp_path):
    other = TrackioCallback(ConnectionError("no server"))
    with pytest.warns(MemoryWarning, match="TrackioCallback gets no more memory values") as told:
        trainer = train(tmp_path, [other, mc.MemoryTrainerCallback()], "none")
    assert len([one for one in told if one.category is MemoryWarning]) == 1
    assert trainer.state.global_step == 6


def test_the_training_is_the_same_with_and_without_the_callback(tmp_path, monkeypatch):
    def run(name, callbacks):
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / name))
        trainer = train(tmp_path / name, callbacks, "tensorboard")
        history = [
            {key: value for key, value in row.items() if key in ("loss", "grad_norm", "step")}
            for row in trainer.state.log_history
        ]
        own = curves_of(Path(tmp_path / name))[""]
        losses = {tag: points for tag, points in own.items() if tag == "train/loss"}
        return list(trainer.model.parameters()), torch.get_rng_state(), history, losses

    with_it, without = run("with", [mc.MemoryTrainerCallback()]), run("without", [])
    assert all(torch.equal(*pair) for pair in zip(with_it[0], without[0], strict=True))
    assert torch.equal(with_it[1], without[1])
    assert with_it[2:] == without[2:]
