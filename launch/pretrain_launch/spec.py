"""Specification of a job: `launch/spec.json` in the run folder, beside a copy of the config at submission.

The batch script is the same for every run; everything that differs is here. Later edits of the user's files do not
affect a waiting job. Not here: secrets, which travel in the environment only.
"""

import json
import secrets
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field, model_validator

from pretrain.config.base import Section
from pretrain.errors import ConfigError
from pretrain.run.folder import RunDir
from pretrain.utils.io import make_dir, write_file
from pretrain_launch.site import SiteConfig

MAX_IDLE_RESTARTS = 3
Mode = Literal["torchrun", "srun", "accelerate", "deepspeed"]
AbsolutePath = Annotated[str, Field(pattern=r"^/[^\x00-\x1f\x7f%\\]{0,1023}$")]
"""Slurm interprets `%` and backslashes in the name of an output file."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class LaunchSpec(Section):
    """A job.

    Attributes:
        version: Version of this format.
        name: Name of the run and of the job.
        run: Run folder.
        cwd: Working folder of the command: base of relative paths in the config.
        python: Interpreter on the nodes.
        mode: Launcher of the ranks of a node.
        nodes: Maximum number of nodes.
        node_counts: Numbers of nodes to train on: with `elastic` all that divide the batch, else `nodes`.
        ranks_per_node: Ranks per node.
        gpus_per_node: GPUs to request per node; 0: none.
        time_s: Time limit of a job.
        signal_s: Seconds before the limit at which the run is asked to save.
        elastic: Whether fewer nodes than `nodes` are accepted.
        max_idle_restarts: Restarts in a row without a new checkpoint that end the chain.
        singleton: Whether to wait for jobs of the same name.
        chain: Random id shared by the journal rows of one submission.
        site: Settings of the cluster.
    """

    version: Literal[1] = 1
    name: Name
    run: AbsolutePath
    cwd: AbsolutePath
    python: AbsolutePath
    mode: Mode = "torchrun"
    nodes: int = Field(ge=1, le=100_000)
    node_counts: list[int]
    ranks_per_node: int = Field(ge=1, le=1024)
    gpus_per_node: int = Field(ge=0, le=1024)
    time_s: int = Field(ge=60)
    signal_s: int = Field(ge=30, le=65535)
    elastic: bool = False
    max_idle_restarts: int = Field(default=MAX_IDLE_RESTARTS, ge=1)
    singleton: bool = False
    chain: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
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
    def config(self) -> Path:
        """The config that the ranks read."""
        return self.folder.launch / "config.yaml"

    @property
    def path(self) -> Path:
        """This, as a file."""
        return self.folder.launch / "spec.json"


def new_chain() -> str:
    """Returns the identity of a submission."""
    return secrets.token_hex(6)


def write_spec(spec: LaunchSpec, config: str) -> None:
    """Writes a spec and the config of its run into the run folder. Raises: DiskError."""
    make_dir(spec.folder.launch)
    make_dir(spec.folder.logs)
    write_file(spec.config, config.encode())
    rewrite_spec(spec)


def rewrite_spec(spec: LaunchSpec) -> None:
    """Replaces the spec, readable by its owner only; the config stays. Raises: DiskError."""
    write_file(spec.path, (json.dumps(spec.model_dump(mode="json"), indent=2) + "\n").encode())
    spec.path.chmod(0o600)


def load_spec(path: Path) -> LaunchSpec:
    """Reads a spec. Raises: ConfigError, where it is not there, not JSON or not sound."""
    fix = "submit the run with `pretrain launch slurm`"
    try:
        return LaunchSpec.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError("there is no spec of a job", where=str(path), fix=fix) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path), fix=fix) from None
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"not the spec of a job: {place}: {first['msg']}", where=str(path), fix=fix) from None
