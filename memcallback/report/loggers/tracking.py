"""Experiment trackers that take texts, pictures and pages: W&B, MLflow and Comet."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING, Any

from memcallback.core.document import Document
from memcallback.report.loggers.destination import LogMetrics, ValuesOnly

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class WandbRun(ValuesOnly):
    """A run of W&B: pictures as images, texts and the page as HTML.

    W&B drops what is logged under an earlier step than the last one, so no step of its own is ever
    given: the Trainer's step is a value among the others, as for the Trainer's own metrics.
    """

    takes_all = True

    def log_text(self, tag: str, document: Document, step: int) -> None:
        self.log_page(tag, document.html(), step)

    def log_image(self, tag: str, image: npt.NDArray[np.uint8], step: int) -> None:
        import wandb

        self._log_metrics({tag: wandb.Image(image)}, step)

    def log_page(self, tag: str, html: str, step: int) -> None:
        import wandb

        self._log_metrics({tag: wandb.Html(StringIO(html))}, step)


class MlflowRun(ValuesOnly):
    """A run of MLflow: texts, pictures and the page are artifacts, the last of each tag."""

    takes_all = True

    def __init__(self, name: str, log_metrics: LogMetrics, client: Any, run_id: str) -> None:
        super().__init__(name, log_metrics)
        self._client = client
        self._run_id = run_id

    def log_text(self, tag: str, document: Document, step: int) -> None:
        self._client.log_text(self._run_id, document.markdown(), f"{tag}.md")

    def log_image(self, tag: str, image: npt.NDArray[np.uint8], step: int) -> None:
        self._client.log_image(self._run_id, image, f"{tag}.png")

    def log_page(self, tag: str, html: str, step: int) -> None:
        self._client.log_text(self._run_id, html, f"{tag}.html")


class CometExperiment(ValuesOnly):
    """An experiment of Comet."""

    takes_all = True

    def __init__(self, name: str, log_metrics: LogMetrics, experiment: Any) -> None:
        super().__init__(name, log_metrics)
        self._experiment = experiment

    def log_text(self, tag: str, document: Document, step: int) -> None:
        self._experiment.log_text(document.markdown(), step=step, metadata={"tag": tag})

    def log_image(self, tag: str, image: npt.NDArray[np.uint8], step: int) -> None:
        self._experiment.log_image(image, name=tag, step=step)

    def log_page(self, tag: str, html: str, step: int) -> None:
        self._experiment.log_html(html)
