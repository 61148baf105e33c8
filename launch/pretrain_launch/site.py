"""Settings of a cluster: `slurm/clusters/NAME.yaml`, in the terms of Slurm.

Every text is checked against a pattern: it becomes one argument of sbatch or srun, and never a part of a script.
"""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pretrain.config.base import Section
from pretrain.errors import ConfigError

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._,-]{0,127}$")]
"""A name, or a list of names, as `--partition=a,b` takes it."""
Expression = Annotated[
    str, Field(max_length=128, pattern=r"^\[?[A-Za-z0-9][A-Za-z0-9._-]*([&|*,][A-Za-z0-9][A-Za-z0-9._-]*)*\]?$")
]
"""`--constraint=ib&h100`."""
Module = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/+-]{0,127}$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
Option = Annotated[str, Field(pattern=r"^--[a-z][a-z0-9-]*(=[A-Za-z0-9_.,:/@%+*\[\]=-]*)?$")]
Interface = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,14}$")]
Place = Annotated[str, Field(pattern=r"^[A-Za-z0-9/._][A-Za-z0-9/._:@#+-]{0,1023}$")]

EXPORTED = (
    *("HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR"),
    *("OMP_NUM_THREADS", "TORCH_LOGS", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"),
    *("HF_TOKEN", "HF_HOME", "HF_HUB_OFFLINE", "GOOGLE_APPLICATION_CREDENTIALS"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)
"""Variables that a job gets of the environment it is submitted from, besides Slurm's own and those a site adds."""

_OURS = {"output", "error", "job-name", "export", "signal", "array", "wrap", "chdir", "nodes", "ntasks", "requeue",
         "no-requeue", "ntasks-per-node", "open-mode", "multi-prog", "input", "parsable", "test-only"}  # fmt: skip


class ContainerConfig(Section):
    """A container for the ranks, by the pyxis plugin.

    Attributes:
        image: Value of `--container-image`: a path to a .sqsh, or registry#image.
        mounts: Values of `--container-mounts`: `/from:/to`, the run folder and the data included.
    """

    image: Place
    mounts: list[Place] = Field(default_factory=list)


class SiteConfig(Section):
    """A cluster. None: Slurm's default.

    Attributes:
        partition: `--partition`.
        account: `--account`.
        qos: `--qos`.
        constraint: `--constraint`.
        reservation: `--reservation`.
        exclusive: Whether to take whole nodes.
        cpus_per_node: CPUs of each node. None: as many as Slurm gives to one task, which mostly is one.
        mem: Memory of a node; "0" is all of it.
        gpus: How GPUs are asked for: `--gpus-per-node=N`, `--gres=gpu:N`, or not at all.
        gpu_type: Named in that request: `--gres=gpu:h100:8`.
        gpu: What `pretrain plan` calls them, to check that the run fits.
        modules: Loaded before Python is started.
        container: None: none.
        interface: Network interface that ranks use. None: whichever all nodes can reach.
        export: Names of variables that a job gets, besides the usual ones (`EXPORTED`). Never values.
        sbatch: Further options, one an item: `--comment=x`.
        srun: Further options of the step that trains: `--mpi=none`.
        requeue: Whether a job may put itself back into the queue. If not, submit a chain of them with `--jobs`.
        doctor: Whether `pretrain doctor --quick` looks at every node at the head of a job.
        python: Interpreter on the nodes. None: the one that submits.
        signal_s: Seconds before the time limit at which a job is asked to save. None: from how long a save takes.
    """

    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Expression | None = None
    reservation: Word | None = None
    exclusive: bool = False
    cpus_per_node: int | None = Field(default=None, ge=1)
    mem: Annotated[str, Field(pattern=r"^[0-9]+[KMGT]?$")] | None = None
    gpus: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    gpu_type: Word | None = None
    gpu: Word | None = None
    modules: list[Module] = Field(default_factory=list)
    container: ContainerConfig | None = None
    interface: Interface | None = None
    export: list[Variable] = Field(default_factory=list)
    sbatch: list[Option] = Field(default_factory=list)
    srun: list[Option] = Field(default_factory=list)
    requeue: bool = True
    doctor: bool = True
    python: Place | None = None
    signal_s: int | None = Field(default=None, ge=30, le=65535)

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
    raise ConfigError("the package's own slurm folder is missing", where=str(package), fix="reinstall pretrain")


def load_site(name: str | None) -> SiteConfig:
    """Loads a cluster's file; without a name, that of a cluster with nothing particular.

    Args:
        name: A YAML file; or the name of one in `~/.config/pretrain/clusters/` or in `slurm/clusters/`.

    Raises:
        ConfigError: There is none, or it is wrong: file, line, key and the nearest known one.
    """
    from pretrain.config.load import load_section  # ranks and drivers, which read a spec, do without it

    if name is None:
        return SiteConfig()
    if name.endswith((".yaml", ".yml")) or "/" in name:
        return load_section(SiteConfig, Path(name).absolute())
    folders = [Path("~/.config/pretrain/clusters").expanduser(), slurm_folder() / "clusters"]
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        for folder in folders:
            if (folder / f"{name}.yaml").is_file():
                return load_section(SiteConfig, folder / f"{name}.yaml")
    known = sorted({path.stem for folder in folders if folder.is_dir() for path in folder.glob("*.yaml")})
    raise ConfigError(
        f"there is no cluster {name[:80]!r}",
        where="--cluster",
        fix=f"give a YAML file, write {folders[0]}/NAME.yaml, or use {' or '.join(known) or 'none'}",
    )
