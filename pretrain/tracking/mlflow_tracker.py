"""MLflow: a run of a server or of a database, found again by the tag `pretrain.id`.

The client retries a server that is away for minutes, in the thread of its mirror. Metrics cannot
be deleted there, so a step is sent once. Without MLFLOW_TRACKING_URI, `auto` is mlflow.db in the
run folder, with the artifacts beside it: `mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db`.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pretrain.config.tracking import TrackingConfig
from pretrain.tracking.tracker import Identity, Tracker, panel_name, without_secrets
from pretrain.utils.log import quiet_libraries

_TAG = "pretrain.id"
_MAX_BATCH = 1000
_MAX_PARAMS = 100
_MAX_PARAM_CHARACTERS = 6000
_MAX_NAME_CHARACTERS = 250
_NO_NAME = re.compile(r"[^/\w.\- :]")


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the leaves of nested dicts under their dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            key = _NO_NAME.sub("_", f"{prefix}{name}")[:_MAX_NAME_CHARACTERS]
            yield key, str(value)[:_MAX_PARAM_CHARACTERS]


class MlflowTracker(Tracker):
    """Metrics; the config as params and as a file; facts as tags; texts and pictures as files."""

    name: ClassVar[str] = "mlflow"

    def __init__(self, run_dir: Path, config: TrackingConfig, identity: Identity) -> None:
        uri = config.mlflow if config.mlflow != "auto" else os.environ.get("MLFLOW_TRACKING_URI")
        self._is_local = not uri
        self._uri = uri or f"sqlite:///{(run_dir / 'mlflow.db').resolve()}"
        self._artifacts = (run_dir / "mlflow").resolve().as_uri()
        self._config = config
        self._identity = identity
        self.modes = [""]
        self._client: Any = None
        self._run_id = ""

    def open(self, mode: str, facts: Mapping[str, Any]) -> None:
        """Finds the run in the experiment that `tracking.project` names, or creates both."""
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunTag

        quiet_libraries("mlflow", "alembic")
        client = self._client = MlflowClient(tracking_uri=self._uri)
        project = self._config.project
        experiment = client.get_experiment_by_name(project)
        place = self._artifacts if self._is_local else None
        if experiment is None:
            number = client.create_experiment(project, artifact_location=place)
        else:
            number = experiment.experiment_id
        ours = f"tags.`{_TAG}` = '{self._identity.id}'"
        runs = client.search_runs([number], ours, max_results=1)
        tags = without_secrets(
            {
                "mlflow.note.content": self._config.notes,
                "group": self._config.group,
                "job_type": self._config.job_type,
                "tags": ", ".join(self._config.tags),
            }
        )
        described = [RunTag(key, value) for key, value in [*tags.items(), *_flat(facts)] if value]
        if runs:
            self._run_id = runs[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
        else:
            name = without_secrets(self._config.name or self._identity.name)
            run = client.create_run(number, run_name=name, tags={_TAG: self._identity.id})
            self._run_id = run.info.run_id
            params = [Param(*pair) for pair in _flat(self._identity.config)]
            for start in range(0, len(params), _MAX_PARAMS):
                client.log_batch(self._run_id, params=params[start : start + _MAX_PARAMS])
        client.log_batch(self._run_id, tags=described[:_MAX_PARAMS])
        client.log_dict(self._run_id, dict(self._identity.config), "config.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends a row."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        row = []
        for name, value in metrics.items():
            key = _NO_NAME.sub("_", panel_name(name))[:_MAX_NAME_CHARACTERS]
            row.append(Metric(key, value, now_ms, step))
        for start in range(0, len(row), _MAX_BATCH):
            self._client.log_batch(self._run_id, metrics=row[start : start + _MAX_BATCH])

    def samples(self, step: int, rows: Sequence[tuple[str, str]]) -> None:
        """Sends the texts, as a file of the step."""
        texts = [{"prompt": prompt, "text": text} for prompt, text in rows]
        content = {"step": step, "samples": texts}
        self._client.log_dict(self._run_id, content, f"samples/step-{step:08d}.json")

    def picture(self, step: int, name: str, path: Path) -> None:
        """Sends an image file."""
        self._client.log_artifact(self._run_id, str(path), name)

    def alert(self, title: str, text: str) -> None:
        """Sets a tag to the last alert."""
        self._client.set_tag(self._run_id, "alert", f"{title}: {text}")

    def close(self, *, is_failing: bool) -> None:
        """Ends the run; another start opens it again."""
        self._client.set_terminated(self._run_id, "FAILED" if is_failing else "FINISHED")
