"""Settings of a cluster: `slurm/clusters/NAME.yaml`, in the terms of Slurm.

Patterns check every text: it becomes one argument of sbatch or srun, and never a part of a script.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pretrain.config.base import Section
from pretrain.errors import ConfigError, install_fix

# A name, or a list of names: `--partition=a,b`.
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._,-]{0,127}$")]
# An expression of features: `--constraint=ib&h100`.
_FEATURE = r"[A-Za-z0-9][A-Za-z0-9._-]*"
Expression = Annotated[str, Field(max_length=128, pattern=rf"^\[?{_FEATURE}([&|*,]{_FEATURE})*\]?$")]
Module = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/+-]{0,127}$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
Option = Annotated[str, Field(pattern=r"^--[a-z][a-z0-9-]*(=[A-Za-z0-9_.,:/@%+*\[\]=-]*)?$")]
Interface = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,14}$")]
Place = Annotated[str, Field(pattern=r"^[A-Za-z0-9/._][A-Za-z0-9/._:@#+-]{0,1023}$")]

EXPORTED = (
    *("HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR"),
    *("OMP_NUM_THREADS", "TORCH_LOGS", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"),
    *("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN"),
    *("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
    *("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WRITE_TOKEN"),
    *("HF_TOKEN", "HF_HOME", "HF_HUB_OFFLINE", "GOOGLE_APPLICATION_CREDENTIALS"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)
"""Variables of the environment that a job gets, besides those of Slurm and of the site."""

_OURS = {
    *("output", "error", "job-name", "export", "signal", "array", "wrap", "chdir", "nodes", "ntasks"),
    *("requeue", "no-requeue", "ntasks-per-node", "open-mode", "multi-prog", "input", "parsable", "test-only"),
}


class ContainerConfig(Section):
    """A container for the ranks, by the pyxis plugin."""

    image: Place  # `--container-image`: a path to a .sqsh, or registry#image
    mounts: list[Place] = Field(default_factory=list)  # `/from:/to`, run folder and data included


class SiteConfig(Section):
    """A cluster. None: Slurm's default."""

    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Expression | None = None
    reservation: Word | None = None
    exclusive: bool = False  # take whole nodes
    cpus_per_node: int | None = Field(default=None, ge=1)  # None: one a rank; all of them if exclusive
    mem: Annotated[str, Field(pattern=r"^[0-9]+[KMGT]?$")] | None = None  # of a node; "0": all of it
    gpus: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"  # option that requests GPUs
    gpu_type: Word | None = None  # in that request: `--gres=gpu:h100:8`
    gpu: Word | None = None  # name in `pretrain plan`, to check that the run fits
    modules: list[Module] = Field(default_factory=list)  # loaded before Python is started
    container: ContainerConfig | None = None  # None: no container
    interface: Interface | None = None  # of the ranks. None: the first that all nodes can reach
    export: list[Variable] = Field(default_factory=list)  # names besides `EXPORTED`, never values
    sbatch: list[Option] = Field(default_factory=list)  # further options: `--comment=x`
    srun: list[Option] = Field(default_factory=list)  # further options of the step: `--mpi=none`
    requeue: bool = True  # a job may requeue itself; if not, submit a chain with `--jobs`
    doctor: bool = True  # `pretrain doctor --quick` checks every node at the start of a job
    python: Place | None = None  # interpreter on the nodes. None: the one that submits
    signal_s: int | None = Field(default=None, ge=30, le=65535)  # None: from the duration of a save

    @model_validator(mode="after")
    def _check(self) -> "SiteConfig":
        for kind, options in (("sbatch", self.sbatch), ("srun", self.srun)):
            taken = [option for option in options if option[2:].partition("=")[0] in _OURS]
            if taken:
                raise ValueError(f"{kind}: {taken[0]} is set by `pretrain launch`; leave it out")
        return self


def slurm_folder() -> Path:
    """Returns the folder of the batch script and the clusters that come with the package."""
    import pretrain

    package = Path(pretrain.__file__).resolve().parent
    for folder in (package.parent / "slurm", package / "slurm"):
        if (folder / "train.sbatch.tmpl").is_file():
            return folder
    raise ConfigError(
        "the package's own slurm folder is missing",
        where=str(package),
        fix=install_fix(),
    )


def load_site(name: str | None) -> SiteConfig:
    """Loads a YAML file, or one of a name in the folders of clusters; None: Slurm's defaults.

    Raises:
        ConfigError: There is none, or it is wrong: file, line, key and the nearest known one.
    """
    if name is None:
        return SiteConfig()
    from pretrain.config.load import load_section  # ranks and drivers do without it

    if name.endswith((".yaml", ".yml")) or "/" in name:
        return load_section(SiteConfig, Path(name).absolute())
    folders = [Path("~/.config/pretrain/clusters").expanduser(), slurm_folder() / "clusters"]
    sites = {path.stem: path for folder in reversed(folders) for path in folder.glob("*.yaml")}
    if name in sites:
        return load_section(SiteConfig, sites[name])
    names = " or ".join(sorted(sites)) or "none"
    raise ConfigError(
        f"there is no cluster {name[:80]!r}",
        where="--cluster",
        fix=f"give a YAML file, write {folders[0]}/NAME.yaml, or use {names}",
    )
