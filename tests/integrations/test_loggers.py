"""Real loggers, offline: curves, pictures, texts and the page arrive, and the training stays."""

import json
import random

import pytest
import torch
import training
from lightning.pytorch.loggers import CometLogger, MLFlowLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger

from memcallback import MemoryCallback, MemoryWarning

PICTURES = ["1_timeline", "2_at_the_peak", "3_batch_size", "5_modules"]
PEAKS = ["peak_forward", "peak_backward", "peak_optimizer"]
# The libraries' own: threads and files that they leave to the end of the program, old syntax.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning",
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


def fit(tmp_path, logger, callbacks=None):
    torch.manual_seed(0)
    random.seed(0)
    callbacks = [MemoryCallback(per_module=True)] if callbacks is None else callbacks
    trainer = training.trainer(tmp_path, callbacks, logger=logger)
    module = training.Automatic()
    trainer.fit(module, training.loader(6))
    return [parameter.detach().clone() for parameter in module.parameters()]


class Row:
    """What a run of W&B is given, in the order in which it is."""

    def __init__(self, run):
        self.calls, self._log = [], run.log
        run.log = self

    def __call__(self, data, step=None, **options):
        self.calls.append((data, step))
        self._log(data, step=step, **options)


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    library = pytest.importorskip("wandb")
    yield library
    library.finish()


def test_wandb_gets_curves_pictures_texts_and_the_page(tmp_path, wandb):
    logger = WandbLogger(save_dir=tmp_path, offline=True, project="memory")
    rows = Row(logger.experiment)
    fit(tmp_path, logger)
    ours = {key: value for data, _ in rows.calls for key, value in data.items()}
    for peak in PEAKS:
        assert ours[f"memory_gib/predicted/{peak}"] == pytest.approx(
            ours[f"memory_gib/{peak}"], rel=0.1
        )
    assert {type(ours[f"memory_pictures/{name}"]) for name in PICTURES} == {wandb.Image}
    for tag in ("memory/report", "memory/modules", "memory/page"):
        assert isinstance(ours[tag], wandb.Html)
    assert len(list(tmp_path.rglob("media/images/memory_pictures/*.png"))) >= len(PICTURES)
    assert len(list(tmp_path.rglob("media/html/memory/*.html"))) >= 3


def test_wandb_drops_nothing_of_a_users_since_no_step_of_its_own_is_given(tmp_path, wandb):
    logger = WandbLogger(save_dir=tmp_path, offline=True, project="memory")
    rows = Row(logger.experiment)
    fit(tmp_path, logger)
    assert {step for _, step in rows.calls} == {None}
    assert all("trainer/global_step" in data for data, _ in rows.calls)
    losses = [data["trainer/global_step"] for data, _ in rows.calls if "loss" in data]
    assert losses == [0, 1, 2, 3, 4, 5]


def test_with_wandb_the_training_has_the_same_bits_with_and_without_the_callback(tmp_path, wandb):
    def run(name, callbacks):
        logger = WandbLogger(save_dir=tmp_path, offline=True, project="memory", name=name)
        rows = Row(logger.experiment)
        weights = fit(tmp_path, logger, callbacks)
        wandb.finish()
        own = [
            {key: value for key, value in data.items() if not key.startswith("_")}
            for data, _ in rows.calls
            if not any(key.startswith("memory") for key in data)
        ]
        return weights, torch.get_rng_state(), random.getstate(), own

    with_it, without = run("with", None), run("without", [])
    assert all(torch.equal(*pair) for pair in zip(with_it[0], without[0], strict=True))
    assert torch.equal(with_it[1], without[1])
    assert with_it[2:] == without[2:]


@pytest.fixture
def mlflow(monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return pytest.importorskip("mlflow")


def artifacts(client, run_id, folder):
    return sorted(artifact.path for artifact in client.list_artifacts(run_id, folder))


def test_mlflow_gets_curves_and_the_last_picture_text_and_page_as_artifacts(tmp_path, mlflow):
    logger = MLFlowLogger(tracking_uri=f"file:{tmp_path}/mlruns")
    fit(tmp_path, logger)
    client, run_id = logger.experiment, logger.run_id
    points = client.get_metric_history(run_id, "memory_gib/predicted/peak_forward")
    assert [point.step for point in points] == [0, 1, 2, 3, 4, 5]
    assert artifacts(client, run_id, "memory_pictures") == [
        f"memory_pictures/{name}.png" for name in PICTURES
    ]
    assert artifacts(client, run_id, "memory") == [
        "memory/modules.md",
        "memory/page.html",
        "memory/report.md",
    ]
    (report,) = tmp_path.rglob("report.md")
    assert report.read_text(encoding="utf-8").startswith("FITS: measured peak ")
    assert client.get_run(run_id).info.status == "FINISHED"


def test_comet_gets_curves_pictures_texts_and_the_page(tmp_path, monkeypatch):
    monkeypatch.setenv("COMET_LOGGING_CONSOLE", "CRITICAL")
    pytest.importorskip("comet_ml")
    logger = CometLogger(online=False, offline_directory=str(tmp_path), project="memory")
    calls = {}

    def noted(kind):
        log = getattr(logger.experiment, kind)
        calls[kind] = []

        def call(*args, **options):
            calls[kind].append(options)
            return log(*args, **options)

        return call

    for kind in ("log_image", "log_text", "log_html"):
        monkeypatch.setattr(logger.experiment, kind, noted(kind))
    fit(tmp_path, logger)
    assert {options["name"] for options in calls["log_image"]} == {
        f"memory_pictures/{name}" for name in PICTURES
    }
    assert {options["metadata"]["tag"] for options in calls["log_text"]} == {
        "memory/report",
        "memory/modules",
    }
    assert len(calls["log_html"]) == 1
    logger.experiment.end()


class NumbersOnly(DummyLogger):
    """Takes numbers, and raises where it gets anything else."""

    def __init__(self):
        super().__init__()
        self.metrics = []

    def log_metrics(self, metrics, step=None):
        json.dumps(metrics)
        self.metrics.append(metrics)


#: Its class is known to take pictures.
NumbersOnly.__name__ = "WandbLogger"


def test_a_logger_that_fails_at_pictures_is_told_once_and_keeps_its_curves(tmp_path):
    logger = NumbersOnly()
    with pytest.warns(MemoryWarning, match="WandbLogger gets no more pictures and texts") as told:
        fit(tmp_path, logger)
    assert len([one for one in told if one.category is MemoryWarning]) == 1
    tags = {tag for metrics in logger.metrics for tag in metrics}
    assert {f"memory_gib/{peak}" for peak in PEAKS} <= tags
