"""Experiment trackers by their key of `tracking:`. A new one: a record, and its key below."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from pretrain.config.base import OFF, OnResume, Section, UserPath


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerKind:
    """A store of the metrics of a run, which a key of `tracking` turns on.

    Attributes:
        build: `"module:function"` of (run folder, TrackingConfig, Identity) -> Tracker; None where the
            environment turns it off.
        off: Keys of `tracking` that are its own, as in a run without it.
        package: Package that it needs, by the name of the extra that installs it. Empty: none.
    """

    build: str
    off: Mapping[str, Any]
    package: str = ""


TRACKERS: dict[str, TrackerKind] = {
    "wandb": TrackerKind(
        build="pretrain.tracking.wandb_tracker:build_wandb", off={"wandb": "off", "wandb_fork": False}
    ),
    "tensorboard": TrackerKind(
        build="pretrain.tracking.tensorboard_tracker:TensorBoardTracker",
        off={"tensorboard": False},
        package="tensorboard",
    ),
    "mlflow": TrackerKind(
        build="pretrain.tracking.mlflow_tracker:MlflowTracker", off={"mlflow": None}, package="mlflow"
    ),
    "trackio": TrackerKind(
        build="pretrain.tracking.trackio_tracker:TrackioTracker", off={"trackio": False}, package="trackio"
    ),
    "prometheus": TrackerKind(build="pretrain.tracking.prometheus_file:PrometheusFile", off={"prometheus": None}),
}
"""Record of each key."""

NO_TRACKERS: dict[str, Any] = {key: value for kind in TRACKERS.values() for key, value in kind.off.items()}
"""Keys of `tracking` for a run that no tracker shows."""


class TrackersConfig(Section):
    """Rows of metrics, and the trackers that have them besides `metrics.jsonl`."""

    log_every_steps: Annotated[int, OFF, OnResume.FREE] = Field(default=10, ge=0)
    """Steps between rows of metrics; the last step has one too. 0: only that."""
    norms_every_steps: Annotated[int, OFF, OnResume.FREE] = Field(default=200, ge=0)
    """Steps between norms by layer, which are part of the next row. 0: never."""
    wandb: Annotated[Literal["auto", "online", "offline", "off"], OnResume.FREE] = "auto"
    """Weights & Biases. `auto`: online if there is an API key, otherwise offline."""
    wandb_fork: Annotated[bool, OnResume.FREE] = False
    """Begin a Weights & Biases run of its own, by `fork_from`, after a rollback, and where
    `init.from` is a run that was tracked: both keep the history up to there. Online only."""
    tensorboard: Annotated[bool, OnResume.FREE] = False
    """TensorBoard: event files in `tensorboard/` of the run folder."""
    mlflow: Annotated[str | None, OnResume.FREE] = None
    """MLflow: `auto` for MLFLOW_TRACKING_URI, or without it `mlflow.db` in the run folder; or an
    address, as `http://HOST:5000` or `sqlite:////PATH/mlflow.db`. None: off."""
    trackio: Annotated[bool, OnResume.FREE] = False
    """Trackio: a local database (TRACKIO_DIR), or what TRACKIO_SPACE_ID or TRACKIO_SERVER_URL name."""
    prometheus: Annotated[UserPath | None, OnResume.FREE] = None
    """Prometheus: folder of node_exporter's textfile collector, for the last row. None: off."""
