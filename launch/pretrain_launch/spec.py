"""Specification of a job: `launch/spec.json` in the run folder, next to a copy of the config.

The batch script is the same for every run; everything that differs is here. Later edits of the
user's files do not affect a waiting job. Not here: secrets, which travel in the environment only.
"""

import json
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field, model_validator

from pretrain.config.base import Section
from pretrain.errors import ConfigError
from pretrain.run.folder import RunDir
from pretrain.utils.io import make_dir, write_file
from pretrain.utils.safe_read import MAX_RECORD_BYTES, read_bounded
from pretrain_launch.site import SiteConfig

Mode = Literal["torchrun", "srun", "accelerate", "deepspeed"]
# Slurm interprets `%` and backslashes in the name of an output file.
AbsolutePath = Annotated[str, Field(pattern=r"^/[^\x00-\x1f\x7f%\\]{0,1023}$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class LaunchSpec(Section):
    """A job."""

    version: Literal[1] = 1  # of this format
    name: Name  # of the run and of the job
    run: AbsolutePath  # run folder
    cwd: AbsolutePath  # base of relative paths in the config
    python: AbsolutePath  # interpreter on the nodes
    mode: Mode = "torchrun"  # launcher of the ranks of a node
    nodes: int = Field(ge=1, le=100_000)  # maximum
    node_counts: list[int]  # to train on: with `elastic` all that divide the batch, else `nodes`
    ranks_per_node: int = Field(ge=1, le=1024)
    gpus_per_node: int = Field(ge=0, le=1024)  # to request; 0: none
    time_s: int = Field(ge=60)  # time limit of a job
    signal_s: int = Field(ge=30, le=65535)  # before the limit, to ask for a save
    elastic: bool = False  # fewer nodes than `nodes` are accepted
    max_idle_restarts: int = Field(default=3, ge=1)  # in a row, until the chain ends
    singleton: bool = False  # wait for jobs of the same name
    exclude: list[Name] = Field(default_factory=list)  # nodes on which earlier chains of the run have failed
    chain: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]  # id of a submission in the journal
    site: SiteConfig = SiteConfig()

    @model_validator(mode="after")
    def _check(self) -> "LaunchSpec":
        if not self.node_counts or not all(1 <= count <= self.nodes for count in self.node_counts):
            raise ValueError("node_counts must be some of 1 to nodes")
        return self

    @property
    def folder(self) -> RunDir:
        """The run folder."""
        return RunDir(Path(self.run))

    @property
    def tasks_per_node(self) -> int:
        """Tasks of Slurm a node: a launcher starts the ranks itself."""
        return self.ranks_per_node if self.mode == "srun" else 1

    @property
    def config(self) -> Path:
        """The config that the ranks read."""
        return self.folder.launch / "config.yaml"

    @property
    def path(self) -> Path:
        """The file of this spec."""
        return self.folder.launch / "spec.json"


def write_spec(spec: LaunchSpec, config: str | None) -> None:
    """Writes a spec, readable by its owner only, and the config of its run (None: it stays). Raises: DiskError."""
    make_dir(spec.folder.launch)
    make_dir(spec.folder.logs)
    if config is not None:
        write_file(spec.config, config.encode())
    write_file(spec.path, (json.dumps(spec.model_dump(mode="json"), indent=2) + "\n").encode())
    spec.path.chmod(0o600)


def load_spec(path: Path) -> LaunchSpec:
    """Reads a spec. Raises: ConfigError if it does not exist, is not JSON or not sound."""
    try:
        return LaunchSpec.model_validate_json(read_bounded(path, MAX_RECORD_BYTES))
    except FileNotFoundError:
        text = "there is no spec of a job"
    except OSError as error:
        text = f"cannot be read: {error.strerror}"
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        text = f"not the spec of a job: {place}: {first['msg']}"
    raise ConfigError(text, where=str(path), fix="submit the run with `pretrain launch slurm`")
